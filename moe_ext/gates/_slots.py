"""The slots of gates that select a different number of experts for each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext._ragged import offsets_of
from moe_ext.ranks.collectives import Ranks
from moe_ext.routing import Routing


class Agreement(NamedTuple):
    """Compares the threshold mask with the batchwise mask.

    Attributes:
        loss: L_batchwise.
        num_differing: number of (token, expert) pairs that only one of the masks selects.
        num_selected: number of pairs in one mask plus number of pairs in the other mask.
    """

    loss: Tensor
    num_differing: Tensor
    num_selected: Tensor


def several(ranks: Ranks | None) -> Ranks | None:
    """Returns None if ranks is a single rank, else ranks."""
    return None if ranks is None or ranks.size == 1 else ranks


def experts_of_rows(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the experts of each row of a bool mask [N, E].

    Returns:
        expert_index [R] int64, the selected experts, sorted by row, then by expert; and row_offsets
        [N + 1] int64: row n has the entries row_offsets[n] to row_offsets[n + 1] - 1.
    """
    return mask.nonzero()[:, 1].contiguous(), offsets_of(mask.sum(1))


def experts_of_selected(row_index: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Returns expert_index and row_offsets of `experts_of_rows` for the rows of each expert.

    row_index: [G, E, m], from `ops.batchwise_topm`; each of the G groups has num_rows rows.
    """
    num_groups, num_experts, m = row_index.shape
    first_row = num_rows * torch.arange(num_groups, device=row_index.device)
    row = row_index + first_row[:, None, None]
    # The counting sort of dispatch_plan turns the rows of each expert into the experts of each row.
    # An entry has the position (g·E + e)·m + i.
    plan = ops.dispatch_plan(row.view(-1), num_groups * num_rows)
    return plan.permutation // max(m, 1) % num_experts, plan.offsets


def values_of_slots(values: Tensor, expert_index: Tensor, token_offsets: Tensor) -> Tensor:
    """Returns the entries [R] of values [T, E] at the expert of each slot."""
    token = ops.token_index(expert_index, token_offsets)
    return values.view(-1).index_select(0, token * values.shape[1] + expert_index)


def sums_of_slots(
    num_experts: int,
    gates: Tensor,
    expert_index: Tensor,
    token_offsets: Tensor,
    ranks: Ranks | None,
    *more: Tensor,
) -> tuple[Tensor, ...]:
    """Sums the tensors that describe the slots of gates [R], and other tensors, over the ranks.

    Returns:
        importance [E], load [E], the number of tokens, the number of tokens without an expert, and
        more, all in the dtype of gates.
    """
    parts = (
        *ops.importance_and_load(gates.unsqueeze(1), expert_index.unsqueeze(1), num_experts),
        gates.new_full((), token_offsets.shape[0] - 1),
        (token_offsets.diff() == 0).count_nonzero().to(gates.dtype),
        *(tensor.to(gates.dtype) for tensor in more),
    )
    return parts if ranks is None else ranks.sum(*parts)


def routing_of_slots(
    num_experts: int,
    gates: Tensor,
    expert_index: Tensor,
    token_offsets: Tensor,
    agreements: Sequence[Agreement],
    ranks: Ranks | None,
) -> Routing:
    """Makes the `Routing` of gates [R]; the agreements of all levels give its loss and metrics.

    Importance, load, loss and metrics cover all ranks.
    """
    more = (torch.stack(column).sum(0) for column in zip(*agreements, strict=True))
    importance, load, num_tokens, num_without, *agreement = sums_of_slots(
        num_experts, gates, expert_index, token_offsets, ranks, *more
    )
    num_tokens = num_tokens.clamp_min(1)
    metrics = {"share_without_expert": num_without / num_tokens}
    loss = None
    if agreements:
        total = Agreement(*agreement)
        loss = total.loss / num_tokens
        metrics["mask_disagreement"] = total.num_differing / total.num_selected.clamp_min(1)
    return Routing(
        gates,
        expert_index,
        importance,
        load,
        token_offsets,
        equal_load=len(agreements) > 0 and ranks is None,
        loss=loss,
        metrics=metrics,
    )
