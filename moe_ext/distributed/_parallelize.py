"""Data parallelism for the dense part of a model with sharded experts (Sec. 3.1)."""

from collections.abc import Collection, Iterable
from itertools import chain
from typing import Literal, get_args
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from moe_ext.checks import require, require_one_of
from moe_ext.distributed._blocks import parameters_over_replicas, require_blocks, shard_blocks
from moe_ext.distributed._dtensors import distribute_experts, local_part, require_distributable
from moe_ext.distributed._gradient_averages import average_gradients, reduce_in
from moe_ext.distributed._parameters import (
    expert_parameters,
    expert_tensors,
    require_ranks,
    require_same_layers,
    spread_layers,
)
from moe_ext.optim import split_parameters
from moe_ext.ranks._process_groups import duplicate
from moe_ext.ranks.collectives import Ranks
from moe_ext.ranks.layout import Layout

__all__ = ["parallelize"]

_Dense = Literal["ddp", "fsdp"]


def parallelize(
    model: nn.Module,
    process_group: ProcessGroup | DeviceMesh | None,
    *,
    dense: _Dense = "ddp",
    blocks: Iterable[nn.Module] = (),
    find_unused_parameters: bool = False,
    reduce_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Makes a model train data-parallel while its experts stay sharded.

    Broadcasts the dense parameters from rank 0 and averages their gradients over all ranks. Expert
    gradients already include the rows of all ranks and are not communicated. If the mesh of a layer
    has replicas of the experts, the expert gradients are averaged over the replicas. Makes a
    process group for these all-reduces: all ranks must call this function together, those of all
    stages of a pipeline too.

    Copies of a buffer are made equal in this call. Later, only "ddp" makes those of dense buffers
    equal, before each forward pass. Copies of other buffers, such as the ``running_mean`` of
    experts that are modules, follow the data of their rank.

    Args:
        model: the model of this rank. Each of its MoE layers must be made with a process_group or a
            mesh of the same ranks.
        process_group: all ranks that train, or their mesh; None: only this rank.
        dense: "ddp" replicates the dense parameters with ``DistributedDataParallel``. "fsdp" shards
            them with ``fully_shard``, except the thresholds of strictly balanced gates. Experts
            that are DTensors (`distribute_experts`) are sharded over their replicas.
        blocks: modules of the model, such as ``model.layers``, whose parameters "fsdp" gathers
            together: at most one block is whole at a time. Experts become DTensors, which are
            sharded over their replicas. The model may be on the meta device: call ``to_empty``
            afterwards, then load a checkpoint. The dense parameters of a block must have one dtype,
            and so must those outside the blocks. (): a forward pass gathers all dense parameters.
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
            not have one row for each expert. Or the model is on the meta device and has parameters
            that ranks average, such as thresholds. Or blocks do not fit the model.
    """
    require_one_of("parallelize: dense", get_args(_Dense), dense)
    if reduce_dtype is not None and not reduce_dtype.is_floating_point:
        rule = "must be a floating-point dtype or None"
        raise TypeError(f"parallelize: reduce_dtype {rule}, got {reduce_dtype!r}")
    blocks = list(blocks)
    rule = 'be left out with dense="ddp"'
    require(dense == "fsdp" or not blocks, "parallelize: blocks", rule, f"{len(blocks)} modules")
    world = Layout.of(process_group, "parallelize").world
    require_ranks("parallelize", model, world)
    if world.size == 1:
        return model
    require_same_layers("parallelize", model, world)
    _require_parts(model, dense, blocks)
    # In one group, all-reduces of gradients and transfers of the experts would need the same order
    # on all ranks. Ranks that use different parameters have different orders.
    own = duplicate(world)
    if blocks:
        distribute_experts(model, process_group)
    copied = [
        (entry.param, entry.layout.replicas)
        for entry in expert_parameters(model).values()
        if entry.layout.replicas.size > 1
    ]
    for layer, sharding in spread_layers(model):
        replicas = sharding.layout.replicas
        for buffer in layer.experts.buffers() if replicas.size > 1 else ():
            if not buffer.is_meta:
                dist.broadcast(local_part(buffer.detach()), group_src=0, group=replicas.group)
    if dense == "fsdp":
        # The first forward pass writes the thresholds in place, which FSDP would lose.
        sharded = {entry.param for entry in expert_parameters(model).values()}
        thresholds = [p for p in split_parameters(model).thresholds if p not in sharded]
        copied += [(param, own) for param in thresholds]
        _start_from_the_first(model, own)
        by_fsdp = parameters_over_replicas(model, blocks)
        for param, copies in copied:
            if param in by_fsdp and not param.is_meta:
                dist.broadcast(local_part(param.detach()), group_src=0, group=copies.group)
        averaged = [(param, copies) for param, copies in copied if param not in by_fsdp]
        average_gradients(model, averaged, reduce_dtype)
        shard_blocks(model, blocks, process_group, {*thresholds, *sharded}, reduce_dtype)
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
    # The hooks of a parameter must not hold the replica, which holds the parameter where no search
    # for cycles looks: neither would ever be freed.
    weak = ref(replica)

    def is_due() -> bool:
        alive = weak()
        return alive is None or alive.require_backward_grad_sync

    average_gradients(model, copied, reduce_dtype, is_due)
    return replica


def _require_parts(model: nn.Module, dense: _Dense, blocks: Collection[nn.Module]) -> None:
    """Raises ValueError if a part of the model does not fit; changes nothing."""
    if blocks:
        require_distributable(model)
    entries = expert_parameters(model).values()
    sharded = {entry.param for entry in entries}
    copied = [param for param in split_parameters(model).thresholds if param not in sharded]
    divided = set[nn.Parameter]()
    if dense == "fsdp":
        require_blocks(model, blocks, {*copied, *sharded})
        divided = parameters_over_replicas(model, blocks)
    copied += [entry.param for entry in entries if entry.layout.replicas.size > 1]
    for param in copied:
        rule = "not be on the meta device if ranks average copies of it"
        holds = param in divided or not param.is_meta
        require(holds, "parallelize: a parameter", rule, tuple(param.shape))


def _start_from_the_first(model: nn.Module, ranks: Ranks) -> None:
    """Broadcasts the model from rank 0 of ranks, except parameters and buffers of the experts."""
    expert_names = expert_tensors(model)
    for name, value in chain(model.named_parameters(), model.named_buffers()):
        if name not in expert_names and not value.is_meta:
            dist.broadcast(value.detach(), group_src=0, group=ranks.group)
