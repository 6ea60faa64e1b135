"""The ranks of a process group, and the differentiable collectives between them."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from moe_ext.ranks._membership import require_group

__all__ = ["AllToAll", "Ranks", "block", "blocks"]


class Ranks:
    """Provides differentiable collectives between the ranks of a process group.

    Gradients through a collective are those of the sum of the ranks' losses. All ranks must call
    each collective in the same order, forward and backward; otherwise they deadlock. A single rank
    communicates nothing.

    Args:
        group: the process group; None: only this rank.

    Attributes:
        group: the constructor argument.
        size: the world size of the group; 1 without a group.
        rank: this rank within the group; 0 without a group.

    Raises:
        TypeError: group is not a process group.
        ValueError: group does not contain this rank.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        require_group("Ranks: group", group, (ProcessGroup,))
        self.group = group
        self.size: int = 1 if group is None else dist.get_world_size(group)
        self.rank: int = 0 if group is None else dist.get_rank(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ranks":
        return self  # a process group cannot be copied

    def sum(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Sums each tensor over the ranks, with one all-reduce for all of them.

        Args:
            values: tensors of one dtype, with the same shapes on every rank.
        """
        if self.size == 1 or not values:
            return values
        total = _Sum.apply(torch.cat([value.reshape(-1) for value in values]), self)
        parts = total.split([value.numel() for value in values])
        # Clone: wrappers such as FSDP2 warn about views in a module's outputs.
        return tuple(p.view_as(value).clone() for p, value in zip(parts, values, strict=True))

    def gather(self, values: Tensor) -> Tensor:
        """Gathers the values of every rank, [size, ...]. The result has no gradient."""
        if self.size == 1:
            return values.unsqueeze(0)
        gathered = values.new_empty(self.size * values.numel())
        dist.all_gather_into_tensor(gathered, values.flatten(), group=self.group)
        return gathered.view(self.size, *values.shape)

    def gather_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Concatenates the rows [counts[rank], ...] of every rank, in rank order.

        Args:
            rows: [counts[self.rank], ...], the rows of this rank.
            counts: the number of rows of each rank.
        """
        if self.size == 1:
            return rows
        # The sum over these copies in backward has the same order on every rank.
        copies = rows.expand(self.size, *rows.shape).flatten(0, 1)
        return AllToAll(copies, self, [len(rows)] * self.size, counts).wait()

    def gather_objects(self, value: Any) -> list[Any]:
        """Gathers the picklable value of each rank; returns all values in rank order."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values


def blocks(whole: range, number: int) -> list[range]:
    """Divides whole into number contiguous ranges; lengths differ by at most 1, longest first."""
    return [block(whole, number, index) for index in range(number)]


def block(whole: range, number: int, index: int) -> range:
    """Returns one of the ranges of `blocks`."""
    share, rest = divmod(len(whole), number)
    first, last = (whole.start + i * share + min(i, rest) for i in (index, index + 1))
    return range(first, last)


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        total = values.clone()
        dist.all_reduce(total, group=ranks.group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.ranks.group)
        return total, None


class AllToAll:
    """Runs a differentiable, asynchronous all-to-all of rows.

    The constructor starts the transfer and `wait` returns the received rows. Computation in between
    overlaps with the transfer. The backward pass sends the gradients back: it starts the transfer
    at the backward of `wait` and waits at the backward of the constructor.

    Args:
        rows: [sum(num_sent), ...], sorted by destination rank.
        ranks: the ranks that take part in the all-to-all.
        num_sent: number of rows to each rank.
        num_received: number of rows from each rank.
    """

    def __init__(
        self,
        rows: Tensor,
        ranks: Ranks,
        num_sent: Sequence[int],
        num_received: Sequence[int],
    ) -> None:
        self._prepare(ranks, num_sent, num_received)
        # An empty tensor that connects start and wait in the autograd graph.
        self._token: Tensor | None = _Start.apply(rows, self)

    @classmethod
    def prepared(
        cls, ranks: Ranks, num_sent: Sequence[int], num_received: Sequence[int]
    ) -> "AllToAll":
        """Returns a transfer without rows: `start` and `finish` send them, without a gradient."""
        transfer = cls.__new__(cls)
        transfer._prepare(ranks, num_sent, num_received)
        return transfer

    def _prepare(self, ranks: Ranks, num_sent: Sequence[int], num_received: Sequence[int]) -> None:
        self._group = ranks.group
        self._num_sent = list(num_sent)
        self._num_received = list(num_received)

    def wait(self) -> Tensor:
        """Returns the received rows [sum(num_received), ...] in rank order. Call it only once."""
        token, self._token = self._token, None  # avoids a reference cycle with the graph
        received: Tensor = _Wait.apply(token, self)
        return received

    def start(self, rows: Tensor, back: bool = False) -> None:
        """Starts to send rows; back: from the ranks that received them to the senders."""
        sent, received = self._num_sent, self._num_received
        if back:
            sent, received = received, sent
        rows = rows.contiguous()  # _under_way keeps it alive until the transfer ends
        buffer: Tensor = torch.ops.moe_ext._empty_rows(rows, sum(received))
        work = dist.all_to_all_single(
            buffer, rows, received, sent, group=self._group, async_op=True
        )
        assert work is not None  # this rank is in the group
        self._under_way = buffer, rows, work

    def finish(self) -> Tensor:
        """Waits for the end of the transfer and returns the received rows."""
        buffer, _, work = self._under_way
        del self._under_way
        work.wait()
        return buffer


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, transfer: AllToAll) -> Tensor:
        ctx.transfer = transfer
        transfer.start(rows)
        return rows.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.transfer.finish(), None


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, transfer: AllToAll) -> Tensor:
        ctx.transfer = transfer
        return transfer.finish()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.transfer.start(grad, back=True)
        return grad.new_empty(0), None
