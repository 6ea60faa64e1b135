"""The capacity of the experts: which slots are dropped (arXiv 2101.03961, Sec. 2.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext.checks import require, require_one_of, require_positive
from moe_ext.ranks._rows import columns_of
from moe_ext.ranks.collectives import AllToAll, Ranks, blocks
from moe_ext.routing import Routing

Drop = Literal["position", "score"]


@dataclass(frozen=True)
class Capacity:
    """Limits the tokens of each expert: ``MoE(capacity=Capacity(1.25))`` (arXiv 2101.03961).

    An expert takes at most C of the T tokens of the batch (Eq. 3)::

        C = ceil(factor · k · T / E)

    Assignments beyond C are dropped: no expert computes them, and their gates are not given to
    other experts. Losses, importance, load and tokens_per_expert still count them. The metric
    share_dropped is their fraction. With several ranks and balance="global", the batch has the
    tokens of all ranks. E counts all experts of the gate; zero-computation experts have no limit.
    On CUDA, the host synchronizes with the device.

    The product is that of the decimal number that the user wrote: 0.9 · 50 / 3 is 15.

    Args:
        factor: the capacity as a multiple of the mean number of tokens per expert; may be infinite.
        drop: which assignments an expert drops. "position": the assignments of its last tokens.
            "score": the assignments with its lowest gates; among equal gates, the last tokens.

    Raises:
        ValueError: an argument is out of range.
    """

    factor: float
    drop: Drop = "position"

    def __post_init__(self) -> None:
        if self.factor != math.inf:
            (factor,) = require_positive("Capacity", factor=self.factor)
            object.__setattr__(self, "factor", factor)
        require_one_of("Capacity: drop", get_args(Drop), self.drop)

    @classmethod
    def from_option(cls, capacity: Capacity | float | None) -> Capacity | None:
        """Returns the capacity for a value of the option of `MoE`; a number is a factor."""
        return capacity if isinstance(capacity, Capacity | None) else cls(capacity)

    @torch.no_grad()
    def drop_slots(
        self, routing: Routing, num_experts: int, k: int, ranks: Ranks | None
    ) -> Routing:
        """Sets kept of a routing decision, so that no expert has more than C slots.

        Adds the metric share_dropped.

        Args:
            routing: the routing decision for this rank's tokens.
            num_experts: the number of experts with a capacity: the first ones.
            k: experts per token.
            ranks: the ranks that balance together; None: only this rank.

        Raises:
            ValueError: the gate has set kept already.
        """
        rule = "be None for a gate that sets Routing.kept"
        require(routing.kept is None, "MoE: capacity", rule, self)
        expert_index, size = routing.expert_index, routing.importance.shape[0]
        bounds = routing.token_offsets
        own_tokens = expert_index.shape[0] if bounds is None else bounds.shape[0] - 1
        plan = ops.dispatch_plan(expert_index, size)
        own_counts = torch.cat([plan.tokens_per_expert, expert_index.new_full((1,), own_tokens)])
        rank_counts = own_counts.unsqueeze(0) if ranks is None else ranks.gather(own_counts)
        counts, num_tokens = rank_counts.sum(0).split([size, 1])
        product = (num_tokens * k).double() * self.factor / size
        # 2⁻⁵⁰ is more than all roundings of the product, and of the factor to a float.
        capacity = (product * (1 - 2**-50)).ceil()
        capacity = torch.minimum(capacity, num_tokens.double()).long()  # also if it is infinite
        if self.drop == "position":
            before = rank_counts[: 0 if ranks is None else ranks.rank, :size].sum(0)
            place = plan.inverse + (before - plan.offsets[:-1])[expert_index]
        elif ranks is None:
            place = _places(expert_index.reshape(-1), routing.gates.reshape(-1), size)
            place = place.view_as(expert_index)
        else:
            place = _places_over_ranks(plan, routing.gates, rank_counts[:, :size], ranks)
        kept = (place < capacity) | (expert_index >= num_experts)
        dropped = (counts[:num_experts] - capacity).clamp_min(0).sum()
        share = dropped.to(routing.gates.dtype) / counts.sum().clamp_min(1)
        return routing._replace(kept=kept, metrics=routing.metrics | {"share_dropped": share})


def _places(expert_index: Tensor, gates: Tensor, num_experts: int) -> Tensor:
    """Returns the place [R] of each slot among the slots of its expert, by decreasing gate.

    The lower slot wins a tie. NaN ranks above every number, so that it reaches the output.
    """
    order = gates.argsort(descending=True, stable=True)
    expert_index = expert_index[order]
    plan = ops.dispatch_plan(expert_index, num_experts)
    place = plan.inverse - plan.offsets[expert_index]
    return torch.empty_like(place).scatter(0, order, place)


def _places_over_ranks(
    plan: ops.DispatchPlan, gates: Tensor, counts: Tensor, ranks: Ranks
) -> Tensor:
    """Returns the place of each slot as `_places` does, over the slots of all ranks.

    Each rank sorts the slots of some experts. counts: [ranks, E], the slots of each rank.
    """
    columns = [len(block) for block in blocks(range(counts.shape[1]), ranks.size)]
    block_counts = counts.split(columns, 1)
    sizes = torch.stack([block.sum(1) for block in block_counts], 1).tolist()  # [from, to]
    num_sent, num_received = sizes[ranks.rank], [row[ranks.rank] for row in sizes]
    sent = gates.reshape(-1)[plan.permutation]
    received = AllToAll(sent, ranks, num_sent, num_received).wait()
    # Received slots are sorted by rank, then expert, then token.
    expert_index = columns_of(block_counts[ranks.rank], len(received))
    place = _places(expert_index, received, columns[ranks.rank])
    return AllToAll(place, ranks, num_received, num_sent).wait()[plan.inverse]
