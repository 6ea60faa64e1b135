"""Operators of strictly balanced gating (Appendix F)."""

from typing import NamedTuple

import torch
from torch import Tensor


class BatchwiseTopM(NamedTuple):
    """Holds the mask M_batchwise of G batches as the m selected rows of each of E experts.

    Attributes:
        row_index: [G, E, m] int64, the rows of each expert in ascending order.
        mth_score: [G, E], the lowest selected score of each expert, without gradient; infinity if
            m = 0.
    """

    row_index: Tensor
    mth_score: Tensor


def rows_per_expert(k: int, num_rows: int, num_experts: int) -> int:
    """Computes m = k·T/E, rounded to the nearest whole number (half up).

    The result is at least 1 if T > 0, and 0 if T = 0.

    Args:
        k: mean number of experts per row.
        num_rows: T, or the number of rows of a group in a hierarchical mixture.
        num_experts: E, the number of experts.
    """
    return max(min(1, num_rows), (2 * k * num_rows + num_experts) // (2 * num_experts))


def batchwise_topm(
    scores: Tensor, m: int, first_expert: int = 0, num_experts: int | None = None
) -> BatchwiseTopM:
    """Selects for each expert the m rows with its largest scores: M_batchwise(X, m).

    A fixed pseudo-random function of the row and the number g·E + e of batch g and expert e breaks
    ties. If all scores are equal, different experts therefore get different rows. The result is the
    same in every run, with any number of threads and on every device. NaN ranks below every number.
    The rows of an expert are always distinct.

    CUDA is experimental: no kernel has run on a GPU yet.

    Args:
        scores: [G, N, E], G batches of N rows; or [N, E], then the results have no dimension G.
        m: rows for each expert, 0 <= m <= N.
        first_expert: the number of column 0 in batch 0, if scores has only some of the batches or
            experts. Ties then break as if scores had all of them.
        num_experts: the number of experts of a batch; None: E.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype or value.
    """
    if isinstance(scores, Tensor) and scores.dim() == 2:
        result = batchwise_topm(scores.unsqueeze(0), m, first_expert, num_experts)
        return BatchwiseTopM(*(tensor.squeeze(0) for tensor in result))
    if torch.compiler.is_exporting():
        # Hide where m comes from: the exported program would only accept batches with m > 1.
        m = torch.scalar_tensor(m, dtype=torch.int64).item()  # type: ignore[assignment]
    return BatchwiseTopM(*torch.ops.moe_ext.batchwise_topm(scores, m, first_expert, num_experts))


def selected_softmax(logits: Tensor, expert_index: Tensor, token_offsets: Tensor) -> Tensor:
    """Computes the gates of the selected experts, [R].

    The gates are G(x)_i = G_σ(x)_i M_i / Σ_j G_σ(x)_j M_j, where M_i = 1 for a selected expert and
    else 0. The operator computes the softmax over only the selected logits. So the sum cannot
    underflow. A token without selected experts has no gates.

    CUDA is experimental: no kernel has run on a GPU yet.

    Args:
        logits: [T, E].
        expert_index: [R] int64, the selected experts, sorted by token.
        token_offsets: [T + 1] int64; token t has the slots
            token_offsets[t] <= s < token_offsets[t + 1].

    Raises:
        ValueError, TypeError, IndexError: an argument has a wrong shape, dtype, device or value.
    """
    gates: Tensor = torch.ops.moe_ext.selected_softmax(logits, expert_index, token_offsets)
    return gates
