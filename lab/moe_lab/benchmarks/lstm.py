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
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_ext import ops
from moe_lab.benchmarks.harness import Row
from moe_lab.benchmarks.roofline import row_with_limit

# Those of App. C.1 with a projection, and of configs/mt/small-moe-32.toml.
SHAPES = [(64, 30, 512, 2_048, 512), (100, 25, 128, 256, 128)]
EXPONENTIALS = 6  # of a cell: 3 sigmoids and 2 tanh in forward, a tanh in backward
TITLE = "{dtype}, {threads} threads"
HEADER = "B, S, D, U, P | moe_ext, ms | torch, ms | GF/s | limit | quartiles | x | quartiles"
CELLS = (
    "{shape} | {moe_ext.median:.0f} | {torch.median:.0f} | {gflops:.0f} | {fraction:.2f|} | "
    "{speedup:.2f|}"
)


def run_moe_ext(lstm: nn.LSTM, x: Tensor) -> Tensor:
    w = dict(lstm.named_parameters())
    bias = w["bias_ih_l0"] + w["bias_hh_l0"]
    return ops.lstm(x, w["weight_ih_l0"], w["weight_hh_l0"], bias, w["weight_hr_l0"]).m


def run_torch(lstm: nn.LSTM, x: Tensor) -> Tensor:
    return lstm(x)[0]


def gradients(function: Callable[[nn.LSTM, Tensor], Tensor], lstm: nn.LSTM, x: Tensor) -> None:
    torch.autograd.grad(function(lstm, x).sum(), [x, *lstm.parameters()])


def measure(args: Any) -> Iterator[Row]:
    dtype = getattr(torch, args.dtype)
    warnings.filterwarnings("ignore", message=".*projection.*")  # of oneDNN, in torch's LSTM
    for shape in args.shape or SHAPES:
        num_sentences, num_tokens, d_input, units, width = shape
        lstm = nn.LSTM(d_input, units, proj_size=width, batch_first=True, dtype=dtype)
        x = torch.randn(num_sentences, num_tokens, d_input, dtype=dtype, requires_grad=True)
        functions = {
            "moe_ext": partial(gradients, run_moe_ext, lstm, x),
            "torch": partial(gradients, run_torch, lstm, x),
        }
        cells = num_sentences * num_tokens * units
        flops = 6 * cells * (4 * (d_input + width) + width)
        yield row_with_limit(shape, functions, dtype, args.rounds, flops, EXPONENTIALS * cells)
