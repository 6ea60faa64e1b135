"""The ranks that train together, and the differentiable collectives between them."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

__all__ = ["AllToAll", "Ranks", "blocks"]


class Ranks:
    """The ranks of a group, or this one alone: then nothing is communicated.

    The gradient of everything that crosses between them is that of the sum of the losses of all
    ranks. Each collective has to be entered by all of them, in the same order; so has its
    backward pass.

    Args:
        group: None is this rank alone.

    Attributes:
        group: as given.
        size, rank: of the group; 1 and 0 without one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ranks":
        return self  # a copy of a module trains with the same ranks

    def sum(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Each of some tensors summed over the ranks, in one collective.

        Args:
            values: of one type, and of the same shapes on every rank.
        """
        if self.size == 1 or not values:
            return values
        total = _Sum.apply(torch.cat([value.reshape(-1) for value in values]), self)
        parts = total.split([value.numel() for value in values])
        # No views: wrappers such as FSDP2 warn of those in a module's outputs.
        return tuple(p.view_as(value).clone() for p, value in zip(parts, values, strict=True))

    def gather(self, values: Tensor) -> Tensor:
        """The values of every rank, [size, ...]; no gradient."""
        if self.size == 1:
            return values.unsqueeze(0)
        gathered = values.new_empty(self.size * values.numel())
        dist.all_gather_into_tensor(gathered, values.flatten(), group=self.group)
        return gathered.view(self.size, *values.shape)

    def gather_objects(self, value: Any) -> list[Any]:
        """What each rank has, by rank; anything that can be pickled."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values


def blocks(whole: range, number: int) -> list[range]:
    """Divides a range into contiguous blocks; the first are longer by one if it does not divide."""
    share, rest = divmod(len(whole), number)
    bounds = [whole.start + i * share + min(i, rest) for i in range(number + 1)]
    return [range(first, last) for first, last in pairwise(bounds)]


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
    """A differentiable, asynchronous all-to-all of rows.

    The transfer starts in the constructor. `wait` returns the received rows; work can be done in
    between. The gradients go the other way and overlap likewise: the backward pass starts them
    where the forward pass waited, and waits where that began.

    Args:
        rows: [sum(num_sent), ...], those for the first rank, for the second, …
        ranks: between which.
        num_sent, num_received: the number of rows to and from each rank.
    """

    def __init__(
        self,
        rows: Tensor,
        ranks: Ranks,
        num_sent: Sequence[int],
        num_received: Sequence[int],
    ) -> None:
        self._group = ranks.group
        self._num_sent = list(num_sent)
        self._num_received = list(num_received)
        # Has no elements: it ties the two ends together in the graph.
        self._token: Tensor | None = _Start.apply(rows, self)

    def wait(self) -> Tensor:
        """What arrived, [sum(num_received), ...], by rank; to be called once."""
        token, self._token = self._token, None  # or the graph would hold itself
        return _Wait.apply(token, self)

    def start(self, rows: Tensor, back: bool = False) -> None:
        sent, received = self._num_sent, self._num_received
        if back:
            sent, received = received, sent
        rows = rows.contiguous()  # kept until it has been sent
        buffer = rows.new_empty(sum(received), *rows.shape[1:])
        work = dist.all_to_all_single(
            buffer, rows, received, sent, group=self._group, async_op=True
        )
        assert work is not None  # this rank is in the group
        self._under_way = buffer, rows, work

    def finish(self) -> Tensor:
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
