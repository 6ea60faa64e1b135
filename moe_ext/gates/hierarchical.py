"""Noisy top-k gating on two levels (Appendix B)."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from moe_ext import ops
from moe_ext.checks import require_k_of_levels
from moe_ext.distributed.ranks import Ranks
from moe_ext.gates._logits import widened
from moe_ext.gates._noisy import NoisyGate
from moe_ext.gates.gate import Routing

__all__ = ["HierarchicalNoisyTopKGate", "SecondarySelection", "hierarchical_load"]


class SecondarySelection(NamedTuple):
    """Holds the decision of secondary gates for S slots. A slot is a (token, chosen group) pair.

    Attributes:
        gates: [S, k2], G_primary(x)_i · G_i(x)_j.
        expert_index: [S, k2] int64, i · b + j.
        group_size: [a] int64, ``|X^(i)|``, the number of tokens of each group.
        load_of_group: [a, b], Load_i(X^(i)) of each group; None in evaluation mode.
    """

    gates: Tensor
    expert_index: Tensor
    group_size: Tensor
    load_of_group: Tensor | None


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
        groups: the groups whose secondary gates are here, all without `keep_groups`.

    Raises:
        ValueError: a size is below 1, k1 is not between 1 and a, k2 is not between 1 and b, or
            noise_epsilon is negative.
    """

    secondary_parameters: ClassVar[tuple[str, ...]] = ("w_gate_secondary", "w_noise_secondary")

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
        self.groups = range(num_groups)
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
        if len(self.groups) < self.num_groups:
            raise RuntimeError(
                "HierarchicalNoisyTopKGate: forward needs the secondary gates of all groups, got "
                f"{self.groups}"
            )
        x = widened(x)
        clean_logits, primary = self.select_groups(x)
        secondary = self.select_experts(x, primary.expert_index, primary.gates)
        return self.routing(clean_logits, primary, secondary, ranks)

    def select_groups(self, x: Tensor) -> tuple[Tensor, ops.TopKSelection]:
        """Returns the clean logits [T, a] of the primary gate and its selection of k1 groups."""
        return self._select(widened(x), self.w_gate, self.w_noise, self.k_of_levels[0])

    def secondary_noise(self, clean_logits: Tensor) -> Tensor | None:
        """Draws the noise of the secondary gates, [T · k1, b]; None in evaluation mode.

        Args:
            clean_logits: [T, a], from `select_groups`.
        """
        if not self.training:
            return None
        num_slots = len(clean_logits) * self.k_of_levels[0]
        return self.draw_noise(clean_logits.new_empty(num_slots, self.experts_per_group))

    def select_experts(
        self,
        x: Tensor,
        group_index: Tensor,
        primary_gates: Tensor,
        token_offsets: Tensor | None = None,
        noise: Tensor | None = None,
        local: slice | None = None,
    ) -> SecondarySelection:
        """Selects the k2 experts of each slot (token, chosen group).

        Args:
            x: [T, D].
            group_index: [T, K] int64, or [S] with token_offsets. The group of each slot, counted
                from the first of `local`.
            primary_gates: the primary gate of each slot, in the shape of group_index.
            token_offsets: see `Routing`.
            noise: [S, b], from `secondary_noise`; None: drawn here.
            local: which of the groups here take part; None: all.
        """
        w_gate, w_noise = (
            weight if local is None else weight[local]
            for weight in (self.w_gate_secondary, self.w_noise_secondary)
        )
        # The rows of X^(1), X^(2), …: one for each slot.
        plan = ops.dispatch_plan(group_index, len(w_gate))
        k2 = self.k_of_levels[1]
        clean_rows, kept = self._select(widened(x), w_gate, w_noise, k2, plan, token_offsets, noise)
        # combine multiplies the secondary gates of each row by its primary gate.
        gates = ops.combine(kept.gates, primary_gates.reshape(-1, 1), plan.inverse.reshape(-1, 1))
        expert_index = kept.expert_index.index_select(0, plan.inverse.reshape(-1))
        expert_index = expert_index + group_index.reshape(-1, 1) * self.experts_per_group
        load = None
        if self.training:
            # A rank may have no groups.
            load = self._load(clean_rows, kept, plan.offsets) if len(w_gate) else clean_rows[:0]
        return SecondarySelection(gates, expert_index, plan.tokens_per_expert, load)

    def routing(
        self,
        clean_logits: Tensor,
        primary: ops.TopKSelection,
        secondary: SecondarySelection,
        ranks: Ranks | None,
    ) -> Routing:
        """Makes the `Routing` of both levels. See `Gate.forward` for ranks."""
        gates, expert_index = (
            secondary.gates.view(-1, self.k),
            secondary.expert_index.view(-1, self.k),
        )
        if secondary.load_of_group is None:
            return self.make_routing(gates, expert_index, ranks=ranks)
        load = self._load(clean_logits, primary)
        if self.experts_per_group == 1:
            return self.make_routing(gates, expert_index, load=load, ranks=ranks)
        sums = (
            ops.importance(gates, expert_index, self.num_experts),
            load,
            secondary.load_of_group,
            secondary.group_size.to(load.dtype),
        )
        importance, *factors = sums if ranks is None else ranks.sum(*sums)
        load = hierarchical_load(*factors)
        return Routing(gates, expert_index, importance, load, load_factors=tuple(factors))

    def keep_groups(self, groups: range) -> None:
        """Keeps the secondary gates of these groups only; the other ranks have the others."""
        for name in self.secondary_parameters:
            whole = getattr(self, name)
            part = whole.detach()[groups.start : groups.stop].clone()
            setattr(self, name, nn.Parameter(part, whole.requires_grad))
        self.groups = groups

    def draw_noise(self, like: Tensor) -> Tensor:
        """Draws noise in the shape of `like`; returns zeros for a single group or expert."""
        return torch.zeros_like(like) if like.shape[1] == 1 else super().draw_noise(like)

    def extra_repr(self) -> str:
        return (
            f"d_model={self.d_model}, num_groups={self.num_groups}, "
            f"experts_per_group={self.experts_per_group}, k={self.k_of_levels}, "
            f"noise_epsilon={self.noise_epsilon}, detach_threshold={self.detach_threshold}"
        )
