"""Sends several values of each row in one all-to-all."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from moe_ext.ranks.collectives import AllToAll, Ranks


class PackedAllToAll:
    """Runs one differentiable, asynchronous all-to-all of several values of each row.

    Values of different dtypes are sent as their bytes. The backward pass sends the gradients of the
    values that require them, also in one all-to-all.

    Args:
        values: [sum(num_sent), ...] each, sorted by destination rank.
        ranks, num_sent, num_received: see `AllToAll`.
    """

    def __init__(
        self,
        values: Sequence[Tensor],
        ranks: Ranks,
        num_sent: Sequence[int],
        num_received: Sequence[int],
    ) -> None:
        self._single = len(values) == 1
        self._values = [(value.dtype, value.shape[1:]) for value in values]
        grads = torch.is_grad_enabled()
        self.with_gradient: list[int] = [
            n for n, value in enumerate(values) if grads and value.requires_grad
        ]
        if self._single:
            self._transfer = AllToAll(values[0], ranks, num_sent, num_received)
            return
        self._transfer = AllToAll.prepared(ranks, num_sent, num_received)
        # An empty tensor that connects start and wait in the autograd graph.
        self._token: Tensor | None = _PackedStart.apply(self, *values)

    def wait(self) -> tuple[Tensor, ...]:
        """Returns the received rows of each value, in rank order. Call it only once."""
        if self._single:
            return (self._transfer.wait(),)
        token, self._token = self._token, None  # avoids a reference cycle with the graph
        received: tuple[Tensor, ...] = _PackedWait.apply(token, self)
        return received

    def start(self, values: Sequence[Tensor], back: bool = False) -> None:
        """Starts to send values; back: gradients, from the ranks that received the values."""
        rows = values[0] if len(values) == 1 else torch.cat([*map(_bytes_of, values)], 1)
        self._transfer.start(rows, back)

    def finish(self, back: bool = False) -> list[Tensor]:
        """Waits for the end of the transfer and returns the received values, or gradients."""
        rows = self._transfer.finish()
        kinds = [self._values[n] for n in self.with_gradient] if back else self._values
        if len(kinds) == 1:
            return [rows]
        sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in kinds]
        return [
            part.clone(memory_format=torch.contiguous_format).view(dtype).view(len(rows), *shape)
            for part, (dtype, shape) in zip(rows.split(sizes, 1), kinds, strict=True)
        ]


def _bytes_of(value: Tensor) -> Tensor:
    """Returns the bytes [R, ...] of each row."""
    return value.reshape(len(value), math.prod(value.shape[1:])).contiguous().view(torch.uint8)


class _PackedStart(Function):
    @staticmethod
    def forward(ctx: Any, transfer: PackedAllToAll, *values: Tensor) -> Tensor:
        ctx.transfer, ctx.number = transfer, len(values)
        transfer.start(values)
        return next(v for v in values if v.is_floating_point()).new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads: list[Tensor | None] = [None] * ctx.number
        for n, value in zip(ctx.transfer.with_gradient, ctx.transfer.finish(True), strict=True):
            grads[n] = value
        return None, *grads


class _PackedWait(Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, transfer: PackedAllToAll) -> tuple[Tensor, ...]:
        ctx.transfer, ctx.dtype = transfer, token.dtype
        values = transfer.finish()
        without = (v for n, v in enumerate(values) if n not in transfer.with_gradient)
        ctx.mark_non_differentiable(*without)
        return tuple(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.transfer.start([grads[n] for n in ctx.transfer.with_gradient], back=True)
        return grads[0].new_empty(0, dtype=ctx.dtype), None
