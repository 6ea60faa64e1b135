"""The ranks of a process group, and the differentiable collectives between them."""

import math
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

    The constructor starts the transfer; `wait` or `wait_all` returns the received rows. Computation
    in between overlaps with the transfer. The backward pass sends the gradients back: it starts the
    transfer at the backward of `wait` and waits at the backward of the constructor.

    Several values of each row are sent together, as their bytes if they have different dtypes. So
    are the gradients of the values that require them.

    Args:
        rows: [sum(num_sent), ...], sorted by destination rank; or several such tensors.
        ranks: the ranks that take part in the all-to-all.
        num_sent: number of rows to each rank.
        num_received: number of rows from each rank.
    """

    def __init__(
        self,
        rows: Tensor | Sequence[Tensor],
        ranks: Ranks,
        num_sent: Sequence[int],
        num_received: Sequence[int],
    ) -> None:
        values = [rows] if isinstance(rows, Tensor) else rows
        self._group = ranks.group
        self._num_sent = list(num_sent)
        self._num_received = list(num_received)
        self._kinds = [(value.dtype, value.shape[1:]) for value in values]
        grads = torch.is_grad_enabled()
        self._with_grad: list[int] = [
            n for n, value in enumerate(values) if grads and value.requires_grad
        ]
        # An empty tensor that connects start and wait in the autograd graph.
        self._token: Tensor | None = _Start.apply(self, *values)

    def wait(self) -> Tensor:
        """Returns the received rows [sum(num_received), ...] in rank order. Call it only once."""
        (rows,) = self.wait_all()
        return rows

    def wait_all(self) -> tuple[Tensor, ...]:
        """Returns the received rows of each tensor that was sent; see `wait`."""
        token, self._token = self._token, None  # avoids a reference cycle with the graph
        received: tuple[Tensor, ...] = _Wait.apply(self, token)
        return received

    def start(self, values: Sequence[Tensor], back: bool = False) -> None:
        """Starts to send values; back: gradients, from the ranks that received the values."""
        sent, received = self._num_sent, self._num_received
        if back:
            sent, received = received, sent
        rows = values[0] if len(values) == 1 else torch.cat([*map(_bytes_of, values)], 1)
        rows = rows.contiguous()  # _under_way keeps it alive until the transfer ends
        buffer: Tensor = torch.ops.moe_ext._empty_rows(rows, sum(received))
        work = dist.all_to_all_single(
            buffer, rows, received, sent, group=self._group, async_op=True
        )
        assert work is not None  # this rank is in the group
        self._under_way = buffer, rows, work

    def finish(self, back: bool = False) -> list[Tensor]:
        """Waits for the end of the transfer; returns the received values, or gradients."""
        rows, _, work = self._under_way
        del self._under_way
        work.wait()
        kinds = [self._kinds[n] for n in self._with_grad] if back else self._kinds
        if len(kinds) == 1:
            return [rows]
        sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in kinds]
        return [
            part.clone(memory_format=torch.contiguous_format).view(dtype).view(len(rows), *shape)
            for part, (dtype, shape) in zip(rows.split(sizes, 1), kinds, strict=True)
        ]


def _bytes_of(value: Tensor) -> Tensor:
    """Returns the bytes [R, ...] of each row."""
    rows = value.reshape(len(value), math.prod(value.shape[1:]))
    # Not `contiguous`: a column of an expanded gradient counts as contiguous, but has no bytes.
    return rows.clone(memory_format=torch.contiguous_format).view(torch.uint8)


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, transfer: AllToAll, *values: Tensor) -> Tensor:
        ctx.transfer, ctx.number = transfer, len(values)
        transfer.start(values)
        return values[next(iter(transfer._with_grad), 0)].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        received = dict(zip(ctx.transfer._with_grad, ctx.transfer.finish(back=True), strict=True))
        return None, *(received.get(n) for n in range(ctx.number))


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, transfer: AllToAll, token: Tensor) -> tuple[Tensor, ...]:
        ctx.transfer = transfer
        values = transfer.finish()
        without = (v for n, v in enumerate(values) if n not in transfer._with_grad)
        ctx.mark_non_differentiable(*without)
        return tuple(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        sent = [grads[n] for n in ctx.transfer._with_grad]
        ctx.transfer.start(sent, back=True)
        return None, sent[0].new_empty(0)
