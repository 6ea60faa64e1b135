"""The smooth load estimator (Appendix A)."""

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
    """Estimates the number of tokens of each expert, Load(X)_i = Σ_x P(x, i) (Appendix A).

    P(x, i) is the probability that expert i is in the top k when only its own noise is redrawn::

        P(x, i) = Φ((clean_logits_i - kth_excluding(H, k, i)) / noise_stddev_i)

    The gradient flows to the logits, the standard deviations and the thresholds. Through the
    thresholds, the gradient reaches the k-th and (k+1)-th largest noisy logits.

    CUDA is experimental: no kernel has run on a GPU yet.

    Args:
        clean_logits: [T, E].
        noise_stddev, threshold, expert_index: see `TopKSelection`.
        detach_threshold: whether to treat the thresholds as constants in the backward pass.
        group_offsets: [G + 1] int64, ascending from 0 to T. Group g has the rows
            group_offsets[g] <= t < group_offsets[g + 1]; a group may be empty. None: no groups.

    Returns:
        [E], or [G, E] with group_offsets. Row g is then the sum over the rows of group g, the load
        Load_g(X^(g)) of a secondary gate (Appendix B).

    Raises:
        ValueError, TypeError, IndexError: an argument has a wrong shape, dtype, device or value.
    """
    if detach_threshold and isinstance(threshold, Tensor):
        threshold = threshold.detach()
    sums: Tensor = torch.ops.moe_ext.load(
        clean_logits, noise_stddev, threshold, expert_index, group_offsets
    )
    return sums
