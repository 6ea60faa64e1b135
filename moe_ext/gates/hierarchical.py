"""Noisy top-k gating on two levels (Appendix B)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_ext import ops
from moe_ext.checks import require_k_of_levels
from moe_ext.distributed.ranks import Ranks
from moe_ext.gates._logits import widened
from moe_ext.gates._noisy import NoisyGate
from moe_ext.gates.gate import Routing

__all__ = ["HierarchicalNoisyTopKGate", "hierarchical_load"]


def hierarchical_load(load: Tensor, load_of_group: Tensor, group_size: Tensor) -> Tensor:
    """Computes the load of a hierarchical gate (Appendix B), [a · b].

    The load of expert j in group i is 0 for an empty group. Otherwise::

        Load_H(X)_ij = Load_primary(X)_i · Load_i(X^(i))_j / |X^(i)|

    Args:
        load: [a], Load_primary(X), the load of each group.
        load_of_group: [a, b], Load_i(X^(i)) of each group; 0 for an empty group.
        group_size: [a], ``|X^(i)|``, the number of tokens of each group.
    """
    return (load / group_size.clamp_min(1)).unsqueeze(1).mul(load_of_group).reshape(-1)


class HierarchicalNoisyTopKGate(NoisyGate):
    """Selects k1 of a groups, then k2 of the b experts in each, with noise (Appendix B).

    Expert i · b + j is expert j of group i. Its gate is G_H(x)_ij = G_primary(x)_i · G_i(x)_j. Each
    factor is computed as in `NoisyTopKGate`. A secondary gate G_i sees only the tokens
    X^(i) = {x : G_primary(x)_i > 0}. The balancing losses use::

        Importance_H(X)_ij = Σ_x G_primary(x)_i · G_i(x)_j
        Load_H(X)_ij = Load_primary(X)_i · Load_i(X^(i))_j / |X^(i)|

    The group size ``|X^(i)|`` is an exact count without gradient. An empty group has load 0. The
    losses balance all experts and train both levels.

    The gate computes T · (a + k1 · b) logits. All four parameters start at zero. The notes of
    `NoisyTopKGate` on evaluation mode and on k = 1 apply to each level. A level with a single group
    or a single expert draws no noise. With a = 1 or b = 1, results are therefore bitwise identical
    to a `NoisyTopKGate` with the same seed.

    Args:
        d_model: D, the width of x.
        num_groups: a, the number of groups.
        experts_per_group: b, the number of experts in each group.
        k: (k1, k2), groups per token and experts per chosen group. A single number k means (k, k).
        noise_epsilon, detach_threshold, generator: see `NoisyTopKGate`.

    Attributes:
        w_gate: [D, a] parameter of the primary gate.
        w_noise: [D, a] parameter of the primary gate's noise.
        w_gate_secondary: [a, D, b] parameter of the secondary gates.
        w_noise_secondary: [a, D, b] parameter of the secondary gates' noise.

    Raises:
        ValueError: a size is below 1, k1 is not between 1 and a, k2 is not between 1 and b, or
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
        name = type(self).__name__
        k1, k2 = require_k_of_levels(name, k, d_model, num_groups, experts_per_group)
        num_experts = num_groups * experts_per_group
        super().__init__(d_model, num_experts, k1 * k2, noise_epsilon, detach_threshold, generator)
        self.num_groups = num_groups
        self.experts_per_group = experts_per_group
        self.k_of_levels = k1, k2
        self.w_gate = nn.Parameter(torch.zeros(d_model, num_groups))
        self.w_noise = nn.Parameter(torch.zeros(d_model, num_groups))
        secondary = num_groups, d_model, experts_per_group
        self.w_gate_secondary = nn.Parameter(torch.zeros(secondary))
        self.w_noise_secondary = nn.Parameter(torch.zeros(secondary))

    def forward(self, x: Tensor, ranks: Ranks | None = None) -> Routing:
        """Routes x [T, D] to k1 · k2 experts per token.

        The experts of a token are in order of decreasing noisy logit of the group, then of the
        expert. See `Gate.forward` for ranks.
        """
        k1, k2 = self.k_of_levels
        x = widened(x)
        clean, primary = self._select(x, self.w_gate, self.w_noise, k1)
        # The rows of X^(1), X^(2), …: one for each slot (token, chosen group).
        plan = ops.dispatch_plan(primary.expert_index, self.num_groups)
        secondary_weights = self.w_gate_secondary, self.w_noise_secondary
        clean_rows, secondary = self._select(x, *secondary_weights, k2, plan)

        # combine multiplies the secondary gates of each row by its primary gate.
        row_of_slot = plan.inverse.reshape(-1, 1)
        gates = ops.combine(secondary.gates, primary.gates.reshape(-1, 1), row_of_slot)
        expert_index = secondary.expert_index.index_select(0, plan.inverse.reshape(-1))
        expert_index = expert_index + primary.expert_index.reshape(-1, 1) * self.experts_per_group
        gates, expert_index = gates.view(-1, self.k), expert_index.view(-1, self.k)

        if not self.training:
            return self.make_routing(gates, expert_index, ranks=ranks)
        load = self._load(clean, primary)
        if self.experts_per_group == 1:
            return self.make_routing(gates, expert_index, load=load, ranks=ranks)
        sums = (
            ops.importance(gates, expert_index, self.num_experts),
            load,
            self._load(clean_rows, secondary, plan.offsets),
            plan.tokens_per_expert.to(load.dtype),
        )
        importance, *factors = sums if ranks is None else ranks.sum(*sums)
        load = hierarchical_load(*factors)
        return Routing(gates, expert_index, importance, load, load_factors=tuple(factors))

    def draw_noise(self, like: Tensor) -> Tensor:
        """Draws noise in the shape of `like`; returns zeros for a single group or expert."""
        return torch.zeros_like(like) if like.shape[1] == 1 else super().draw_noise(like)

    def extra_repr(self) -> str:
        return (
            f"d_model={self.d_model}, num_groups={self.num_groups}, "
            f"experts_per_group={self.experts_per_group}, k={self.k_of_levels}, "
            f"noise_epsilon={self.noise_epsilon}, detach_threshold={self.detach_threshold}"
        )
