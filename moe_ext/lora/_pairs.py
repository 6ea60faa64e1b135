"""Pairs of low-rank matrices: the sum of several as one, and dropout."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ext import ops


def joined(
    pairs: Sequence[ops.LoRA],
    dtype: torch.dtype,
    experts: slice = slice(None),
    used: Tensor | None = None,
) -> ops.LoRA | None:
    """Returns one pair for the sum of several, whose ranks are concatenated; None without pairs.

    Args:
        pairs: A, B and the scale of each adapter of a layer.
        dtype: of the result.
        experts: the experts that the result has.
        used: the indices of those whose values are needed, if there are no gradients; None: all.
    """

    def cast(values: Tensor) -> Tensor:
        own = values[experts]
        if used is None or own.dtype == dtype:
            return own.to(dtype)
        # The cast of all experts would take longer than the products of a few rows.
        return own.new_empty(own.shape, dtype=dtype).index_copy_(0, used, own[used].to(dtype))

    loras = [ops.LoRA(cast(p.a), cast(p.b), p.scale) for p in pairs]
    if len(loras) <= 1:
        return loras[0] if loras else None
    a, b = torch.cat([p.a for p in loras], 2), torch.cat([p.scale * p.b for p in loras], 1)
    return ops.LoRA(a, b, 1.0)


def with_dropout(pair: ops.LoRA, dropout: float, num_rows: int) -> ops.LoRA:
    """Returns a pair with a random dropout mask for the rows of a call."""
    shape = num_rows, pair.a.shape[1]
    mask = torch.empty(shape, dtype=torch.bool, device=pair.a.device).bernoulli_(1 - dropout)
    return pair._replace(mask=mask, scale=pair.scale / (1 - dropout))
