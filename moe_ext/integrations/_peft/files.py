"""The adapters of `moe_ext.LoRAExperts` in the files of PEFT."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from moe_ext import ops
from moe_ext._counting import is_of_transformers
from moe_ext.checks import require, required
from moe_ext.distributed import expert_parameters
from moe_ext.experts import _Networks
from moe_ext.integrations._peft.layers import from_peft, to_peft
from moe_ext.integrations._transformers.experts import WEIGHT_NAMES, weight_names
from moe_ext.lora import LoRAAdapter, LoRAExperts, lora_experts

__all__ = [
    "PREFIX",
    "AdapterTensors",
    "Names",
    "by_target",
    "default_names",
    "matrices_of_files",
    "paths_of_experts",
    "set_matrices",
    "tensors_of_experts",
]

PREFIX = "base_model.model."  # of all names in PEFT's files

Names = Callable[[str], str | None]
"""Maps the path of experts to that of the experts module of transformers."""


# Writing


class AdapterTensors(NamedTuple):
    """What files have of an adapter.

    Attributes:
        tensors: A and B of each layer, by the names of PEFT.
        targets: the adapted parameters: target_parameters of PEFT.
        options: the rank, alpha and rslora of all layers; one, unless they differ.
    """

    tensors: dict[str, Tensor]
    targets: list[str]
    options: set[tuple[int, float, bool]]


def tensors_of_experts(
    owner: str, model: nn.Module, adapter: str, path_of: Names
) -> AdapterTensors:
    """Returns the tensors of an adapter of all experts that have it.

    Raises:
        ValueError: experts do not have two layers, or are sharded over ranks, or have no path.
    """
    result = AdapterTensors({}, [], set())
    for path, experts in lora_experts(model).items():
        if adapter not in experts.adapters:
            continue
        rule = "have all experts on one rank"
        require(not expert_parameters(model), f"{owner}: model", rule, "experts of several ranks")
        made = cast(LoRAAdapter, experts.adapters[adapter])
        result.options.add((made.rank, made.alpha, made.rslora))
        target = required(path_of(path), f"{owner}: names", f"return a path for {path}")
        weights = _weights_of(owner, experts)
        for i, prefix in zip(made.layers, _wrappers(len(made.layers)), strict=True):
            pair = made.pair(i)
            assert pair is not None
            result.targets.append(f"{target}.{weights[i]}")
            for letter, value in zip("AB", to_peft(pair), strict=True):
                result.tensors[f"{PREFIX}{target}.{prefix}lora_{letter}.weight"] = value
    return result


# Reading


def by_target(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Groups the tensors of files by the path of the module that they belong to."""
    groups: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, value in tensors.items():
        target, _, rest = name.removeprefix(PREFIX).rpartition(".lora_")
        prefix = "base_layer." if target.endswith(".base_layer") else ""
        groups[target.removesuffix(".base_layer")][f"{prefix}lora_{rest}"] = value
    return groups


