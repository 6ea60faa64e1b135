"""Data parallelism for the dense part of a model with sharded experts (Sec. 3.1)."""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from moe_ext.checks import require, require_one_of
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

    Returns:
        The wrapped model for "ddp"; call it instead of `model`. Returns `model` itself for "fsdp",
        for a single rank, and if no dense parameter is trained.

    Raises:
        ValueError: `dense` is unknown, or process_group does not have the ranks of a layer. Or
            ranks have layers with other options. Or a parameter or buffer of custom experts does
            not have one row for each expert.
    """
    require_one_of("parallelize: dense", get_args(_Dense), dense)
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
        _average_gradients(model, copied)
        fully_shard(
            model, mesh=mesh, ignored_params=whole, shard_placement_fn=partial(_shard, world.size)
        )
        return model
    _average_gradients(model, copied)
    expert_names = expert_tensors(model)
    if not any(p.requires_grad for n, p in model.named_parameters() if n not in expert_names):
        _start_from_the_first(model, own)
        return model
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(expert_names))
    return DistributedDataParallel(
        model, process_group=own.group, find_unused_parameters=find_unused_parameters
    )


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


def _average_gradients(model: nn.Module, copied: Sequence[tuple[nn.Parameter, Ranks]]) -> None:
    """Keeps parameters equal to their copies on other ranks.

    Broadcasts each parameter from the first rank that has it. After every backward pass, averages
    its gradient over these ranks. A trained parameter that a rank has not used has the gradient 0.
    """
    for param, copies in copied:
        dist.broadcast(param.detach(), group_src=0, group=copies.group)
    due: set[int] = set()  # the running backward passes that will average

    def average(backward_pass: int) -> None:
        due.discard(backward_pass)
        # The order is the same on all ranks, which need not have used the same parameters.
        for param, copies in copied:
            if param.requires_grad:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                dist.all_reduce(param.grad, group=copies.group)
                param.grad /= copies.size

    def schedule(_: torch.Tensor) -> None:
        backward_pass = torch._C._current_graph_task_id()
        if backward_pass not in due:
            due.add(backward_pass)
            Variable._execution_engine.queue_callback(partial(average, backward_pass))

    # Any parameter schedules the average: a rank may have used none of its copies.
    for param in model.parameters() if copied else ():
        if param.is_floating_point():
            trained = param.requires_grad
            param.requires_grad_()  # a frozen parameter, which may be trained later, takes no hook
            param.register_post_accumulate_grad_hook(schedule)
            param.requires_grad_(trained)
