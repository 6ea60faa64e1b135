"""The balancing losses, Section 4 and Appendix A, and that of the thresholds, Appendix F."""

import torch
from torch import Tensor

from moe_ext.checks import require, require_shape
from moe_ext.ops import accumulation_dtype

__all__ = ["batchwise_loss", "cv_squared", "importance_loss", "load_loss"]


def cv_squared(values: Tensor) -> Tensor:
    """The squared coefficient of variation, population variance over squared mean; a scalar.

    It does not change when all values are scaled, lies between 0 and E - 1, and is 0 when all
    values are 0. No epsilon takes part: the only zero mean of non-negative values is all zeros.

    Args:
        values: [E], non-negative.

    Raises:
        ValueError: it is not [E], or empty.
    """
    shape = tuple(values.shape)
    require(len(shape) == 1 and shape[0] > 0, "cv_squared: values", "have shape [E], E > 0", shape)
    values = values.to(accumulation_dtype(values))
    mean = values.mean()
    deviation = (values - mean) / torch.where(mean > 0, mean, 1)
    return deviation.square().mean()


def importance_loss(importance: Tensor, weight: float) -> Tensor:
    """L_importance = weight · CV(Importance(X))² (Eq. 7).

    Args:
        importance: [E], of the whole batch.
        weight: w_importance.
    """
    return _weighted(importance, weight)


def load_loss(load: Tensor, weight: float) -> Tensor:
    """L_load = weight · CV(Load(X))² (Appendix A).

    Args:
        load: [E], of the whole batch.
        weight: w_load.
    """
    return _weighted(load, weight)


def batchwise_loss(scores: Tensor, threshold: Tensor, mask: Tensor) -> Tensor:
    """L_batchwise = Σ_j Σ_i (M_threshold(X_j, T)_i - M_batchwise(X)_ji) (X_ji - T_i)  (Appendix F).

    No term is negative, and all are 0 where the masks agree. ∂L/∂T_i is the number of tokens that
    the batchwise mask gives to expert i less the number of those that pass its threshold.

    Args:
        scores: X, [..., T, E].
        threshold: T, [..., E].
        mask: M_batchwise(X), of the scores' shape, bool.

    Raises:
        ValueError: the shapes do not fit.
    """
    shape = tuple(scores.shape)
    require_shape("batchwise_loss", shape[:-2] + shape[-1:], threshold=threshold)
    require_shape("batchwise_loss", shape, mask=mask)
    excess = scores - threshold.unsqueeze(-2)
    return (((excess > 0).to(excess.dtype) - mask.to(excess.dtype)) * excess).sum()


def _weighted(values: Tensor, weight: float) -> Tensor:
    """weight · CV(values)², which costs nothing if the weight is 0."""
    if weight == 0:
        return values.new_zeros((), dtype=accumulation_dtype(values))
    return weight * cv_squared(values)
