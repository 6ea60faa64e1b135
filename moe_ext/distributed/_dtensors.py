"""Experts as DTensors, which the tools of torch understand."""

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from moe_ext._compiled import unwrapped_module
from moe_ext.checks import require
from moe_ext.dispatch._sharding import ExpertSharding
from moe_ext.distributed._parameters import entries_of, require_ranks, spread_layers
from moe_ext.experts import ModuleExperts
from moe_ext.moe import MoE
from moe_ext.ranks._whole import mark_dtensors
from moe_ext.ranks.collectives import Ranks
from moe_ext.ranks.layout import Layout
from moe_ext.recurrent import MoELSTM

__all__ = ["distribute_experts"]


def distribute_experts(
    model: nn.Module, process_group: ProcessGroup | DeviceMesh | None
) -> nn.Module:
    """Makes the parameters of sharded experts DTensors, on all ranks together.

    A parameter then has the shape [E, …] of all experts, and the placement ``Shard(0)`` on the
    ranks that share them. So the tools of torch save, load, gather and clip it as in a single
    process: ``torch.distributed.checkpoint``, ``get_model_state_dict``,
    `torch.nn.utils.clip_grad_norm_`, and ``fully_shard`` over replicas. The names and the results
    of the model do not change. The attributes of a module, such as ``experts.weight_0``, are the
    rows of this rank; ``experts.parameters()`` are the DTensors. Call this function before you make
    an optimizer.

    Args:
        model: the model of this rank. Layers whose experts are DTensors already do not change.
        process_group: all ranks that train, or their mesh; see `parallelize`.

    Returns:
        The model.

    Raises:
        ValueError: the experts of a layer are `ModuleExperts`, packed, or in a `MoELSTM`. Or the
            ranks do not have the rows of ``Shard(0)``: ceil(E / ranks) on each of the first ranks.
            Or process_group does not have the ranks of a layer.
    """
    owner = "distribute_experts"
    require_ranks(owner, model, Layout.of(process_group, owner).world)
    for layer, sharding in require_distributable(model):
        device = next(layer.parameters()).device
        mesh = mesh_of(sharding.layout.expert_parallel, process_group, device)
        _distribute(layer, sharding, mesh)
    return model


def require_distributable(model: nn.Module) -> list[tuple[MoE, ExpertSharding]]:
    """Returns the layers that `distribute_experts` changes; raises ValueError unless it can."""
    owner = "distribute_experts"
    lstms = [module for module in model.modules() if isinstance(module, MoELSTM)]
    layers = [pair for pair in spread_layers(model) if not pair[1].has_dtensors]
    for layer, sharding in layers:
        in_lstm = any(layer is part for lstm in lstms for part in lstm.modules())
        require(not in_lstm, f"{owner}: model", "have no MoELSTM with sharded experts", "one")
        _require_rows(owner, layer, sharding)
        require_even(owner, sharding)
    return layers


def local_part(tensor: Tensor) -> Tensor:
    """Returns the part of a tensor that this rank has: all of a plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _require_rows(owner: str, layer: MoE, sharding: ExpertSharding) -> None:
    """Raises ValueError unless each parameter of a layer's experts has a row for each of them."""
    experts = unwrapped_module(layer.experts)
    kind = type(experts).__name__
    rule = "have parameters with one row for each expert"
    require(not isinstance(experts, ModuleExperts), f"{owner}: experts", rule, kind)
    for name, entry in entries_of(layer, sharding):
        rule = "be floating-point, not packed"
        is_float = entry.param.is_floating_point()
        require(is_float, f"{owner}: {name} of {kind}", rule, entry.param.dtype)


def require_even(owner: str, sharding: ExpertSharding) -> None:
    """Raises ValueError unless the ranks have as many experts each as Shard(0) gives them."""
    counts, total = sharding.placement.counts, sharding.placement.num_experts
    size = -(-total // len(counts))
    wanted = [max(min(size, total - rank * size), 0) for rank in range(len(counts))]
    rule = f"give the ranks {wanted} experts, as Shard(0) does (a multiple of {len(counts)} does)"
    require(counts == wanted, f"{owner}: num_experts = {total}", rule, counts)


def mesh_of(
    ranks: Ranks, process_group: ProcessGroup | DeviceMesh | None, device: torch.device
) -> DeviceMesh:
    """Returns a mesh of these ranks with one dimension: of process_group, if it is a mesh."""
    if isinstance(process_group, DeviceMesh):
        meshes = [process_group]
        if process_group.ndim > 1:
            assert process_group.mesh_dim_names is not None  # `Layout.of` has checked it
            meshes = [process_group[name] for name in reversed(process_group.mesh_dim_names)]
            meshes.append(process_group._flatten())
        for mesh in meshes:
            if mesh.mesh.tolist() == dist.get_process_group_ranks(ranks.group):
                return mesh
    assert ranks.group is not None  # there are several ranks
    kinds = [device.type for device in ranks.group._device_types]
    kind = device.type if device.type in kinds else kinds[0]
    return DeviceMesh.from_group(ranks.group, kind, mesh_dim_names=("ranks",))


def _distribute(layer: MoE, sharding: ExpertSharding, mesh: DeviceMesh) -> None:
    """Replaces the tensors of a layer's experts, and of its own secondary gates, by DTensors."""
    entries = {id(entry.param): entry for _, entry in entries_of(layer, sharding)}
    for module in layer.modules():
        names = []
        for name, value in [*module._parameters.items(), *module._buffers.items()]:
            entry = entries.get(id(value))
            if entry is None:
                continue
            assert value is not None
            assert entry.bounds is not None  # `_require_rows` has checked it
            names.append(name)
            local = value.detach().contiguous()
            shape = torch.Size([entry.bounds[2], *local.shape[1:]])
            stride = torch.empty(shape, device="meta").stride()
            part = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
            )
            if name in module._parameters:
                module._parameters[name] = nn.Parameter(part, value.requires_grad)
            else:
                module._buffers[name] = part
        if names:
            kind: Any = type(module)
            module.__class__ = _reads_rows(kind, *names)
    sharding.has_dtensors = True
    mark_dtensors(layer.experts)


class _Rows(Function):
    """Returns the rows of a DTensor that this rank has.

    Unlike the result of ``to_local``, they are no view: the thresholds of gates change in place.
    """

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Tensor:
        ctx.mesh, ctx.placements = tensor.device_mesh, tensor.placements
        ctx.sizes = {"shape": tensor.shape, "stride": tensor.stride()}
        return tensor.to_local().detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        grad = grad.contiguous()
        return DTensor.from_local(grad, ctx.mesh, ctx.placements, run_check=False, **ctx.sizes)


@cache
def _reads_rows(kind: Any, *names: str) -> Any:
    """Returns a class of modules whose attributes of these names are the rows of this rank.

    Each part of a module reads its parameters by attributes. `nn.Module` and the tools of torch
    read and write the DTensors in ``_parameters`` and ``_buffers``.
    """

    def rows(name: str) -> property:
        def get(module: nn.Module) -> Any:
            tensors = module._parameters if name in module._parameters else module._buffers
            value: Any = tensors[name]
            # The parts of fully_shard are no rows. It gathers them before the module runs.
            is_rows = isinstance(value, DTensor) and value.device_mesh.ndim == 1
            return _Rows.apply(value) if is_rows else value

        return property(get)

    return type(kind.__name__, (kind,), {"__doc__": kind.__doc__} | {n: rows(n) for n in names})
