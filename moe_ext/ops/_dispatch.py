"""Where each token's copies go, and taking them there: x [T, D] to rows [R, D] by expert."""

from typing import NamedTuple

import torch
from torch import Tensor


class DispatchPlan(NamedTuple):
    """The (token, expert) pairs in two orders.

    Slots are the pairs ordered by token, as the gate gives them: with K for every token, slot
    t·K + j is the j-th choice of token t. Rows are the same pairs ordered by expert, then by slot.

    Attributes:
        permutation: [R] int64, from row to slot.
        inverse: [T, K] or [R] int64 as expert_index, from slot to row.
        tokens_per_expert: [E] int64.
        offsets: [E + 1] int64; expert e's rows are offsets[e] <= r < offsets[e + 1].
    """

    permutation: Tensor
    inverse: Tensor
    tokens_per_expert: Tensor
    offsets: Tensor


def dispatch_plan(expert_index: Tensor, num_experts: int) -> DispatchPlan:
    """Sorts the slots by expert: a stable counting sort, O(R + E).

    Args:
        expert_index: [T, K] or [R] int64, the expert of each slot, in [0, num_experts).
        num_experts: E.

    Raises:
        ValueError, TypeError, IndexError: an argument's shape, type or value does not fit.
    """
    return DispatchPlan(*torch.ops.moe_ext.dispatch_plan(expert_index, num_experts))


def dispatch(x: Tensor, inverse: Tensor, token_offsets: Tensor | None = None) -> Tensor:
    """Copies every token to its rows, rows[inverse[s]] = x[t] for its slots s; returns [R, D].

    Args:
        x: [T, D].
        inverse: [T, K] int64, or [R] with token_offsets: a permutation of 0 … R - 1 as
            `dispatch_plan` makes it.
        token_offsets: [T + 1] int64, where each token's slots begin and end; None: K slots each.

    Raises:
        ValueError, TypeError, IndexError: an argument's shape, type, device or value does not fit.
    """
    return torch.ops.moe_ext.dispatch(x, inverse, token_offsets)


def token_index(expert_index: Tensor, token_offsets: Tensor | None = None) -> Tensor:
    """The token of each slot, [R] int64.

    Args:
        expert_index: [T, K], or [R] with token_offsets, the expert of each slot.
        token_offsets: [T + 1] int64, where each token's slots begin and end; None: K slots each.
    """
    if token_offsets is None:
        num_tokens, k = expert_index.shape
        return torch.arange(num_tokens, device=expert_index.device).repeat_interleave(k)
    return torch.repeat_interleave(token_offsets.diff(), output_size=expert_index.numel())
