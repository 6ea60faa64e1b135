"""Data parallelism for the dense part of a model with sharded experts (Sec. 3.1)."""

from functools import partial
from itertools import chain
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from moe_ext.checks import require, require_one_of
from moe_ext.distributed._gradient_averages import average_gradients, reduce_in
from moe_ext.distributed._parameters import (
    expert_parameters,
    expert_tensors,
    require_ranks,
    require_same_layers,
)
from moe_ext.optim import split_parameters
from moe_ext.ranks import Layout, Ranks
from moe_ext.ranks._groups import duplicate

__all__ = ["parallelize"]

_Dense = Literal["ddp", "fsdp"]


def parallelize(
    model: nn.Module,
    process_group: ProcessGroup | DeviceMesh | None,
    *,
    dense: _Dense = "ddp",
    find_unused_parameters: bool = False,
    reduce_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Makes a model train data-parallel while its experts stay sharded.

    Broadcasts the dense parameters from rank 0 and averages their gradients over all ranks. Expert
    gradients already include the rows of all ranks and are not communicated. If the mesh of a layer
    has replicas of the experts, the expert gradients are averaged over the replicas. Makes a
    process group for these all-reduces: all ranks must call this function together, those of all
    stages of a pipeline too.

    Args:
        model: the model of this rank. Each of its MoE layers must be made with a process_group or a
            mesh of the same ranks.
        process_group: all ranks that train, or their mesh; None: only this rank.
        dense: "ddp" replicates the dense parameters with ``DistributedDataParallel``. "fsdp" shards
            them with ``fully_shard``, except the thresholds of strictly balanced gates. The
            sharded parameters must have one dtype; a forward pass gathers all of them at once.
        find_unused_parameters: see `torch.nn.parallel.DistributedDataParallel`. Must be True if a
            dense parameter has no gradient in some step, such as W_noise in evaluation mode. "ddp"
            does not average the gradients of dense parameters that are frozen in this call.
        reduce_dtype: the dtype in which gradients are averaged over ranks, such as torch.float32
            for gradients in half precision; None: the dtype of the gradients.

    Returns:
        The wrapped model for "ddp"; call it instead of `model`. Returns `model` itself for "fsdp",
        for a single rank, and if no dense parameter is trained.

    Raises:
        ValueError: `dense` is unknown, or process_group does not have the ranks of a layer. Or
            ranks have layers with other options. Or a parameter or buffer of custom experts does
            not have one row for each expert.
    """
    require_one_of("parallelize: dense", get_args(_Dense), dense)
    if reduce_dtype is not None and not reduce_dtype.is_floating_point:
        rule = "must be a floating-point dtype or None"
        raise TypeError(f"parallelize: reduce_dtype {rule}, got {reduce_dtype!r}")
    world = Layout.of(process_group, "parallelize").world
    require_ranks("parallelize", model, world)
    if world.size == 1:
        return model
    require_same_layers("parallelize", model, world)
    # In one group, all-reduces of gradients and transfers of the experts would need the same order
    # on all ranks. Ranks that use different parameters have different orders.
    own = duplicate(world)
    experts = expert_parameters(model)
    copied = [
        (entry.param, entry.layout.replicas)
        for entry in experts.values()
        if entry.layout.replicas.size > 1
    ]
    if dense == "fsdp":
        mesh = process_group
        if not isinstance(mesh, DeviceMesh):
            kind = next(model.parameters()).device.type
            assert world.group is not None  # there are several ranks
            # The order of FSDP's collectives does not depend on the parameters that a rank uses.
            mesh = DeviceMesh.from_group(world.group, kind)
        elif mesh.ndim == 2:
            mesh = mesh._flatten()
        # The first forward pass writes the thresholds in place, which FSDP would lose.
        sharded = {entry.param for entry in experts.values()}
        thresholds = [p for p in split_parameters(model).thresholds if p not in sharded]
        copied += [(param, own) for param in thresholds]
        whole = {*thresholds, *sharded}
        dense_params = [p for p in model.parameters() if p not in whole and p.is_floating_point()]
        dtypes = sorted({str(p.dtype) for p in dense_params})
        rule = 'have dense parameters of one dtype with dense="fsdp"'
        require(len(dtypes) <= 1, "parallelize: model", rule, dtypes)
        _start_from_the_first(model, own)
        average_gradients(model, copied, reduce_dtype)
        fully_shard(
            model,
            mesh=mesh,
            ignored_params=whole,
            shard_placement_fn=partial(_shard, world.size),
            mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
        )
        return model
    expert_names = expert_tensors(model)
    if not any(p.requires_grad for n, p in model.named_parameters() if n not in expert_names):
        _start_from_the_first(model, own)
        average_gradients(model, copied, reduce_dtype)
        return model
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(expert_names))
    replica = DistributedDataParallel(
        model, process_group=own.group, find_unused_parameters=find_unused_parameters
    )
    if reduce_dtype is not None:
        replica.register_comm_hook(None, reduce_in(reduce_dtype, own))
    average_gradients(
        model, copied, reduce_dtype, is_due=lambda: replica.require_backward_grad_sync
    )
    return replica


def _shard(num_ranks: int, param: nn.Parameter) -> Shard | None:
    """Chooses the dimension that FSDP shards; None: the first.

    The matrices [1, D, F] of a shared expert are divided between the ranks by rows.
    """
    by_rows = param.dim() == 3 and len(param) == 1 and param.shape[1] % num_ranks == 0
    return Shard(1) if by_rows else None


def _start_from_the_first(model: nn.Module, ranks: Ranks) -> None:
    """Broadcasts the model from rank 0 of ranks, except parameters and buffers of the experts."""
    expert_names = expert_tensors(model)
    for name, value in chain(model.named_parameters(), model.named_buffers()):
        if name not in expert_names:
            dist.broadcast(value.detach(), group_src=0, group=ranks.group)
