"""Ragged tensors: segments of different lengths in one tensor, with offsets."""

import torch
from torch import Tensor
from torch.nn import functional as F


def offsets_of(sizes: Tensor) -> Tensor:
    """Returns the offsets [N + 1] of segments with sizes [N]; a bool is a size of 0 or 1."""
    return F.pad(sizes.cumsum(0), (1, 0))


def select_segments(offsets: Tensor, index: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Selects segments; segment n has the entries offsets[n] to offsets[n + 1] - 1.

    Args:
        offsets: [N + 1] int64.
        index: [M] int64, the selected segments.
        total: number of entries of these segments, which the caller knows.

    Returns:
        The offsets [M + 1] of the selected segments, and the position [total] of each of their
        entries before the selection.
    """
    sizes = offsets.diff().index_select(0, index)
    selected = offsets_of(sizes)
    segment = torch.repeat_interleave(sizes, output_size=total)
    moved = offsets[:-1].index_select(0, index) - selected[:-1]
    place = torch.arange(total, device=offsets.device)
    return selected, place + moved.index_select(0, segment)
