"""Implementations of Eq. 1 for given gates, in moe_ext and elsewhere, on the same weights.

A package is imported only when its implementation is built.
"""

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_ext import ops
from moe_lab.benchmarks.roofline import Work, experts_work

ROUTINGS = ("uniform", "zipf", "hierarchical")
FORWARD, BOTH = PASSES = ("forward", "forward+backward")  # what is timed


class Shape(NamedTuple):
    """T tokens with k of E experts each; an expert has the widths d -> h -> d.

    The routing is "uniform", "zipf" (the r-th most popular expert has weight 1 / r) or
    "hierarchical" (√k of √E groups, and √k experts in each group).
    """

    tokens: int
    num_experts: int
    k: int
    d_model: int
    hidden: int
    routing: str = "uniform"


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


@dataclass
class Problem:
    """Random tokens, gates and weights that all implementations share.

    The weights are [E, d, h] (or [E, d, 2 h] for swiglu) and [E, h, d].

    A gated hidden layer is narrower by a third, rounded to a multiple of 16, so the GEMMs of both
    activations cost the same.
    """

    shape: Shape
    dtype: torch.dtype
    activation: ops.Activation = "relu"
    device: str = "cpu"
    hidden: int = field(init=False)
    expert_index: Tensor = field(init=False)
    x: Tensor = field(init=False)
    gates: Tensor = field(init=False)
    upstream: Tensor = field(init=False)
    weights: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        T, E, k, d, h, _ = self.shape
        gated = self.activation == "swiglu"
        self.hidden = max(16, 16 * round(2 * h / 3 / 16)) if gated else h
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        self.expert_index = random_routing(self.shape, self.device)

        def normal(*sizes: int) -> Tensor:
            return torch.randn(*sizes, device=self.device)

        self.x = normal(T, d).to(self.dtype).requires_grad_()
        self.gates = normal(T, k).softmax(dim=-1).to(self.dtype).requires_grad_()
        self.upstream = normal(T, d).to(self.dtype)
        widths = [d, (2 if gated else 1) * self.hidden], [self.hidden, d]
        self.weights = [
            torch.empty(E, fan_in, width, **options).uniform_(-1, 1).mul_((3 / fan_in) ** 0.5)
            for fan_in, width in widths
        ]

    @cached_property
    def transposed(self) -> list[Tensor]:
        """The weights in the layout of nn.Linear, with output features first."""
        return [weight.transpose(1, 2).contiguous() for weight in self.weights]

    @cached_property
    def used_experts(self) -> int:
        return self.expert_index.unique().numel()

    @property
    def rows(self) -> int:
        return self.expert_index.numel()

    def work(self) -> tuple[Work, Work]:
        """Returns the work of forward, and of forward plus backward."""
        return experts_work(
            self.shape.tokens,
            self.rows,
            self.used_experts,
            self.shape.num_experts,
            self.shape.d_model,
            self.hidden,
            gated=self.activation == "swiglu",
            itemsize=self.dtype.itemsize,
        )

    def of_rows(self) -> "Problem":
        """Returns a problem with R tokens and one expert, which has as many operations."""
        shape = self.shape._replace(tokens=self.rows, num_experts=1, k=1, routing="uniform")
        return Problem(shape, self.dtype, self.activation, self.device)

    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)


Stacked = Tensor | Sequence[Tensor]  # [E, …], or E of them


def _as_they_are(gradients: Sequence[Tensor]) -> Sequence[Stacked]:
    return gradients


@dataclass
class Peer:
    """An implementation of Eq. 1.

    Attributes:
        parameters: the leaf tensors that hold the weights.
        forward: maps x [T, d] and gates [T, k] to y [T, d].
        by_expert: converts the parameters' gradients to gradients of the problem's weights; element
            e of each is the gradient of expert e.
    """

    parameters: list[Tensor]
    forward: Callable[[Tensor, Tensor], Tensor]
    by_expert: Callable[[Sequence[Tensor]], Sequence[Stacked]] = _as_they_are


class Extra(NamedTuple):
    """What an implementation needs in addition to Eq. 1: bytes of memory, flops, bytes moved."""

    memory: float = 0
    flops: float = 0
    bytes: float = 0


def _nothing(problem: Problem, backward: bool) -> Extra:
    return Extra()


