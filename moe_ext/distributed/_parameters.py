"""The parameters of a model that are sharded over ranks."""

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_ext._compiled import uncompiled, unwrapped_module
from moe_ext._plain_names import plain_names
from moe_ext.checks import require
from moe_ext.dispatch._sharding import ExpertSharding
from moe_ext.experts import ModuleExperts
from moe_ext.gates import HierarchicalGate
from moe_ext.moe import MoE
from moe_ext.ranks._agreement import require_same
from moe_ext.ranks._whole import WHOLE
from moe_ext.ranks.collectives import Ranks
from moe_ext.ranks.layout import Layout


class ExpertParameter(NamedTuple):
    """Describes a parameter of sharded experts, or of sharded secondary gates.

    Attributes:
        name: the name in the model of a single process, which has the experts of all ranks and no
            wrappers around its modules.
        param: the parameter of this rank.
        layout: how ranks divide the experts of the parameter's layer.
        bounds: (first, last, total), if param has the rows first <= r < last of a tensor
            [total, ...] of a single process. None: param is a DTensor, or of a single expert.
    """

    name: str
    param: nn.Parameter
    layout: Layout
    bounds: tuple[int, int, int] | None


def expert_parameters(model: nn.Module) -> dict[str, ExpertParameter]:
    """Returns the sharded parameters of a model, by their name in `model`.

    Each parameter of `ModuleExperts` belongs to one expert. Parameters of `FeedForwardExperts` and
    of custom `Experts` are shards of a larger tensor. So are the secondary gates with
    ``placement="groups"``. After `distribute_experts` they are DTensors. On a single rank, the
    result is empty.

    Raises:
        ValueError: a parameter or buffer of custom experts does not have one row for each expert.
    """
    by_param = {entry.param: entry for entry in expert_state(model).values()}
    return {name: by_param[param] for name, param in model.named_parameters() if param in by_param}


def expert_tensors(model: nn.Module) -> set[str]:
    """Returns the names of the model's sharded parameters and buffers, also non-persistent ones.

    DistributedDataParallel reads both the names of parameters and those of modules. Only the first
    are without the prefix of checkpoint_wrapper. The result has both.
    """
    sharded: set[Tensor] = {entry.param for entry in expert_state(model).values()}
    for layer, _ in spread_layers(model):
        sharded.update(layer.experts.buffers())
    named: list[tuple[str, Tensor | None]] = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in chain(module._parameters.items(), module._buffers.items()):
            named.append((f"{path}.{name}", value))
    return {name for name, value in named if value in sharded}


def expert_state(model: nn.Module) -> dict[str, ExpertParameter]:
    """Returns the sharded entries of the model's state_dict, under all their names.

    The entries are found by identity, because a wrapper around a module may change its name.
    """
    # By the id of a tensor: its name in the layer, and its description with the whole name there.
    described: dict[int, tuple[str, ExpertParameter]] = {}
    for layer, sharding in spread_layers(model):
        for name, entry in entries_of(layer, sharding):
            described[id(entry.param)] = name, entry
    entries, lost = {}, dict(described)
    state = model.state_dict(keep_vars=True)
    plain = plain_names(model, state)
    for key, value in state.items():
        if id(value) in described:
            (in_layer, entry), name = described[id(value)], plain[key]
            require(name.endswith(in_layer), "model: state_dict", f"end with {in_layer}", name)
            entries[key] = entry._replace(name=name.removesuffix(in_layer) + entry.name)
            lost.pop(id(value), None)
    names = [name for name, _ in lost.values()]
    require(not names, "model: state_dict", "contain all parameters of sharded experts", names)
    return entries


def entries_of(layer: MoE, sharding: ExpertSharding) -> Iterator[tuple[str, ExpertParameter]]:
    """Yields the name and the description of each sharded entry of a layer's state_dict."""
    local, layout = sharding.local_experts, sharding.layout
    has_modules = isinstance(unwrapped_module(layer.experts), ModuleExperts)
    state = layer.experts.state_dict(keep_vars=True)
    for key, name in plain_names(layer.experts, state).items():
        value = state[key]
        is_dtensor = isinstance(value, DTensor)
        rule = "be a DTensor (add it before distribute_experts)" if sharding.has_dtensors else WHOLE
        holds = is_dtensor == sharding.has_dtensors
        require(holds, f"MoE: experts.{name}", rule, type(value).__name__)
        if is_dtensor:
            whole_name, bounds = name, None
        elif has_modules:
            container, number, rest = name.split(".", 2)
            whole_name, bounds = f"{container}.{local.start + int(number)}.{rest}", None
        else:
            rule = f"have one row for each of this rank's experts ({len(local)})"
            shape = tuple(value.shape) if isinstance(value, Tensor) else (type(value),)
            require(shape[:1] == (len(local),), f"MoE: experts.{name}", rule, shape)
            whole_name, bounds = name, (local.start, local.stop, layer.num_experts)
        entry = ExpertParameter(f"experts.{whole_name}", value, layout, bounds)
        yield f"experts.{name}", entry
    groups = sharding.local_groups
    if groups is None:
        return
    gate = cast(HierarchicalGate, uncompiled(layer.gate))
    state = layer.gate.state_dict(keep_vars=True)
    for key, name in plain_names(layer.gate, state).items():
        if name.rsplit(".")[-1] in gate.secondary_parameters:
            value = state[key]
            rows = groups.start, groups.stop, gate.num_groups
            bounds = None if isinstance(value, DTensor) else rows
            yield f"gate.{name}", ExpertParameter(f"gate.{name}", value, layout, bounds)


def require_ranks(owner: str, model: nn.Module, ranks: Ranks, stages: Ranks | None = None) -> None:
    """Raises ValueError unless every layer with sharded experts has these ranks.

    stages: the ranks of a pipeline, one of each stage. Layers have the ranks of this stage.
    """
    members, elsewhere = set(_members(ranks)), set[int]()  # elsewhere: in other stages
    if stages is not None and stages.group is not None:
        elsewhere = {*_members(stages)} - {dist.get_rank()}
    for _, sharding in spread_layers(model):
        sharing = set(_members(sharding.layout.world))
        num_expected = len(sharing) * (1 + len(elsewhere))
        require(
            sharing <= members - elsewhere and len(members) == num_expected,
            f"{owner}: process_group",
            f"have the ranks {sorted(sharing)} of the layers whose experts are sharded (experts in "
            "several copies need layers with a DeviceMesh [replicas, shards])",
            sorted(members) or None,
        )


def _members(ranks: Ranks) -> list[int]:
    return [] if ranks.group is None else dist.get_process_group_ranks(ranks.group)


def require_same_layers(owner: str, model: nn.Module, ranks: Ranks) -> None:
    """Raises ValueError, prefixed by owner, unless the layers of all ranks have the same options.

    All ranks must call this function together. It compares the layers with sharded experts.
    """
    paths = {module: path for path, module in model.named_modules()}
    values: dict[str, object] = {}
    for layer, _ in spread_layers(model):
        where = f" of the layer {paths[layer]}" if paths[layer] else ""
        options = layer._options_of_all_ranks()
        values |= {f"{name}{where}": value for name, value in options.items()}
    require_same(owner, values, ranks)


def spread_layers(model: nn.Module) -> Iterator[tuple[MoE, ExpertSharding]]:
    """Yields the layers whose experts are sharded over several ranks, with their sharding."""
    for layer in model.modules():
        if not isinstance(layer, MoE) or layer.sharding is None:
            continue
        if layer.sharding.layout.world.size > 1:
            yield layer, layer.sharding
