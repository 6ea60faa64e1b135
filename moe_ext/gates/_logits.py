"""Computes the logits and the initial weights of all gates."""

from itertools import chain

import torch
from torch import Tensor, nn


def widened(x: Tensor) -> Tensor:
    """Converts x to at least float32; a gate calls this once for all its matrices."""
    return x.float() if x.dtype.itemsize < 4 else x


def logits(
    x: Tensor,
    *weights: Tensor,
    offsets: Tensor | None = None,
    inverse: Tensor | None = None,
    token_offsets: Tensor | None = None,
) -> list[Tensor]:
    """Computes x · weight for each of the weights, in at least float32, also under autocast.

    `moe_ext.ops.load` subtracts a threshold from a logit, which cancels in lower precision.

    On the CPU, a row's result does not depend on the other rows. On CUDA it may depend on their
    number, because torch selects a GEMM kernel by that number.

    Args:
        x: [T, D].
        weights: [D, E], or [G, D, E] with one matrix for each group of rows.
        offsets, inverse, token_offsets: the rows of each group; see `moe_ext.ops.experts`.
    """
    products: list[Tensor] = torch.ops.moe_ext._logits(x, weights, offsets, inverse, token_offsets)
    return products


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
