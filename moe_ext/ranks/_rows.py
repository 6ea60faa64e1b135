"""Finds the experts of rows that were received from several ranks, and changes gradients."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def columns_of(counts: Tensor, total: int) -> Tensor:
    """Returns the column c of each item, [total], for counts[r, c] items in row-major order.

    Args:
        counts: [rows, columns] int64.
        total: the sum of counts, which the caller knows. Reading counts would synchronize.
    """
    column = torch.arange(counts.shape[1], device=counts.device).repeat(len(counts))
    return column.repeat_interleave(counts.flatten(), output_size=total)


def scale_grad(x: Tensor, factor: float) -> Tensor:
    """Returns x and multiplies its gradient by `factor` in the backward pass."""
    if factor == 1:
        return x
    y: Tensor = _ScaleGrad.apply(x, factor)
    return y


class _ScaleGrad(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def with_backward_of(y: Tensor, x: Tensor) -> Tensor:
    """Returns y; its backward pass also runs the backward pass of x.

    If y was not computed from x, x gets the gradient 0.
    """
    same: Tensor = _WithBackwardOf.apply(y, x)
    return same


class _WithBackwardOf(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
