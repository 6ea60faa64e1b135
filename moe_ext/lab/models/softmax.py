"""Softmax over the vocabulary in blocks of rows, without ever storing all [T, V] logits.

With 10,000 classes, the softmax dominates the cost of a small language model. On the CPU each block
of logits fits the cache. The forward pass computes the gradient of a block while its logits are in
the cache, so no logit is computed twice.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_ext.checks import require, require_shape
from moe_ext.ops import accumulation_dtype


def linear_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """Computes the sum over t of -ln softmax(hidden_t weight^T + bias)[targets_t].

    Under autocast, the GEMMs use the autocast dtype; all other operations use float32.

    Args:
        hidden: [T, D].
        weight: [V, D].
        bias: [V].
        targets: [T] int64, in [0, V).

    Returns:
        Scalar, nats; float64 if hidden is float64, otherwise float32.

    Raises:
        ValueError: the shapes are inconsistent, or a target on the CPU is outside [0, V).
    """
    check_arguments("linear_cross_entropy", hidden, weight, bias, targets)
    learns = hidden.requires_grad or weight.requires_grad or bias.requires_grad
    if not (learns and torch.is_grad_enabled()):
        return _nll(hidden, weight, bias, targets).sum()
    return _LinearCrossEntropy.apply(hidden, weight, bias, targets)


def linear_nll(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """Computes -ln softmax(hidden_t weight^T + bias)[targets_t]: [T], nats, without gradient."""
    check_arguments("linear_nll", hidden, weight, bias, targets)
    return _nll(hidden, weight, bias, targets)


@torch.no_grad()
def _nll(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    nll = hidden.new_empty(len(targets), dtype=accumulation_dtype(hidden))
    weight, dtype = to_product_dtype(weight, hidden)
    for rows in row_blocks(len(targets), weight):
        logits = logits_of(hidden[rows].to(dtype), weight, bias)
        nll[rows] = logits.logsumexp(1) - logits.gather(1, targets[rows, None]).squeeze(1)
    return nll


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
        full = accumulation_dtype(hidden)
        total = torch.zeros((), dtype=full, device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=full)
        grad_bias = torch.zeros_like(bias, dtype=full)
        cast_weight, dtype = to_product_dtype(weight, hidden)
        for rows in row_blocks(len(targets), weight):
            h = hidden[rows].to(dtype)
            target = targets[rows, None]
            logits = logits_of(h, cast_weight, bias)
            target_logit = logits.gather(1, target)
            largest = logits.amax(1, keepdim=True)
            grad = logits.sub_(largest).exp_()
            z = grad.sum(1, keepdim=True)
            total += (largest + z.log() - target_logit).sum()
            # d nll / d logits = softmax(logits) - onehot(target)
            grad.mul_(1 / z)
            grad.scatter_add_(1, target, grad.new_full(target.shape, -1.0))
            grad_bias += grad.sum(0)
            grad = grad.to(dtype)
            with torch.autocast(hidden.device.type, enabled=False):
                grad_hidden[rows] = grad @ cast_weight
                if dtype == full:
                    grad_weight.addmm_(grad.t(), h)
                else:
                    grad_weight += grad.t() @ h
        # The gradients of a sum can overflow a half type. Backward first scales them, then casts.
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = hidden.dtype, weight.dtype, bias.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grads = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *((grad_output * grad).to(dtype) for grad, dtype in grads), None


def check_arguments(
    name: str, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor
) -> None:
    """Raises ValueError if the shapes are inconsistent or a target on the CPU is outside [0, V).

    GPU kernels check targets on a GPU.
    """
    require(weight.dim() == 2, f"{name}: weight", "have shape [V, D]", tuple(weight.shape))
    num_classes, width = weight.shape
    require_shape(name, (num_classes,), bias=bias)
    rows = tuple(hidden.shape[:1])
    require_shape(name, (*rows, width), hidden=hidden)
    require_shape(name, rows, targets=targets)
    if targets.device.type == "cpu" and len(targets) and not torch.compiler.is_compiling():
        least, most = (int(value) for value in targets.aminmax())
        holds = least >= 0 and most < num_classes
        require(holds, f"{name}: targets", f"be in [0, {num_classes})", (least, most))


def to_product_dtype(weight: Tensor, hidden: Tensor) -> tuple[Tensor, torch.dtype]:
    """Casts weight to the dtype of its GEMM with hidden; returns the cast weight and the dtype."""
    device = hidden.device.type
    enabled = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if enabled else hidden.dtype
    return weight.to(dtype), dtype


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    full = accumulation_dtype(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        if hidden.dtype == full:
            return torch.addmm(bias.to(full), hidden, weight.t())
        return (hidden @ weight.t()).to(full).add_(bias)


def row_blocks(num_rows: int, weight: Tensor) -> Iterator[slice]:
    """Yields slices of rows; the logits of a slice fit the cache of a CPU or fill a GPU.

    All slices but the last have at least 128 rows. With fewer rows, the time to read the weights
    would dominate.
    """
    values = 2**20 if weight.device.type == "cpu" else 2**27
    size = max(128, values // len(weight))
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))
