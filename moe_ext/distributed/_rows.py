"""Rows that came from several ranks."""

import torch
from torch import Tensor


def columns_of(counts: Tensor, total: int) -> Tensor:
    """The column of each of counts[r, c] items that lie one after the other, row by row; [total].

    Args:
        counts: [rows, columns] int64.
        total: their sum, which so need not be read from the device.
    """
    column = torch.arange(counts.shape[1], device=counts.device).repeat(len(counts))
    return column.repeat_interleave(counts.flatten(), output_size=total)
