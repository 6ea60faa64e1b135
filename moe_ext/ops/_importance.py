"""The importance of each expert (Section 4, Eq. 6)."""

from typing import NamedTuple

import torch
from torch import Tensor


class ImportanceAndLoad(NamedTuple):
    """Holds the result of `importance_and_load`, two [E] in the dtype of gates, at least float32.

    Attributes:
        importance: the sum of the gates of each expert.
        load: the number of tokens of each expert. It has no gradient.
    """

    importance: Tensor
    load: Tensor


def importance(gates: Tensor, expert_index: Tensor, num_experts: int) -> Tensor:
    """Sums the gates of each expert, Importance(X) = Σ_x G(x) (Eq. 6); returns [E].

    CUDA is experimental: no kernel has run on a GPU yet.

    Args:
        gates: [T, K].
        expert_index: [T, K] int64, the expert of each gate.
        num_experts: E, the number of experts.

    Raises:
        ValueError, TypeError, IndexError: an argument has a wrong shape, dtype, device or value.
    """
    sums: Tensor = torch.ops.moe_ext.importance(gates, expert_index, num_experts)
    return sums


def importance_and_load(gates: Tensor, expert_index: Tensor, num_experts: int) -> ImportanceAndLoad:
    """Computes the importance (Eq. 6) and the number of tokens of each expert in one pass.

    CUDA is experimental: no kernel has run on a GPU yet.

    Args:
        gates: [T, K].
        expert_index: [T, K] int64, the expert of each gate.
        num_experts: E, the number of experts.

    Raises:
        ValueError, TypeError, IndexError: an argument has a wrong shape, dtype, device or value.
    """
    return ImportanceAndLoad(
        *torch.ops.moe_ext.importance_and_load(gates, expert_index, num_experts)
    )
