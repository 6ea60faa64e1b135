"""Computes the logits and the initial weights of all gates."""

from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor, nn

from moe_ext import ops
from moe_ext.ops._dtypes import cast


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Computes x · weight. On the CPU, a row's result does not depend on the other rows.

    On CUDA it may depend on the number of rows, because torch selects a GEMM kernel by that number.
    """
    return ops.experts(x, [weight.unsqueeze(0)])


def widened(x: Tensor) -> Tensor:
    """Converts x to at least float32; a gate calls this once for all its matrices."""
    return cast(x, ops.accumulation_dtype(x))


def logits(
    x: Tensor, weight: Tensor, product: Callable[[Tensor, Tensor], Tensor] = matmul
) -> Tensor:
    """Computes x · weight by product(x, weight), in at least float32, also under autocast.

    `moe_ext.ops.load` subtracts a threshold from a logit, which cancels in lower precision.
    """
    wide = torch.promote_types(ops.accumulation_dtype(x), weight.dtype)
    x, weight = cast(x, wide), cast(weight, wide)
    device = x.device.type
    # The meta device does not support autocast.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return product(x, weight)
    with torch.autocast(device, enabled=False):
        return product(x, weight)


def only_given(logits: Tensor, expert_index: Tensor | None) -> Tensor:
    """Sets the logits [T, E] of experts that are not in expert_index [T, K] to -inf.

    A top-k selection then selects exactly the given experts, with unchanged gates. None: returns
    logits.
    """
    if expert_index is None:
        return logits
    given = torch.zeros_like(logits, dtype=torch.bool).scatter(1, expert_index, True)
    return torch.where(given, logits, -torch.inf)


@torch.no_grad()
def zero_(gate: nn.Module) -> None:
    """Sets all parameters and buffers of a gate to zero."""
    for value in chain(gate.parameters(), gate.buffers()):
        value.zero_()
