"""Floating types."""

import torch
from torch import Tensor


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """The type in which sums of x's elements are kept: float32 for half types, else x's own."""
    return torch.promote_types(x.dtype, torch.float32)
