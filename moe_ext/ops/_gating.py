"""Noisy top-k gating, Section 2.1."""

from typing import NamedTuple

import torch
from torch import Tensor


class TopKSelection(NamedTuple):
    """What `noisy_topk_gating` returns.

    Attributes:
        gates: [T, K], the kept gates G(x), in order of decreasing noisy logit; rows sum to 1.
        expert_index: [T, K] int64, the experts they belong to.
        threshold: [T, 2], kth_excluding(H, k, i) of Appendix A: column 0, the k-th largest noisy
            logit, is what an expert outside the top k must exceed; column 1, the (k+1)-th, is what
            an expert inside must exceed (-inf where k = E).
        threshold_index: [T, 2] int64, where the two are (-1 where k = E).
        noise_stddev: [T, E], softplus(raw_noise_stddev) + noise_epsilon; [0, E] without noise.
    """

    gates: Tensor
    expert_index: Tensor
    threshold: Tensor
    threshold_index: Tensor
    noise_stddev: Tensor


def noisy_topk_gating(
    clean_logits: Tensor,
    raw_noise_stddev: Tensor | None,
    noise: Tensor | None,
    k: int,
    noise_epsilon: float = 1e-2,
) -> TopKSelection:
    """Keeps the k largest noisy logits of each token and turns them into gates (Eqs. 3-5).

    H = clean_logits + noise · (softplus(raw_noise_stddev) + noise_epsilon);
    G = softmax(KeepTopK(H, k)). Ties go to the lower index. NaN ranks below every number; where a
    kept logit is NaN or the largest is infinite the token's gates are NaN. The indices are distinct
    and in range whatever the logits.

    `gates`, `threshold` and `noise_stddev` are differentiable in the first two arguments. For half
    types they come in float32, and gradients go back in the half type.

    Args:
        clean_logits: [T, E], x·W_g.
        raw_noise_stddev: [T, E], x·W_noise, or None for gating without noise.
        noise: [T, E], drawn from the standard normal distribution; None without noise.
        k: experts kept per token, 1 <= k <= E.
        noise_epsilon: floor of the noise's standard deviation.

    Raises:
        ValueError, TypeError: an argument's shape, type, device or value does not fit.
    """
    return TopKSelection(
        *torch.ops.moe_ext.noisy_topk_gating(
            clean_logits, raw_noise_stddev, noise, k, noise_epsilon
        )
    )
