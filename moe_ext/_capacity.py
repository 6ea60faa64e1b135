"""The capacity of the experts: which slots are dropped (arXiv 2101.03961, Sec. 2.2)."""

from __future__ import annotations

import math
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext.checks import require, require_one_of, require_positive
from moe_ext.ranks import AllToAll, Ranks, blocks
from moe_ext.ranks._rows import columns_of
from moe_ext.routing import Routing

Drop = Literal["position", "score"]


def checked_capacity(capacity_factor: float | None, drop: Drop) -> float | None:
    """Returns the capacity factor as a float; it may be infinite.

    Raises:
        ValueError: an option of `MoE` is out of range, or drop has no effect.
    """
    if capacity_factor not in (None, math.inf):
        (capacity_factor,) = require_positive("MoE", capacity_factor=capacity_factor)
    require_one_of("MoE: drop", get_args(Drop), drop)
    has_effect = capacity_factor is not None or drop == "position"
    require(has_effect, "MoE: drop", "be left out without capacity_factor", drop)
    return capacity_factor


@torch.no_grad()
def drop_slots(
    routing: Routing,
    num_experts: int,
    k: int,
    capacity_factor: float,
    drop: Drop,
    ranks: Ranks | None,
) -> Routing:
    """Sets `Routing.kept` so that no expert has more than C slots, and the metric share_dropped.

    The batch has T tokens on all ranks, and the gate has N experts::

        C = ceil(capacity_factor · k · T / N)

    Only the first num_experts of the N experts have a capacity; the others compute nothing. The
    product is that of the decimal number that the user wrote: 0.9 · 50 / 3 is 15.

    Args:
        routing: the routing decision for this rank's tokens.
        num_experts: E, the number of experts with a capacity.
        k: experts per token.
        capacity_factor: the capacity as a multiple of the mean number of slots per expert.
        drop: see `MoE`. Tokens are ordered by rank, then within the rank.
        ranks: the ranks that balance together; None: only this rank.
    """
    # The attributes may have changed since the last step.
    capacity_factor = cast(float, checked_capacity(capacity_factor, drop))
    rule = "be None for a gate that sets Routing.kept"
    require(routing.kept is None, "MoE: capacity_factor", rule, capacity_factor)
    expert_index, size = routing.expert_index, routing.importance.shape[0]
    bounds = routing.token_offsets
    num_tokens_here = expert_index.shape[0] if bounds is None else bounds.shape[0] - 1
    plan = ops.dispatch_plan(expert_index, size)
    here = torch.cat([plan.tokens_per_expert, expert_index.new_full((1,), num_tokens_here)])
    of_ranks = here.unsqueeze(0) if ranks is None else ranks.gather(here)
    counts, num_tokens = of_ranks.sum(0).split([size, 1])
    product = (num_tokens * k).double() * capacity_factor / size
    # 2⁻⁵⁰ is more than all roundings of the product, and of capacity_factor to a float.
    capacity = (product * (1 - 2**-50)).ceil()
    capacity = torch.minimum(capacity, num_tokens.double()).long()  # also if it is infinite
    if drop == "position":
        before = of_ranks[: 0 if ranks is None else ranks.rank, :size].sum(0)
        place = plan.inverse + (before - plan.offsets[:-1])[expert_index]
    elif ranks is None:
        place = _places(expert_index.reshape(-1), routing.gates.reshape(-1), size)
        place = place.view_as(expert_index)
    else:
        place = _places_over_ranks(plan, routing.gates, of_ranks[:, :size], ranks)
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
    of_blocks = counts.split(columns, 1)
    sizes = torch.stack([block.sum(1) for block in of_blocks], 1).tolist()  # [from, to]
    num_sent, num_received = sizes[ranks.rank], [row[ranks.rank] for row in sizes]
    sent = gates.reshape(-1)[plan.permutation]
    received = AllToAll(sent, ranks, num_sent, num_received).wait()
    # Received slots are sorted by rank, then expert, then token.
    expert_index = columns_of(of_blocks[ranks.rank], len(received))
    place = _places(expert_index, received, columns[ranks.rank])
    return AllToAll(place, ranks, num_received, num_sent).wait()[plan.inverse]
