"""Implementations of Eq. 1 for given gates, in moe_ext and elsewhere, on the same weights.

A package is imported only when its implementation is built.
"""

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_ext import ops
from moe_lab.benchmarks.measurement import Extra, LayerProblem, Stacked
from moe_lab.benchmarks.roofline import Work, experts_work
from moe_lab.benchmarks.shapes import Shape
from moe_lab.packages import require_transformers

FORWARD, TRAINING = PASSES = ("forward", "forward+backward")  # what is timed
BESIDE_PEERS = ("experts", "dense")  # timed without a comparison of results


def random_routing(shape: Shape, device: str = "cpu") -> Tensor:
    """Returns the experts of each token [T, k], all distinct."""
    T, E, k, *_, routing = shape
    if routing == "hierarchical":
        side, chosen = math.isqrt(E), math.isqrt(k)
        groups = torch.rand(T, side, device=device).topk(chosen).indices
        members = torch.rand(T, chosen, side, device=device).topk(chosen).indices
        return (groups[..., None] * side + members).flatten(1)
    popularity = torch.zeros(E, device=device)  # unnormalized log-probabilities
    if routing == "zipf":
        ranks = torch.arange(1.0, E + 1, device=device)
        popularity = -ranks.log()[torch.randperm(E, device=device)]
    # The top k of log p + Gumbel noise are a sample without replacement from p.
    noise = -torch.empty(T, E, device=device).exponential_().log()
    return (popularity + noise).topk(k).indices


class Inputs(NamedTuple):
    """The inputs of a pass: x [T, H], experts [T, k], gates [T, k] and the gradient of y [T, H]."""

    x: Tensor
    expert_index: Tensor
    gates: Tensor
    upstream: Tensor

    @classmethod
    def draw(cls, shape: Shape, dtype: torch.dtype, device: str = "cpu") -> "Inputs":
        T, index = shape.tokens, random_routing(shape, device)
        x, upstream = (torch.randn(T, shape.d_model, device=device).to(dtype) for _ in range(2))
        gates = torch.randn(T, shape.k, device=device).softmax(dim=-1).to(dtype)
        return cls(x.requires_grad_(), index, gates.requires_grad_(), upstream)

    @property
    def used_experts(self) -> int:
        return self.expert_index.unique().numel()


@dataclass
class Peer:
    """An implementation of Eq. 1.

    `by_expert` converts the parameters' gradients to gradients of the problem's weights; element e
    of each is the gradient of expert e.
    """

    parameters: list[Tensor]  # the leaf tensors that hold the weights
    forward: Callable[[Tensor, Tensor], Tensor]  # maps x [T, d] and gates [T, k] to y [T, d]
    by_expert: Callable[[Sequence[Tensor]], Sequence[Stacked]] = lambda gradients: gradients


class Kind(NamedTuple):
    """An implementation's activation, its constructor, and its extra cost for each pass."""

    activation: str
    build: Callable[["Problem"], Peer]
    extra: Callable[["Problem", bool], Extra] = lambda problem, backward: Extra()


