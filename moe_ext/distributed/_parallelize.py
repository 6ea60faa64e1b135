"""The model around the experts: replicas that average their gradients (Sec. 3.1)."""

from itertools import chain
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from moe_ext.checks import require
from moe_ext.distributed._parameters import expert_parameters, expert_tensors
from moe_ext.distributed.ranks import Ranks
from moe_ext.distributed.sharding import Layout
from moe_ext.optim import split_parameters

__all__ = ["parallelize"]

_Dense = Literal["ddp", "fsdp"]


def parallelize(
    model: nn.Module,
    process_group: ProcessGroup | DeviceMesh | None,
    *,
    dense: _Dense = "ddp",
    find_unused_parameters: bool = False,
) -> nn.Module:
    """Makes `model` one of the replicas that train together, each with its block of the experts.

    The gradients of the dense parameters are averaged over all ranks, beginning with rank 0's
    values; the experts' stay where they are, for they already have the rows of all. Where a layer's
    mesh has copies of its experts, their gradients are averaged over these.

    Args:
        model: its MoE layers each made with a process_group, or a mesh, of the same ranks.
        process_group: all ranks that train, or their mesh; None is this one alone.
        dense: "ddp", copies of the dense parameters (`DistributedDataParallel`), or "fsdp", shards
            of them too (`fully_shard`), but for the thresholds of strictly balanced gates.
        find_unused_parameters: see `DistributedDataParallel`: to be True where a dense parameter
            has no gradient in some step, such as W_noise in evaluation mode.

    Returns:
        For "ddp" the wrapped model, which is to be called instead of `model`; for "fsdp", or where
            there is one rank or nothing dense is trained, `model` itself.

    Raises:
        ValueError: `dense` is something else, or a parameter or buffer of experts that are one
            module has no row for each.
    """
    require(dense in get_args(_Dense), "parallelize: dense", "be ddp or fsdp", dense)
    world = Layout.of(process_group).world
    if world.size == 1:
        return model
    experts = expert_parameters(model)
    for entry in experts.values():
        if entry.layout.replicas.size > 1:
            _average(entry.param, entry.layout.replicas)
    if dense == "fsdp":
        mesh = process_group
        if not isinstance(mesh, DeviceMesh):
            kind = next(model.parameters()).device.type
            assert world.group is not None  # there are several
            mesh = DeviceMesh.from_group(world.group, kind)
        elif mesh.ndim == 2:
            mesh = mesh._flatten()
        # The forward pass that starts the thresholds writes to them: to the parameters themselves.
        thresholds = split_parameters(model).thresholds
        for param in thresholds:
            _average(param, world)
        whole = {*thresholds, *(entry.param for entry in experts.values())}
        _start_from_the_first(model, world)
        fully_shard(model, mesh=mesh, ignored_params=whole)
        return model
    of_experts = expert_tensors(model)
    if not any(p.requires_grad for n, p in model.named_parameters() if n not in of_experts):
        _start_from_the_first(model, world)
        return model
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(of_experts))
    return DistributedDataParallel(
        model, process_group=world.group, find_unused_parameters=find_unused_parameters
    )


def _start_from_the_first(model: nn.Module, ranks: Ranks) -> None:
    """All but the experts."""
    of_experts = expert_tensors(model)
    for name, value in chain(model.named_parameters(), model.named_buffers()):
        if name not in of_experts:
            dist.broadcast(value.detach(), group_src=0, group=ranks.group)


def _average(param: nn.Parameter, copies: Ranks) -> None:
    """From now on the gradient is the mean over the copies, which start from the first one's."""
    with torch.no_grad():
        dist.broadcast(param, group_src=0, group=copies.group)

    if not param.requires_grad:
        return

    def average(param: torch.Tensor) -> None:
        assert param.grad is not None
        dist.all_reduce(param.grad, group=copies.group)
        param.grad /= copies.size

    param.register_post_accumulate_grad_hook(average)
