"""The smooth load estimator, Appendix A."""

import torch
from torch import Tensor


def load(
    clean_logits: Tensor,
    noise_stddev: Tensor,
    threshold: Tensor,
    expert_index: Tensor,
    detach_threshold: bool = False,
    group_offsets: Tensor | None = None,
) -> Tensor:
    """Load(X)_i = Σ_x P(x, i), the expected number of tokens of expert i; returns [E].

    With group_offsets, the same sum over each group of rows: Load_g(X^(g))_i of a hierarchical
    mixture's secondary gates (Appendix B); returns [G, E].

    P(x, i) = Φ((clean_logits_i - kth_excluding(H, k, i)) / noise_stddev_i): the probability that
    i is in the top k under a new draw of its own noise. The gradient goes to the logits, to the
    standard deviations and to the thresholds, through which it reaches the k-th and (k+1)-th noisy
    logits.

    Args:
        clean_logits: [T, E].
        noise_stddev, threshold, expert_index: as `noisy_topk_gating` returns them.
        detach_threshold: treat the thresholds as constants.
        group_offsets: [G + 1] int64, ascending from 0 to T: group g has the rows
            group_offsets[g] <= t < group_offsets[g + 1], which may be none.

    Raises:
        ValueError, TypeError, IndexError: an argument's shape, type, device or value does not fit.
    """
    if detach_threshold:
        threshold = threshold.detach()
    return torch.ops.moe_ext.load(
        clean_logits, noise_stddev, threshold, expert_index, group_offsets
    )
