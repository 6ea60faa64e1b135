"""Computes the logits and the initial weights of all gates."""

from itertools import chain

import torch
from torch import Tensor, nn

from moe_ext import ops
from moe_ext.ops._dtypes import cast


def widened(x: Tensor) -> Tensor:
    """Converts x to at least float32; a gate calls this once for all its matrices."""
    return x.float() if x.dtype.itemsize < 4 else x


def logits(
    x: Tensor,
    weight: Tensor,
    *,
    offsets: Tensor | None = None,
    inverse: Tensor | None = None,
    token_offsets: Tensor | None = None,
) -> Tensor:
    """Computes x · weight in at least float32, also under autocast.

    `moe_ext.ops.load` subtracts a threshold from a logit, which cancels in lower precision.

    On the CPU, a row's result does not depend on the other rows. On CUDA it may depend on their
    number, because torch selects a GEMM kernel by that number.

    Args:
        x: [T, D].
        weight: [D, E], or [G, D, E] with one matrix for each group of rows.
        offsets, inverse, token_offsets: the rows of each group; see `moe_ext.ops.experts`.
    """
    device = x.device.type
    # The meta device does not support autocast.
    if device != "meta" and torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return logits(x, weight, offsets=offsets, inverse=inverse, token_offsets=token_offsets)
    x = widened(x)
    if x.dtype != weight.dtype:
        wide = torch.promote_types(x.dtype, weight.dtype)
        x, weight = cast(x, wide), cast(weight, wide)
    weights = [weight if weight.dim() == 3 else weight.unsqueeze(0)]
    return ops.experts(x, weights, offsets=offsets, inverse=inverse, token_offsets=token_offsets)


def only_given(logits: Tensor, expert_index: Tensor) -> Tensor:
    """Sets the logits [T, E] of experts that are not in expert_index [T, K] to -inf.

    A top-k selection then selects exactly the given experts, with unchanged gates.

    Raises:
        RuntimeError: a token has the same expert twice; on the CPU only, also in a compiled graph.
    """
    given = torch.zeros_like(logits, dtype=torch.bool).scatter(1, expert_index, True)
    if given.device.type == "cpu":  # on CUDA, a failed check would end the use of the device
        different = (given.sum(1) == expert_index.shape[1]).all()
        torch._assert_async(different, "expert_index must have different experts for each token")
    return torch.where(given, logits, -torch.inf)


@torch.no_grad()
def zero_(gate: nn.Module) -> None:
    """Sets all parameters and buffers of a gate to zero."""
    for value in chain(gate.parameters(), gate.buffers()):
        value.zero_()
