"""The parameters of a model that are sharded over ranks."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from moe_ext.checks import require
from moe_ext.distributed._groups import gate_of_groups
from moe_ext.distributed.ranks import Layout
from moe_ext.experts import ModuleExperts
from moe_ext.moe import MoE


class ExpertParameter(NamedTuple):
    """Describes a parameter of sharded experts, or of sharded secondary gates.

    Attributes:
        name: the name in the model of a single process, which has the experts of all ranks.
        param: the parameter of this rank.
        layout: how ranks divide the experts of the parameter's layer.
        bounds: (first, last, total), if param has the rows first <= r < last of a tensor
            [total, ...] of a single process. None: param belongs to a single expert.
    """

    name: str
    param: nn.Parameter
    layout: Layout
    bounds: tuple[int, int, int] | None


def expert_parameters(model: nn.Module) -> dict[str, ExpertParameter]:
    """Returns the sharded parameters of a model, by their name in `model`.

    Each parameter of `ModuleExperts` belongs to one expert. Parameters of `FeedForwardExperts` and
    of custom `Experts` are shards of a larger tensor. So are the secondary gates with
    ``placement="groups"``. On a single rank, the result is empty.

    Raises:
        ValueError: a parameter or buffer of custom experts does not have one row for each expert.
    """
    state = expert_state(model)
    return {name: state[name] for name, _ in model.named_parameters() if name in state}


def expert_tensors(model: nn.Module) -> set[str]:
    """Returns the names of the model's sharded parameters and buffers, also non-persistent ones."""
    names = set(expert_state(model))
    for prefix, layer in _spread_layers(model):
        names |= {prefix + name for name, _ in layer.experts.named_buffers()}
    return names


def expert_state(model: nn.Module) -> dict[str, ExpertParameter]:
    """Returns the sharded entries of the model's state_dict, under all their names."""
    found = {}
    for prefix, layer in _spread_layers(model):
        assert layer.sharding is not None  # _spread_layers yields only sharded layers
        local, layout = layer.sharding.local_experts, layer.sharding.layout
        for name, value in layer.experts.state_dict(keep_vars=True).items():
            if isinstance(layer.experts, ModuleExperts):
                container, number, rest = name.split(".", 2)
                whole_name, bounds = f"{container}.{local.start + int(number)}.{rest}", None
            else:
                rule = f"have one row for each of this rank's experts ({len(local)})"
                shape = tuple(value.shape) if isinstance(value, Tensor) else (type(value),)
                require(shape[:1] == (len(local),), f"model: {prefix}{name}", rule, shape)
                whole_name, bounds = name, (local.start, local.stop, layer.num_experts)
            found[prefix + name] = ExpertParameter(prefix + whole_name, value, layout, bounds)
        groups, gate = layer.sharding.local_groups, gate_of_groups(layer.gate)
        if groups is None or gate is None:
            continue
        prefix = prefix.removesuffix("experts.") + "gate."
        for name, value in layer.gate.state_dict(keep_vars=True).items():
            if name.rsplit(".")[-1] in gate.secondary_parameters:
                bounds = groups.start, groups.stop, gate.num_groups
                found[prefix + name] = ExpertParameter(prefix + name, value, layout, bounds)
    return found


def _spread_layers(model: nn.Module) -> Iterator[tuple[str, MoE]]:
    """Yields the prefix of its experts' names and the layer, for each name of a sharded layer."""
    for path, layer in model.named_modules(remove_duplicate=False):
        if not isinstance(layer, MoE) or layer.sharding is None:
            continue
        if layer.sharding.layout.world.size > 1:
            yield f"{path}.experts." if path else "experts.", layer
