"""Compares the training step of a small transformer with the same model in plain torch.

    moe-lab benchmark training-step                              # 1 thread, float32
    moe-lab benchmark training-step --dtype bfloat16 --threads 2
    moe-lab benchmark training-step --layers 2 --vocabulary 8000 --json step.json

The model has causal attention and feed-forward layers; every second one is a mixture of SwiGLU
experts. A step computes the loss and its gradients, and updates the weights with torch's fused
Adam. Both models have the same weights:

    moe_ext     MoE with TopKGate and its balancing losses, and ops.linear_cross_entropy
    plain       the same without balancing losses in torch: a router with topk, sorted rows with
                F.grouped_mm, and F.linear_cross_entropy (since torch 2.13)
    compiled    the same step of "plain" or of "moe_ext" with its model by torch.compile; the update
                is not compiled

Each part is also timed alone, forward and backward. The limit of a part is the time of its GEMMs at
the peak rate; that of the loss has T·V exponentials in addition. Both rates are measured in the
same rounds. The limit of the step is the sum of the limits of its parts. "limit" is the limit
divided by the time of moe_ext, and "x" is another time divided by that of moe_ext. Functions are
called in interleaved rounds; all figures are medians.
"""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_ext import MoE, TopKGate, ops
from moe_lab.benchmarks.cross_entropy import cross_entropy_of_torch
from moe_lab.benchmarks.harness import Quartiles, Row, interleaved
from moe_lab.benchmarks.peers import swiglu
from moe_lab.benchmarks.roofline import gemm_and_exp_limits, gemm_and_exp_probes

HEAD_WIDTH = 64
NAMES = ("moe_ext, compiled", "plain", "plain, compiled")  # compared with moe_ext
TITLE = (
    "{dtype}, {threads} threads, {sequences} sequences of {length}, D = {d_model}, {layers} layers,"
    " E = {num_experts}, k = {k}, F = {hidden}, V = {vocabulary}"
)
HEADER = " | ".join(["part", "moe_ext, ms", "limit", *(f"x {name}" for name in NAMES)])
CELLS = " | ".join(
    ["{part}", "{ms:.0f}", "{share_of_limit:.2f}", *(f"{{x[{name}]:.2f}}" for name in NAMES)]
)
Output = tuple[Tensor, Tensor | float]  # y, and the loss of the layer


