"""Finds the experts of rows that were received from several ranks."""

import torch
from torch import Tensor


def columns_of(counts: Tensor, total: int) -> Tensor:
    """Returns the column c of each item, [total], for counts[r, c] items in row-major order.

    Args:
        counts: [rows, columns] int64.
        total: the sum of counts, which the caller knows. Reading counts would synchronize.
    """
    column = torch.arange(counts.shape[1], device=counts.device).repeat(len(counts))
    return column.repeat_interleave(counts.flatten(), output_size=total)
