"""The state of a model and its optimizers, under the names of a single process."""

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from moe_ext._plain_names import names_here, plain_names
from moe_ext.checks import require
from moe_ext.distributed._parameters import (
    ExpertParameter,
    expert_state,
    require_ranks,
)
from moe_ext.ranks.collectives import Ranks
from moe_ext.ranks.layout import Layout

Key = tuple[str, ...]  # ("model", name) or ("optimizer", name of the parameter, key)


class Part(NamedTuple):
    """Describes a rank's part of a tensor or other value in the state.

    Attributes:
        value: the part, which shares the memory of the model or the optimizer.
        first: value[i] is row first + i of the full tensor.
        size: number of rows of the full tensor. None: value is complete, or a DTensor.
        is_buffer: whether ranks that have this part may have other values of it.
    """

    value: Any
    first: int = 0
    size: int | None = None
    is_buffer: bool = False

    @property
    def shape(self) -> torch.Size:
        """The shape of the full tensor."""
        shape = self.value.shape
        return shape if self.size is None else torch.Size([self.size, *shape[1:]])


def full_state_dict(
    model: nn.Module, process_group: ProcessGroup | DeviceMesh | None
) -> dict[str, Tensor]:
    """Gathers on the CPU the state_dict that the model has in a single process.

    Names have no parts of wrappers: of `parallelize`, torch.compile or checkpoint_wrapper around
    the model or its modules. All ranks must call this function together. Rank 0 gets all tensors,
    the other ranks an empty dict.

    Args:
        model: the model, with or without the wrapper of `parallelize`.
        process_group: all ranks that train, or their mesh.

    Raises:
        ValueError: process_group does not have the ranks over which experts are sharded.
    """
    ranks = Layout.of(process_group, "full_state_dict").world
    require_ranks("full_state_dict", model, ranks)
    state: dict[str, Tensor] = {}
    spread: dict[str, Part] = {}
    names = {entry.name for entry in expert_state(model).values()}
    for (_, name), part in model_parts(model).items():
        is_dtensor = isinstance(part.value, DTensor)
        value = part.value.full_tensor() if is_dtensor else part.value
        if name in names and not is_dtensor:
            spread[name] = part
        elif ranks.rank == 0:
            state[name] = value.detach().to("cpu", copy=True)
    return state | _gathered(spread, ranks)


def _gathered(spread: Mapping[str, Part], ranks: Ranks) -> dict[str, Tensor]:
    """Returns the whole tensors of all ranks' parts on rank 0, the other ranks an empty dict.

    Each part is sent alone, so that a rank needs memory for one more part only.
    """
    devices = [torch.device("cpu")] if ranks.group is None else ranks.group._device_types
    device = torch.device("cpu") if torch.device("cpu") in devices else devices[0]
    whole: dict[str, Tensor] = {}
    seen: set[tuple[str, int]] = set()
    described = {
        name: (part.shape, part.value.shape, part.value.dtype, part.first)
        for name, part in spread.items()
    }
    for sender, parts in enumerate(ranks.gather_objects(described)):
        for name, (shape, part_shape, dtype, first) in parts.items():
            if ranks.rank == 0 and name not in whole:
                whole[name] = torch.empty(shape, dtype=dtype)
            if (name, first) in seen or 0 in part_shape:
                continue
            seen.add((name, first))
            if ranks.rank == sender:
                value = spread[name].value.detach().to(device).contiguous()
                if sender != 0:
                    dist.send(_bytes(value), group=ranks.group, group_dst=0)
            elif ranks.rank == 0:
                value = torch.empty(part_shape, dtype=dtype, device=device)
                dist.recv(_bytes(value), group=ranks.group, group_src=sender)
            if ranks.rank == 0:
                rows = slice(first, first + part_shape[0]) if part_shape else ...
                whole[name][rows] = value
    return whole


def _bytes(value: Tensor) -> Tensor:
    """Returns the memory of a contiguous tensor as bytes: not every backend sends every dtype."""
    return value.view(-1).view(torch.uint8)


