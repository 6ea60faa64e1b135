"""The model around the experts: replicas that average their gradients (Sec. 3.1)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from moe_ext.checks import require
from moe_ext.distributed.parameters import expert_parameters
from moe_ext.exchange import Exchange
from moe_ext.processes import processes_of

DENSE = ("ddp", "fsdp")


def parallelize(
    model: nn.Module, process_group: ProcessGroup | DeviceMesh, *, dense: str = "ddp"
) -> nn.Module:
    """Makes `model` one of the replicas that train together, each with its block of the experts.

    The gradients of the dense parameters are averaged over all processes, beginning with rank 0's
    values; the experts' stay where they are, for they already have the rows of all. On a mesh of
    two dimensions each expert has a copy in each row, and these are averaged too.

    Args:
        model: its MoE layers made with the same process_group.
        process_group: of all processes that train, or their mesh.
        dense: "ddp", copies of the dense parameters (`DistributedDataParallel`), or "fsdp", shards
            of them too (`fully_shard`).

    Returns:
        The wrapped model for "ddp", which is to be called instead of `model`; else `model` itself.

    Raises:
        ValueError: `dense` is something else.
    """
    require(dense in DENSE, "parallelize: dense", f"be one of {', '.join(DENSE)}", dense)
    _, batch = processes_of(process_group)
    experts = expert_parameters(model)
    if isinstance(process_group, DeviceMesh) and process_group.ndim == 2:
        copies = process_group.get_group(0)
        for entry in experts.values():
            _average(entry.param, copies)
    if dense == "fsdp":
        mesh = process_group
        if not isinstance(mesh, DeviceMesh):
            kind = next(model.parameters()).device.type
            mesh = DeviceMesh.from_group(mesh, kind)
        elif mesh.ndim == 2:
            mesh = mesh._flatten()
        fully_shard(model, mesh=mesh, ignored_params={e.param for e in experts.values()})
        return model
    constants = [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, Exchange)
        for name, _ in module.named_buffers()
    ]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, [*experts, *constants]
    )
    return DistributedDataParallel(model, process_group=batch.group)


def _average(param: nn.Parameter, copies: ProcessGroup) -> None:
    """From now on, the gradient is the mean over the copies; as they start from equal values."""
    size = dist.get_world_size(copies)
    with torch.no_grad():
        dist.broadcast(param, group_src=0, group=copies)

    def average(param: torch.Tensor) -> None:
        assert param.grad is not None
        dist.all_reduce(param.grad, group=copies)
        param.grad /= size

    param.register_post_accumulate_grad_hook(average)
