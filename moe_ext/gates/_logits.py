"""Computes the logits of all gates."""

import torch
from torch import Tensor


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
