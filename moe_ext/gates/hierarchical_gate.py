"""The interface of hierarchical gates: their groups may be on other ranks than the tokens."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from fractions import Fraction
from operator import index
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_ext import ops
from moe_ext._counting import SparsePart
from moe_ext.checks import require, require_k_of_levels
from moe_ext.gates._logits import widened
from moe_ext.gates.gate import Gate
from moe_ext.ranks.collectives import Ranks
from moe_ext.routing import Routing

__all__ = ["HierarchicalGate", "PrimarySelection", "SecondarySelection"]


class PrimarySelection(NamedTuple):
    """Holds the decision of a primary gate for T tokens. A slot is a (token, chosen group) pair.

    Attributes:
        gates: [T, k1], or [S] with token_offsets. G_primary(x)_i of each slot.
        group_index: int64, in the shape of gates. The group i of each slot.
        token_offsets: [T + 1] int64; token t has the slots token_offsets[t] to
            token_offsets[t + 1] - 1, in the order of their groups. None: each token has k1 slots,
            in any order.
        values: tensors [S, ...] that the secondary gates need with each slot.
        details: values that the gate passes to its own `HierarchicalGate.routing`.
    """

    gates: Tensor
    group_index: Tensor
    token_offsets: Tensor | None = None
    values: tuple[Tensor, ...] = ()
    details: Any = None


class SecondarySelection(NamedTuple):
    """Holds the decision of secondary gates for S slots (token, chosen group).

    Attributes:
        gates: [S, k2], or [R] with slot_offsets. G_primary(x)_i · G_i(x)_j.
        expert_in_group: int64, in the shape of gates. The expert j of the slot's group.
        slot_offsets: [S + 1] int64; slot s has the experts slot_offsets[s] to
            slot_offsets[s + 1] - 1. None: each slot has k2 experts.
        details: values that the gate passes to its own `HierarchicalGate.statistics`.
    """

    gates: Tensor
    expert_in_group: Tensor
    slot_offsets: Tensor | None = None
    details: Any = None

    def expert_index(self, group_index: Tensor, experts_per_group: int) -> Tensor:
        """Returns i · b + j in the shape of gates.

        Args:
            group_index: S elements, the group i of each slot.
            experts_per_group: b.
        """
        first = group_index.reshape(-1) * experts_per_group
        if self.slot_offsets is None:
            return first.unsqueeze(1) + self.expert_in_group
        slot = ops.token_index(self.expert_in_group, self.slot_offsets)
        return first.index_select(0, slot) + self.expert_in_group


# select(gate, x, primary, ranks) returns the experts of the slots of primary, without details, and
# the statistics of this rank's groups.
_GroupSelection = Callable[
    ["HierarchicalGate", Tensor, PrimarySelection, Ranks | None],
    tuple[SecondarySelection, tuple[Tensor, ...]],
]


class HierarchicalGate(Gate, ABC):
    """Selects groups, then experts in each chosen group; the base class of hierarchical gates.

    Expert i · b + j is expert j of group i. Its gate is G_H(x)_ij = G_primary(x)_i · G_i(x)_j. The
    secondary gate G_i sees only the tokens X^(i) = {x : G_primary(x)_i > 0}.

    The routing decision has four steps. With ``ExpertParallel(placement="groups")``, the rank of a
    group runs step 2 for the tokens of all ranks.

    1. `select_groups`, on the rank of the token
    2. `select_experts`, on the rank of the group
    3. `statistics`, on the rank of the group: sums over all tokens of its groups
    4. `routing`, on the rank of the token

    Args:
        d_model: D, the width of x.
        num_groups: a, the number of groups.
        experts_per_group: b, the number of experts in each group.
        k: (k1, k2), groups per token and experts per chosen group. A single number k means (k, k).
        options: more arguments for the next class in the method resolution order.

    Attributes:
        num_groups: the constructor argument.
        k_of_levels: (k1, k2).
        groups: the groups whose secondary gates are here, all without `keep_groups`.
        secondary_parameters: names of the parameters that have one row for each of `groups`.

    Raises:
        ValueError: a size is below 1, k1 is not between 1 and a, or k2 not between 1 and b.
    """

    shares_groups: ClassVar[bool] = True
    secondary_parameters: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        d_model: int,
        num_groups: int,
        experts_per_group: int,
        k: int | tuple[int, int],
        *options: Any,
    ) -> None:
        name = type(self).__name__
        k1, k2 = require_k_of_levels(name, k, d_model, num_groups, experts_per_group)
        num_groups, experts_per_group = map(index, (num_groups, experts_per_group))
        super().__init__(d_model, num_groups * experts_per_group, k1 * k2, *options)
        self.num_groups = num_groups
        self.experts_per_group = experts_per_group
        self.k_of_levels: tuple[int, int] = k1, k2
        self.groups: range = range(num_groups)

    def __init_subclass__(cls, **options: Any) -> None:
        """Requires that a class with its own `forward` declares shares_groups."""
        super().__init_subclass__(**options)
        if "forward" in vars(cls) and "shares_groups" not in vars(cls):
            cls.shares_groups = False
            warnings.warn(
                f"{cls.__name__} has its own forward, so that ranks cannot share its groups; "
                "declare shares_groups = True if it passes x and select to "
                "HierarchicalGate.forward and changes neither gates nor expert_index, else "
                "shares_groups = False",
                stacklevel=3,
            )

    def forward(
        self, x: Tensor, ranks: Ranks | None = None, select: _GroupSelection | None = None
    ) -> Routing:
        """Routes x [T, D].

        Args:
            x: [T, D].
            ranks: see `Gate.forward`.
            select: runs steps 2 and 3 on the ranks of the groups. None: this rank has all groups.
        """
        self._require_tokens(x)
        if select is not None:
            primary = self.select_groups(x, ranks)
            return self.routing(primary, *select(self, x, primary, ranks), ranks)
        if len(self.groups) < self.num_groups:
            raise RuntimeError(
                f"{type(self).__name__}: forward needs the secondary gates of all groups, got "
                f"{self.groups}"
            )
        x = widened(x)
        primary = self.select_groups(x, ranks)
        secondary = self.select_experts(x, primary, None, ranks)
        statistics = self.statistics([secondary.details], ranks)
        return self.routing(primary, secondary, statistics, ranks)

    def _sizes(self) -> str:
        return (
            f"d_model={self.d_model}, num_groups={self.num_groups}, "
            f"experts_per_group={self.experts_per_group}, k={self.k_of_levels}"
        )

    @abstractmethod
    def select_groups(self, x: Tensor, ranks: Ranks | None) -> PrimarySelection:
        """Selects the groups of the tokens x [T, D]. See `Gate.forward` for ranks."""

    @abstractmethod
    def select_experts(
        self, x: Tensor, primary: PrimarySelection, local: slice | None, ranks: Ranks | None
    ) -> SecondarySelection:
        """Selects the experts of each slot (token, chosen group).

        Args:
            x: [T, D].
            primary: the slots, without details. The groups are counted from the first of `local`.
            local: which of the groups here take part; None: all.
            ranks: the ranks that have other tokens of these groups; None: none.
        """

    @abstractmethod
    def statistics(self, details: Sequence[Any], ranks: Ranks | None) -> tuple[Tensor, ...]:
        """Returns sums over the slots of this rank's groups; the next sum is over all ranks.

        Args:
            details: the details of each `SecondarySelection`, in the order of the groups.
            ranks: see `Gate.forward`.
        """

    @abstractmethod
    def routing(
        self,
        primary: PrimarySelection,
        secondary: SecondarySelection,
        statistics: tuple[Tensor, ...],
        ranks: Ranks | None,
    ) -> Routing:
        """Makes the `Routing` of both levels, for this rank's tokens.

        Args:
            primary: from `select_groups`.
            secondary: the experts of the slots of primary, without details.
            statistics: from `statistics`, on this rank.
            ranks: see `Gate.forward`.
        """

    def keep_groups(self, groups: range) -> None:
        """Keeps the secondary gates of these groups only; the other ranks have the others.

        Raises:
            ValueError: the gate has some of its groups only, as after an earlier call.
        """
        rule = f"have all {self.num_groups} groups (make a new gate for each layer)"
        require(len(self.groups) == self.num_groups, type(self).__name__, rule, self.groups)
        for name in self.secondary_parameters:
            whole = getattr(self, name)
            part = whole.detach()[groups.start : groups.stop].clone()
            setattr(self, name, nn.Parameter(part, whole.requires_grad))
        self.groups = groups

    def _sparse_parts(self) -> list[SparsePart]:
        """Returns the parameters that `count_parameters` counts in part."""
        share = Fraction(self.k_of_levels[0], self.num_groups)
        return [
            # A DTensor has the rows of all groups.
            ([param], share, Fraction(self.num_groups, max(len(param), 1)))
            for name, param in self.named_parameters()
            if name in self.secondary_parameters
        ]

    def _rows_of(self, name: str, local: slice | None) -> Tensor:
        """Returns the rows of a secondary parameter for the groups of `local`; None: all here."""
        rows: Tensor = getattr(self, name)
        return rows if local is None else rows[local]

    def _padded_to_all_groups(self, parts: Sequence[Tensor]) -> Tensor:
        """Concatenates values of this rank's groups; the values of other groups are 0."""
        values = parts[0] if len(parts) == 1 else torch.cat([*parts])
        groups = self.groups
        if len(groups) == self.num_groups:
            return values
        sides = groups.start, self.num_groups - groups.stop
        return F.pad(values, (*[0] * (2 * values.dim() - 2), *sides))
