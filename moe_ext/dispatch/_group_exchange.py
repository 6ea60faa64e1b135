"""Sharding of whole secondary mixtures (Sec. 3.1): each rank has groups with their gates."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from moe_ext import ops
from moe_ext._compiled import eager
from moe_ext._ragged import offsets_of, select_segments
from moe_ext.checks import require
from moe_ext.dispatch._exchange import Exchange, Received
from moe_ext.dispatch._mixture import mixture
from moe_ext.gates import HierarchicalGate, PrimarySelection, SecondarySelection
from moe_ext.ranks._rows import scale_grad
from moe_ext.ranks._whole import is_marked, require_whole
from moe_ext.ranks.collectives import AllToAll, Ranks
from moe_ext.ranks.placement import ExpertPlacement
from moe_ext.routing import Routing

__all__ = ["GroupExchange"]


class _Decisions(NamedTuple):
    """Holds the secondary decisions of a chunk's groups, if their number varies between slots.

    Attributes:
        gates: [R], see `SecondarySelection`.
        expert_in_group: [R] int32, see `SecondarySelection`.
        slot_offsets: [S + 1] int64, see `SecondarySelection`.
        num_slots: [ranks] int64, the number of slots from each rank. Slots are sorted by rank.
    """

    gates: Tensor
    expert_in_group: Tensor
    slot_offsets: Tensor
    num_slots: Tensor


class GroupExchange:
    """Computes a hierarchical mixture whose groups are sharded over ranks (Eq. 12, Sec. 3.1).

    Each secondary mixture, a secondary gate and its experts, is on one rank.

    1. the primary gate selects the groups of each token, on the token's rank
    2. an all-to-all sends each token once to each owner of its groups, with its primary gates and
       the noise of its secondary gates
    3. the secondary gates and the experts of each owner compute a gated sum of each token
    4. an all-to-all returns the sums; small ones return the secondary decisions
    5. combine: add the sums of each token

    The sums are rounded in another order than in a single process.

    Args:
        groups: the assignment of groups to ranks.
        ranks: the ranks that share the groups.
        num_chunks: number of chunks of each rank's groups; see `Exchange`.
        replicas: the ranks that have the same groups; None: only this rank.

    Attributes:
        exchange: sends tokens to the owners of their groups.
    """

    def __init__(
        self,
        groups: ExpertPlacement,
        ranks: Ranks,
        num_chunks: int = 1,
        replicas: Ranks | None = None,
    ) -> None:
        self.exchange: Exchange = Exchange(groups, ranks, "tokens", num_chunks, chunks_of="experts")
        self.replicas = replicas

    def __call__(
        self,
        x: Tensor,
        gate: Callable[..., Routing],
        experts: Callable[..., Tensor],
        ranks: Ranks | None,
        *,
        fused: bool,
        recompute: bool = False,
        dtype: torch.dtype | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[Tensor, Routing, Tensor]:
        """Computes y [T, d_output], the routing and tokens_per_expert [E] of this rank's tokens.

        Args:
            x: [T, D]. ``x.requires_grad`` must agree on all ranks; otherwise backward deadlocks.
            gate: the `HierarchicalGate` of the layer, with the secondary gates of this rank's
                groups, or a function with the arguments of its `forward`.
            experts: the experts of this rank.
            ranks: see `Gate.forward`.
            fused: see `moe_ext.Experts`.
            recompute: see `moe_ext.ops.experts`.
            dtype: tokens are cast to it for the experts; None: no cast.
            meanwhile: see `Exchange.run`.

        Raises:
            ValueError: the gate does not call its argument `select`.
        """
        outputs: list[Tensor] = []
        mix = partial(mixture, fused=fused, recompute=recompute)
        select = partial(self._select, outputs, experts, mix, dtype, meanwhile)
        routing = gate(x, ranks, select=select)
        rule = "pass select to HierarchicalGate.forward once, as shares_groups = True says"
        require(len(outputs) == 1, "MoE: gate", rule, f"{len(outputs)} calls")
        plan = ops.dispatch_plan(routing.expert_index, routing.importance.shape[0])
        return outputs[0], routing, plan.tokens_per_expert

    @eager  # torch.compile would break the graph at each transfer
    def _select(
        self,
        outputs: list[Tensor],
        experts: Callable[..., Tensor],
        mix: Callable[..., Tensor],
        dtype: torch.dtype | None,
        meanwhile: Callable[[], None] | None,
        gate: HierarchicalGate,
        x: Tensor,
        primary: PrimarySelection,
        ranks: Ranks | None,
    ) -> tuple[SecondarySelection, tuple[Tensor, ...]]:
        """Selects the experts on the ranks of the groups, and computes the tokens there.

        Args:
            outputs: gets y [T, d_output].
            mix: `mixture` with its options.
            experts, dtype, meanwhile: see `__call__`.
            gate, x, primary, ranks: see `HierarchicalGate.forward`.
        """
        exchange, (_, k2), b = self.exchange, gate.k_of_levels, gate.experts_per_group
        parts = exchange.parts_of(experts, b)
        details: list[Any] = []
        ragged: list[_Decisions] = []

        def compute(chunk: int, received: Received) -> tuple[Tensor, Sequence[Tensor]]:
            if is_marked(experts):
                require_whole(cast(nn.Module, experts).named_parameters("experts"), exchange.ranks)
            first, size = sum(exchange.chunk_sizes[:chunk]), exchange.chunk_sizes[chunk]
            local = None if exchange.num_chunks == 1 else slice(first, first + size)
            x, group_index, gates, slots_of_token, values, num_slots = received
            slots = PrimarySelection(gates, group_index, slots_of_token, tuple(values))
            selected = gate.select_experts(x, slots, local, self.replicas)
            details.append(selected.details)
            assert slots_of_token is not None  # because of `values`, tokens are sent once
            if selected.slot_offsets is None:
                token_offsets = slots_of_token * k2
            else:
                token_offsets = selected.slot_offsets.index_select(0, slots_of_token)
            expert_index = selected.expert_index(group_index, b)
            y = mix(
                parts[chunk],
                x if dtype is None else x.to(dtype),
                selected.gates.reshape(-1),
                ops.dispatch_plan(expert_index.reshape(-1), size * b),
                token_offsets,
            )
            decisions = selected.gates, selected.expert_in_group.to(torch.int32)
            if selected.slot_offsets is None:
                return y, decisions
            if torch.is_grad_enabled():  # for frozen gates too: all ranks run backward together
                selected.gates.requires_grad_()
            ragged.append(_Decisions(*decisions, selected.slot_offsets, num_slots))
            return y, (selected.slot_offsets.diff().to(torch.int32),)

        slots = primary.gates, primary.group_index, primary.token_offsets
        y, _, values = exchange.run(x, *slots, compute, primary.values, meanwhile)
        outputs.append(y)
        if ragged:
            secondary = self._return(primary, values[0], ragged)
        else:
            secondary = SecondarySelection(*values)
        statistics = gate.statistics(details, ranks)
        return secondary, tuple(self._unscaled(value) for value in statistics)

    def _unscaled(self, value: Tensor) -> Tensor:
        """Returns a value from the ranks of the groups, with the gradient of this rank's loss."""
        return scale_grad(value, 1 / self.exchange.factor)

    def _return(
        self, primary: PrimarySelection, sizes: Tensor, decisions: Sequence[_Decisions]
    ) -> SecondarySelection:
        """Returns the decisions to the ranks of the tokens.

        Args:
            primary: the slots of this rank's tokens. The groups of a token are in ascending order.
            sizes: [S], the number of experts of each slot.
            decisions: the decisions of each chunk of this rank's groups.
        """
        exchange, ranks = self.exchange, self.exchange.ranks
        # Sort the slots by destination: each owner has its slots in the same order.
        destination = exchange.destination(primary.group_index, primary.token_offsets)
        plan = ops.dispatch_plan(destination, len(decisions) * ranks.size)
        offsets = offsets_of(sizes.index_select(0, plan.permutation))
        sent = [chunk.slot_offsets[offsets_of(chunk.num_slots)].diff() for chunk in decisions]
        # The host synchronizes to read these counts, each [chunks, ranks].
        counts = torch.stack([torch.cat(sent), offsets[plan.offsets].diff()])
        num_sent, num_received = counts.view(2, len(decisions), ranks.size).tolist()
        transfers = [
            AllToAll([chunk.gates, chunk.expert_in_group], ranks, num_sent[c], num_received[c])
            for c, chunk in enumerate(decisions)
        ]
        gates, expert_in_group = map(
            torch.cat, zip(*(transfer.wait_all() for transfer in transfers), strict=True)
        )
        slot_offsets, source = select_segments(offsets, plan.inverse, len(gates))
        gates = self._unscaled(gates.index_select(0, source))
        return SecondarySelection(gates, expert_in_group.index_select(0, source), slot_offsets)
