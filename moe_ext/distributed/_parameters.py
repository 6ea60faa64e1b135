"""Which parameters of a model are spread over ranks."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from moe_ext.checks import require
from moe_ext.distributed.sharding import Layout
from moe_ext.experts import ModuleExperts
from moe_ext.moe import MoE


class ExpertParameter(NamedTuple):
    """A parameter of experts of which other ranks have others.

    Attributes:
        name: in the model of a single process, which numbers the experts of all.
        param: of this rank's experts.
        layout: of the layer.
        bounds: (first, last, all): param is [last - first, ...], a block of the [all, ...] of a
            single process; None: it is the parameter of one expert, whole.
    """

    name: str
    param: nn.Parameter
    layout: Layout
    bounds: tuple[int, int, int] | None


def expert_parameters(model: nn.Module) -> dict[str, ExpertParameter]:
    """The parameters of the experts that are spread over ranks, by their names in `model`.

    Those of `ModuleExperts` belong to one expert each; those of `FeedForwardExperts`, and of any
    other module that is all experts at once, are blocks of a larger tensor. A model of a single
    rank has none.

    Raises:
        ValueError: a parameter or buffer of such a module has no row for each expert.
    """
    state = expert_state(model)
    return {name: state[name] for name, _ in model.named_parameters() if name in state}


def expert_tensors(model: nn.Module) -> set[str]:
    """The names of all their parameters and buffers, those that no state_dict has too."""
    names = set(expert_state(model))
    for prefix, layer in _spread_layers(model):
        names |= {prefix + name for name, _ in layer.experts.named_buffers()}
    return names


def expert_state(model: nn.Module) -> dict[str, ExpertParameter]:
    """The same of the state_dict: buffers as well, and all names of what has several."""
    found = {}
    for prefix, layer in _spread_layers(model):
        assert layer.sharding is not None  # its experts are spread
        local, layout = layer.sharding.local_experts, layer.sharding.layout
        for name, value in layer.experts.state_dict(keep_vars=True).items():
            if isinstance(layer.experts, ModuleExperts):
                container, number, rest = name.split(".", 2)
                whole_name, bounds = f"{container}.{local.start + int(number)}.{rest}", None
            else:
                rule = f"have a row for each of this rank's experts, {len(local)}"
                shape = tuple(value.shape) if isinstance(value, Tensor) else (type(value),)
                require(shape[:1] == (len(local),), f"{prefix}{name}", rule, shape)
                whole_name, bounds = name, (local.start, local.stop, layer.num_experts)
            found[prefix + name] = ExpertParameter(prefix + whole_name, value, layout, bounds)
    return found


def _spread_layers(model: nn.Module) -> Iterator[tuple[str, MoE]]:
    """The layers whose experts are spread over ranks, and what their experts' names begin with;
    under all names of a layer that has several."""
    for path, layer in model.named_modules(remove_duplicate=False):
        if not isinstance(layer, MoE) or layer.sharding is None:
            continue
        if layer.sharding.layout.world.size > 1:
            yield f"{path}.experts." if path else "experts.", layer
