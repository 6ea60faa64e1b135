"""The arguments and the logits of a softmax."""

import torch
from torch import Tensor

from moe_ext.checks import require, require_shape
from moe_ext.ops import accumulation_dtype


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
    """Computes hidden weightᵀ + bias in at least float32."""
    full = accumulation_dtype(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        if hidden.dtype == full:
            return torch.addmm(bias.to(full), hidden, weight.t())
        return (hidden @ weight.t()).to(full).add_(bias)
