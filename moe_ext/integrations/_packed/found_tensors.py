"""What the tensors of a checkpoint belong to, by the names that transformers knows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from moe_ext.integrations._packed.layer_tensors import LayerTensors
from moe_ext.integrations._packed.stored_tensors import Stored
from moe_ext.integrations._transformers.experts import WEIGHT_NAMES, experts_modules

__all__ = ["FoundTensors", "Place", "Read", "expert_keys", "find_in_safetensors"]

Read = Callable[[torch.dtype], Tensor]  # reads a tensor, and dequantizes it in a dtype


class Place(NamedTuple):
    """Where a file has a weight, or a part of it.

    Attributes:
        stored: the tensor of the file.
        part: returns the values of the tensor, from those of the weight; None: it is the weight.
    """

    stored: Stored
    part: Callable[[Tensor], Tensor] | None = None


@dataclass
class FoundTensors:
    """The tensors of a checkpoint, by what they belong to.

    Attributes:
        experts: the tensors of each parameter of each experts module; None for tensors whose rows
            are not those of the parameter.
        dense: how to read each tensor, by the name that transformers' loader takes. Those of
            experts are there too.
        places: where the files have each weight of `dense`. The names are those of `dense`.
        names: the names in `dense` of the tensors of each experts module.
        whole: the name in `dense` of each parameter that is one tensor of the files.
        unused: the names of the weights that the model does not have.
    """

    experts: dict[str, dict[str, LayerTensors | None]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    dense: dict[str, Read] = field(default_factory=dict)
    places: dict[str, list[Place]] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    whole: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)


def expert_keys(skeleton: Any) -> list[tuple[str, str]]:
    """Returns the module and the name of each weight and bias of experts."""
    return [
        (name, key)
        for name, module in experts_modules(skeleton).items()
        for key, _ in module.named_parameters(recurse=False)
        if key.removesuffix("_bias") in WEIGHT_NAMES
    ]


def find_in_safetensors(skeleton: Any, stored: dict[str, Stored]) -> FoundTensors:
    """Finds out what each weight of safetensors files belongs to."""
    mapping = get_model_conversion_mapping(skeleton)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    order = [pattern for converter in converters for pattern in converter.source_patterns]
    state = skeleton.state_dict()
    owners = {f"{module}.{key}": (module, key) for module, key in expert_keys(skeleton)}
    parts: dict[tuple[str, str], dict[str, list[Stored]]] = defaultdict(lambda: defaultdict(list))
    found_tensors = FoundTensors()
    for name, weight in sorted(stored.items(), key=lambda item: dot_natural_key(item[0])):
        target, pattern = rename_source_key(
            name, renamings, converters, skeleton.base_model_prefix, state
        )
        if target not in state and name in state:
            target, pattern = name, None
        if target not in state:
            found_tensors.unused.append(name)
            continue
        found_tensors.dense[name] = weight.read
        found_tensors.places[name] = [Place(weight)]
        if pattern is None:
            found_tensors.whole[target] = name
        if target in owners:
            parts[owners[target]][pattern or ""].append(weight)
            found_tensors.names[owners[target][0]].append(name)
    for (module, key), by_pattern in parts.items():
        tensors = None
        if "" in by_pattern:
            tensors = LayerTensors(tuple(by_pattern[""]))
        elif all(_keeps_rows(pattern, converters) for pattern in by_pattern):
            tensors = LayerTensors(
                tuple(by_pattern[p] for p in sorted(by_pattern, key=order.index))
            )
        found_tensors.experts[module][key] = tensors
    return found_tensors


def _keeps_rows(pattern: str, converters: list[WeightConverter]) -> bool:
    """Returns whether a converter only stacks matrices and joins their rows."""
    (converter,) = [converter for converter in converters if pattern in converter.source_patterns]
    return all(
        isinstance(operation, MergeModulelist | Concatenate)
        and operation.dim == (0 if isinstance(operation, MergeModulelist) else 1)
        for operation in converter.operations
    )
