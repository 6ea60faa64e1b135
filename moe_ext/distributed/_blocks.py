"""Shards a model by blocks with fully_shard: dense parameters, and experts over their replicas."""

from collections.abc import Collection, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from moe_ext.checks import require
from moe_ext.dispatch._sharding import ExpertSharding
from moe_ext.distributed._dtensors import local_part, mesh_of
from moe_ext.distributed._parameters import spread_layers
from moe_ext.moe import MoE
from moe_ext.ranks.layout import Layout


def require_blocks(
    model: nn.Module, blocks: Collection[nn.Module], whole: set[nn.Parameter]
) -> None:
    """Raises ValueError unless `shard_blocks` can shard the model; see there for the arguments.

    The experts may become DTensors after this call.
    """
    every = _in_order(model, blocks)
    rule = "be modules of the model"
    require({*blocks} <= {*every}, "parallelize: blocks", rule, [*map(type, blocks)])
    inner: set[nn.Parameter] = set()
    for layer, sharding in _layers_over_replicas(model, blocks):
        _require_one_chunk(sharding)
        _require_one_dtype("experts", layer.experts.parameters())
        for param in layer.experts.parameters():
            _shard_of_experts(sharding.layout.replicas.size, param)
        inner.update(layer.experts.parameters())
    for module in every:
        dense = {*module.parameters()} - whole - inner
        _require_one_dtype("dense", dense)
        inner |= dense


def parameters_over_replicas(model: nn.Module, blocks: Collection[nn.Module]) -> set[nn.Parameter]:
    """Returns the parameters of experts that `shard_blocks` divides between their replicas."""
    layers = [layer for layer, _ in _layers_over_replicas(model, blocks)]
    return {param for layer in layers for param in layer.experts.parameters()}


def shard_blocks(
    model: nn.Module,
    blocks: Collection[nn.Module],
    process_group: ProcessGroup | DeviceMesh | None,
    whole: set[nn.Parameter],
    reduce_dtype: torch.dtype | None,
) -> None:
    """Calls fully_shard for experts that are DTensors, for each block, and for the model.

    Args:
        model: the model.
        blocks: the modules of the model whose parameters are gathered together.
        process_group: all ranks that train, or their mesh.
        whole: the parameters that only `parameters_over_replicas` may divide.
        reduce_dtype: the dtype of the sums of gradients; None: as the gradients.
    """
    world = Layout.of(process_group, "parallelize").world
    device = next(model.parameters()).device
    mesh = mesh_of(world, process_group, device)
    shard = partial(fully_shard, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    units: list[Any] = []
    for layer, sharding in _layers_over_replicas(model, blocks):
        replicas = sharding.layout.replicas
        on = mesh_of(replicas, process_group, device)
        place = partial(_shard_of_experts, replicas.size)
        units.append(shard(layer.experts, mesh=on, shard_placement_fn=place))
    for module in _in_order(model, blocks):
        place_dense = partial(_shard_of_dense, world.size)
        options = {"mesh": mesh, "ignored_params": whole, "shard_placement_fn": place_dense}
        units.append(shard(module, **options))
    for unit in units if blocks else ():
        # By default, torch gathers a block while it still has the next one.
        unit.set_modules_to_backward_prefetch([unit])


def _in_order(model: nn.Module, blocks: Collection[nn.Module]) -> list[nn.Module]:
    """Returns the blocks in the model, and the model; inner modules first, as fully_shard needs."""
    return [module for module in reversed([*model.modules()]) if module in {model, *blocks}]


def _layers_over_replicas(
    model: nn.Module, blocks: Collection[nn.Module]
) -> Iterator[tuple[MoE, ExpertSharding]]:
    """Yields layers with replicas of experts that are DTensors: with blocks, all experts are."""
    for layer, sharding in spread_layers(model):
        if sharding.layout.replicas.size > 1 and (blocks or sharding.has_dtensors):
            yield layer, sharding


def _require_one_chunk(sharding: ExpertSharding) -> None:
    """Raises ValueError if chunks of experts run, which fully_shard would not gather."""
    exchange = sharding.exchange
    one = exchange is None or exchange.num_chunks == 1 or exchange.chunks_of == "tokens"
    rule = "be 1 for experts that are sharded over replicas, unless chunks are of tokens"
    require(one, "parallelize: num_chunks", rule, exchange and exchange.num_chunks)


def _require_one_dtype(kind: str, parameters: Iterable[Tensor]) -> None:
    dtypes = sorted({str(p.dtype) for p in parameters if p.is_floating_point()})
    rule = 'have {kind} parameters of one dtype with dense="fsdp" (in each of blocks)'
    require(len(dtypes) <= 1, "parallelize: model", rule.format(kind=kind), dtypes)


def _shard_of_dense(num_ranks: int, param: nn.Parameter) -> Shard | None:
    """Chooses the dimension of a dense parameter that FSDP shards; None: the first.

    The matrices [1, D, F] of a shared expert are divided between the ranks by rows.
    """
    by_rows = param.dim() == 3 and len(param) == 1 and param.shape[1] % num_ranks == 0
    return Shard(1) if by_rows else None


def _shard_of_experts(num_replicas: int, param: nn.Parameter) -> Shard:
    """Chooses the dimension of a parameter [E, …] that FSDP shards between replicas of the experts.

    The first dimension comes last: the ranks that share the experts have divided it already.
    """
    sizes = [*local_part(param).shape]
    even = [dim for dim in (*range(1, len(sizes)), 0) if sizes[dim] % num_replicas == 0]
    rule = f"have a size that the {num_replicas} replicas divide"
    require(bool(even), "parallelize: parameters of a rank's experts", rule, tuple(sizes))
    return Shard(even[0])
