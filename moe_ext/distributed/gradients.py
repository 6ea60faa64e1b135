"""Gradient clipping and loss scaling for gradients that are sharded over ranks."""

import math
from collections import defaultdict
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from moe_ext.checks import require
from moe_ext.distributed._parameters import expert_parameters, spread_layers
from moe_ext.ops import accumulation_dtype
from moe_ext.ranks._membership import require_group
from moe_ext.ranks.layout import Layout

__all__ = ["GradScaler", "clip_grad_norm_"]

_ProcessGroups = tuple[ProcessGroup | None, ...]


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    stages: ProcessGroup | None = None,
) -> Tensor:
    """Clips as torch's function of this name, but takes a model and covers all of its ranks.

    Scales all gradients to a total norm of at most `max_norm` and returns the norm before scaling.
    Equals `torch.nn.utils.clip_grad_norm_` in a single process with all experts. The total norm
    covers the dense gradients once and the expert gradients of all ranks. All ranks must call this
    function together.

    Args:
        model: the model after backward, with or without the wrapper of `parallelize`.
        max_norm: the maximum total norm.
        norm_type: p of the p-norm, above 0; may be infinity.
        error_if_nonfinite: whether all ranks raise if the norm is infinite or NaN.
        stages: the ranks of a pipeline, one of each stage; model is then the stage of this rank.
            None: model is whole.

    Raises:
        TypeError: model is not a ``torch.nn.Module``, or stages is not a process group.
        ValueError: max_norm is negative or not a number, or norm_type is not above 0.
        RuntimeError: error_if_nonfinite is set and the norm is infinite or NaN.
    """
    if not isinstance(model, nn.Module):
        rule = "be an nn.Module (not its parameters, as for torch's function)"
        raise TypeError(f"clip_grad_norm_: model must {rule}, got {type(model).__name__}")
    holds = isinstance(max_norm, Real) and max_norm >= 0
    require(holds, "clip_grad_norm_: max_norm", "be a number, at least 0", max_norm)
    try:
        order = float(norm_type)  # accepts "inf"
    except (TypeError, ValueError):
        order = math.nan
    require(order > 0, "clip_grad_norm_: norm_type", "be a number above 0", norm_type)
    norm_type = order
    require_group("clip_grad_norm_: stages", stages, (ProcessGroup,))
    experts = {e.param: e.layout.expert_parallel.group for e in expert_parameters(model).values()}
    by_kind = defaultdict[tuple[DeviceMesh | None, _ProcessGroups], list[nn.Parameter]](list)
    for _, sharding in spread_layers(model):  # the experts of this rank may have no parameters
        by_kind[None, (sharding.layout.expert_parallel.group,)] = []
    for param in model.parameters():
        mesh = param.device_mesh if isinstance(param, DTensor) else None
        by_kind[mesh, _groups_of_shards(param, experts)].append(param)
    first = next(model.parameters(), None)
    device = _device_of(stages) if first is None else first.device
    norms = [torch.zeros((), dtype=torch.float64, device=device)]
    for (_, groups), params in by_kind.items():
        norm = _norm(params, norm_type).to(device)
        for group in groups:
            norm = _norm_of_ranks(norm, norm_type, group)
        norms.append(norm)
    total = get_total_norm(norms, norm_type)
    if stages is not None:
        total = _norm_of_ranks(total, norm_type, stages)
    total = total.to(torch.float32 if first is None else accumulation_dtype(first))
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"clip_grad_norm_: the gradient norm of order {norm_type} must be finite, "
            f"got {total.item()}"
        )
    for params in by_kind.values():  # torch does not scale tensors of several meshes together
        clip_grads_with_norm_(params, max_norm, total)
    return total


def _device_of(group: ProcessGroup | None) -> torch.device:
    """Returns the device of tensors that a group sums: the accelerator, if it can."""
    device = torch.accelerator.current_accelerator(check_available=True)
    types = [] if group is None else [device.type for device in group._device_types]
    return torch.device("cpu") if device is None or device.type not in types else device


def _groups_of_shards(
    param: nn.Parameter, experts: Mapping[nn.Parameter, ProcessGroup | None]
) -> _ProcessGroups:
    """Returns the groups whose ranks each have a part of a parameter: none if it is whole."""
    if isinstance(param, DTensor):
        sharded = [dim for dim, p in enumerate(param.placements) if not p.is_replicate()]
        return tuple(param.device_mesh.get_group(dim) for dim in sharded)
    return (experts[param],) if param in experts else ()


def _norm(params: list[nn.Parameter], norm_type: float) -> Tensor:
    """Returns the norm of order norm_type of the parts of gradients that this rank has."""
    grads = [param.grad for param in params if param.grad is not None]
    parts = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    # The maximum norm fails for a tensor without elements.
    norm = get_total_norm([part for part in parts if part.numel()], norm_type)
    # norm ** p would overflow in half precision. The dtype must agree on all ranks.
    return norm.double()


def _norm_of_ranks(norm: Tensor, norm_type: float, group: ProcessGroup | None) -> Tensor:
    """Returns the norm of order norm_type of the norms of all ranks."""
    if math.isinf(norm_type):
        dist.all_reduce(norm, dist.ReduceOp.MAX, group=group)
        return norm
    norm = norm.pow(norm_type)
    dist.all_reduce(norm, group=group)
    return norm.pow(1 / norm_type)


class GradScaler(torch.amp.GradScaler):
    """Scales losses as `torch.amp.GradScaler` does, for gradients that are sharded over ranks.

    All ranks skip a step if the gradients of one rank overflow.

    Args:
        device: see `torch.amp.GradScaler`.
        process_group: all ranks that train, or their mesh; None: only this rank.
        options: the other keyword arguments of `torch.amp.GradScaler`.
    """

    def __init__(
        self,
        device: str = "cuda",
        *,
        process_group: ProcessGroup | DeviceMesh | None,
        **options: Any,
    ) -> None:
        super().__init__(device, **options)
        self._ranks = Layout.of(process_group, "GradScaler").world

    def _unscale_grads_(self, *arguments: Any) -> dict[torch.device, Tensor]:
        flags = super()._unscale_grads_(*arguments)
        if self._ranks.size > 1:
            if not flags:  # no parameter of this rank has a gradient; the other ranks wait for it
                device = torch.empty(0, device=self._device).device
                flags[device] = torch.zeros((), device=device)
            flag = torch.stack([one.to(next(iter(flags))) for one in flags.values()]).amax(0)
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._ranks.group)
            for found_inf in flags.values():
                found_inf.copy_(flag)
        return flags
