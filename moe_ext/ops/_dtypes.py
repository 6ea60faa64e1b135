"""The dtype in which the operators accumulate sums."""

import torch
from torch import Tensor


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype that accumulates sums of x: float32 for half precision, else x.dtype."""
    return torch.promote_types(x.dtype, torch.float32)