def matrices_of_files(
    owner: str,
    model: nn.Module,
    config: Any,
    groups: Mapping[str, Mapping[str, Tensor]],
    places: Mapping[str, str | None],
) -> tuple[list[int], dict[str, dict[str, Tensor]]]:
    """Returns the adapted layers, and the parameters of the adapter for the path of all experts.

    Args:
        owner: the beginning of errors.
        model: the model.
        config: the LoraConfig of the files.
        groups: the tensors of the files; see `by_target`.
        places: the path of the experts module of transformers, by that of the experts.
    """
    given = {path: target for path, target in places.items() if target in groups}
    sizes = {target: len(groups[target]) // 2 for target in given.values() if target}
    layers = _layers_of(owner, config.target_parameters or (), sizes)
    return layers, {
        path: _matrices_of(f"{owner}: {target}", model, path, groups[target], layers, config.r)
        for path, target in given.items()
        if target
    }


def _layers_of(owner: str, targets: Iterable[str], sizes: Mapping[str, int]) -> list[int]:
    """Returns the layers that all experts in the files have.

    Args:
        owner: the beginning of errors.
        targets: target_parameters.
        sizes: the number of adapted parameters of each experts module, by its path.
    """
    kinds = set()
    for name in targets:
        parent, _, kind = name.rpartition(".")
        if any(f".{path}".endswith(f".{parent}") for path in sizes):  # not that of a router
            kinds.add(kind)
    rule = f"name {', '.join(WEIGHT_NAMES)}"
    known = kinds <= {*WEIGHT_NAMES} and (bool(kinds) or not sizes)
    require(known, f"{owner}: target_parameters", rule, sorted(kinds))
    layers = sorted({int(name == "down_proj") for name in kinds})
    rule = f"have {len(layers)} adapted parameters for all experts"
    require({*sizes.values()} <= {len(layers)}, f"{owner}: folder", rule, dict(sizes))
    return layers


def _matrices_of(
    owner: str,
    model: nn.Module,
    path: str,
    given: Mapping[str, Tensor],
    layers: Sequence[int],
    rank: int,
) -> dict[str, Tensor]:
    """Returns the parameters of an adapter of this rank's experts, after a check of their shapes.

    Args:
        owner: the beginning of errors.
        model: the model.
        path: the path of the experts.
        given: the tensors of PEFT, which have the experts of all ranks.
        layers: the layers that have adapters.
        rank: r.
    """
    module = cast(Any, model.get_submodule(path))
    base = module.base if isinstance(module, LoRAExperts) else module
    bounds = 0, base.num_experts, base.num_experts
    for name, entry in expert_parameters(model).items():
        if name.startswith(f"{path}.") and entry.bounds is not None:
            bounds = entry.bounds
    first, last, total = bounds
    matrices = {}
    for layer, prefix in zip(layers, _wrappers(len(layers)), strict=True):
        fan_in, width = base._layer_sizes()[layer]
        a, b = (given[f"{prefix}lora_{letter}.weight"] for letter in "AB")
        shapes = (total * rank, fan_in), (width, total * rank)
        sizes = tuple(a.shape), tuple(b.shape)
        rule = f"have A and B of shape {shapes[0]} and {shapes[1]}"
        require(shapes == sizes, owner, rule, f"{sizes[0]} and {sizes[1]}")
        for letter, value in zip("ab", from_peft(a, b, total), strict=True):
            matrices[f"{letter}_{layer}"] = value[first:last]
    return matrices


def set_matrices(
    model: nn.Module, adapter: str, matrices: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Copies the matrices of each path into an adapter that is there."""
    for path, pairs in matrices.items():
        made = cast(LoRAExperts, model.get_submodule(path)).adapters[adapter]
        for name, value in pairs.items():
            made.get_parameter(name).detach().copy_(value)


# Names


def default_names(model: nn.Module) -> Names:
    """Returns the function that maps experts to the module of transformers that contains them."""

    def path_of(path: str) -> str:
        parent, _, _ = path.rpartition(".")
        return parent if parent and is_of_transformers(model.get_submodule(parent)) else path

    return path_of


def paths_of_experts(model: nn.Module) -> list[str]:
    """Returns the paths of the experts that have adapters or can have them."""
    adapted = lora_experts(model)
    paths = [path for path, module in model.named_modules() if isinstance(module, _Networks)]
    return [*adapted, *(path for path in paths if path.rpartition(".")[0] not in adapted)]


def _wrappers(num_layers: int) -> list[str]:
    """Returns where the wrapper of each layer is in PEFT's nest: that of the last is outermost."""
    return ["base_layer.", ""][2 - num_layers :]


def _weights_of(owner: str, experts: LoRAExperts) -> list[str]:
    """Returns the names that transformers gives to the weights of experts."""
    rule = "have two layers, as the experts of transformers"
    require(experts.base.num_layers == 2, f"{owner}: experts", rule, experts.base.num_layers)
    return weight_names(experts.base.activation in ops.GATED_ACTIVATIONS)
