"""Compares the time of `ops.lstm` with the LSTM of torch and with the limit of its products.

    moe-lab benchmark lstm                                 # takes about a minute
    moe-lab benchmark lstm --shape 64 30 512 2048 512 --dtype bfloat16 --threads 2
    moe-lab benchmark lstm --rounds 7 --json lstm.json

A call computes the outputs of all sentences and the gradients of input and weights. Both LSTMs of a
shape use the same weights, in interleaved rounds. The limit is the time of the products at the peak
rate, plus 6 exponentials for each cell. Both rates are measured in the same rounds: a square GEMM
of `ops.experts`, and torch.exp in cache. "limit" is the limit divided by the time of `ops.lstm`.
"x" is the time of torch's LSTM divided by that time. Both are medians over the rounds.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from moe_ext import ops
from moe_lab.benchmarks.cross_entropy import limits, probes
from moe_lab.benchmarks.harness import (
    Quartiles,
    environment,
    interleaved,
    pinned,
    ratio,
    report_rows,
)
from moe_lab.cli import at_least, make_parser

# Those of App. C.1 with a projection, and of configs/mt/small-moe-32.toml.
SHAPES = [(64, 30, 512, 2_048, 512), (100, 25, 128, 256, 128)]
EXPONENTIALS = 6  # of a cell: 3 sigmoids and 2 tanh in forward, a tanh in backward


@dataclass
class Row:
    """The seconds of a call by LSTM, and quartiles of limit / moe_ext and torch / moe_ext."""

    shape: str
    moe_ext: Quartiles
    torch: Quartiles
    gflops: float
    fraction: Quartiles
    speedup: Quartiles


def of_moe_ext(lstm: nn.LSTM, x: Tensor) -> Tensor:
    w = dict(lstm.named_parameters())
    bias = w["bias_ih_l0"] + w["bias_hh_l0"]
    return ops.lstm(x, w["weight_ih_l0"], w["weight_hh_l0"], bias, w["weight_hr_l0"]).m


def of_torch(lstm: nn.LSTM, x: Tensor) -> Tensor:
    return lstm(x)[0]


def gradients(function: Callable[[nn.LSTM, Tensor], Tensor], lstm: nn.LSTM, x: Tensor) -> None:
    torch.autograd.grad(function(lstm, x).sum(), [x, *lstm.parameters()])


def measure(shape: Sequence[int], dtype: torch.dtype, rounds: int) -> Row:
    num_sentences, num_tokens, d_input, units, width = shape
    lstm = nn.LSTM(d_input, units, proj_size=width, batch_first=True, dtype=dtype)
    x = torch.randn(num_sentences, num_tokens, d_input, dtype=dtype, requires_grad=True)
    seconds = interleaved(
        {
            **probes(dtype),
            "moe_ext": partial(gradients, of_moe_ext, lstm, x),
            "torch": partial(gradients, of_torch, lstm, x),
        },
        rounds,
        warm_up=1,
    )
    cells = num_sentences * num_tokens * units
    flops = 6 * cells * (4 * (d_input + width) + width)
    ours = Quartiles.of(seconds["moe_ext"])
    return Row(
        ", ".join(map(str, shape)),
        moe_ext=ours,
        torch=Quartiles.of(seconds["torch"]),
        gflops=flops / ours.median / 1e9,
        fraction=ratio(limits(seconds, flops, EXPONENTIALS * cells), seconds["moe_ext"]),
        speedup=ratio(seconds["torch"], seconds["moe_ext"]),
    )


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--shape",
        type=at_least(1),
        nargs=5,
        action="append",
        metavar=("B", "S", "D", "U", "P"),
        help="sentences, tokens, widths of input, cells and projection; may be repeated; default: "
        "two shapes",
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=at_least(1), default=1)
    parser.add_argument("--rounds", type=at_least(2), default=5)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    print(f"{options.dtype}, {options.threads} threads; {environment()}\n")
    dtype = getattr(torch, options.dtype)
    with pinned(options.threads), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*projection.*")  # of oneDNN, in torch's LSTM
        rows = [measure(shape, dtype, options.rounds) for shape in options.shape or SHAPES]
    report_rows(
        rows,
        ["B, S, D, U, P", "moe_ext, ms", "torch, ms"]
        + ["GF/s", "limit", "quartiles", "x", "quartiles"],
        lambda row: [
            row.shape,
            f"{1e3 * row.moe_ext.median:.0f}",
            f"{1e3 * row.torch.median:.0f}",
            f"{row.gflops:.0f}",
            *row.fraction.cells(),
            *row.speedup.cells(),
        ],
        options.json,
    )
    return rows