def load_full_state_dict(
    model: nn.Module,
    state: Mapping[str, Tensor],
    process_group: ProcessGroup | DeviceMesh | None,
) -> None:
    """Loads this rank's part of the state_dict of a single process, on all ranks together.

    Args:
        model: the model, with or without the wrapper of `parallelize`.
        state: the full state_dict, on every rank. ``torch.load(..., mmap=True)`` reads from disk
            only the parts that this rank uses.
        process_group: all ranks that train, or their mesh.

    Raises:
        ValueError: names or shapes do not match the model, or process_group does not have the ranks
            over which experts are sharded. The model is not changed.
    """
    ranks = Layout.of(process_group, "load_full_state_dict").world
    require_ranks("load_full_state_dict", model, ranks)
    parts = model_parts(model)
    wanted = whole_shapes(parts, ranks)
    names = names_here(state, wanted)
    state = {names[name]: value for name, value in state.items()}
    shapes = {name: value.shape for name, value in state.items()}
    for rank_shapes in ranks.gather_objects(shapes):  # so that all ranks raise
        require_same_shapes("load_full_state_dict: state", rank_shapes, wanted)
    for (_, name), part in parts.items():
        source = state[name]
        if part.size is not None:
            source = source.narrow(0, part.first, len(part.value))
        if isinstance(part.value, DTensor):
            source = distribute_tensor(
                source.to(part.value.device),
                part.value.device_mesh,
                part.value.placements,
                src_data_rank=None,
            )
        part.value.copy_(source)


def whole_shapes(parts: Mapping[Key, Part], ranks: Ranks) -> dict[str, torch.Size]:
    """Returns the names and full shapes of the model's tensors, from the parts of all ranks."""
    shapes = {path[1]: part.shape for path, part in parts.items() if path[0] == "model"}
    return dict(ChainMap(*ranks.gather_objects(shapes)))


def require_same_shapes(
    name: str, given: Mapping[str, torch.Size], wanted: Mapping[str, torch.Size]
) -> None:
    """Raises ValueError, prefixed by name, unless given has the same names and shapes as wanted."""
    wrong = [
        f"{key}: {_text(given.get(key))} instead of {_text(wanted.get(key))}"
        for key in sorted({*given, *wanted})
        if given.get(key) != wanted.get(key)
    ]
    if wrong:
        raise ValueError(
            f"{name} must have the names and shapes of the model, got {_listed(wrong)}"
        )


def _listed(texts: Sequence[str]) -> str:
    more = f"; and {len(texts) - 8} more" if len(texts) > 8 else ""
    return f"{'; '.join(texts[:8])}{more}"


def _text(shape: torch.Size | None) -> str:
    return "no tensor" if shape is None else str(list(shape))


def flat(parts: Mapping[Key, Part]) -> dict[str, Any]:
    """Returns the values of parts by name; a name is a key joined with dots."""
    return {".".join(key): part.value for key, part in parts.items()}


def model_parts(model: nn.Module) -> dict[Key, Part]:
    """Returns the parts of a model's state_dict. Raises TypeError if a value is not a tensor."""
    experts = expert_state(model)
    state = model.state_dict()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    parts: dict[Key, Part] = {}
    for key, name in plain_names(model, state).items():
        value, entry = state[key], experts.get(key)
        if not isinstance(value, Tensor):
            raise TypeError(f"model: {name} must be a tensor, got {type(value).__name__}")
        part = _part(value, entry)._replace(is_buffer=key not in parameters)
        parts["model", entry.name if entry else name] = part
    return parts


