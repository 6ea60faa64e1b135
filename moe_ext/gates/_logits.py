"""What gates share: their logits, and their start."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain

import torch
from torch import Tensor, nn

from moe_ext import ops


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x · weight, each row by itself: its bits do not depend on the other rows of the batch. (On
    CUDA they may: torch chooses another kernel for another number of rows.)"""
    return ops.experts(x, [weight.unsqueeze(0)])


def widened(x: Tensor) -> Tensor:
    """x in float32 at least: converted once for all matrices of a gate."""
    return x.to(ops.accumulation_dtype(x))


def logits(
    x: Tensor, weight: Tensor, product: Callable[[Tensor, Tensor], Tensor] = matmul
) -> Tensor:
    """x · weight in float32 at least, under autocast too: a threshold minus a logit cancels."""
    x = widened(x)
    wide = torch.promote_types(x.dtype, weight.dtype)
    # The meta device has no autocast and raises an error when asked for it.
    meta = x.device.type == "meta"
    with nullcontext() if meta else torch.autocast(x.device.type, enabled=False):
        return product(x.to(wide), weight.to(wide))


@torch.no_grad()
def zero_(gate: nn.Module) -> None:
    """Sets all parameters and buffers to zero."""
    for value in chain(gate.parameters(), gate.buffers()):
        value.zero_()
