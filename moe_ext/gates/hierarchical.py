"""Noisy top-k gating on two levels (Appendix B)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.types import Device

from moe_ext import ops
from moe_ext._argument_names import explains_names
from moe_ext.gates._logits import widened
from moe_ext.gates._noisy import NoisyGate
from moe_ext.gates.hierarchical_gate import HierarchicalGate, PrimarySelection, SecondarySelection
from moe_ext.ranks.collectives import Ranks
from moe_ext.routing import Routing

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


class HierarchicalNoisyTopKGate(HierarchicalGate, NoisyGate):
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
        noise_epsilon, detach_threshold, generator, device, dtype: see `NoisyTopKGate`.

    Attributes:
        w_gate: [D, a] parameter of the primary gate.
        w_noise: [D, a] parameter of the primary gate's noise.
        w_gate_secondary: [a, D, b] parameter of the secondary gates.
        w_noise_secondary: [a, D, b] parameter of the secondary gates' noise.

    Raises:
        ValueError: a size is below 1, k1 is not between 1 and a, k2 is not between 1 and b, or
            noise_epsilon is negative.
        TypeError: an option has the wrong type.
    """

    secondary_parameters: ClassVar[tuple[str, ...]] = ("w_gate_secondary", "w_noise_secondary")

    @explains_names
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
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        noise = noise_epsilon, detach_threshold, generator
        super().__init__(d_model, num_groups, experts_per_group, k, *noise)
        levels = (
            ("gate of the first level", self.k_of_levels[0], num_groups),
            ("gate of the second level", self.k_of_levels[1], experts_per_group),
        )
        for part, chosen, choices in levels:
            remedy = "use k of at least 2 at this level, or TopKGate with renormalize=False"
            self._warn_if_untrained(chosen, choices, remedy, part)
        factory = self._factory(device, dtype)
        self.w_gate: nn.Parameter = nn.Parameter(torch.zeros(d_model, num_groups, **factory))
        self.w_noise: nn.Parameter = nn.Parameter(torch.zeros(d_model, num_groups, **factory))
        secondary = num_groups, d_model, experts_per_group
        self.w_gate_secondary: nn.Parameter = nn.Parameter(torch.zeros(secondary, **factory))
        self.w_noise_secondary: nn.Parameter = nn.Parameter(torch.zeros(secondary, **factory))

    def select_groups(self, x: Tensor, ranks: Ranks | None) -> PrimarySelection:
        """Selects k1 groups; draws the noise [T · k1, b] of the secondary gates in training mode.

        The groups of a token are in order of decreasing noisy logit.
        """
        k1 = self.k_of_levels[0]
        clean_logits, selection = self._select(widened(x), self.w_gate, self.w_noise, k1)
        values: tuple[Tensor, ...] = ()
        if self.training:
            like = clean_logits.new_empty(len(clean_logits) * k1, self.experts_per_group)
            values = (self.draw_noise(like),)
        details = clean_logits, selection
        return PrimarySelection(selection.gates, selection.expert_index, None, values, details)

    def select_experts(
        self, x: Tensor, primary: PrimarySelection, local: slice | None, ranks: Ranks | None
    ) -> SecondarySelection:
        """Selects k2 experts of each slot, in order of decreasing noisy logit.

        See `HierarchicalGate.select_experts`.
        """
        w_gate, w_noise = (self._rows_of(name, local) for name in self.secondary_parameters)
        # The rows of X^(1), X^(2), …: one for each slot.
        plan = ops.dispatch_plan(primary.group_index, len(w_gate))
        k2 = self.k_of_levels[1]
        noise = primary.values[0] if primary.values else None
        clean_rows, selection = self._select(
            widened(x), w_gate, w_noise, k2, plan, primary.token_offsets, noise
        )
        # combine multiplies the secondary gates of each row by its primary gate.
        inverse = plan.inverse.reshape(-1, 1)
        gates = ops.combine(selection.gates, primary.gates.reshape(-1, 1), inverse)
        expert_in_group = selection.expert_index.index_select(0, plan.inverse.reshape(-1))
        if not self.training:
            return SecondarySelection(gates, expert_in_group)
        # A rank may have no groups.
        load = self._load(clean_rows, selection, plan.offsets) if len(w_gate) else clean_rows[:0]
        details = load, plan.tokens_per_expert.to(load.dtype)
        return SecondarySelection(gates, expert_in_group, None, details)

    def statistics(self, details: Sequence[Any], ranks: Ranks | None) -> tuple[Tensor, ...]:
        """Returns Load_i(X^(i)) [a, b] and ``|X^(i)|`` [a] in training mode.

        See `HierarchicalGate.statistics`.
        """
        if not self.training:
            return ()
        return tuple(map(self._padded_to_all_groups, zip(*details, strict=True)))

    def routing(
        self,
        primary: PrimarySelection,
        secondary: SecondarySelection,
        statistics: tuple[Tensor, ...],
        ranks: Ranks | None,
    ) -> Routing:
        """Makes the `Routing` of both levels. See `HierarchicalGate.routing`."""
        gates = secondary.gates.view(-1, self.k)
        expert_index = secondary.expert_index(primary.group_index, self.experts_per_group)
        expert_index = expert_index.view(-1, self.k)
        if not statistics:
            return self.make_routing(gates, expert_index, ranks=ranks)
        load = self._load(*primary.details)
        if self.experts_per_group == 1:
            return self.make_routing(gates, expert_index, load=load, ranks=ranks)
        sums = ops.importance(gates, expert_index, self.num_experts), load, *statistics
        importance, *factors = sums if ranks is None else ranks.sum(*sums)
        load = hierarchical_load(*factors)
        return Routing(gates, expert_index, importance, load, load_factors=tuple(factors))

    def draw_noise(self, like: Tensor) -> Tensor:
        """Draws noise in the shape of `like`; returns zeros for a single group or expert."""
        return torch.zeros_like(like) if like.shape[1] == 1 else super().draw_noise(like)
