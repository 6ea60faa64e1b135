"""Which rank owns which experts."""

from dataclasses import dataclass

from moe_ext.checks import require, require_at_least
from moe_ext.distributed.ranks import blocks

__all__ = ["ExpertPlacement"]


@dataclass(frozen=True)
class ExpertPlacement:
    """Which rank owns which experts: contiguous blocks, as even as whole groups allow.

    Attributes:
        num_experts: of all ranks.
        num_ranks: which share them.
        experts_per_group: those of a group stay together (a hierarchical mixture's, App. B).
    """

    num_experts: int
    num_ranks: int
    experts_per_group: int = 1

    def __post_init__(self) -> None:
        require_at_least(1, "ExpertPlacement", num_ranks=self.num_ranks)
        require(
            self.experts_per_group >= 1 and self.num_experts % self.experts_per_group == 0,
            "ExpertPlacement: experts_per_group",
            f"divide num_experts = {self.num_experts}",
            self.experts_per_group,
        )

    def experts_of(self, rank: int) -> range:
        """The experts of one rank; if there are fewer than ranks, some have none."""
        rule = f"be in [0, {self.num_ranks})"
        require(0 <= rank < self.num_ranks, "ExpertPlacement.experts_of: rank", rule, rank)
        size = self.experts_per_group
        groups = blocks(range(self.num_experts // size), self.num_ranks)[rank]
        return range(groups.start * size, groups.stop * size)

    @property
    def counts(self) -> list[int]:
        """The number of experts of each rank."""
        return [len(self.experts_of(rank)) for rank in range(self.num_ranks)]

    def owner(self, expert: int) -> int:
        """The rank that owns an expert."""
        rule = f"be in [0, {self.num_experts})"
        require(0 <= expert < self.num_experts, "ExpertPlacement.owner: expert", rule, expert)
        return next(r for r in range(self.num_ranks) if expert in self.experts_of(r))