def optimizer_parts(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[Key, Part]:
    """Returns the parts of the optimizers' states.

    Raises:
        ValueError: a parameter does not belong to the model, or the state of a sharded parameter is
            neither a scalar nor sharded as the parameter is.
    """
    parts: dict[Key, Part] = {}
    for name, param, entry, state in _parameters(model, optimizers):
        for key, value in state.items():
            part = _part(value, entry)
            require(
                part.size is None or len(value) == len(param),
                f"optimizer: {key} of {name}",
                f"have the expert dimension first, of size {len(param)} on this rank",
                tuple(value.shape) if part.size is not None else None,
            )
            parts["optimizer", name, key] = part
    return parts


def new_optimizer_parts(
    model: nn.Module, optimizers: Sequence[Optimizer], saved: Mapping[Key, STORAGE_TYPES]
) -> dict[Key, Part]:
    """Allocates states of the model's optimizers, with the shapes and dtypes in saved."""
    keys: dict[str, list[str]] = {}
    for path in saved:
        if path[0] == "optimizer":
            keys.setdefault(path[1], []).append(path[2])
    parts: dict[Key, Part] = {}
    for name, param, entry, _ in _parameters(model, optimizers):
        for key in keys.get(name, []):
            path = ("optimizer", name, key)
            parts[path] = _part(_room(param, entry, saved[path]), entry)
    return parts


def _room(param: Tensor, entry: ExpertParameter | None, saved: STORAGE_TYPES) -> Tensor | None:
    if not isinstance(saved, TensorStorageMetadata):
        return None
    dtype = saved.properties.dtype
    if isinstance(param, DTensor) and saved.size == param.shape:
        return torch.empty_like(param, dtype=dtype, requires_grad=False)
    if not saved.size:  # a scalar; the optimizer moves it to the right device
        return torch.empty((), dtype=dtype)
    size = list(saved.size)
    if entry is not None and entry.bounds is not None:
        size[0] = len(param)
    return torch.empty(size, dtype=dtype, device=param.device)


# Options that decide which tensors an optimizer stores for a parameter.
_DECISIVE = ("amsgrad", "centered", "factored", "momentum")
# Options of the computation. A checkpoint of another machine does not change them.
_RUN_OPTIONS = ("capturable", "differentiable", "foreach", "fused")

ParamGroups = list[dict[str, Any]]  # the options of an optimizer's groups, with "param_names"


def optimizer_options(
    model: nn.Module, optimizers: Sequence[Optimizer]
) -> list[tuple[str, ParamGroups]]:
    """Returns, for each of optimizers, its class name and the options of its parameter groups.

    The option "param_names" has the names of this rank's parameters in the group.

    Raises:
        ValueError: the state of an optimizer has a key that is no parameter.
    """
    for optimizer in optimizers:
        other_keys = [key for key in optimizer.state if not isinstance(key, Tensor)]
        rule = "have parameters as keys (save other values in the state of the checkpoint)"
        require(not other_keys, f"{type(optimizer).__name__}: state", rule, other_keys)
    names = (name for name, *_ in _parameters(model, optimizers))

    def options_of(group: dict[str, Any]) -> dict[str, Any]:
        options = {option: value for option, value in group.items() if option != "params"}
        return options | {"param_names": list(islice(names, len(group["params"])))}

    return [
        (type(optimizer).__name__, [options_of(group) for group in optimizer.param_groups])
        for optimizer in optimizers
    ]


def merged_options(
    options: Sequence[tuple[str, ParamGroups]], ranks: Ranks
) -> list[tuple[str, ParamGroups]]:
    """Returns this rank's options of optimizers, with the names of all ranks' parameters."""
    names: dict[tuple[int, int], dict[str, None]] = {}
    for rank_names in ranks.gather_objects(_names_of(options)):
        for place, group_names in rank_names.items():
            names.setdefault(place, {}).update(dict.fromkeys(group_names))
    return [
        (kind, [{**g, "param_names": [*names[i, j]]} for j, g in enumerate(groups)])
        for i, (kind, groups) in enumerate(options)
    ]


def require_same_optimizers(
    name: str, saved: Sequence[tuple[str, ParamGroups]], current: Sequence[tuple[str, ParamGroups]]
) -> None:
    """Raises ValueError, prefixed by name, unless the options of saved optimizers fit those here.

    The classes, the numbers of groups, the parameters of each group and the options that decide
    which tensors are stored must be equal. Everything fits if there are no optimizers here.
    """
    if not current:
        return
    kinds_there, kinds_here = (
        [f"{kind} with {len(groups)} group(s)" for kind, groups in options]
        for options in (saved, current)
    )
    require(kinds_there == kinds_here, name, f"be {kinds_here}", kinds_there)
    names = _names_of(current)
    wanted = _places(current, names)
    saved_places = _places(saved, names | _names_of(saved))  # earlier versions saved no names
    saved_places = {
        name: saved_places[key] for key, name in names_here(saved_places, wanted).items()
    }
    none = "no optimizer"
    wrong = [
        f"{key}: {saved_places.get(key, none)} instead of {wanted.get(key, none)}"
        for key in sorted({*saved_places, *wanted})
        if saved_places.get(key) != wanted.get(key)
    ]
    if wrong:
        rule = "have the parameters and the kinds of state of the optimizers"
        raise ValueError(f"{name} must {rule}, got {_listed(wrong)}")


def _names_of(options: Sequence[tuple[str, ParamGroups]]) -> dict[tuple[int, int], list[str]]:
    """Returns the names of the parameters by optimizer and group, without groups that have none."""
    return {
        (i, j): group["param_names"]
        for i, (_, groups) in enumerate(options)
        for j, group in enumerate(groups)
        if "param_names" in group
    }


def _places(
    options: Sequence[tuple[str, ParamGroups]], names: Mapping[tuple[int, int], Sequence[str]]
) -> dict[str, str]:
    """Describes, for each parameter, the optimizer and the group that it is in."""
    places = {}
    for (i, j), group_names in names.items():
        kind, group = options[i][0], options[i][1][j]
        decisive = ", ".join(option for option in _DECISIVE if group.get(option))
        kind = f"{kind} ({decisive})" if decisive else kind
        places.update(dict.fromkeys(group_names, f"{kind}, group {j} of optimizer {i}"))
    return places


def load_optimizers(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    values: Mapping[Key, Any],
    options: Sequence[tuple[str, ParamGroups]],
) -> None:
    """Loads the states in values and the options from `optimizer_options` into the optimizers."""
    states: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        if key[0] == "optimizer":
            states.setdefault(key[1], {})[key[2]] = value
    for optimizer, (_, saved_groups) in zip(optimizers, options, strict=False):
        state_dict = optimizer.state_dict()
        groups = state_dict["param_groups"]
        ids = [number for group in groups for number in group["params"]]
        names = [name for name, *_ in _parameters(model, [optimizer])]
        state_dict["state"] = {
            number: states[name] for number, name in zip(ids, names, strict=True) if name in states
        }
        for group, saved in zip(groups, saved_groups, strict=True):
            for option, value in saved.items():
                if option not in (*_RUN_OPTIONS, "param_names"):
                    group[option] = _as_here(value, group.get(option))
        optimizer.load_state_dict(state_dict)


def _as_here(saved: Any, current: Any) -> Any:
    """Returns a saved option; a learning rate is a tensor or a number, as it is here."""
    if isinstance(current, Tensor):
        return torch.as_tensor(saved).to(current).reshape(current.shape)
    number = isinstance(current, float | int) and isinstance(saved, Tensor)
    return saved.item() if number else saved


def _parameters(
    model: nn.Module, optimizers: Sequence[Optimizer]
) -> Iterator[tuple[str, Tensor, ExpertParameter | None, dict[str, Any]]]:
    """Yields name, parameter, shard and state of model's parameters, in the optimizers' order."""
    experts = expert_state(model)
    state = model.state_dict(keep_vars=True)
    plain = plain_names(model, state)
    keys: dict[Tensor, str] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            keys.setdefault(value, key)  # a shared parameter has its first name
    for optimizer in optimizers:
        for param in chain.from_iterable(group["params"] for group in optimizer.param_groups):
            if param not in keys:
                raise ValueError(
                    f"{type(optimizer).__name__}: params must belong to the model, "
                    f"got a parameter of shape {tuple(param.shape)} that does not"
                )
            entry = experts.get(keys[param])
            name = plain[keys[param]] if entry is None else entry.name
            yield name, param, entry, optimizer.state.get(param, {})


def _part(value: Any, entry: ExpertParameter | None) -> Part:
    """Returns the part of a value that entry describes; scalars, such as the step, are complete."""
    if entry is None or entry.bounds is None or not isinstance(value, Tensor) or not value.dim():
        return Part(value)
    return Part(value, entry.bounds[0], entry.bounds[2])
