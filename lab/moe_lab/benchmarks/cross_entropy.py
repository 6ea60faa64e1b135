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

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_ext import ops
from moe_lab.benchmarks.harness import Row
from moe_lab.benchmarks.roofline import row_with_limit

SHAPES = [(2_560, 128, 8_000), (2_560, 512, 32_000), (512, 2_048, 50_000)]
TITLE = "{dtype}, {threads} threads"
HEADER = (
    "T, D, V | moe_ext, ms | cross_entropy, ms | linear_cross_entropy, ms | GF/s | limit | "
    "quartiles | x | quartiles"
)
CELLS = (
    "{shape} | {moe_ext.median:.0f} | {cross_entropy.median:.0f} | "
    "{linear_cross_entropy.median:.0f} | {gflops:.0f} | {fraction:.2f|} | {speedup:.2f|}"
)
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def cross_entropy_of_torch(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.linear_cross_entropy(x, weight, target)


LOSSES: dict[str, Loss] = {
    "moe_ext": ops.linear_cross_entropy,
    "cross_entropy": lambda x, weight, target: F.cross_entropy(F.linear(x, weight), target),
    "linear_cross_entropy": cross_entropy_of_torch,
}


def measure(args: Any) -> Iterator[Row]:
    dtype = getattr(torch, args.dtype)
    for num_tokens, width, num_classes in args.shape or SHAPES:
        x = torch.randn(num_tokens, width, dtype=dtype, requires_grad=True)
        weight = (torch.randn(num_classes, width) / width**0.5).to(dtype).requires_grad_()
        target = torch.randint(num_classes, (num_tokens,))

        def gradients(
            loss: Loss, x: Tensor = x, weight: Tensor = weight, target: Tensor = target
        ) -> None:
            x.grad = weight.grad = None
            loss(x, weight, target).backward()

        functions = {name: partial(gradients, loss) for name, loss in LOSSES.items()}
        shape, logits = (num_tokens, width, num_classes), num_tokens * num_classes
        yield row_with_limit(shape, functions, dtype, args.rounds, 6 * width * logits, logits)
