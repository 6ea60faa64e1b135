"""The gated sum of the experts' outputs, Eq. 1."""

import torch
from torch import Tensor


def combine(expert_output: Tensor, gates: Tensor, inverse: Tensor) -> Tensor:
    """y_t = Σ_j gates[t, j] · expert_output[inverse[t, j]]; returns [T, D] in expert_output's type.

    The sum is accumulated in float32 for half types, in the order of the choices.

    Args:
        expert_output: [R, D].
        gates: [T, K], of any floating type.
        inverse: [T, K] int64, a permutation of 0 … T·K - 1 as `dispatch_plan` makes it.

    Raises:
        ValueError, TypeError, IndexError: an argument's shape, type, device or value does not fit.
    """
    return torch.ops.moe_ext.combine(expert_output, gates, inverse)