def flops_of(sizes: Any) -> dict[str, int]:
    """Returns the operations of the GEMMs of each part, forward and backward."""
    d, t = sizes.d_model, sizes.sequences * sizes.length
    feed_forward = sizes.layers // 2 * 3 * d * sizes.k * sizes.hidden
    return {
        "loss": 6 * t * d * sizes.vocabulary,
        "experts": 6 * t * (feed_forward + sizes.layers // 2 * d * sizes.num_experts),
        # The scores and their products with the values: half of all pairs of tokens.
        "attention": 6 * t * sizes.layers * (4 * d * d + sizes.length * d),
        "feed-forward": 6 * t * feed_forward,
    }


class SwiGLU(nn.Module):
    def __init__(self, d_model: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, d_model, bias=False)

    def forward(self, x: Tensor) -> Output:
        return self.down(swiglu(self.up(x))), 0.0


class FusedMoE(nn.Module):
    def __init__(self, sizes: Any) -> None:
        super().__init__()
        shape = sizes.d_model, sizes.num_experts, sizes.k
        swiglu = partial(MoE, *shape, activation="swiglu", gate=TopKGate(*shape))
        self.layer = swiglu(hidden_sizes=[sizes.hidden])
        nn.init.normal_(self.layer.gate.get_parameter("w_gate"), std=sizes.d_model**-0.5)

    def forward(self, x: Tensor) -> Output:
        y, aux = self.layer(x)
        return y, aux.loss


class PlainMoE(nn.Module):
    """Computes a MoE with TopKGate in plain torch, from the weights of a layer of moe_ext."""

    def __init__(self, layer: MoE) -> None:
        super().__init__()
        self.k, self.num_experts = layer.k, layer.num_experts
        self.w_gate, self.up, self.down = (
            nn.Parameter(weight.detach().clone())
            for weight in (layer.gate.get_parameter("w_gate"), *layer.experts.parameters())
        )

    def forward(self, x: Tensor) -> Output:
        logits, index = (x @ self.w_gate).topk(self.k)
        gates = logits.softmax(-1, dtype=torch.float32).to(x.dtype)
        slot = index.flatten().argsort(stable=True)
        token = slot // self.k
        counts = (index.flatten()[:, None] == torch.arange(self.num_experts)).sum(0)
        ends = counts.cumsum(0, dtype=torch.int32)
        hidden = swiglu(F.grouped_mm(x[token], self.up, offs=ends))
        rows = F.grouped_mm(hidden, self.down, offs=ends) * gates.flatten()[slot][:, None]
        return torch.zeros_like(x).index_add(0, token, rows), 0.0


class Attention(nn.Module):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.num_heads = max(1, d_model // HEAD_WIDTH)
        self.input = nn.Linear(d_model, 3 * d_model, bias=False)
        self.output = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor) -> Output:
        """Maps x [B, S, D] to [B, S, D]."""
        heads = self.input(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(y.transpose(1, 2).flatten(2)), 0.0


class Transformer(nn.Module):
    """Predicts each next token. `forward` returns the loss, with that of the MoE layers."""

    def __init__(self, sizes: Any) -> None:
        super().__init__()
        d = sizes.d_model
        self.embedding = nn.Embedding(sizes.vocabulary, d)
        self.attention = nn.ModuleList(Attention(d) for _ in range(sizes.layers))
        # A dense layer has as many operations for a token as k experts.
        self.feed_forward = nn.ModuleList(
            FusedMoE(sizes) if layer % 2 else SwiGLU(d, sizes.k * sizes.hidden)
            for layer in range(sizes.layers)
        )
        self.norms = nn.ModuleList(nn.RMSNorm(d) for _ in range(2 * sizes.layers + 1))
        self.softmax = nn.Parameter(torch.randn(sizes.vocabulary, d) / math.sqrt(d))
        self.cross_entropy: Callable[..., Tensor] = ops.linear_cross_entropy

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        """Computes the mean loss of tokens [B, S] with target [B · S]."""
        x, losses = self.embedding(tokens), []
        for i, (attention, layer) in enumerate(zip(self.attention, self.feed_forward, strict=True)):
            x = x + attention(self.norms[2 * i](x))[0]
            y, loss = layer(self.norms[2 * i + 1](x).flatten(0, 1))
            x = x + y.view_as(x)
            losses.append(loss)
        return self.loss(self.norms[-1](x).flatten(0, 1), target) + sum(losses)

    def loss(self, x: Tensor, target: Tensor) -> Tensor:
        """Computes the mean cross-entropy for the inputs x [T, D] of the softmax."""
        return self.cross_entropy(x, self.softmax, target)

    def plain(self) -> "Transformer":
        """Returns a copy that uses no operator of moe_ext."""
        step = copy.deepcopy(self)
        for i, layer in enumerate(self.feed_forward):
            if isinstance(layer, FusedMoE):
                step.feed_forward[i] = PlainMoE(layer.layer)
        step.cross_entropy = cross_entropy_of_torch
        return step


class Step:
    """The training step of a model, and its parts."""

    def __init__(self, model: Transformer, sizes: Any, dtype: torch.dtype) -> None:
        self.model = model.to(dtype)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4, fused=True)
        generator = torch.Generator().manual_seed(0)
        text_shape = sizes.sequences, sizes.length + 1
        text = torch.randint(sizes.vocabulary, text_shape, generator=generator)
        self.tokens, self.target = text[:, :-1], text[:, 1:].flatten()
        shape = 2, sizes.sequences, sizes.length, sizes.d_model
        x, self.upstream = torch.randn(shape, generator=generator).to(dtype)
        self.x = x.requires_grad_()

    def run(self, model: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Runs a step; `model` is the model, or its compiled form."""
        self.model.zero_grad()
        model(self.tokens, self.target).backward()
        self.optimizer.step()

    def parts(self) -> dict[str, Callable[[], object]]:
        """Returns the functions that run all layers of a kind, forward and backward."""
        layers = list(self.model.feed_forward)
        dense = [layer for layer in layers if isinstance(layer, SwiGLU)]
        mixtures = [layer for layer in layers if not isinstance(layer, SwiGLU)]
        return {
            "update": self.optimizer.step,  # with the gradients of the step before it
            "loss": self._loss,
            "experts": partial(self._backward, mixtures, flat=True),
            "attention": partial(self._backward, list(self.model.attention), flat=False),
            "feed-forward": partial(self._backward, dense, flat=True),
        }

    def _loss(self) -> None:
        self.model.zero_grad()
        self.model.loss(self.x.flatten(0, 1), self.target).backward()

    def _backward(self, layers: Sequence[nn.Module], *, flat: bool) -> None:
        self.model.zero_grad()
        x, upstream = (t.flatten(0, 1) if flat else t for t in (self.x, self.upstream))
        for layer in layers:
            y, loss = layer(x)
            with_loss = isinstance(loss, Tensor)
            torch.autograd.backward([y, loss][: 1 + with_loss], [upstream, None][: 1 + with_loss])


@torch.no_grad()
def check(step: Step, plain: Step) -> None:
    """Raises an error if the cross-entropies of both models differ."""
    layers = [layer for layer in step.model.modules() if isinstance(layer, MoE)]
    for layer in layers:
        layer.w_importance = layer.w_load = 0.0
    actual = step.model(step.tokens, step.target)
    for layer in layers:
        layer.w_importance = layer.w_load = 0.1
    tolerance = 1e-4 if step.x.dtype == torch.float32 else 2e-2
    expected = plain.model(plain.tokens, plain.target).to(actual.dtype)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def measure(args: Any) -> list[Row]:
    dtype, model = getattr(torch, args.dtype), Transformer(args)
    steps = {"moe_ext": Step(model, args, dtype), "plain": Step(model.plain(), args, dtype)}
    check(steps["moe_ext"], steps["plain"])
    functions: dict[tuple[str, str], Callable[[], object]] = {
        ("step", name): partial(step.run, step.model) for name, step in steps.items()
    }
    for name, step in steps.items():
        if not args.eager:
            functions["step", f"{name}, compiled"] = partial(step.run, torch.compile(step.model))
    for name, step in steps.items():
        functions |= {(part, name): function for part, function in step.parts().items()}
    probes = {("", name): probe for name, probe in gemm_and_exp_probes(dtype).items()}
    seconds = interleaved(functions | probes, args.rounds, warm_up=1)
    rates = {name: seconds["", name] for _, name in probes}
    least = {}
    for part, flops in flops_of(args).items():
        exponentials = args.sequences * args.length * args.vocabulary if part == "loss" else 0
        least[part] = Quartiles.from_values(gemm_and_exp_limits(rates, flops, exponentials)).median
    least["step"] = sum(least.values())
    rows = []
    for part in dict.fromkeys(part for part, _ in functions):
        times = {name: Quartiles.from_values(s) for (p, name), s in seconds.items() if p == part}
        base, limit = times["moe_ext"].median, least.get(part)  # without a limit if it has no GEMM
        share = limit / base if limit else None
        x = {name: times[name].median / base if name in times else None for name in NAMES}
        ms = times["moe_ext"].scaled(1e3)
        rows.append(Row(part=part, seconds=times, limit=limit, share_of_limit=share, x=x, ms=ms))
    return rows
