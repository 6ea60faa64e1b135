"""Expert parallelism by two all-to-all operations (Sec. 3).

Every rank has a replica of the gate and owns some experts. An all-to-all sends each routed row to
the owner of its expert. A second all-to-all returns the outputs, which are then summed. The
exchange sends no weights (Sec. 3.2).
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Literal, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from moe_ext import ops
from moe_ext._compiled import eager
from moe_ext._ragged import offsets_of
from moe_ext.checks import require_sizes
from moe_ext.dispatch._mixture import mixture
from moe_ext.ranks._rows import columns_of, scale_grad, with_backward_of
from moe_ext.ranks._whole import is_marked, require_whole
from moe_ext.ranks.collectives import AllToAll, Ranks, blocks
from moe_ext.ranks.placement import ExpertPlacement
from moe_ext.routing import Routing

__all__ = ["ChunksOf", "Exchange", "ExchangeUnit", "Received"]

ChunksOf = Literal["experts", "tokens"]
ExchangeUnit = Literal["rows", "tokens"]
_Reduction = Literal["mean", "sum"]
_HOST = torch.device("cpu")
_Sender = Callable[[int], AllToAll]  # starts the all-to-all of a chunk


@runtime_checkable
class _Divisible(Protocol):
    """Experts that consist of parts; see `moe_ext.Experts.split`."""

    def split(self, sizes: Sequence[int]) -> Sequence[Callable[..., Tensor]]: ...


class _Copies(NamedTuple):
    """Plans which token rows are sent, sorted by destination. A copy is one sent row.

    Attributes:
        position: the copy of each slot, in the shape of the slots.
        num_copies: [destinations] int64, the number of copies for each destination.
        is_first: [R] bool, whether a slot is the first one of its copy. None: each slot has its
            own copy.
        copy_index: [R] int32, the copy that each row needs, counted from the first copy of its
            destination. None: each slot has its own copy.
    """

    position: Tensor
    num_copies: Tensor
    is_first: Tensor | None = None
    copy_index: Tensor | None = None

    def dispatch_arguments(
        self, slots_of_token: Tensor | None, number: int, k: int
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the arguments inverse and token_offsets of `moe_ext.ops.dispatch`.

        Args:
            slots_of_token: token_offsets of the slots; None: each token has k slots.
            number: the sum of num_copies, which the caller knows. Reading it would synchronize.
            k: the number of slots of each token; unused with slots_of_token.
        """
        if self.is_first is None:
            return self.position, slots_of_token
        first_slots = self.is_first.nonzero_static(size=number).squeeze(1)
        copies_before = offsets_of(self.is_first)
        if slots_of_token is None:
            token_offsets = copies_before[::k].contiguous()
        else:
            token_offsets = copies_before[slots_of_token]
        return self.position.reshape(-1)[first_slots], token_offsets


class _Counts(NamedTuple):
    """Holds the numbers of rows that this rank sends and receives: [chunks][ranks], on the host.

    Attributes:
        rows_out, rows_in: the numbers of rows.
        copies_out, copies_in: the numbers of copies, see `_Copies`.
    """

    rows_out: list[list[int]]
    rows_in: list[list[int]]
    copies_out: list[list[int]]
    copies_in: list[list[int]]


class Received(NamedTuple):
    """Holds the tokens that a rank received for a chunk of its experts.

    A slot is a (copy, expert) assignment. Slots are ordered by copy.

    Attributes:
        x: [N, D], the copies.
        expert_index: [N, 1], or [S] with token_offsets. The expert of each slot, counted from the
            first of the chunk.
        gates: the gate of each slot, in the shape of expert_index.
        token_offsets: [N + 1]; copy n has the slots token_offsets[n] to token_offsets[n + 1] - 1.
            None: one slot for each copy.
        values: [S, ...], the values of each slot.
        num_slots: [ranks], the number of slots from each rank. Slots are sorted by rank.
    """

    x: Tensor
    expert_index: Tensor
    gates: Tensor
    token_offsets: Tensor | None
    values: Sequence[Tensor]
    num_slots: Tensor


# compute(chunk, received) returns the sum of the gated outputs of each copy, [N, d_output], and
# values of each slot, [S, ...].
_Compute = Callable[[int, Received], tuple[Tensor, Sequence[Tensor]]]


