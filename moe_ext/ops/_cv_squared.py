"""The squared coefficient of variation, CV² (Eq. 7)."""

import torch
from torch import Tensor


def cv_squared(values: Tensor) -> Tensor:
    """Computes the squared coefficient of variation: population variance / mean² (Eq. 7).

    The result is a scalar between 0 and E - 1. It does not depend on the scale of the values. It is
    0 if all values are 0. No epsilon is needed: non-negative values have mean 0 only if all are 0.
    For half-precision values, the result is float32.

    Args:
        values: [E], non-negative.

    Raises:
        ValueError: values is empty or does not have one dimension.
        TypeError: values is not floating point.
    """
    return torch.ops.moe_ext.cv_squared(values)
