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
    compiled    the step of "plain" or of "moe_ext", without the update, by torch.compile

Each part is also timed alone, forward and backward. The limit of a part is the time of its GEMMs at
the peak rate; that of the loss has T·V exponentials in addition. Both rates are measured in the
same rounds. The limit of the step is the sum of the limits of its parts. "limit" is the limit
divided by the time of moe_ext, and "x" is another time divided by that of moe_ext. Functions are
called in interleaved rounds; all figures are medians.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_ext import MoE, TopKGate, ops
from moe_ext.info import avoid_missing_amx
from moe_lab.benchmarks.cross_entropy import cross_entropy_of_torch, limits, probes
from moe_lab.benchmarks.harness import Quartiles, environment, interleaved, pinned, report_rows
from moe_lab.cli import at_least, make_parser

HEAD_WIDTH = 64
NAMES = ("moe_ext", "moe_ext, compiled", "plain", "plain, compiled")


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model and of its batch."""

    sequences: int = 8
    length: int = 256
    d_model: int = 512
    layers: int = 8
    num_experts: int = 32
    k: int = 2
    hidden: int = 1_024
    vocabulary: int = 32_000

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    @property
    def dense_hidden(self) -> int:
        """The width of a dense layer that has as many operations for a token as k experts."""
        return self.k * self.hidden

    def flops(self) -> dict[str, int]:
        """Returns the operations of the GEMMs of each part, forward and backward."""
        d, t = self.d_model, self.tokens
        feed_forward = self.layers // 2 * 3 * d * self.dense_hidden
        return {
            "loss": 6 * t * d * self.vocabulary,
            "experts": 6 * t * (feed_forward + self.layers // 2 * d * self.num_experts),
            # The scores and their products with the values: half of all pairs of tokens.
            "attention": 6 * t * self.layers * (4 * d * d + self.length * d),
            "feed-forward": 6 * t * feed_forward,
        }


class SwiGLU(nn.Module):
    """A dense feed-forward layer."""

    def __init__(self, d_model: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(x).chunk(2, -1)
        result: Tensor = self.down(F.silu(a) * b)
        return result


class PlainMoE(nn.Module):
    """Computes a MoE with TopKGate in plain torch, from the weights of a layer of moe_ext."""

    def __init__(self, layer: MoE) -> None:
        super().__init__()
        self.k, self.num_experts = layer.k, layer.num_experts
        self.w_gate, self.up, self.down = (
            nn.Parameter(weight.detach().clone())
            for weight in (layer.gate.get_parameter("w_gate"), *layer.experts.parameters())
        )

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        logits, index = (x @ self.w_gate).topk(self.k)
        gates = logits.softmax(-1, dtype=torch.float32).to(x.dtype)
        slot = index.flatten().argsort(stable=True)
        token = slot // self.k
        counts = (index.flatten()[:, None] == torch.arange(self.num_experts)).sum(0)
        ends = counts.cumsum(0, dtype=torch.int32)
        a, b = F.grouped_mm(x[token], self.up, offs=ends).chunk(2, -1)
        rows = F.grouped_mm(F.silu(a) * b, self.down, offs=ends) * gates.flatten()[slot][:, None]
        return torch.zeros_like(x).index_add(0, token, rows), 0.0


class Ours(nn.Module):
    """Returns the output and the loss of a MoE."""

    def __init__(self, layer: MoE) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, aux = self.layer(x)
        return y, aux.loss


class Attention(nn.Module):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.num_heads = max(1, d_model // HEAD_WIDTH)
        self.input = nn.Linear(d_model, 3 * d_model, bias=False)
        self.output = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [B, S, D] to [B, S, D]."""
        heads = self.input(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.output(y.transpose(1, 2).flatten(2))
        return result


class Transformer(nn.Module):
    """Predicts each next token. `forward` returns the loss, with that of the MoE layers."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        d = sizes.d_model
        self.embedding = nn.Embedding(sizes.vocabulary, d)
        self.attention = nn.ModuleList(Attention(d) for _ in range(sizes.layers))
        self.feed_forward = nn.ModuleList(
            Ours(_moe(sizes)) if layer % 2 else SwiGLU(d, sizes.dense_hidden)
            for layer in range(sizes.layers)
        )
        self.norms = nn.ModuleList(nn.RMSNorm(d) for _ in range(2 * sizes.layers + 1))
        self.softmax = nn.Parameter(torch.randn(sizes.vocabulary, d) / math.sqrt(d))
        self.cross_entropy: Callable[..., Tensor] = ops.linear_cross_entropy

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        """Computes the mean loss of tokens [B, S] with target [B · S]."""
        x = self.embedding(tokens)
        losses = []
        for i, (attention, layer) in enumerate(zip(self.attention, self.feed_forward, strict=True)):
            x = x + attention(self.norms[2 * i](x))
            rows = self.norms[2 * i + 1](x).flatten(0, 1)
            if isinstance(layer, SwiGLU):
                y = layer(rows)
            else:
                y, loss = layer(rows)
                losses.append(loss)
            x = x + y.view_as(x)
        return self.loss(self.norms[-1](x).flatten(0, 1), target) + sum(losses)

    def loss(self, x: Tensor, target: Tensor) -> Tensor:
        """Computes the mean cross-entropy for the inputs x [T, D] of the softmax."""
        return self.cross_entropy(x, self.softmax, target)

    def plain(self) -> "Transformer":
        """Returns a copy that uses no operator of moe_ext."""
        other = copy.deepcopy(self)
        for i, layer in enumerate(self.feed_forward):
            if isinstance(layer, Ours):
                other.feed_forward[i] = PlainMoE(layer.layer)
        other.cross_entropy = cross_entropy_of_torch
        return other


def _moe(sizes: Sizes) -> MoE:
    shape = sizes.d_model, sizes.num_experts, sizes.k
    layer = MoE(*shape, hidden_sizes=[sizes.hidden], activation="swiglu", gate=TopKGate(*shape))
    nn.init.normal_(layer.gate.get_parameter("w_gate"), std=sizes.d_model**-0.5)
    return layer


class Step:
    """The training step of a model, and its parts."""

    def __init__(self, model: Transformer, sizes: Sizes, dtype: torch.dtype) -> None:
        self.model = model.to(dtype)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4, fused=True)
        generator = torch.Generator().manual_seed(0)
        text = torch.randint(
            sizes.vocabulary, (sizes.sequences, sizes.length + 1), generator=generator
        )
        self.tokens, self.target = text[:, :-1], text[:, 1:].flatten()
        shape = sizes.sequences, sizes.length, sizes.d_model
        self.x = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
        self.upstream = torch.randn(shape, generator=generator).to(dtype)

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
        functions: dict[str, Callable[[], object]] = {
            "update": self.optimizer.step,  # with the gradients of the step before it
            "loss": self._loss,
            "experts": partial(self._backward, mixtures, flat=True),
            "attention": partial(self._backward, list(self.model.attention), flat=False),
            "feed-forward": partial(self._backward, dense, flat=True),
        }
        return functions

    def _loss(self) -> None:
        self.model.zero_grad()
        self.model.loss(self.x.flatten(0, 1), self.target).backward()

    def _backward(self, layers: Sequence[nn.Module], *, flat: bool) -> None:
        self.model.zero_grad()
        x, upstream = self.x, self.upstream
        if flat:
            x, upstream = x.flatten(0, 1), upstream.flatten(0, 1)
        for layer in layers:
            result = layer(x)
            y, loss = result if isinstance(result, tuple) else (result, 0.0)
            outputs = [y, loss] if isinstance(loss, Tensor) else [y]
            torch.autograd.backward(outputs, [upstream, None][: len(outputs)])


@torch.no_grad()
def check(ours: Step, plain: Step) -> None:
    """Raises an error if the cross-entropies of both models differ."""
    layers = [layer for layer in ours.model.modules() if isinstance(layer, MoE)]
    for layer in layers:
        layer.w_importance = layer.w_load = 0.0
    found = ours.model(ours.tokens, ours.target)
    for layer in layers:
        layer.w_importance = layer.w_load = 0.1
    tolerance = 1e-4 if ours.x.dtype == torch.float32 else 2e-2
    expected = plain.model(plain.tokens, plain.target).to(found.dtype)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@dataclass
class Row:
    """The seconds of a part by implementation, and the least seconds of its GEMMs."""

    part: str
    seconds: dict[str, Quartiles]
    limit: float | None  # None: the part has no GEMM


def measure(sizes: Sizes, dtype: torch.dtype, rounds: int, *, compiles: bool) -> list[Row]:
    """Measures the steps and their parts."""
    model = Transformer(sizes)
    steps = {"moe_ext": Step(model, sizes, dtype), "plain": Step(model.plain(), sizes, dtype)}
    check(steps["moe_ext"], steps["plain"])
    functions: dict[tuple[str, str], Callable[[], object]] = {
        ("step", name): partial(step.run, step.model) for name, step in steps.items()
    }
    if compiles:
        for name, step in steps.items():
            compiled = torch.compile(step.model)
            functions["step", f"{name}, compiled"] = partial(step.run, compiled)
    for name, step in steps.items():
        functions |= {(part, name): function for part, function in step.parts().items()}
    functions |= {("probe", name): probe for name, probe in probes(dtype).items()}
    seconds = interleaved(functions, rounds, warm_up=1)

    rates = {name: seconds["probe", name] for name in ("peak", "exp")}
    least = {
        part: Quartiles.of(
            limits(rates, flops, sizes.tokens * sizes.vocabulary if part == "loss" else 0)
        ).median
        for part, flops in sizes.flops().items()
    }
    least["step"] = sum(least.values())
    return [
        Row(
            part,
            {name: Quartiles.of(s) for (of, name), s in seconds.items() if of == part},
            least.get(part),
        )
        for part in dict.fromkeys(part for part, _ in functions if part != "probe")
    ]


def cells(row: Row) -> list[str]:
    """Formats a row of the table."""
    ours = row.seconds["moe_ext"]
    ratios = [
        f"{row.seconds[name].median / ours.median:.2f}" if name in row.seconds else "–"
        for name in NAMES[1:]
    ]
    share = "–" if row.limit is None else f"{row.limit / ours.median:.2f}"
    milliseconds = Quartiles(*(1e3 * value for value in ours))
    return [row.part, f"{milliseconds:.0f}", share, *ratios]


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    parser = make_parser(__doc__)
    for size in fields(Sizes):
        option = f"--{size.name.replace('_', '-')}"
        parser.add_argument(option, type=at_least(1), default=size.default)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--eager", action="store_true", help="leave out torch.compile")
    parser.add_argument("--threads", type=at_least(1), default=1)
    parser.add_argument("--rounds", type=at_least(2), default=5)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    if options.dtype == "bfloat16":
        avoid_missing_amx()
    torch.manual_seed(0)
    sizes = Sizes(*(getattr(options, size.name) for size in fields(Sizes)))
    print(f"{options.dtype}, {options.threads} threads; {environment()}\n{sizes}\n")
    with pinned(options.threads):
        dtype = getattr(torch, options.dtype)
        rows = measure(sizes, dtype, options.rounds, compiles=not options.eager)
    header = ["part", "moe_ext, ms", "limit", *(f"x {name}" for name in NAMES[1:])]
    report_rows(rows, header, cells, options.json)
    return rows
