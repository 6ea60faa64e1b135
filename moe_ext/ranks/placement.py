"""The assignment of experts to ranks."""

from dataclasses import dataclass

from moe_ext.checks import require, require_sizes
from moe_ext.ranks.collectives import block

__all__ = ["ExpertPlacement"]


@dataclass(frozen=True)
class ExpertPlacement:
    """Assigns contiguous blocks of experts to ranks, as evenly as whole groups allow.

    Attributes:
        num_experts: total number of experts.
        num_ranks: number of ranks that share the experts.
        experts_per_group: size of a group; a rank gets only complete groups (hierarchical mixture,
            App. B).

    Raises:
        ValueError: a number is out of range, or experts_per_group does not divide num_experts.
    """

    num_experts: int
    num_ranks: int
    experts_per_group: int = 1

    def __post_init__(self) -> None:
        for name in ("num_experts", "num_ranks", "experts_per_group"):
            minimum = 0 if name == "num_experts" else 1
            (value,) = require_sizes("ExpertPlacement", minimum, **{name: getattr(self, name)})
            object.__setattr__(self, name, value)  # an int
        require(
            self.num_experts % self.experts_per_group == 0,
            "ExpertPlacement: experts_per_group",
            f"divide num_experts = {self.num_experts}",
            self.experts_per_group,
        )

    def experts_of(self, rank: int) -> range:
        """Returns the experts of a rank; none for the last ranks if ranks outnumber groups.

        Raises:
            ValueError: rank is not between 0 and num_ranks - 1.
        """
        rule = f"be in [0, {self.num_ranks})"
        require(0 <= rank < self.num_ranks, "ExpertPlacement.experts_of: rank", rule, rank)
        size = self.experts_per_group
        groups = block(range(self.num_experts // size), self.num_ranks, rank)
        return range(groups.start * size, groups.stop * size)

    @property
    def counts(self) -> list[int]:
        """The number of experts of each rank."""
        return [len(self.experts_of(rank)) for rank in range(self.num_ranks)]

    def owner(self, expert: int) -> int:
        """Returns the rank that owns an expert.

        Raises:
            ValueError: expert is not between 0 and num_experts - 1.
        """
        rule = f"be in [0, {self.num_experts})"
        require(0 <= expert < self.num_experts, "ExpertPlacement.owner: expert", rule, expert)
        group, num_groups = (n // self.experts_per_group for n in (expert, self.num_experts))
        share, rest = divmod(num_groups, self.num_ranks)
        boundary = rest * (share + 1)  # the groups of the first ranks, which have one more each
        if group < boundary:
            return group // (share + 1)
        return rest + (group - boundary) // share
