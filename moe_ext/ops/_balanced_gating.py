"""Strictly balanced gating, Appendix F: every expert gets its m tokens of the batch."""

from typing import NamedTuple

import torch
from torch import Tensor


class BatchwiseTopM(NamedTuple):
    """The mask M_batchwise, by experts.

    Attributes:
        row_index: [G, E, m] int64, the rows of each expert, ascending.
        mth_score: [G, E], the lowest score among them; infinity if m = 0. No gradient.
    """

    row_index: Tensor
    mth_score: Tensor


def batchwise_topm(
    scores: Tensor, m: int, first_expert: int = 0, num_experts: int | None = None
) -> BatchwiseTopM:
    """M_batchwise(X, m): the m rows with the largest scores of each column.

    Of equal scores a fixed pseudo-random function of column and row decides (the column counted
    over all batches, g·E + e), so that where all are equal every expert gets m rows of its own: the
    same ones in every run, at any number of threads and on every device. NaN ranks below every
    number; the rows of an expert are always distinct.

    Args:
        scores: [G, N, E], G batches of N rows; or [N, E], and the results have no G either.
        m: rows for each expert, 0 <= m <= N.
        first_expert, num_experts: the columns are those of some experts of a batch, from
            first_expert on of num_experts: they decide as they would among all; None is E.

    Raises:
        ValueError, TypeError: an argument's shape, type or value does not fit.
    """
    if scores.dim() == 2:
        of_one = batchwise_topm(scores.unsqueeze(0), m, first_expert, num_experts)
        return BatchwiseTopM(*(tensor.squeeze(0) for tensor in of_one))
    return BatchwiseTopM(*torch.ops.moe_ext.batchwise_topm(scores, m, first_expert, num_experts))


def selected_softmax(logits: Tensor, expert_index: Tensor, token_offsets: Tensor) -> Tensor:
    """G(x)_i = G_σ(x)_i M_i / Σ_j G_σ(x)_j M_j for the selected experts i; returns [R].

    It is the softmax over the selected logits alone, so that nothing underflows. A token without a
    selected expert has no gates.

    Args:
        logits: [T, E].
        expert_index: [R] int64, the selected experts of the first token, of the second, …
        token_offsets: [T + 1] int64, token t's are token_offsets[t] <= s < token_offsets[t + 1].

    Raises:
        ValueError, TypeError, IndexError: an argument's shape, type, device or value does not fit.
    """
    return torch.ops.moe_ext.selected_softmax(logits, expert_index, token_offsets)