class Kind(NamedTuple):
    """An implementation's activation, its constructor, and its extra cost for each pass."""

    activation: str
    build: Callable[[Problem], Peer]
    extra: Callable[[Problem, bool], Extra] = _nothing


def _leaf(weight: Tensor) -> Tensor:
    return weight.detach().requires_grad_()


def ours(problem: Problem) -> Peer:
    weights = [_leaf(weight) for weight in problem.weights]

    def forward(x: Tensor, gates: Tensor) -> Tensor:
        plan = ops.dispatch_plan(problem.expert_index, problem.shape.num_experts)
        return ops.experts(
            x,
            weights,
            activation=problem.activation,
            offsets=plan.offsets,
            inverse=plan.inverse,
            gates=gates,
        )

    return Peer(weights, forward)


def experts_alone(problem: Problem) -> Peer:
    """Runs only GEMMs and activation of moe_ext, on rows [R, d] that are sorted by expert."""
    weights = [_leaf(weight) for weight in problem.weights]
    plan = ops.dispatch_plan(problem.expert_index, problem.shape.num_experts)

    def forward(x: Tensor, gates: Tensor) -> Tensor:
        return ops.experts(x, weights, activation=problem.activation, offsets=plan.offsets)

    return Peer(weights, forward)


def dense(problem: Problem) -> Peer:
    """Runs one network of torch's linear layers, for a problem with one expert."""
    weights = [weight.squeeze(0).t().contiguous().requires_grad_() for weight in problem.weights]
    activation = _swiglu if problem.activation == "swiglu" else torch.relu

    def forward(x: Tensor, gates: Tensor) -> Tensor:
        return F.linear(activation(F.linear(x, weights[0])), weights[1])

    return Peer(weights, forward)


def _swiglu(z: Tensor) -> Tensor:
    a, b = z.chunk(2, dim=-1)
    return F.silu(a) * b


def _separate(problem: Problem) -> tuple[list[Tensor], list[Tensor]]:
    """Returns separate parameters for each expert, as in a list of modules."""
    first, second = ([_leaf(w) for w in weight.unbind()] for weight in problem.weights)
    return first, second


