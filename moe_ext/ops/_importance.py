"""The importance of each expert (Section 4, Eq. 6)."""

import torch
from torch import Tensor


def importance(gates: Tensor, expert_index: Tensor, num_experts: int) -> Tensor:
    """Sums the gates of each expert, Importance(X) = Σ_x G(x) (Eq. 6); returns [E].

    Args:
        gates: [T, K].
        expert_index: [T, K] int64, the expert of each gate.
        num_experts: E, the number of experts.

    Raises:
        ValueError, TypeError, IndexError: an argument has a wrong shape, dtype, device or value.
    """
    return torch.ops.moe_ext.importance(gates, expert_index, num_experts)
