"""The gated sum of the experts' outputs, Eq. 1."""

import torch
from torch import Tensor


def combine(
    expert_output: Tensor, gates: Tensor, inverse: Tensor, token_offsets: Tensor | None = None
) -> Tensor:
    """y_t = Σ_s gates[s] · expert_output[inverse[s]] over the slots s of token t; returns [T, D].

    The sum is accumulated in float32 for half types, in the order of the slots, and comes back in
    expert_output's type. The y of a token without slots is 0.

    Args:
        expert_output: [R, D].
        gates: of inverse's shape, of any floating type.
        inverse: [T, K] int64, or [R] with token_offsets: a permutation of 0 … R - 1 as
            `dispatch_plan` makes it.
        token_offsets: [T + 1] int64, where each token's slots begin and end; None: K slots each.

    Raises:
        ValueError, TypeError, IndexError: an argument's shape, type, device or value does not fit.
    """
    return torch.ops.moe_ext.combine(expert_output, gates, inverse, token_offsets)
