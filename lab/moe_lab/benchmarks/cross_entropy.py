"""Compares the time of `ops.linear_cross_entropy` with the functions of torch 2.13, and its limit.

    moe-lab benchmark cross-entropy                        # takes 2 GiB
    moe-lab benchmark cross-entropy --shape 2560 128 8000
    moe-lab benchmark cross-entropy --dtype bfloat16 --rounds 7 --json loss.json

A call computes the mean loss and the gradients of input and weight. All functions of a shape use
the same tensors, in interleaved rounds. The limit is the time of three GEMMs at the peak rate, plus
T·V exponentials. Both rates are measured in the same rounds: a square GEMM of `ops.experts`, and
torch.exp in cache. "limit" is the limit divided by the time of `ops.linear_cross_entropy`. "x" is
the time of the faster function of torch divided by that time. Both are medians over the rounds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_ext import ops
from moe_lab.benchmarks.harness import (
    Quartiles,
    environment,
    interleaved,
    pinned,
    ratio,
    report_rows,
)
from moe_lab.cli import at_least, make_parser

SHAPES = [(2_560, 128, 8_000), (2_560, 512, 32_000), (512, 2_048, 50_000)]
PEAK_SIZE = 1_536  # rows of the square matrices of the peak
NUM_EXPONENTIALS = 1 << 13  # in cache
REPEATS = 200

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def cross_entropy_of_logits(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), target)


def cross_entropy_of_torch(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.linear_cross_entropy(x, weight, target)


LOSSES: dict[str, Loss] = {
    "moe_ext": ops.linear_cross_entropy,
    "cross_entropy": cross_entropy_of_logits,
    "linear_cross_entropy": cross_entropy_of_torch,
}


@dataclass
class Row:
    """The seconds of a call by function, and quartiles of limit / moe_ext and torch / moe_ext."""

    shape: str
    moe_ext: Quartiles
    cross_entropy: Quartiles
    linear_cross_entropy: Quartiles
    gflops: float
    fraction: Quartiles
    speedup: Quartiles


def peak(a: Tensor, weight: Tensor) -> None:
    ops.experts(a, [weight])


def exponentials(values: Tensor, out: Tensor) -> None:
    for _ in range(REPEATS):
        torch.exp(values, out=out)


def probes(dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Returns the functions that measure the rates of GEMMs, "peak", and exponentials, "exp"."""
    square, values = torch.randn(PEAK_SIZE, PEAK_SIZE).to(dtype), torch.randn(NUM_EXPONENTIALS)
    return {
        "peak": partial(peak, square, square[None]),
        "exp": partial(exponentials, values, torch.empty_like(values)),
    }


def limits(
    seconds: Mapping[str, Sequence[float]], flops: int, num_exponentials: int
) -> list[float]:
    """Returns the least seconds of GEMMs and exponentials, from the measured rates of each round.

    seconds: of each of `probes` in each round.
    """
    return [
        gemm * flops / (2 * PEAK_SIZE**3) + exp * num_exponentials / (REPEATS * NUM_EXPONENTIALS)
        for gemm, exp in zip(seconds["peak"], seconds["exp"], strict=True)
    ]


def gradients(loss: Loss, x: Tensor, weight: Tensor, target: Tensor) -> None:
    x.grad = weight.grad = None
    loss(x, weight, target).backward()


def measure(shape: Sequence[int], dtype: torch.dtype, rounds: int) -> Row:
    num_tokens, width, num_classes = shape
    x = torch.randn(num_tokens, width, dtype=dtype, requires_grad=True)
    weight = (torch.randn(num_classes, width) / width**0.5).to(dtype).requires_grad_()
    target = torch.randint(num_classes, (num_tokens,))
    functions = probes(dtype)
    for name, loss in LOSSES.items():
        functions[name] = partial(gradients, loss, x, weight, target)
    seconds = interleaved(functions, rounds, warm_up=1)
    flops = 6 * num_tokens * width * num_classes
    ours = seconds["moe_ext"]
    torchs = [min(each) for each in zip(*(seconds[n] for n in list(LOSSES)[1:]), strict=True)]
    quartiles = {name: Quartiles.of(seconds[name]) for name in LOSSES}
    return Row(
        f"{num_tokens}, {width}, {num_classes}",
        **quartiles,
        gflops=flops / quartiles["moe_ext"].median / 1e9,
        fraction=ratio(limits(seconds, flops, num_tokens * num_classes), ours),
        speedup=ratio(torchs, ours),
    )


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--shape",
        type=at_least(1),
        nargs=3,
        action="append",
        metavar=("T", "D", "V"),
        help="tokens, width and classes; may be repeated; default: three shapes",
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=at_least(1), default=1)
    parser.add_argument("--rounds", type=at_least(2), default=5)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    print(f"{options.dtype}, {options.threads} threads; {environment()}\n")
    dtype = getattr(torch, options.dtype)
    with pinned(options.threads):
        rows = [measure(shape, dtype, options.rounds) for shape in options.shape or SHAPES]
    report_rows(
        rows,
        ["T, D, V", "moe_ext, ms", *(f"{name}, ms" for name in list(LOSSES)[1:])]
        + ["GF/s", "limit", "quartiles", "x", "quartiles"],
        lambda row: [
            row.shape,
            *(f"{1e3 * getattr(row, name).median:.0f}" for name in LOSSES),
            f"{row.gflops:.0f}",
            *row.fraction.cells(),
            *row.speedup.cells(),
        ],
        options.json,
    )
    return rows
