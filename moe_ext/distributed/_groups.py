"""Sharding of whole secondary mixtures (Sec. 3.1): each rank has groups with their gates."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_ext import ops
from moe_ext._mixture import mixture
from moe_ext.distributed._rows import scale_grad
from moe_ext.distributed.exchange import Exchange, Received
from moe_ext.distributed.placement import ExpertPlacement
from moe_ext.distributed.ranks import Ranks
from moe_ext.experts import Experts
from moe_ext.gates import HierarchicalNoisyTopKGate, Routing
from moe_ext.gates.hierarchical import SecondarySelection

__all__ = ["GroupExchange", "gate_of_groups"]


def gate_of_groups(gate: nn.Module) -> HierarchicalNoisyTopKGate | None:
    """Returns the gate without torch.compile's wrapper; None if ranks cannot share its groups."""
    gate = getattr(gate, "_orig_mod", gate)
    if not isinstance(gate, HierarchicalNoisyTopKGate):
        return None
    # `GroupExchange` does not call `forward`, which a subclass may have changed.
    own = type(gate).forward is HierarchicalNoisyTopKGate.forward
    return gate if own else None


class GroupExchange:
    """Computes a hierarchical mixture whose groups are sharded over ranks (Eq. 12, Sec. 3.1).

    Each secondary mixture, a secondary gate and its experts, is on one rank.

    1. the primary gate selects k1 groups of each token, on the token's rank
    2. an all-to-all sends each token once to each owner of its groups, with its primary gates and
       the noise of its secondary gates
    3. the secondary gates and the experts of each owner compute a gated sum of each token
    4. an all-to-all returns the sums; two small ones return the secondary decisions
    5. combine: add the sums of each token

    The sums are rounded in another order than in a single process.

    Args:
        groups: the assignment of groups to ranks.
        ranks: the ranks that share the groups.
        num_chunks: number of chunks of each rank's groups; see `Exchange`.

    Attributes:
        exchange: sends tokens to the owners of their groups.
    """

    def __init__(self, groups: ExpertPlacement, ranks: Ranks, num_chunks: int = 1) -> None:
        self.exchange = Exchange(groups, ranks, "tokens", num_chunks, chunks_of="experts")

    def __call__(
        self,
        x: Tensor,
        gate: HierarchicalNoisyTopKGate,
        experts: Experts,
        ranks: Ranks | None,
        *,
        fused: bool,
        recompute: bool = False,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Routing, Tensor]:
        """Computes y [T, d_output], the routing and tokens_per_expert [E] of this rank's tokens.

        Args:
            x: [T, D]. ``x.requires_grad`` must agree on all ranks; otherwise backward deadlocks.
            gate: the gate of the layer, with the secondary gates of this rank's groups.
            experts: the experts of this rank.
            ranks: see `Gate.forward`.
            fused: see `moe_ext.Experts`.
            recompute: see `moe_ext.ops.experts`.
            dtype: tokens are cast to it for the experts; None: no cast.
        """
        exchange, (_, k2), b = self.exchange, gate.k_of_levels, gate.experts_per_group
        parts: Sequence[Callable[..., Tensor]] = [experts]
        if exchange.num_chunks > 1:
            parts = experts.split([size * b for size in exchange.chunk_sizes])
        clean_logits, primary = gate.select_groups(x)
        noise = gate.secondary_noise(clean_logits)
        loads = []

        def compute(chunk: int, received: Received) -> tuple[Tensor, Sequence[Tensor]]:
            first, size = sum(exchange.chunk_sizes[:chunk]), exchange.chunk_sizes[chunk]
            local = None if exchange.num_chunks == 1 else slice(first, first + size)
            x, group_index, gates, token_offsets, values = received
            noise = values[0] if values else None
            selected = gate.select_experts(x, group_index, gates, token_offsets, noise, local)
            if selected.load_of_group is not None:
                loads.append(selected.load_of_group)
            assert token_offsets is not None  # because of `values`, tokens are sent once
            y = mixture(
                parts[chunk],
                x if dtype is None else x.to(dtype),
                selected.gates.reshape(-1),
                ops.dispatch_plan(selected.expert_index.reshape(-1), size * b),
                token_offsets * k2,
                fused=fused,
                recompute=recompute,
            )
            expert_in_group = selected.expert_index - group_index[:, None] * b
            return y, (selected.gates, expert_in_group.to(torch.int32))

        values = () if noise is None else (noise,)
        group_index = primary.expert_index
        y, group_size, (gates, expert_in_group) = exchange.run(
            x, primary.gates, group_index, None, compute, values
        )
        expert_index = group_index.reshape(-1, 1) * b + expert_in_group
        load = self._load_of_all(gate, loads) if loads else None
        secondary = SecondarySelection(gates, expert_index, group_size, load)
        routing = gate.routing(clean_logits, primary, secondary, ranks)
        plan = ops.dispatch_plan(routing.expert_index, gate.num_experts)
        return y, routing, plan.tokens_per_expert

    def _load_of_all(self, gate: HierarchicalNoisyTopKGate, loads: Sequence[Tensor]) -> Tensor:
        """Returns the loads [a, b] of this rank's groups; the other rows are 0."""
        load = loads[0] if len(loads) == 1 else torch.cat([*loads])
        here = gate.groups
        load = F.pad(load, (0, 0, here.start, gate.num_groups - here.stop))
        return scale_grad(load, 1 / self.exchange.factor)
