"""The batchwise mask of a batch that is sharded over ranks (Appendix F)."""

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext.ops._balanced_gating import rows_per_expert
from moe_ext.ranks._rows import columns_of
from moe_ext.ranks.collectives import AllToAll, Ranks, blocks


def mask_over_ranks(
    scores: Tensor, k: int, group_sizes: Tensor, first_group: int, ranks: Ranks
) -> tuple[Tensor, Tensor]:
    """Selects the m rows of each group with the largest scores for each expert, over all ranks.

    This is M_batchwise (Appendix F). Each rank selects the rows of some experts.

    Args:
        scores: [R, E], this rank's rows, sorted by group.
        k: mean number of experts per row.
        group_sizes: [G], this rank's number of rows in each group. Summed over the ranks, all
            groups have the same size.
        first_group: the number of the first of these groups. Ties depend on it.
        ranks: the ranks that call this function together.

    Returns:
        mask [R, E] bool for this rank's rows, and mth_score [G, E] as in
        `moe_ext.ops.batchwise_topm`.
    """
    (num_rows, num_experts), num_groups = scores.shape, len(group_sizes)
    sizes = ranks.gather(group_sizes)
    rows_of = sizes.sum(1).tolist()
    if sum(rows_of) == 0:
        mth_score = scores.new_full((num_groups, num_experts), torch.inf)
        return torch.zeros_like(scores, dtype=torch.bool), mth_score
    columns = [len(block) for block in blocks(range(num_experts), ranks.size)]
    num_columns, first = columns[ranks.rank], sum(columns[: ranks.rank])
    num_sent = [num_rows * number for number in columns]
    num_received = [rows * num_columns for rows in rows_of]

    sent = torch.cat([part.reshape(-1) for part in scores.split(columns, 1)])
    received = AllToAll(sent, ranks, num_sent, num_received).wait().view(sum(rows_of), num_columns)
    # Received rows are sorted by rank, then group.
    plan = ops.dispatch_plan(columns_of(sizes, len(received)), num_groups)
    by_group = received[plan.permutation].view(num_groups, sum(rows_of) // num_groups, num_columns)
    m = rows_per_expert(k, by_group.shape[1], num_experts)
    first_expert = first_group * num_experts + first
    row_index, mth_score = ops.batchwise_topm(by_group, m, first_expert, num_experts)
    mask = torch.zeros_like(by_group, dtype=torch.bool).scatter(1, row_index.mT, True)
    back = mask.view_as(received)[plan.inverse].reshape(-1)
    parts = AllToAll(back, ranks, num_received, num_sent).wait().split(num_sent)
    all_scores = scores.new_zeros(num_groups, num_experts)
    all_scores[:, first : first + num_columns] = mth_score
    (all_scores,) = ranks.sum(all_scores)
    own_mask = [part.view(num_rows, n) for part, n in zip(parts, columns, strict=True)]
    return torch.cat(own_mask, 1), all_scores
