"""Where each token's copies go, and taking them there: x [T, D] to rows [R, D] by expert."""

from typing import NamedTuple

import torch
from torch import Tensor


class DispatchPlan(NamedTuple):
    """The routed rows sorted by expert, then by token; slot t·K + j is the j-th choice of token t.

    Attributes:
        permutation: [R] int64, from row to slot.
        inverse: [T, K] int64, from slot to row.
        tokens_per_expert: [E] int64.
        offsets: [E + 1] int64; expert e's rows are offsets[e] <= r < offsets[e + 1].
    """

    permutation: Tensor
    inverse: Tensor
    tokens_per_expert: Tensor
    offsets: Tensor


def dispatch_plan(expert_index: Tensor, num_experts: int) -> DispatchPlan:
    """Sorts the routed rows by expert: a stable counting sort, O(T·K + E).

    Args:
        expert_index: [T, K] int64, each in [0, num_experts).
        num_experts: E.

    Raises:
        ValueError, TypeError, IndexError: an argument's shape, type or value does not fit.
    """
    return DispatchPlan(*torch.ops.moe_ext.dispatch_plan(expert_index, num_experts))


def dispatch(x: Tensor, inverse: Tensor) -> Tensor:
    """Copies every token to its rows, rows[inverse[t, j]] = x[t]; returns [R, D].

    Args:
        x: [T, D].
        inverse: [T, K] int64, a permutation of 0 … T·K - 1 as `dispatch_plan` makes it.

    Raises:
        ValueError, TypeError, IndexError: an argument's shape, type, device or value does not fit.
    """
    return torch.ops.moe_ext.dispatch(x, inverse)
