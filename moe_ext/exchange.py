"""Experts on several processes: which are where, and the way of the tokens there and back (Sec. 3).

Every process is a replica of the gate and owner of some experts. A token's copies go to the owners
of its experts, each of which so gets the rows of all processes, and the experts' outputs come back
to be summed. Only rows travel, never weights (Sec. 3.2).
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_ext import ops
from moe_ext.checks import require, require_at_least
from moe_ext.experts import FeedForwardExperts, mixture
from moe_ext.gates import token_of_slot
from moe_ext.processes import Processes, Transfer, blocks, columns_of, scale_grad

EXCHANGES = ("rows", "tokens")  # the units of an `Exchange`
_HOST = torch.device("cpu")
_Sender = Callable[[int], Transfer]  # of a chunk


@dataclass(frozen=True)
class Placement:
    """Which process owns which experts: contiguous blocks, as even as whole groups allow.

    Attributes:
        num_experts: of all processes.
        num_processes: which share them.
        experts_per_group: those of a group stay together (a hierarchical mixture's, App. B).
    """

    num_experts: int
    num_processes: int
    experts_per_group: int = 1

    def __post_init__(self) -> None:
        require_at_least(1, "Placement", num_processes=self.num_processes)
        require(
            self.experts_per_group >= 1 and self.num_experts % self.experts_per_group == 0,
            "Placement: experts_per_group",
            f"divide num_experts = {self.num_experts}",
            self.experts_per_group,
        )

    def experts_of(self, rank: int) -> range:
        """The experts of one process; if there are fewer than processes, some have none."""
        rule = f"be in [0, {self.num_processes})"
        require(0 <= rank < self.num_processes, "Placement.experts_of: rank", rule, rank)
        size = self.experts_per_group
        groups = blocks(range(self.num_experts // size), self.num_processes)[rank]
        return range(groups.start * size, groups.stop * size)

    @property
    def counts(self) -> list[int]:
        """The number of experts of each process."""
        return [len(self.experts_of(rank)) for rank in range(self.num_processes)]

    def owner(self, expert: int) -> int:
        """The rank of the process that has an expert."""
        rule = f"be in [0, {self.num_experts})"
        require(0 <= expert < self.num_experts, "Placement.owner: expert", rule, expert)
        return next(r for r in range(self.num_processes) if expert in self.experts_of(r))


class _Copies(NamedTuple):
    """What is sent of the tokens, ordered by destination.

    Attributes:
        inverse, token_offsets: where each token's copies are, as for `moe_ext.ops.dispatch`.
        num_copies: [destinations] int64.
        of_row: [R] int64, the copy that each row needs, counted from its destination's first; None:
            each row has a copy of its own.
    """

    inverse: Tensor
    token_offsets: Tensor | None
    num_copies: Tensor
    of_row: Tensor | None


class _Order(NamedTuple):
    """Where the rows of all experts go: sorted by destination, a pair (chunk, process).

    Attributes:
        position: [E], of each expert among all.
        bounds: [destinations + 1], the positions of each destination.
        destination: [E], by position.
        message: what to tell each process: the counts of its experts, then, numbered from E on, the
            numbers of copies for its chunks.
    """

    position: Tensor
    bounds: Tensor
    destination: Tensor
    message: Tensor


class Exchange(nn.Module):
    """The mixture of experts that several processes share.

    1. plan: the rows sorted by expert, and so by owner; the processes tell each other how many come
    2. dispatch: the rows to the owners
    3. experts: what came, sorted by expert, then process, then token: the rows that a process with
       all tokens would have, in its order
    4. the outputs back again
    5. combine: each token's outputs, weighted by its gates

    With several chunks the experts of every process are computed one chunk after the other, while
    the rows of others travel. The gradients of the experts are those of the mean of the losses of
    all processes, as DistributedDataParallel makes those of the other parameters.

    Args:
        placement: which experts each process has.
        processes: all of them call this together, forward and backward.
        unit: "rows": every copy of a token travels by itself, and its output is weighted and
            summed at home: the bits of a single process. The outputs are kept for the backward
            pass. "tokens": the copies of a token for experts of one process travel as one, with
            their gates, and come back as their sum: fewer bytes where k > 1, and nothing of the
            outputs is kept, but the sum is in another order.
        num_chunks: into how many the experts of each process are divided, at least 1.
    """

    def __init__(
        self,
        placement: Placement,
        processes: Processes,
        unit: str = "rows",
        num_chunks: int = 1,
    ) -> None:
        super().__init__()
        size = processes.size
        self.placement = placement
        self.processes = processes
        self.unit = unit
        self.num_chunks = num_chunks
        ranks = range(size)
        chunks = [blocks(placement.experts_of(rank), num_chunks) for rank in ranks]
        destinations = [chunks[rank][c] for c in range(num_chunks) for rank in ranks]
        self.chunk_sizes = [len(experts) for experts in chunks[processes.rank]]
        first = placement.num_experts
        message = [
            [*placement.experts_of(rank), *range(first + rank, first + len(destinations), size)]
            for rank in ranks
        ]
        self.message_sizes = [len(part) for part in message]
        with _HOST:  # a layer can be made on the meta device
            sizes = torch.tensor([len(experts) for experts in destinations])
            # Constants: neither buffers, which `to_empty` would leave undefined, nor in the state.
            self._order = {
                _HOST: _Order(
                    torch.tensor([*chain(*destinations)]).argsort(),
                    F.pad(sizes.cumsum(0), (1, 0)),
                    torch.arange(len(destinations)).repeat_interleave(sizes),
                    torch.tensor([*chain(*message)]),
                )
            }

    def forward(
        self,
        x: Tensor,
        gates: Tensor,
        expert_index: Tensor,
        token_offsets: Tensor | None,
        experts: Any,
        recompute: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """y [T, d_output] of this process's tokens, and their tokens_per_expert [E].

        Args:
            x: [T, D]; with or without a gradient in all processes alike.
            gates, expert_index, token_offsets: see `Gating`; the experts of all processes.
            experts: of this process.
            recompute: see `moe_ext.ops.experts`.
        """
        autocast = torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64
        if autocast and isinstance(experts, FeedForwardExperts):
            # The experts' type is what travels.
            x = x.to(torch.get_autocast_dtype(x.device.type))
        order = self._order_on(x.device)
        size, num_chunks = self.processes.size, self.num_chunks
        num_local = sum(self.chunk_sizes)
        # Between here and y gradients are those of the mean of the losses, as the experts need.
        x, gates = scale_grad(x, size), scale_grad(gates, size)

        plan = ops.dispatch_plan(order.position[expert_index], self.placement.num_experts)
        tokens_per_expert = plan.tokens_per_expert[order.position]
        copies = self._copies(expert_index, token_offsets, plan, order)
        numbers = Transfer(
            torch.cat([tokens_per_expert, copies.num_copies])[order.message],
            self.processes,
            self.message_sizes,
            [num_local + num_chunks] * size,
        )
        rows = ops.dispatch(x, copies.inverse, copies.token_offsets)
        received = numbers.wait().view(size, num_local + num_chunks)
        received_by_chunk = received[:, :num_local].split(self.chunk_sizes, dim=1)

        # Here the host waits for the numbers: [chunks, processes] of each.
        host = [
            copies.num_copies,
            received[:, num_local:].T.reshape(-1),
            plan.offsets[order.bounds].diff(),
            torch.cat([counts.sum(1) for counts in received_by_chunk]),
        ]
        copies_out, copies_in, rows_out, rows_in = (
            torch.stack(host).view(4, num_chunks, size).tolist()
        )

        def sender(values: Tensor, out: list[list[int]], into: list[list[int]]) -> _Sender:
            # The split of a single chunk would be copied in the backward pass.
            parts = [values] if num_chunks == 1 else values.split([sum(n) for n in out])
            return lambda c: Transfer(parts[c], self.processes, out[c], into[c])

        senders = [sender(rows, copies_out, copies_in)]
        if copies.of_row is not None:
            row_gates = ops.dispatch(gates.reshape(-1, 1), plan.inverse.reshape(-1, 1))
            senders += [
                sender(row_gates, rows_out, rows_in),
                sender(copies.of_row, rows_out, rows_in),
            ]
        parts = [experts] if num_chunks == 1 else experts.split(self.chunk_sizes)
        # One chunk ahead: more at once would share the link, so that the first arrives no sooner.
        # Every wait lies where the backward pass, in the reverse order, has to start as soon.
        coming = [send(0) for send in senders]
        going: Transfer | None = None
        returned = []
        for c, counts in enumerate(received_by_chunk):
            x_c, *routing = (transfer.wait() for transfer in coming)
            if c + 1 < num_chunks:
                coming = [send(c + 1) for send in senders]
            index, gates_c, slots = _slots(counts, received[:, num_local + c], len(x_c), routing)
            plan_c = ops.dispatch_plan(index, counts.shape[1])
            y = mixture(parts[c], x_c, gates_c, plan_c, slots, recompute=recompute)
            if torch.is_grad_enabled() and (x.requires_grad or gates.requires_grad):
                y.requires_grad_()  # of frozen experts too: all go back together
            if going is not None:
                returned.append(going.wait())
            going = Transfer(y, self.processes, copies_in[c], copies_out[c])
        assert going is not None  # there is a chunk
        y = going.wait()
        if returned:
            y = torch.cat([*returned, y])
        if copies.of_row is not None:
            gates = torch.ones_like(copies.inverse, dtype=gates.dtype)
        y = ops.combine(y, gates, copies.inverse, copies.token_offsets)
        return scale_grad(y, 1 / size), tokens_per_expert

    def _order_on(self, device: torch.device) -> _Order:
        if device not in self._order:
            self._order[device] = _Order(*(value.to(device) for value in self._order[_HOST]))
        return self._order[device]

    def _copies(
        self,
        expert_index: Tensor,
        token_offsets: Tensor | None,
        plan: ops.DispatchPlan,
        order: _Order,
    ) -> _Copies:
        if self.unit == "rows" or (token_offsets is None and expert_index.shape[1] == 1):
            return _Copies(plan.inverse, token_offsets, plan.offsets[order.bounds].diff(), None)
        num_destinations = len(order.bounds) - 1
        num_tokens = len(expert_index) if token_offsets is None else len(token_offsets) - 1
        token = token_of_slot(expert_index, token_offsets)
        destination = order.destination[order.position[expert_index]].reshape(-1)
        needed = torch.zeros(
            num_tokens, num_destinations, dtype=torch.bool, device=expert_index.device
        )
        needed[token, destination] = True
        # Copies are numbered by token, then destination; and sorted by destination they are sent.
        number = needed.flatten().cumsum(0).view_as(needed)[token, destination] - 1
        # The host waits to know how many they are.
        by_destination = ops.dispatch_plan(needed.nonzero()[:, 1].contiguous(), num_destinations)
        place = by_destination.inverse[number] - by_destination.offsets[destination]
        return _Copies(
            by_destination.inverse,
            F.pad(needed.sum(1).cumsum(0), (1, 0)),
            by_destination.tokens_per_expert,
            place[plan.permutation],
        )


def _slots(
    counts: Tensor, num_copies: Tensor, total: int, routing: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The expert and the gate of each slot of the copies that arrived, and where theirs begin.

    Args:
        counts: [processes, experts], the rows that came; by process, each sorted by expert.
        num_copies: [processes], those of each.
        total: their sum.
        routing: nothing, where each row has a copy of its own, whose gate stayed at home; or the
            rows' gates [R, 1], and the copies that they need, counted from their process's first.
    """
    if not routing:
        index = columns_of(counts, total)[:, None]
        return index, torch.ones_like(index, dtype=torch.float32), None
    gates, copy = routing
    index = columns_of(counts, len(copy))
    first = num_copies.cumsum(0) - num_copies
    copy = copy + first.repeat_interleave(counts.sum(1), output_size=len(copy))
    by_copy = ops.dispatch_plan(copy, total)
    gates = ops.dispatch(gates, by_copy.inverse[:, None])
    return index[by_copy.permutation], gates[:, 0], by_copy.offsets
