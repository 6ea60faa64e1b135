"""The gated sum of the expert outputs (Eq. 1)."""

import torch
from torch import Tensor


def combine(
    expert_output: Tensor, gates: Tensor, inverse: Tensor, token_offsets: Tensor | None = None
) -> Tensor:
    """Sums the expert outputs of each token, weighted by its gates (Eq. 1); returns [T, D].

    y_t = Σ_s gates[s] · expert_output[inverse[s]] over the slots s of token t. The sum runs in slot
    order and accumulates half-precision inputs in float32. The result has the dtype of
    expert_output. A token without slots gets 0.

    CUDA is experimental: no kernel has run on a GPU yet.

    Args:
        expert_output: [R, D], sorted by expert.
        gates: the weight of each slot, in the shape of inverse and any floating-point dtype.
        inverse: [T, K] int64, or [R] with token_offsets. The row of each slot, from
            `dispatch_plan`: a permutation of 0, …, R - 1.
        token_offsets: [T + 1] int64; token t has the slots
            token_offsets[t] <= s < token_offsets[t + 1]. None: each token has K slots.

    Raises:
        ValueError, TypeError, IndexError: an argument has a wrong shape, dtype, device or value.
    """
    y: Tensor = torch.ops.moe_ext.combine(expert_output, gates, inverse, token_offsets)
    return y