def mask_loop(problem: Problem) -> Peer:
    first, second = _separate(problem)
    E = problem.shape.num_experts

    def forward(x: Tensor, gates: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert in range(E):
            token, choice = torch.where(problem.expert_index == expert)
            if token.numel():
                out = (x[token] @ first[expert]).relu() @ second[expert]
                y.index_add_(0, token, out * gates[token, choice][:, None])
        return y

    return Peer([*first, *second], forward, lambda found: [found[:E], found[E:]])


def _sorted(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the slots sorted by expert, the token of each slot, and the rows per expert."""
    flat = problem.expert_index.flatten()
    slot = flat.argsort(stable=True)
    return slot, slot // problem.shape.k, flat.bincount(minlength=problem.shape.num_experts)


def _sort_and_loop(
    parts: Callable[[Tensor, list[int]], Sequence[Tensor]], problem: Problem
) -> Peer:
    first, second = _separate(problem)
    E = problem.shape.num_experts

    def forward(x: Tensor, gates: Tensor) -> Tensor:
        slot, token, counts = _sorted(problem)
        inputs = enumerate(parts(x[token], counts.tolist()))
        out = torch.cat([(rows @ first[e]).relu() @ second[e] for e, rows in inputs if len(rows)])
        weighted = out * gates.flatten()[slot][:, None]
        return torch.zeros_like(x).index_add(0, token, weighted)

    return Peer([*first, *second], forward, lambda found: [found[:E], found[E:]])


def _slices(rows: Tensor, counts: list[int]) -> list[Tensor]:
    # The gradient of each slice is a tensor with all rows.
    return [rows[a:b] for a, b in pairwise(accumulate(counts, initial=0))]


sort_and_slices = partial(_sort_and_loop, _slices)
sort_and_split = partial(_sort_and_loop, Tensor.split)


def _sort_and_grouped_mm(problem: Problem) -> Peer:
    first, second = (_leaf(weight) for weight in problem.weights)

    def forward(x: Tensor, gates: Tensor) -> Tensor:
        slot, token, counts = _sorted(problem)
        ends = counts.cumsum(0, dtype=torch.int32)
        hidden = F.grouped_mm(x[token], first, offs=ends).relu()
        weighted = F.grouped_mm(hidden, second, offs=ends) * gates.flatten()[slot][:, None]
        return torch.zeros_like(x).index_add(0, token, weighted)

    return Peer([first, second], forward)


def _hf(implementation: str) -> Callable[[Problem], Peer]:
    """Builds transformers' MixtralExperts with one of the experts implementations."""

    def build(problem: Problem) -> Peer:
        mixtral = importlib.import_module("transformers.models.mixtral.modeling_mixtral")
        config = mixtral.MixtralConfig(
            hidden_size=problem.shape.d_model,
            intermediate_size=problem.hidden,
            num_local_experts=problem.shape.num_experts,
            num_experts_per_tok=problem.shape.k,
            hidden_act="silu",
        )
        config._experts_implementation = implementation
        with torch.device("meta"):
            layer = mixtral.MixtralExperts(config)
        layer.gate_up_proj, layer.down_proj = map(nn.Parameter, problem.transposed)

        def forward(x: Tensor, gates: Tensor) -> Tensor:
            return layer(x, problem.expert_index, gates)

        parameters = [layer.gate_up_proj, layer.down_proj]
        return Peer(parameters, forward, lambda found: [g.transpose(1, 2) for g in found])

    return build


def _scattermoe(name: str) -> Callable[[Problem], Peer]:
    """Builds ScatterMoE's multilayer perceptrons: one Triton kernel per GEMM."""

    def build(problem: Problem) -> Peer:
        package = importlib.import_module("scattermoe.mlp")
        first, second = problem.transposed
        gated = problem.activation == "swiglu"
        if gated:  # ScatterMoE activates the second half
            first = first.roll(problem.hidden, dims=1)
        layer = getattr(package, name)(
            problem.shape.d_model,
            1,
            problem.shape.num_experts,
            problem.shape.k,
            activation=nn.SiLU() if gated else nn.ReLU(),
        )
        layer.experts.weight, layer.output_experts.weight = map(nn.Parameter, (first, second))

        def forward(x: Tensor, gates: Tensor) -> Tensor:
            return layer(x, gates, problem.expert_index)

        def by_expert(found: Sequence[Tensor]) -> Sequence[Stacked]:
            one, two = found
            one = one.roll(-problem.hidden, dims=1) if gated else one
            return [one.transpose(1, 2), two.transpose(1, 2)]

        return Peer([layer.experts.weight, layer.output_experts.weight], forward, by_expert)

    return build


def eager_extra(used_experts: int, weight_bytes: int, *, backward: bool) -> Extra:
    """Returns the extra cost of transformers' eager experts.

    The gradient of a slice W[e] is a tensor of the size of W, which is then added.
    """
    return Extra(bytes=backward * 4 * used_experts * weight_bytes)


def batched_extra(rows: int, num_experts: int, weight_bytes: int, *, backward: bool) -> Extra:
    """Returns the extra cost of transformers' batched_mm.

    Every row stores the weights of its expert, and their gradients.
    """
    return Extra(memory=(2 if backward else 1) * rows / num_experts * weight_bytes)


def _eager_extra(problem: Problem, backward: bool) -> Extra:
    return eager_extra(problem.used_experts, problem.weight_bytes(), backward=backward)


def _batched_extra(problem: Problem, backward: bool) -> Extra:
    num_experts = problem.shape.num_experts
    return batched_extra(problem.rows, num_experts, problem.weight_bytes(), backward=backward)


class Groups(NamedTuple):
    """The number of tokens in a group, and the capacity: rows of a group per expert."""

    size: int
    capacity: int


def _groups(problem: Problem) -> Groups:
    """Returns the group size that minimizes the cost of one-hot dispatch and padding.

    The capacity is large enough that no token is dropped.
    """
    T, E, k, d, _, _ = problem.shape
    sizes = [T >> shift for shift in range(8) if T % (1 << shift) == 0 and T >> shift >= 32]
    best = []
    for size in sizes or [T]:
        group = torch.arange(T, device=problem.device).div(size, rounding_mode="floor")
        counts = (group[:, None] * E + problem.expert_index).flatten().bincount()
        groups = Groups(size, int(counts.max()))
        best.append((_one_hot_flops(problem, groups), groups))
    return min(best)[1]


def _one_hot_flops(problem: Problem, groups: Groups) -> int:
    """Returns the flops of forward: one-hot dispatch and combine, and experts on padded rows."""
    T, E, _, d, _, _ = problem.shape
    places = T // groups.size * E * groups.capacity
    return places * 4 * d * (groups.size + problem.hidden)


def _one_hot_extra(problem: Problem, backward: bool) -> Extra:
    groups = _groups(problem)
    T, E, *_ = problem.shape
    one_hot = problem.x.element_size() * T * E * groups.capacity  # [b, n, E, c]
    factor = 3 if backward else 1
    return Extra(memory=3 * factor * one_hot, flops=factor * _one_hot_flops(problem, groups))


class _GivenGate(nn.Module):
    """Replaces a layer's gate: returns one-hot tensors [b, n, E, c] for dispatch and combine."""

    def __init__(self, problem: Problem, groups: Groups, losses: int) -> None:
        super().__init__()
        T, E, k, *_ = problem.shape
        b = T // groups.size
        token = torch.arange(T, device=problem.device)[:, None].expand(T, k)
        group = token.div(groups.size, rounding_mode="floor")
        target = group * E + problem.expert_index
        plan = ops.dispatch_plan(target, b * E)
        position = plan.inverse - plan.offsets[target]
        self.where = (group, token % groups.size, problem.expert_index, position)
        self.size = (b, groups.size, E, groups.capacity)
        self.dispatch = problem.x.new_zeros(self.size).index_put(self.where, problem.x.new_ones(()))
        self.losses = losses
        self.gates = problem.gates

    def forward(self, x: Tensor, **unused: object) -> tuple[Tensor, ...]:
        combine = torch.zeros_like(self.dispatch).index_put(self.where, self.gates)
        return self.dispatch, combine, *[x.new_zeros(())] * self.losses


def _in_layer(layer: nn.Module, gate: _GivenGate) -> Callable[[Tensor, Tensor], Tensor]:
    layer.gate = gate

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
    experts.w1, experts.w2 = map(nn.Parameter, problem.weights)
    layer = package.MoE(d, num_experts=E, experts=experts)
    gate = _GivenGate(problem, _groups(problem), losses=1)
    return Peer([experts.w1, experts.w2], _in_layer(layer, gate))


def st_moe_pytorch(problem: Problem) -> Peer:
    """Builds lucidrains' st-moe-pytorch with given gates; an expert has two nn.Linear."""
    package = importlib.import_module("st_moe_pytorch.st_moe_pytorch")
    d, E = problem.shape.d_model, problem.shape.num_experts
    first, second = (
        [nn.Parameter(weight.t()) for weight in stacked] for stacked in problem.weights
    )

    def linear(weight: nn.Parameter) -> nn.Linear:
        layer = nn.Linear(1, 1, bias=False, device="meta")
        layer.weight = weight
        return layer

    networks = [
        nn.Sequential(linear(a), nn.ReLU(), linear(b)) for a, b in zip(first, second, strict=True)
    ]
    layer = package.MoE(d, num_experts=E, experts=nn.ModuleList(networks))
    gate = _GivenGate(problem, _groups(problem), losses=2)

    def by_expert(found: Sequence[Tensor]) -> Sequence[Stacked]:
        return [[g.t() for g in found[:E]], [g.t() for g in found[E:]]]

    return Peer([*first, *second], _in_layer(layer, gate), by_expert)


PEERS = {
    "mask loop": Kind("relu", mask_loop),
    "sort + slices": Kind("relu", sort_and_slices),
    "sort + split": Kind("relu", sort_and_split),
    "sort + grouped_mm": Kind("relu", _sort_and_grouped_mm),
    "mixture-of-experts": Kind("relu", mixture_of_experts, _one_hot_extra),
    "st-moe-pytorch": Kind("relu", st_moe_pytorch, _one_hot_extra),
    "ScatterMoE": Kind("relu", _scattermoe("MLP")),
    "ScatterMoE GLU": Kind("swiglu", _scattermoe("GLUMLP")),
    "HF eager": Kind("swiglu", _hf("eager"), _eager_extra),
    "HF grouped_mm": Kind("swiglu", _hf("grouped_mm")),
    "HF batched_mm": Kind("swiglu", _hf("batched_mm"), _batched_extra),
}