class _Order(NamedTuple):
    """Orders N numbered experts by destination. A destination is a (chunk, rank) pair.

    N is E with chunks of experts. With chunks of tokens, an expert has a number in each chunk.

    Attributes:
        position: [N], the position of each number in this order.
        bounds: [destinations + 1], the first position of each destination, and N.
        destination: [N], the destination at each position.
        message: indices of the counts to send to each rank. Indices below N are token counts of its
            experts; N + d is the number of copies for destination d.
    """

    position: Tensor
    bounds: Tensor
    destination: Tensor
    message: Tensor

    def destination_of(self, number: Tensor) -> Tensor:
        """Returns the destination of each number, in one dimension."""
        return self.destination[self.position[number]].reshape(-1)


class Exchange:
    """Computes the mixture of experts that are sharded over ranks.

    1. plan: sort the rows by expert and so by owner; an all-to-all sends the row counts
    2. dispatch: an all-to-all sends the rows to the owners of their experts
    3. experts: sort the received rows by expert, then rank, then token. This is the order of a
       single process with all tokens. Apply the experts.
    4. return: an all-to-all sends the outputs back
    5. combine: sum the outputs of each token, weighted by its gates

    With several chunks, each rank computes them in sequence. The computation of one chunk overlaps
    with the transfer of others.

    Args:
        placement: the assignment of experts to ranks.
        ranks: the ranks that share the experts; all must call this together, forward and backward.
        unit: "rows" sends every routed row. Its output is weighted and summed on the token's own
            rank. Results are bitwise identical to a single process. The outputs are saved for
            backward. "tokens" sends each token at most once to each rank, with its gates, and
            returns one weighted sum. Compared with "rows", it sends fewer bytes if k > 1 and saves
            no outputs for backward. Its summation order differs, so outputs agree to rounding.
        num_chunks: number of chunks, at least 1.
        chunks_of: "experts": a chunk is a part of each rank's experts. "tokens": a chunk is a part
            of each rank's tokens, so that no token is sent twice to a rank. The weight gradients
            of the chunks are then summed, which rounds. None: "experts" for rows, else "tokens".
        reduction: "mean": expert gradients belong to the mean of the ranks' losses.
            DistributedDataParallel uses the same mean for the other parameters. "sum": they
            belong to the sum of the losses. The gradients of x and the gates are equal in both.
    """

    def __init__(
        self,
        placement: ExpertPlacement,
        ranks: Ranks,
        unit: ExchangeUnit = "rows",
        num_chunks: int = 1,
        reduction: _Reduction = "mean",
        chunks_of: ChunksOf | None = None,
    ) -> None:
        (num_chunks,) = require_sizes("Exchange", num_chunks=num_chunks)
        size, num_experts = ranks.size, placement.num_experts
        self.placement = placement
        self.ranks = ranks
        self.unit = unit
        self.num_chunks = num_chunks
        self.chunks_of = chunks_of or ("experts" if unit == "rows" else "tokens")
        # The experts need the gradients of this multiple of the mean of the ranks' losses.
        self.factor: int = size if reduction == "mean" else 1
        owned = [placement.experts_of(rank) for rank in range(size)]
        if self.chunks_of == "experts":
            chunks = [blocks(experts, num_chunks) for experts in owned]
        else:  # chunk c has the numbers from c · E on
            first_numbers = [c * num_experts for c in range(num_chunks)]
            chunks = [[range(i + e.start, i + e.stop) for i in first_numbers] for e in owned]
        destinations = [chunks[rank][c] for c in range(num_chunks) for rank in range(size)]
        self.chunk_sizes: list[int] = [len(experts) for experts in chunks[ranks.rank]]
        first = sum(map(len, destinations))
        message = [
            [*chain(*chunks[rank]), *range(first + rank, first + len(destinations), size)]
            for rank in range(size)
        ]
        self.message_sizes: list[int] = [len(part) for part in message]
        with _HOST:  # even if the layer is made on the meta device
            sizes = torch.tensor([len(experts) for experts in destinations])
            # Not buffers: `to_empty` would leave buffers undefined.
            self._order = {
                _HOST: _Order(
                    torch.tensor([*chain(*destinations)]).argsort(),
                    offsets_of(sizes),
                    torch.arange(len(destinations)).repeat_interleave(sizes),
                    torch.tensor([*chain(*message)]),
                )
            }

    def __call__(
        self,
        x: Tensor,
        routing: Routing,
        experts: Callable[..., Tensor],
        *,
        fused: bool,
        recompute: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Computes y [T, d_output] and tokens_per_expert [E] of this rank's tokens.

        Args:
            x: [T, D]. ``x.requires_grad`` must agree on all ranks; otherwise backward deadlocks.
            routing: the routing decision of this rank's tokens, over the experts of all ranks.
            experts: the experts of this rank, an `Experts` or a callable with its arguments.
            fused: see `moe_ext.Experts`.
            recompute: see `moe_ext.ops.experts`.
            meanwhile: see `run`.
        """
        if fused and torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            # Send the dtype of the GEMMs.
            x = x.to(torch.get_autocast_dtype(x.device.type))
        parts = self.parts_of(experts)

        def compute(chunk: int, received: Received) -> tuple[Tensor, Sequence[Tensor]]:
            if is_marked(experts):
                require_whole(cast(nn.Module, experts).named_parameters("experts"), self.ranks)
            plan = ops.dispatch_plan(received.expert_index, self.chunk_sizes[chunk])
            y = mixture(
                parts[chunk],
                received.x,
                received.gates,
                plan,
                received.token_offsets,
                fused=fused,
                recompute=recompute,
            )
            return y, ()

        y, tokens_per_expert, _ = self.run(
            x,
            routing.gates,
            routing.expert_index,
            routing.token_offsets,
            compute,
            meanwhile=meanwhile,
        )
        return y, tokens_per_expert

    def parts_of(
        self, experts: Callable[..., Tensor], experts_per_number: int = 1
    ) -> Sequence[Callable[..., Tensor]]:
        """Returns what computes each chunk: the experts, or their parts in chunks of experts.

        Args:
            experts: the experts of this rank.
            experts_per_number: the number of experts that the placement counts as one.

        Raises:
            ValueError: the experts must be split, and cannot be.
        """
        if self.num_chunks == 1 or self.chunks_of == "tokens":
            return [experts] * self.num_chunks
        rule = "be 1 if the experts are replaced by a module without split(sizes)"
        if not isinstance(experts, _Divisible):
            raise ValueError(f"ExpertParallel: num_chunks must {rule}, got {self.num_chunks}")
        return experts.split([size * experts_per_number for size in self.chunk_sizes])

    @eager  # torch.compile would break the graph at each transfer
    def run(
        self,
        x: Tensor,
        gates: Tensor,
        expert_index: Tensor,
        token_offsets: Tensor | None,
        compute: _Compute,
        values: Sequence[Tensor] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        """Sends the tokens to the owners of their experts, computes there and returns the sums.

        Args:
            x: [T, D]. ``x.requires_grad`` must agree on all ranks; otherwise backward deadlocks.
            gates, expert_index, token_offsets: see `Routing`.
            compute: called for each chunk with the chunk's number and a `Received`. Returns the sum
                of the gated outputs of each copy, and values of each slot.
            values: [R, ...], more values of each slot that are sent with it. None: none, and
                gates may stay on this rank.
            meanwhile: called once, while the first tokens are sent.

        Returns:
            y [T, d_output]; tokens_per_expert [E] of this rank's tokens; the values of each slot
            that compute returned, [R, ...].
        """
        order = self._order_on(x.device)
        size, num_counts = self.ranks.size, sum(self.chunk_sizes) + self.num_chunks
        # From here to y, gradients are those that the experts need.
        x, gates = scale_grad(x, self.factor), scale_grad(gates, self.factor)

        number = self._number(expert_index, token_offsets)
        plan = ops.dispatch_plan(order.position[number], len(order.position))
        counts_out = plan.tokens_per_expert[order.position]
        parts = 1 if self.chunks_of == "experts" else self.num_chunks
        tokens_per_expert = counts_out.view(parts, self.placement.num_experts).sum(0)
        one_slot = token_offsets is None and expert_index.shape[1] == 1
        by_row = values is None and (self.unit == "rows" or one_slot)
        copies = self._copies(by_row, number, token_offsets, plan, order)
        numbers = AllToAll(
            torch.cat([counts_out, copies.num_copies])[order.message],
            self.ranks,
            self.message_sizes,
            [num_counts] * size,
        )
        incoming = (
            numbers.wait().view(size, num_counts).split([*self.chunk_sizes, self.num_chunks], 1)
        )
        counts = self._counts(plan.offsets[order.bounds].diff(), copies.num_copies, incoming)

        num_copies, k = sum(map(sum, counts.copies_out)), number.shape[-1]
        inverse, copies_of_token = copies.dispatch_arguments(token_offsets, num_copies, k)
        rows = ops.dispatch(x, inverse, copies_of_token)
        senders = [self._sender([rows], counts.copies_out, counts.copies_in)]
        if copies.copy_index is not None:
            row_of_slot = plan.inverse.reshape(-1, 1)
            sent_values = gates.reshape(-1, 1), *(values or ())
            sent_rows = [ops.dispatch(value, row_of_slot) for value in sent_values]
            senders += [
                self._sender([copies.copy_index, *sent_rows], counts.rows_out, counts.rows_in)
            ]
            gates = torch.ones_like(inverse, dtype=gates.dtype)
        y, *row_values = self._compute_chunks(senders, incoming, counts, compute, meanwhile)
        y = ops.combine(y, gates, inverse, copies_of_token)
        slot_values = [value.index_select(0, plan.inverse.reshape(-1)) for value in row_values]
        y, *slot_values = (scale_grad(value, 1 / self.factor) for value in (y, *slot_values))
        return y, tokens_per_expert, slot_values

    def _counts(self, rows_out: Tensor, copies_out: Tensor, incoming: Sequence[Tensor]) -> _Counts:
        """Brings the counts to the host, which synchronizes with the device.

        Args:
            rows_out, copies_out: [chunks · ranks], the rows that this rank sends to each rank.
            incoming: [ranks, experts of the chunk] for each chunk, the numbers of rows that this
                rank receives; then [ranks, chunks], the numbers of copies.
        """
        *rows, copies = incoming
        rows_in = torch.cat([chunk.sum(1) for chunk in rows])
        counts = torch.stack([rows_out, rows_in, copies_out, copies.T.reshape(-1)])
        return _Counts(*counts.view(4, self.num_chunks, self.ranks.size).tolist())

    def _sender(
        self, values: Sequence[Tensor], out: list[list[int]], into: list[list[int]]
    ) -> _Sender:
        """Returns what starts the transfer of a chunk of several values of each row."""
        if self.num_chunks == 1:  # Backward of a split into one chunk would copy the gradient.
            chunks: Sequence[tuple[Tensor, ...]] = [tuple(values)]
        else:
            sizes = [sum(numbers) for numbers in out]
            chunks = [*zip(*(value.split(sizes) for value in values), strict=True)]
        return lambda c: AllToAll(chunks[c], self.ranks, out[c], into[c])

    def _compute_chunks(
        self,
        senders: Sequence[_Sender],
        incoming: Sequence[Tensor],
        counts: _Counts,
        compute: _Compute,
        meanwhile: Callable[[], None] | None,
    ) -> Sequence[Tensor]:
        """Sends, computes and returns one chunk after the other.

        Args:
            senders: one for the token copies, and one for the values of the rows if tokens are sent
                once to each rank.
            incoming: see `_counts`.
            counts: the numbers of rows that this rank sends and receives.
            compute, meanwhile: see `run`.

        Returns:
            The sums that compute returned for the copies of this rank, and the values for its rows.
        """
        *rows_by_chunk, num_copies = incoming
        # Send one chunk ahead. More transfers at once would share the link and delay the first.
        # The backward pass starts a transfer where forward waits, so the place of each wait matters
        # for both directions.
        coming = [send(0) for send in senders]
        if meanwhile is not None:
            meanwhile()
        going: list[AllToAll] = []
        returned: list[list[Tensor]] = []
        for c, num_rows in enumerate(rows_by_chunk):
            x, *row_values = chain.from_iterable(transfer.wait_all() for transfer in coming)
            if c + 1 < self.num_chunks:
                coming = [send(c + 1) for send in senders]
            in_slots, by_copy = _slots(num_rows, num_copies[:, c], x, row_values)
            y, slot_values = compute(c, in_slots)
            if x.requires_grad:
                # The experts may not use x; the ranks that sent it wait for its gradient.
                y = with_backward_of(y, x)
            back: list[Tensor] = []
            if by_copy is not None:
                back = [value.index_select(0, by_copy.inverse) for value in slot_values]
            if torch.is_grad_enabled():
                for value in (y, *back):  # for frozen experts too: all ranks run backward together
                    if value.is_floating_point():
                        value.requires_grad_()
            if going:
                returned.append([*chain.from_iterable(transfer.wait_all() for transfer in going)])
            going = [AllToAll([y], self.ranks, counts.copies_in[c], counts.copies_out[c])]
            if back:
                going += [AllToAll(back, self.ranks, counts.rows_in[c], counts.rows_out[c])]
        returned.append([*chain.from_iterable(transfer.wait_all() for transfer in going)])
        return (
            returned[0] if self.num_chunks == 1 else [*map(torch.cat, zip(*returned, strict=True))]
        )

    def destination(self, expert_index: Tensor, token_offsets: Tensor | None) -> Tensor:
        """Returns the destination [R] of each slot: chunk · ranks + rank. See `Routing`."""
        number = self._number(expert_index, token_offsets)
        return self._order_on(number.device).destination_of(number)

    def _order_on(self, device: torch.device) -> _Order:
        if device not in self._order:
            self._order[device] = _Order(*(value.to(device) for value in self._order[_HOST]))
        return self._order[device]

    def _number(self, expert_index: Tensor, token_offsets: Tensor | None) -> Tensor:
        """Returns the number of each slot's expert in the token's chunk; see `_Order`."""
        if self.num_chunks == 1 or self.chunks_of == "experts":
            return expert_index
        num_tokens = len(expert_index) if token_offsets is None else len(token_offsets) - 1
        token = ops.token_index(expert_index, token_offsets).view_as(expert_index)
        chunk = token * self.num_chunks // max(num_tokens, 1)
        return expert_index + chunk * self.placement.num_experts

    def _copies(
        self,
        by_row: bool,
        number: Tensor,
        token_offsets: Tensor | None,
        plan: ops.DispatchPlan,
        order: _Order,
    ) -> _Copies:
        if by_row:
            return _Copies(plan.inverse, plan.offsets[order.bounds].diff())
        token = ops.token_index(number, token_offsets)
        destination = order.destination_of(number)
        # A stable counting sort: the slots of a copy follow each other. No size depends on values,
        # so the host needs no synchronization with the device.
        num_destinations = len(order.bounds) - 1
        by_destination = ops.dispatch_plan(destination, num_destinations)
        pair = (token * num_destinations + destination)[by_destination.permutation]
        starts = torch.ones_like(pair, dtype=torch.bool)
        torch.ne(pair[1:], pair[:-1], out=starts[1:])
        copies_before = offsets_of(starts)
        position = copies_before[1:][by_destination.inverse] - 1
        first_copies = copies_before[by_destination.offsets]
        place = position - first_copies[destination]
        return _Copies(
            position,
            first_copies.diff(),
            starts[by_destination.inverse],
            place[plan.permutation].to(torch.int32),
        )


def _slots(
    counts: Tensor, num_copies: Tensor, x: Tensor, rows: list[Tensor]
) -> tuple[Received, ops.DispatchPlan | None]:
    """Orders received rows by copy; returns the slots and the plan that sorts rows into slots.

    Args:
        counts: [ranks, experts], the number of received rows from each rank for each expert.
        num_copies: [ranks], the number of received copies from each rank.
        x: [N, D], the received copies.
        rows: the copy of each row, counted from the first of its rank, the gates [S, 1] of the rows
            and more values of them. Empty if each row has its own copy; then the gates stay on the
            token's rank and the plan is None.
    """
    if not rows:
        index = columns_of(counts, len(x))[:, None]
        gates = torch.ones_like(index, dtype=torch.float32)
        return Received(x, index, gates, None, (), num_copies), None
    copy, *values = rows
    copy = copy.long()
    index = columns_of(counts, len(copy))
    first, num_slots = num_copies.cumsum(0) - num_copies, counts.sum(1)
    copy = copy + first.repeat_interleave(num_slots, output_size=len(copy))
    by_copy = ops.dispatch_plan(copy, len(x))
    gates, *values = (ops.dispatch(value, by_copy.inverse[:, None]) for value in values)
    index = index[by_copy.permutation]
    return Received(x, index, gates[:, 0], by_copy.offsets, values, num_slots), by_copy
