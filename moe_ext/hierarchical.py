"""The hierarchical mixture of experts, Appendix B."""

from typing import Any

import torch
from torch import Tensor, nn

from moe_ext import ops
from moe_ext.checks import require_at_least
from moe_ext.gates import Gating, NoisyGate, hierarchical_load, require_k_of_levels, widened
from moe_ext.moe import MoE


class HierarchicalNoisyTopKGate(NoisyGate):
    """Noisy top-k gating on two levels (Appendix B): k1 of a groups, k2 of each one's b experts.

    G_H(x)_ij = G_primary(x)_i · G_i(x)_j, each factor as in `NoisyTopKGate`, for the a · b experts
    numbered i · b + j. A secondary gate G_i sees X^(i) = {x : G_primary(x)_i > 0} alone. With

        Importance_H(X)_ij = Σ_x G_primary(x)_i · G_i(x)_j
        Load_H(X)_ij = Load_primary(X)_i · Load_i(X^(i))_j / |X^(i)|

    and |X^(i)| a true count, without gradient, the losses balance all experts and train both
    levels. An empty group has load 0, and nothing divides by its size.

    It costs T · (a + k1 · b) logits. All four matrices start at zero; what `NoisyTopKGate` says of
    evaluation and of k = 1 holds on each level. A level with one choice draws no noise and changes
    nothing: with a = 1 or b = 1 this is a `NoisyTopKGate`, to the last bit from the same seed.

    Args:
        d_model: D, the width of x.
        num_groups: a.
        experts_per_group: b.
        k: (k1, k2), groups per token and experts per chosen group; a number is both.
        noise_epsilon, detach_threshold, generator: see `NoisyTopKGate`.

    Raises:
        ValueError: a size is below 1, k1 is not between 1 and a, k2 not between 1 and b, or
            noise_epsilon is negative.
    """

    def __init__(
        self,
        d_model: int,
        num_groups: int,
        experts_per_group: int,
        k: int | tuple[int, int],
        *,
        noise_epsilon: float = 1e-2,
        detach_threshold: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        name = "HierarchicalNoisyTopKGate"
        require_at_least(0, name, noise_epsilon=noise_epsilon)
        self.num_groups = num_groups
        self.experts_per_group = experts_per_group
        self.num_experts = num_groups * experts_per_group
        self.k_of_levels = require_k_of_levels(name, k, d_model, num_groups, experts_per_group)
        self.k = self.k_of_levels[0] * self.k_of_levels[1]
        self.noise_epsilon = noise_epsilon
        self.detach_threshold = detach_threshold
        self.generator = generator
        self.d_model = d_model
        self.w_gate = nn.Parameter(torch.zeros(d_model, num_groups))
        self.w_noise = nn.Parameter(torch.zeros(d_model, num_groups))
        secondary = num_groups, d_model, experts_per_group
        self.w_gate_secondary = nn.Parameter(torch.zeros(secondary))
        self.w_noise_secondary = nn.Parameter(torch.zeros(secondary))

    def forward(self, x: Tensor) -> Gating:
        """x [T, D] to the k1 · k2 gates of each token: by group, each in order of falling logit."""
        k1, k2 = self.k_of_levels
        x = widened(x)
        clean, primary = self._choice(x, self.w_gate, self.w_noise, k1)
        # The rows of X^(1), X^(2), …, one for each slot (token, chosen group).
        plan = ops.dispatch_plan(primary.expert_index, self.num_groups)
        secondary_weights = self.w_gate_secondary, self.w_noise_secondary
        clean_rows, secondary = self._choice(x, *secondary_weights, k2, plan)

        # As in combine a row's output by its gate, here its secondary gates by the primary one.
        row_of_slot = plan.inverse.reshape(-1, 1)
        gates = ops.combine(secondary.gates, primary.gates.reshape(-1, 1), row_of_slot)
        expert_index = secondary.expert_index.index_select(0, plan.inverse.reshape(-1))
        expert_index = expert_index + primary.expert_index.reshape(-1, 1) * self.experts_per_group
        gates, expert_index = gates.view(-1, self.k), expert_index.view(-1, self.k)

        if not self.training:
            return self._summed(gates, expert_index)
        load = self._load(clean, primary)
        if self.experts_per_group == 1:
            return self._summed(gates, expert_index, load)
        importance, *factors = self.processes.sum(
            ops.importance(gates, expert_index, self.num_experts),
            load,
            self._load(clean_rows, secondary, plan.offsets),
            plan.tokens_per_expert.to(load.dtype),
        )
        load = hierarchical_load(*factors)
        return Gating(gates, expert_index, importance, load, load_factors=tuple(factors))

    def _noise(self, like: Tensor) -> Tensor:
        if like.shape[1] == 1:
            return torch.zeros_like(like)
        return super()._noise(like)

    def extra_repr(self) -> str:
        return (
            f"d_model={self.d_model}, num_groups={self.num_groups}, "
            f"experts_per_group={self.experts_per_group}, k={self.k_of_levels}"
        )


class HierarchicalMoE(MoE):
    """y_H = Σ_i Σ_j G_primary(x)_i · G_i(x)_j · E_ij(x) (Eq. 12): `MoE` with a gate of two levels.

    Its num_experts is a · b, its k is k1 · k2; expert E_ij has the index i · b + j, in the losses
    and in what `MoEAux` reports too.

    Args:
        d_model: D, the width of x.
        num_groups: a.
        experts_per_group: b.
        k: (k1, k2), groups per token and experts per chosen group; a number is both.
        gate: a module from x [T, D] to `Gating` over the a · b experts; None is
            `HierarchicalNoisyTopKGate`, with noise_epsilon and generator.
        noise_epsilon, generator: see `NoisyTopKGate`.
        options: the others of `MoE`, by name.

    Raises:
        ValueError: as `HierarchicalNoisyTopKGate` and `MoE`.

    Example:
        >>> layer = HierarchicalMoE(512, num_groups=16, experts_per_group=16, k=2)
        >>> y, aux = layer(torch.randn(8, 20, 512))
        >>> aux.expert_index.shape
        torch.Size([160, 4])
    """

    def __init__(
        self,
        d_model: int,
        num_groups: int,
        experts_per_group: int,
        k: int | tuple[int, int],
        *,
        gate: nn.Module | None = None,
        noise_epsilon: float = 1e-2,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> None:
        name = "HierarchicalMoE"
        k1, k2 = require_k_of_levels(name, k, d_model, num_groups, experts_per_group)
        if gate is None:
            gate = HierarchicalNoisyTopKGate(
                d_model,
                num_groups,
                experts_per_group,
                (k1, k2),
                noise_epsilon=noise_epsilon,
                generator=generator,
            )
        else:
            options.update(noise_epsilon=noise_epsilon, generator=generator)
        super().__init__(d_model, num_groups * experts_per_group, k1 * k2, gate=gate, **options)
