"""Gradients that lie in several processes: their common norm, and their common overflow."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from moe_ext.distributed.parameters import expert_parameters


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales all gradients so that their common norm is at most `max_norm`; returns the norm.

    As `torch.nn.utils.clip_grad_norm_` of a single process with all experts: the norm is that of
    the dense gradients, once, and of the experts' in all processes. All of these call it together.

    Args:
        model: after the backward pass; with or without a wrapper of `parallelize`.
        max_norm: of the gradients, together.
        norm_type: p of the p-norm; may be infinity.
        error_if_nonfinite: raise where the norm is infinite or NaN, in all processes alike.

    Raises:
        RuntimeError: see error_if_nonfinite.
    """
    experts = {entry.param: entry.processes.group for entry in expert_parameters(model).values()}
    dense: list[Tensor] = []
    spread: dict[dist.ProcessGroup | None, list[Tensor]] = {g: [] for g in experts.values()}
    for param in model.parameters():
        if param.grad is not None:
            (spread[experts[param]] if param in experts else dense).append(param.grad)

    norm = get_total_norm(dense, norm_type)
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm]
    for group, grads in spread.items():  # also those of a process that has no gradient for it
        norm = get_total_norm(grads, norm_type).to(norms[0])
        if math.isinf(norm_type):
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=group)
        else:
            norm = norm.pow(norm_type)
            dist.all_reduce(norm, group=group)
            norm = norm.pow(1 / norm_type)
        norms.append(norm)
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"clip_grad_norm_: the norm of order {norm_type} must be finite, got {total.item()}"
        )
    clip_grads_with_norm_(experts, max_norm, total)
    clip_grads_with_norm_((p for p in model.parameters() if p not in experts), max_norm, total)
    return total


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for processes that step together: one finds inf or NaN, all skip.

    Args:
        processes: a process group, None is the default one.
        options: those of torch's.
    """

    def __init__(self, *options: Any, process_group: dist.ProcessGroup | None = None, **more: Any):
        super().__init__(*options, **more)
        self._process_group = process_group

    def _unscale_grads_(self, *arguments: Any) -> dict[torch.device, Tensor]:
        found = super()._unscale_grads_(*arguments)
        for found_inf in found.values():
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=self._process_group)
        return found
