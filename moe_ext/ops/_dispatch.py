"""Dispatch copies the tokens x [T, D] to rows [R, D] that are sorted by expert."""

from typing import NamedTuple

import torch
from torch import Tensor

from moe_ext.checks import require


class DispatchPlan(NamedTuple):
    """Maps between the two orders of the (token, expert) assignments: by token and by expert.

    Slots are the R assignments in the gate's order, sorted by token. With K experts per token, slot
    t·K + j is the j-th expert of token t. Rows are the same assignments, sorted by expert, then by
    slot.

    Attributes:
        permutation: [R] int64, the slot of each row.
        inverse: int64, in the shape of expert_index: [T, K] or [R]. The row of each slot.
        tokens_per_expert: [E] int64, the number of tokens of each expert.
        offsets: [E + 1] int64; expert e has the rows offsets[e] <= r < offsets[e + 1].
    """

    permutation: Tensor
    inverse: Tensor
    tokens_per_expert: Tensor
    offsets: Tensor


def dispatch_plan(expert_index: Tensor, num_experts: int) -> DispatchPlan:
    """Sorts R (token, expert) assignments by expert with a stable counting sort in O(R + E).

    CUDA is experimental: no kernel has run on a GPU yet.

    Args:
        expert_index: [T, K] or [R] int64, the expert of each assignment, in [0, num_experts).
        num_experts: E, the number of experts.

    Raises:
        ValueError, TypeError, IndexError: an argument has a wrong shape, dtype or value.
    """
    return DispatchPlan(*torch.ops.moe_ext.dispatch_plan(expert_index, num_experts))


def dispatch(x: Tensor, inverse: Tensor, token_offsets: Tensor | None = None) -> Tensor:
    """Copies each token to its rows: rows[inverse[s]] = x[t] for the slots s of token t.

    CUDA is experimental: no kernel has run on a GPU yet.

    Args:
        x: [T, D].
        inverse: [T, K] int64, or [R] with token_offsets. The row of each slot, from
            `dispatch_plan`: a permutation of 0, …, R - 1.
        token_offsets: [T + 1] int64; token t has the slots
            token_offsets[t] <= s < token_offsets[t + 1]. None: each token has K slots.

    Returns:
        [R, D], in the dtype of x.

    Raises:
        ValueError, TypeError, IndexError: an argument has a wrong shape, dtype, device or value.
    """
    rows: Tensor = torch.ops.moe_ext.dispatch(x, inverse, token_offsets)
    return rows


def token_index(expert_index: Tensor, token_offsets: Tensor | None = None) -> Tensor:
    """Returns the token of each slot, [R] int64.

    Args:
        expert_index: [T, K], or [R] with token_offsets. The expert of each slot.
        token_offsets: [T + 1] int64; token t has the slots
            token_offsets[t] <= s < token_offsets[t + 1]. None: each token has K slots.

    Raises:
        ValueError: expert_index has another number of dimensions.
    """
    wanted = 2 if token_offsets is None else 1
    num_dims = expert_index.dim()
    require(num_dims == wanted, "token_index: expert_index", f"have {wanted} dimensions", num_dims)
    if token_offsets is None:
        num_tokens, k = expert_index.shape
        return torch.arange(num_tokens, device=expert_index.device).repeat_interleave(k)
    return torch.repeat_interleave(token_offsets.diff(), output_size=expert_index.numel())
