"""Rows that came from several ranks, and the scale of their gradients."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def columns_of(counts: Tensor, total: int) -> Tensor:
    """The column of each of counts[r, c] items that lie one after the other, row by row; [total].

    Args:
        counts: [rows, columns] int64.
        total: their sum, which so need not be read from the device.
    """
    column = torch.arange(counts.shape[1], device=counts.device).repeat(len(counts))
    return column.repeat_interleave(counts.flatten(), output_size=total)


def scale_grad(x: Tensor, factor: float) -> Tensor:
    """x, with a gradient that is multiplied by `factor`."""
    return _ScaleGrad.apply(x, factor)


class _ScaleGrad(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None
