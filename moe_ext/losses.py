"""The balancing losses (Section 4, Appendix A) and the threshold loss (Appendix F)."""

import torch
from torch import Tensor

from moe_ext.checks import require, require_shape
from moe_ext.ops import accumulation_dtype

__all__ = ["batchwise_loss", "cv_squared", "importance_loss", "load_loss"]


def cv_squared(values: Tensor) -> Tensor:
    """Computes the squared coefficient of variation: population variance / mean².

    The result is a scalar between 0 and E - 1. It does not depend on the scale of the values. It is
    0 if all values are 0. No epsilon is needed: non-negative values have mean 0 only if all are 0.

    Args:
        values: [E], non-negative.

    Raises:
        ValueError: values is empty or does not have one dimension.
    """
    shape = tuple(values.shape)
    require(len(shape) == 1 and shape[0] > 0, "cv_squared: values", "have shape [E], E > 0", shape)
    values = values.to(accumulation_dtype(values))
    mean = values.mean()
    deviation = (values - mean) / torch.where(mean > 0, mean, 1)
    return deviation.square().mean()


def importance_loss(importance: Tensor, weight: float) -> Tensor:
    """Computes L_importance = weight · CV(Importance(X))² (Eq. 7), a scalar.

    Args:
        importance: [E], the gates of each expert, summed over the whole batch.
        weight: w_importance, the scale of the loss.
    """
    return _weighted(importance, weight)


def load_loss(load: Tensor, weight: float) -> Tensor:
    """Computes L_load = weight · CV(Load(X))² (Appendix A), a scalar.

    Args:
        load: [E], the estimated tokens of each expert, summed over the whole batch.
        weight: w_load, the scale of the loss.
    """
    return _weighted(load, weight)


def batchwise_loss(scores: Tensor, threshold: Tensor, mask: Tensor) -> Tensor:
    """Computes L_batchwise, the loss that trains the thresholds (Appendix F), a scalar.

    The loss sums over the tokens j and the experts i. M_threshold selects the scores X_ji > T_i::

        L_batchwise = Σ_j Σ_i (M_threshold(X_j, T)_i - M_batchwise(X)_ji) (X_ji - T_i)

    No term is negative. A term is 0 where the two masks agree. The derivative ∂L/∂T_i is the number
    of tokens of expert i in M_batchwise, minus its number of tokens in M_threshold.

    Args:
        scores: X, [..., num_tokens, E].
        threshold: T, [..., E], one threshold for each expert.
        mask: M_batchwise(X), bool, in the shape of scores.

    Raises:
        ValueError: the shapes of scores, threshold and mask do not match.
    """
    shape = tuple(scores.shape)
    require_shape("batchwise_loss", shape[:-2] + shape[-1:], threshold=threshold)
    require_shape("batchwise_loss", shape, mask=mask)
    excess = scores - threshold.unsqueeze(-2)
    return (((excess > 0).to(excess.dtype) - mask.to(excess.dtype)) * excess).sum()


def _weighted(values: Tensor, weight: float) -> Tensor:
    """Computes weight · CV(values)²; skips the computation if the weight is 0."""
    if weight == 0:
        return values.new_zeros((), dtype=accumulation_dtype(values))
    return weight * cv_squared(values)
