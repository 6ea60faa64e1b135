"""Noisy top-k gating (Section 2.1)."""

from typing import NamedTuple

import torch
from torch import Tensor


class TopKSelection(NamedTuple):
    """Holds the result of `noisy_topk_gating`.

    Attributes:
        gates: [T, K], the gates G(x) in order of decreasing noisy logit; each row sums to 1.
        expert_index: [T, K] int64, the expert of each gate.
        threshold: [T, 2], the thresholds kth_excluding(H, k, i) of Appendix A. Column 0 is the k-th
            largest noisy logit; an expert outside the top k must exceed it to enter. Column 1 is
            the (k+1)-th largest, or -inf if k = E; an expert in the top k must exceed it to stay.
        threshold_index: [T, 2] int64, the experts of the two thresholds. Column 1 is -1 if k = E.
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
    """Computes the gates of the k largest noisy logits of each token (Eqs. 3-5).

    The noisy logits H and the gates G are::

        H = clean_logits + noise · (softplus(raw_noise_stddev) + noise_epsilon)
        G = softmax(KeepTopK(H, k))

    The lower index wins a tie. NaN ranks below every number. The gates of a token are NaN if a
    selected logit is NaN or the largest logit is infinite. For any logits, the indices are distinct
    and in range.

    `gates`, `threshold` and `noise_stddev` are differentiable with respect to clean_logits and
    raw_noise_stddev. For half-precision inputs, these three outputs are float32. Gradients have the
    dtype of the input.

    CUDA is experimental: no kernel has run on a GPU yet.

    Args:
        clean_logits: [T, E], x·W_g.
        raw_noise_stddev: [T, E], x·W_noise; None: no noise.
        noise: [T, E], standard normal random values; None: no noise.
        k: experts per token, 1 <= k <= E.
        noise_epsilon: minimum standard deviation of the noise.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype, device or value.
    """
    return TopKSelection(
        *torch.ops.moe_ext.noisy_topk_gating(
            clean_logits, raw_noise_stddev, noise, k, noise_epsilon
        )
    )
