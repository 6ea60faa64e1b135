"""The importance of each expert, Section 4, Eq. 6."""

import torch
from torch import Tensor


def importance(gates: Tensor, expert_index: Tensor, num_experts: int) -> Tensor:
    """Importance(X) = Σ_x G(x), the sum of each expert's gates; returns [E].

    Args:
        gates: [T, K].
        expert_index: [T, K] int64, the experts that the gates belong to.
        num_experts: E.

    Raises:
        ValueError, TypeError, IndexError: an argument's shape, type, device or value does not fit.
    """
    return torch.ops.moe_ext.importance(gates, expert_index, num_experts)
