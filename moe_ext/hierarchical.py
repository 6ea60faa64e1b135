"""The hierarchical mixture of experts (Appendix B)."""

from collections.abc import Sequence
from operator import index
from typing import Unpack

import torch
from torch import nn

from moe_ext._argument_names import explains_names
from moe_ext.checks import require_k_of_levels
from moe_ext.experts import ActivationLike, Experts
from moe_ext.gates import Gate, HierarchicalNoisyTopKGate
from moe_ext.moe import MoE, _CommonOptions, _given_noise

__all__ = ["HierarchicalMoE"]


class _Options(_CommonOptions, total=False):
    """The options of `MoE` that do not depend on the gate and do not need a flat one."""

    hidden_sizes: int | Sequence[int] | None
    activation: ActivationLike
    activation_args: Sequence[float] | None
    bias: bool
    experts: Experts | nn.ModuleList | Sequence[nn.Module] | None
    shared_expert: nn.Module | None


class HierarchicalMoE(MoE):
    """Implements `MoE` with a two-level gate (Eq. 12).

    The output is y_H = Σ_i Σ_j G_primary(x)_i · G_i(x)_j · E_ij(x). The layer has
    num_experts = a · b and k = k1 · k2. Expert E_ij has the index i · b + j, also in `MoEAux`.

    With a process_group, each rank owns whole groups with their secondary gates (Sec. 3.1). A token
    is sent once to each owner of its groups. Outputs agree with those of a single process to
    rounding. See placement in `moe_ext.distributed.ExpertParallel`.

    Args:
        d_model: D, the width of x.
        num_groups: a, the number of groups.
        experts_per_group: b, the number of experts in each group.
        k: (k1, k2), groups per token and experts per chosen group. A single number k means (k, k).
        gate: a `Gate` over the a · b experts. None: a `HierarchicalNoisyTopKGate` with
            noise_epsilon and generator.
        noise_epsilon, generator: see `NoisyTopKGate`. None: the gate's defaults.
        options: the other keyword arguments of `MoE`. Zero-computation experts and a capacity
            need a gate on one level.

    Raises:
        ValueError, TypeError: see `HierarchicalNoisyTopKGate` and `MoE`.

    Example:
        >>> layer = HierarchicalMoE(64, num_groups=16, experts_per_group=16, k=2)
        >>> y, aux = layer(torch.randn(8, 20, 64))
        >>> aux.expert_index.shape
        torch.Size([160, 4])
    """

    @explains_names
    def __init__(
        self,
        d_model: int,
        num_groups: int,
        experts_per_group: int,
        k: int | tuple[int, int],
        *,
        gate: Gate | None = None,
        noise_epsilon: float | None = None,
        generator: torch.Generator | None = None,
        **options: Unpack[_Options],
    ) -> None:
        name = "HierarchicalMoE"
        k1, k2 = require_k_of_levels(name, k, d_model, num_groups, experts_per_group)
        num_groups, experts_per_group = map(index, (num_groups, experts_per_group))
        noise = _given_noise(noise_epsilon, generator)
        if gate is None:
            gate = HierarchicalNoisyTopKGate(
                d_model,
                num_groups,
                experts_per_group,
                (k1, k2),
                **noise,
                device=options.get("device"),
                dtype=options.get("dtype"),
            )
            # MoE accepts neither these together with a gate, nor those with a gate and experts.
            noise = {}
            if options.get("experts") is not None:
                options |= {"device": None, "dtype": None}
        super().__init__(
            d_model,
            num_groups * experts_per_group,
            k1 * k2,
            gate=gate,
            **noise,
            **options,
        )
