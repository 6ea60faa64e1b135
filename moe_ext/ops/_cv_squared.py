"""The squared coefficient of variation, CV² (Eq. 7)."""

from collections.abc import Sequence

import torch
from torch import Tensor


def cv_squared(values: Tensor) -> Tensor:
    """Computes the squared coefficient of variation: population variance / mean² (Eq. 7).

    The result is a scalar between 0 and E - 1. It does not depend on the scale of the values. It is
    0 if all values are 0. No epsilon is needed: non-negative values have mean 0 only if all are 0.
    For half-precision values, the result is float32.

    CUDA is experimental: no kernel has run on a GPU yet.

    Args:
        values: [E], non-negative.

    Raises:
        ValueError: values is empty or does not have one dimension.
        TypeError: values is not floating point.
    """
    squared: Tensor = torch.ops.moe_ext.weighted_cv_squared([values], [1.0])
    return squared


def weighted_cv_squared(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Computes Σ_j weights_j · CV(values_j)², a scalar, with one operator; see `cv_squared`.

    CUDA is experimental: no kernel has run on a GPU yet.

    Args:
        values: one or more [E_j], non-negative, all of the same dtype.
        weights: a number for each of `values`. Values with the weight 0 are not read.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype, device or length.
    """
    total: Tensor = torch.ops.moe_ext.weighted_cv_squared(values, weights)
    return total
