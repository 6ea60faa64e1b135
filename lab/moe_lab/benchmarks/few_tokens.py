"""Measures whole MoE layers, gate included, on few tokens: the steps of a decoder.

    moe-lab benchmark few-tokens                       # 1 thread
    moe-lab benchmark few-tokens --shape 512 64 2 1024 --tokens 1 8 --json few.json

A call is a forward pass without gradients in evaluation mode. The tokens of every call differ, so
that other experts run. Functions are called in interleaved rounds.

    moe_ext      microseconds of a call of MoE, with ReLU and two matrices for each expert
    limit        the time to read the weights of the chosen experts and of the gate, divided by the
                 time of moe_ext. The bandwidth is measured in the same rounds (torch.dot)
    loop         the time of a Python loop over the chosen experts, divided by that of moe_ext
    training     microseconds of a forward pass in training mode, with gradients enabled
    grouped_mm,  the times of transformers' MixtralSparseMoeBlock with these implementations of its
    batched_mm   experts, divided by that of MoE with SwiGLU experts of the same sizes. Their hidden
                 layer is a third smaller, so that an expert has about as many weights

All figures are medians over the rounds.
"""

import importlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from moe_ext import MoE, TopKGate
from moe_lab.benchmarks.harness import (
    Quartiles,
    environment,
    interleaved,
    pinned,
    ratio,
    report_rows,
)
from moe_lab.benchmarks.roofline import stream_probe
from moe_lab.cli import at_least, make_parser
from moe_lab.packages import require_package

SHAPES = [(64, 8, 2, 128), (512, 64, 2, 1_024)]
TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256]
IMPLEMENTATIONS = ("grouped_mm", "batched_mm")
MIN_SECONDS = 0.005  # of the calls in a round


@dataclass
class Row:
    """The microseconds of a call, and ratios of times."""

    shape: str
    tokens: int
    moe_ext: Quartiles
    limit: Quartiles
    loop: Quartiles
    training: Quartiles
    transformers: dict[str, Quartiles]


class Loop(nn.Module):
    """Computes a MoE in evaluation mode by a loop over the chosen experts, in plain torch."""

    def __init__(self, layer: MoE) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        w_1, w_2 = self.layer.experts.parameters()
        top = (x @ self.layer.gate.get_parameter("w_gate")).topk(self.layer.k)
        gates = top.values.softmax(-1)
        y = torch.zeros_like(x)
        for e in top.indices.unique().tolist():
            token, choice = torch.where(top.indices == e)
            rows = torch.relu(x[token] @ w_1[e]) @ w_2[e]
            y.index_add_(0, token, rows * gates[token, choice, None])
        return y


def gated_width(hidden: int) -> int:
    """Returns two thirds of a width, as a multiple of 16, which torch's grouped_mm requires."""
    return max(16, 2 * hidden // 3 // 16 * 16)


def mixtral_block(shape: Sequence[int], implementation: str) -> nn.Module:
    """Makes transformers' layer of Mixtral with random weights."""
    d_model, num_experts, k, hidden = shape
    mixtral = importlib.import_module("transformers.models.mixtral.modeling_mixtral")
    config = mixtral.MixtralConfig(
        hidden_size=d_model,
        intermediate_size=gated_width(hidden),
        num_local_experts=num_experts,
        num_experts_per_tok=k,
    )
    config._experts_implementation = implementation
    block = mixtral.MixtralSparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    return block.eval()


def calls(layer: nn.Module, inputs: Sequence[Tensor], *, training: bool = False) -> None:
    with torch.set_grad_enabled(training):
        for x in inputs:
            layer(x)


def measure(shape: Sequence[int], num_tokens: int, rounds: int) -> Row:
    d_model, num_experts, k, hidden = shape
    layer = MoE(d_model, num_experts, k, hidden_sizes=[hidden]).eval()
    training = MoE(d_model, num_experts, k, hidden_sizes=[hidden])
    gated = MoE(
        *(d_model, num_experts, k),
        hidden_sizes=[gated_width(hidden)],
        activation="swiglu",
        gate=TopKGate(d_model, num_experts, k),
    ).eval()
    for each in (layer, training):
        nn.init.normal_(each.gate.get_parameter("w_gate"))
    inputs = [torch.randn(num_tokens, d_model) for _ in range(16)]
    torch.testing.assert_close(layer(inputs[0])[0], Loop(layer)(inputs[0]), rtol=1e-4, atol=1e-4)
    once = interleaved({"": partial(calls, layer, inputs)}, 3)[""]
    repeats = max(1, round(MIN_SECONDS / min(once)))
    inputs *= repeats

    stream = stream_probe()
    functions: dict[str, Callable[[], object]] = {
        "stream": stream.function,
        "moe_ext": partial(calls, layer, inputs),
        "loop": partial(calls, Loop(layer), inputs),
        "training": partial(calls, training, inputs, training=True),
        "gated": partial(calls, gated, inputs),
    }
    for name in IMPLEMENTATIONS:
        block = mixtral_block(shape, name)
        sequences = [x[None] for x in inputs]
        functions[name] = partial(calls, block, sequences)
    seconds = interleaved(functions, rounds, warm_up=1)

    chosen = [layer(x)[1].expert_index.unique().numel() for x in inputs[:16]]
    weights = 2 * d_model * hidden * sum(chosen) / len(chosen) + d_model * num_experts
    limits = [4 * weights * s / stream.work.bytes * len(inputs) for s in seconds["stream"]]
    microseconds = 1e6 / len(inputs)
    return Row(
        ", ".join(map(str, shape)),
        num_tokens,
        Quartiles.of(microseconds * s for s in seconds["moe_ext"]),
        ratio(limits, seconds["moe_ext"]),
        ratio(seconds["loop"], seconds["moe_ext"]),
        Quartiles.of(microseconds * s for s in seconds["training"]),
        {name: ratio(seconds[name], seconds["gated"]) for name in IMPLEMENTATIONS},
    )


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--shape",
        type=at_least(1),
        nargs=4,
        action="append",
        metavar=("D", "E", "K", "H"),
        help="width, experts, experts per token, hidden width; may be repeated",
    )
    parser.add_argument("--tokens", type=at_least(1), nargs="+", default=TOKENS, metavar="T")
    parser.add_argument("--threads", type=at_least(1), default=1)
    parser.add_argument("--rounds", type=at_least(2), default=9)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    require_package("few_tokens", "transformers", "benchmark")
    torch.manual_seed(0)
    print(f"float32, {options.threads} threads; {environment()}\n")
    with pinned(options.threads):
        rows = [
            measure(shape, num_tokens, options.rounds)
            for shape, num_tokens in itertools.product(options.shape or SHAPES, options.tokens)
        ]
    report_rows(
        rows,
        ["D, E, k, h", "T", "moe_ext, us", "limit", "loop", "training, us", *IMPLEMENTATIONS],
        lambda row: [
            row.shape,
            str(row.tokens),
            f"{row.moe_ext.median:.0f}",
            f"{row.limit.median:.2f}",
            f"{row.loop.median:.2f}",
            f"{row.training.median:.0f}",
            *(f"{x.median:.2f}" for x in row.transformers.values()),
        ],
        options.json,
    )
    return rows