@dataclass
class Problem(LayerProblem):
    """Random tokens, gates and weights [E, d, h] (or [E, d, 2 h] for swiglu) and [E, h, d].

    A gated hidden layer is narrower by a third, rounded to a multiple of 16, so the GEMMs of both
    activations cost the same.
    """

    shape: Shape
    dtype: torch.dtype
    activation: ops.Activation = "relu"
    device: str = "cpu"
    passes = PASSES
    beside = BESIDE_PEERS
    built: dict[str, tuple[Peer, "Problem"]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        _, E, _, d, h, _ = self.shape
        gated = self.activation == "swiglu"
        self.has_peak = self.device != "cpu"
        self.hidden = max(16, 16 * round(2 * h / 3 / 16)) if gated else h
        inputs = Inputs.draw(self.shape, self.dtype, self.device)
        self.x, self.expert_index, self.gates, self.upstream = inputs
        widths = [d, (2 if gated else 1) * self.hidden], [self.hidden, d]
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        self.weights = [
            torch.empty(E, fan_in, width, **options).uniform_(-1, 1).mul_((3 / fan_in) ** 0.5)
            for fan_in, width in widths
        ]
        self.rows, self.used_experts = self.expert_index.numel(), inputs.used_experts

    @cached_property
    def transposed(self) -> list[Tensor]:
        """The weights in the layout of nn.Linear, with output features first."""
        return [weight.transpose(1, 2).contiguous() for weight in self.weights]

    @cached_property
    def row_problem(self) -> "Problem":
        """A problem with R tokens and one expert, which has as many operations."""
        shape = self.shape._replace(tokens=self.rows, num_experts=1, k=1, routing="uniform")
        return Problem(shape, self.dtype, self.activation, self.device)

    def work(self, which: str) -> Work:
        T, E, _, d, _, _ = self.shape
        gated, itemsize = self.activation == "swiglu", self.dtype.itemsize
        sizes = T, self.rows, self.used_experts, E, d, self.hidden
        return experts_work(*sizes, gated=gated, itemsize=itemsize)[PASSES.index(which)]

    def extra(self, name: str, which: str) -> Extra:
        return PEERS[name].extra(self, which == TRAINING) if name in PEERS else Extra()

    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    def peer(self, name: str) -> tuple[Peer, "Problem"]:
        """Builds an implementation; returns it and the problem whose tokens it computes."""
        if name not in self.built:
            if name in BESIDE_PEERS:
                peer = dense(self.row_problem) if name == "dense" else experts_alone(self)
                self.built[name] = peer, self.row_problem
            else:
                build = build_moe_ext if name == "ours" else PEERS[name].build
                self.built[name] = build(self), self
        return self.built[name]

    def call(self, name: str, which: str) -> Callable[[], object]:
        peer, problem = self.peer(name)
        return partial(gradients if which == TRAINING else _output, peer, problem)

    def results(self, name: str, which: str) -> Mapping[str, Stacked]:
        """Returns y, or y and all gradients; weight gradients are by expert."""
        peer, problem = self.peer(name)
        if which == FORWARD:
            return {"y": [_output(peer, problem)]}
        y, dx, dgates, *weights = (gradient.detach() for gradient in gradients(peer, problem))
        first, second = peer.by_expert(weights)
        return {"y": [y], "dx": [dx], "dgates": [dgates], "dW1": first, "dW2": second}


@torch.no_grad()
def _output(peer: Peer, problem: Problem) -> Tensor:
    return peer.forward(problem.x, problem.gates)


def gradients(peer: Peer, problem: Problem) -> tuple[Tensor, ...]:
    """Returns y and the gradients of x, gates and all parameters, in fresh tensors."""
    y = peer.forward(problem.x, problem.gates)
    leaves = [problem.x, problem.gates, *peer.parameters]
    return y, *torch.autograd.grad(y, leaves, problem.upstream, materialize_grads=True)


def swiglu(z: Tensor) -> Tensor:
    a, b = z.chunk(2, dim=-1)
    return F.silu(a) * b


def _leaf(weight: Tensor) -> Tensor:
    return weight.detach().requires_grad_()


def build_moe_ext(problem: Problem) -> Peer:
    weights = [_leaf(weight) for weight in problem.weights]

    def forward(x: Tensor, gates: Tensor) -> Tensor:
        plan = ops.dispatch_plan(problem.expert_index, problem.shape.num_experts)
        run = partial(ops.experts, x, weights, activation=problem.activation, gates=gates)
        return run(offsets=plan.offsets, inverse=plan.inverse)

    return Peer(weights, forward)


def experts_alone(problem: Problem) -> Peer:
    """Runs only GEMMs and activation of moe_ext, on rows [R, d] that are sorted by expert."""
    weights = [_leaf(weight) for weight in problem.weights]
    plan = ops.dispatch_plan(problem.expert_index, problem.shape.num_experts)
    options: dict[str, Any] = {"activation": problem.activation, "offsets": plan.offsets}
    return Peer(weights, lambda x, gates: ops.experts(x, weights, **options))


def dense(problem: Problem) -> Peer:
    """Runs one network of torch's linear layers, for a problem with one expert."""
    first, second = (w.squeeze(0).t().contiguous().requires_grad_() for w in problem.weights)

    activation = swiglu if problem.activation == "swiglu" else torch.relu
    return Peer([first, second], lambda x, _: F.linear(activation(F.linear(x, first)), second))


def _separate(
    problem: Problem, forward: Callable[[list[Tensor], list[Tensor], Tensor, Tensor], Tensor]
) -> Peer:
    """Builds a peer with separate parameters for each expert, as in a list of modules."""
    first, second = ([_leaf(w) for w in weight.unbind()] for weight in problem.weights)
    E = problem.shape.num_experts
    parameters = [*first, *second]
    return Peer(parameters, partial(forward, first, second), lambda g: [g[:E], g[E:]])


def mask_loop(problem: Problem) -> Peer:
    def forward(first: list[Tensor], second: list[Tensor], x: Tensor, gates: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert in range(problem.shape.num_experts):
            token, choice = torch.where(problem.expert_index == expert)
            if token.numel():
                out = (x[token] @ first[expert]).relu() @ second[expert]
                y.index_add_(0, token, out * gates[token, choice][:, None])
        return y

    return _separate(problem, forward)


def _sorted(index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the slots sorted by expert, the token of each slot, and the rows per expert."""
    flat = index.flatten()
    slot = flat.argsort(stable=True)
    return slot, slot // index.shape[1], flat.bincount(minlength=num_experts)


def _sort_and_loop(
    parts: Callable[[Tensor, list[int]], Sequence[Tensor]], problem: Problem
) -> Peer:
    def forward(first: list[Tensor], second: list[Tensor], x: Tensor, gates: Tensor) -> Tensor:
        slot, token, counts = _sorted(problem.expert_index, problem.shape.num_experts)
        inputs = enumerate(parts(x[token], counts.tolist()))
        out = torch.cat([(rows @ first[e]).relu() @ second[e] for e, rows in inputs if len(rows)])
        weighted = out * gates.flatten()[slot][:, None]
        return torch.zeros_like(x).index_add(0, token, weighted)

    return _separate(problem, forward)


def _slices(rows: Tensor, counts: list[int]) -> list[Tensor]:
    # The gradient of each slice is a tensor with all rows.
    return [rows[a:b] for a, b in pairwise(accumulate(counts, initial=0))]


sort_and_slices = partial(_sort_and_loop, _slices)
sort_and_split = partial(_sort_and_loop, Tensor.split)


def grouped_mm(
    weights: Sequence[Tensor],
    activation: Callable[[Tensor], Tensor],
    x: Tensor,
    index: Tensor,
    gates: Tensor,
) -> Tensor:
    """Computes experts with torch's grouped_mm, as transformers does."""
    slot, token, counts = _sorted(index, len(weights[0]))
    ends = counts.cumsum(0, dtype=torch.int32)
    hidden = activation(F.grouped_mm(x[token], weights[0], offs=ends))
    weighted = F.grouped_mm(hidden, weights[1], offs=ends) * gates.flatten()[slot][:, None]
    return torch.zeros_like(x).index_add(0, token, weighted)


def _sort_and_grouped_mm(problem: Problem) -> Peer:
    weights = [_leaf(weight) for weight in problem.weights]
    experts = partial(grouped_mm, weights, torch.relu)
    return Peer(weights, lambda x, gates: experts(x, problem.expert_index, gates))


def mixtral_config(implementation: str, d: int, E: int, k: int, hidden: int) -> tuple[Any, Any]:
    """Returns transformers' module of Mixtral, and a configuration of its layer."""
    modeling = "transformers.models.mixtral.modeling_mixtral"
    mixtral = require_transformers("peers", modeling)
    sizes = {"hidden_size": d, "intermediate_size": hidden, "hidden_act": "silu"}
    config = mixtral.MixtralConfig(num_local_experts=E, num_experts_per_tok=k, **sizes)
    config._experts_implementation = implementation
    return mixtral, config


def _hf(implementation: str, problem: Problem) -> Peer:
    """Builds transformers' MixtralExperts with one of the experts implementations."""
    _, E, k, d, _, _ = problem.shape
    mixtral, config = mixtral_config(implementation, d, E, k, problem.hidden)
    with torch.device("meta"):
        layer = mixtral.MixtralExperts(config)
    parameters: list[Tensor] = [*map(nn.Parameter, problem.transposed)]
    layer.gate_up_proj, layer.down_proj = parameters
    return Peer(
        parameters,
        lambda x, gates: layer(x, problem.expert_index, gates),
        lambda grads: [gradient.transpose(1, 2) for gradient in grads],
    )


def _scattermoe(name: str, problem: Problem) -> Peer:
    """Builds ScatterMoE's multilayer perceptrons: one Triton kernel per GEMM."""
    package = importlib.import_module("scattermoe.mlp")
    first, second = problem.transposed
    T, E, k, d, _, _ = problem.shape
    gated = problem.activation == "swiglu"
    shift = problem.hidden if gated else 0  # ScatterMoE activates the second half
    layer = getattr(package, name)(d, 1, E, k, activation=nn.SiLU() if gated else nn.ReLU())
    layer.experts.weight = nn.Parameter(first.roll(shift, dims=1))
    layer.output_experts.weight = nn.Parameter(second)
    return Peer(
        [layer.experts.weight, layer.output_experts.weight],
        lambda x, gates: layer(x, gates, problem.expert_index),
        lambda grads: [grads[0].roll(-shift, dims=1).transpose(1, 2), grads[1].transpose(1, 2)],
    )


def hf_extra(
    implementation: str, problem: Any, backward: bool, expert_index: Tensor | None = None
) -> Extra:
    """Returns the extra cost of transformers' experts.

    In eager, the gradient of a slice W[e] is a tensor of the size of W, which is then added. In
    batched_mm, every row stores the weights of its expert, and their gradients.
    """
    index, weight_bytes = expert_index, problem.weight_bytes()
    if index is None:
        index = problem.expert_index
    if implementation == "eager":
        return Extra(bytes=backward * 4 * index.unique().numel() * weight_bytes)
    copies = index.numel() / problem.shape.num_experts if implementation == "batched_mm" else 0
    return Extra(memory=(1 + backward) * copies * weight_bytes)


def _groups(problem: Problem) -> tuple[int, int, int]:
    """Returns the flops of one-hot dispatch, experts and combine, a group's size and capacity.

    The group size minimizes the flops in forward, padding included. The capacity, the rows of a
    group for each expert, drops no token.
    """
    T, E, _, d, _, _ = problem.shape
    candidates = []
    for size in [T >> n for n in range(8) if T % (1 << n) == 0 and T >> n >= 32] or [T]:
        group = torch.arange(T, device=problem.device).div(size, rounding_mode="floor")
        counts = (group[:, None] * E + problem.expert_index).flatten().bincount()
        capacity = int(counts.max())
        places = T // size * E * capacity
        candidates.append((places * 4 * d * (size + problem.hidden), size, capacity))
    return min(candidates)


def _one_hot_extra(problem: Problem, backward: bool) -> Extra:
    flops, _, capacity = _groups(problem)
    T, E, *_ = problem.shape
    one_hot = problem.x.element_size() * T * E * capacity  # [b, n, E, c]
    factor = 3 if backward else 1
    return Extra(memory=3 * factor * one_hot, flops=factor * flops)


class _GivenGate(nn.Module):
    """Replaces a layer's gate: returns one-hot tensors [b, n, E, c] for dispatch and combine."""

    def __init__(self, problem: Problem, losses: int) -> None:
        super().__init__()
        T, E, k, *_ = problem.shape
        _, size, capacity = _groups(problem)
        token = torch.arange(T, device=problem.device)[:, None].expand(T, k)
        group = token.div(size, rounding_mode="floor")
        target = group * E + problem.expert_index
        plan = ops.dispatch_plan(target, T // size * E)
        position = plan.inverse - plan.offsets[target]
        self.where = (group, token % size, problem.expert_index, position)
        self.size = (T // size, size, E, capacity)
        self.dispatch = problem.x.new_zeros(self.size).index_put(self.where, problem.x.new_ones(()))
        self.losses = losses
        self.gates = problem.gates

    def forward(self, x: Tensor, **unused: object) -> tuple[Tensor, ...]:
        combine = torch.zeros_like(self.dispatch).index_put(self.where, self.gates)
        return self.dispatch, combine, *[x.new_zeros(())] * self.losses


def _in_layer(
    problem: Problem, layer: nn.Module, losses: int
) -> Callable[[Tensor, Tensor], Tensor]:
    gate = layer.gate = _GivenGate(problem, losses)

    def forward(x: Tensor, gates: Tensor) -> Tensor:
        gate.gates = gates
        b, n = gate.size[:2]
        return layer(x.view(b, n, -1))[0].reshape(x.shape)

    return forward


def mixture_of_experts(problem: Problem) -> Peer:
    """Builds lucidrains' mixture-of-experts with given gates; its capacity drops no token."""
    package = importlib.import_module("mixture_of_experts.mixture_of_experts")
    d, E = problem.shape.d_model, problem.shape.num_experts
    experts = package.Experts(d, 1, hidden_dim=1, activation=nn.ReLU)
    parameters: list[Tensor] = [*map(nn.Parameter, problem.weights)]
    experts.w1, experts.w2 = parameters
    layer = package.MoE(d, num_experts=E, experts=experts)
    return Peer(parameters, _in_layer(problem, layer, losses=1))


def st_moe_pytorch(problem: Problem) -> Peer:
    """Builds lucidrains' st-moe-pytorch with given gates; an expert has two nn.Linear."""
    package = importlib.import_module("st_moe_pytorch.st_moe_pytorch")
    d, E = problem.shape.d_model, problem.shape.num_experts
    first, second = ([nn.Parameter(w.t()) for w in stacked] for stacked in problem.weights)

    def linear(weight: nn.Parameter) -> nn.Linear:
        layer = nn.Linear(1, 1, bias=False, device="meta")
        layer.weight = weight
        return layer

    pairs = zip(first, second, strict=True)
    networks = [nn.Sequential(linear(a), nn.ReLU(), linear(b)) for a, b in pairs]
    layer = package.MoE(d, num_experts=E, experts=nn.ModuleList(networks))
    return Peer(
        [*first, *second],
        _in_layer(problem, layer, losses=2),
        lambda grads: [[g.t() for g in grads[:E]], [g.t() for g in grads[E:]]],
    )


PEERS = {
    "mask loop": Kind("relu", mask_loop),
    "sort + slices": Kind("relu", sort_and_slices),
    "sort + split": Kind("relu", sort_and_split),
    "sort + grouped_mm": Kind("relu", _sort_and_grouped_mm),
    "mixture-of-experts": Kind("relu", mixture_of_experts, _one_hot_extra),
    "st-moe-pytorch": Kind("relu", st_moe_pytorch, _one_hot_extra),
    "ScatterMoE": Kind("relu", partial(_scattermoe, "MLP")),
    "ScatterMoE GLU": Kind("swiglu", partial(_scattermoe, "GLUMLP")),
    "HF eager": Kind("swiglu", partial(_hf, "eager"), partial(hf_extra, "eager")),
    "HF grouped_mm": Kind("swiglu", partial(_hf, "grouped_mm")),
    "HF batched_mm": Kind("swiglu", partial(_hf, "batched_mm"), partial(hf_extra, "batched_mm")),
}
