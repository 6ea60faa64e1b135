"""PEFT's LoRA on the experts of transformers' models, computed by the operators of moe_ext.

``import moe_ext.integrations.peft`` changes how PEFT computes a model with
``LoraConfig(target_parameters=[...])`` and ``experts_implementation="moe_ext"``: the operator gets
the matrices A and B of the adapters, and W + B A is never formed. Other models do not change. What
the operator cannot compute is left to PEFT, with one warning for each reason.

The import also lets PEFT add LoRA to `moe_ext.integrations.transformers.PackedLinear`. Such a layer
has no DoRA or other variants, and its adapters cannot be merged in memory: use
`moe_ext.integrations.transformers.save`.

`save_adapter` and `load_adapter` exchange the adapters of `moe_ext.LoRAExperts` with PEFT's files,
together with those of PEFT on linear layers of the same model.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

# Registers experts_implementation="moe_ext".
import moe_ext.integrations.transformers  # noqa: F401
from moe_ext import ops
from moe_ext._counting import is_of_transformers
from moe_ext.checks import require, required
from moe_ext.distributed import expert_parameters
from moe_ext.experts import _Networks
from moe_ext.integrations._given_lora import GivenLoRA, give_lora
from moe_ext.integrations._packed.linear import PackedLinear
from moe_ext.integrations._transformers_experts import WEIGHT_NAMES, weight_names
from moe_ext.integrations._warnings import warn_once
from moe_ext.lora import LoRAAdapter, LoRAExperts, LoRAReport, add_lora, lora_experts
from moe_ext.lora._pairs import joined

try:
    import peft
    from peft.tuners.lora.layer import Linear as LinearLoRA
    from peft.tuners.lora.layer import ParamWrapper
    from peft.utils import SAFETENSORS_WEIGHTS_NAME, load_peft_weights
    from safetensors.torch import save_file

    from moe_ext.integrations._peft_linear import adapt_packed_linear

    _form = ParamWrapper._activate_lora
except (ImportError, AttributeError) as _error:
    raise ImportError(
        "moe_ext.integrations.peft needs the ParamWrapper of PEFT: pip install 'peft>=0.21'"
    ) from _error

__all__ = ["TESTED_VERSIONS", "load_adapter", "save_adapter"]

TESTED_VERSIONS: tuple[str, ...] = ("0.21.2",)
"""The versions of PEFT that the tests ran with."""

_PREFIX = "base_model.model."  # of all names in PEFT's files


# The forward pass of PEFT's models


@contextmanager
def _activate_lora(self: Any, active_adapters: list[str]) -> Iterator[None]:
    """Gives the active adapters of a ParamWrapper to the operator, or else forms W + B A."""
    names = [name for name in active_adapters if name in self.lora_A]
    module = self.get_base_layer()
    reason = _refusal(self, module, names) if names and _is_ours(module) else ""
    if reason is not None:
        if reason:
            name, kind = self.parameter_name, type(module).__name__
            warn_once(
                f"moe_ext.integrations.peft: PEFT forms W + B A of {name} in {kind}: {reason}"
            )
        with _form(self, active_adapters):
            yield
        return

    def form() -> AbstractContextManager[None]:
        return cast("AbstractContextManager[None]", _form(self, active_adapters))

    dtype = self.get_param().dtype
    pair = joined([_pair_of(self, name) for name in names], dtype)
    assert pair is not None
    with give_lora(module, self.parameter_name, GivenLoRA(pair, form)):
        yield


ParamWrapper._activate_lora = _activate_lora  # type: ignore[method-assign]
adapt_packed_linear()


def _is_ours(module: nn.Module) -> bool:
    """Returns whether a module uses the experts implementation "moe_ext"."""
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return is_of_transformers(module) and implementation == "moe_ext"


def _refusal(wrapper: Any, module: nn.Module, names: Sequence[str]) -> str | None:
    """Returns why the operator cannot take the adapters of a ParamWrapper; None if it can."""
    if wrapper.parameter_name not in WEIGHT_NAMES:
        return f"the operator has adapters of {', '.join(WEIGHT_NAMES)} alone"
    if is_parametrized(module, wrapper.parameter_name):
        return "it has another parametrization"
    parameter = wrapper.get_param()
    if isinstance(parameter, DTensor):
        return "it is sharded over ranks"
    if parameter.dim() != 3 or not parameter.is_floating_point() or parameter.itemsize < 2:
        return f"it has the shape {list(parameter.shape)} and the dtype {parameter.dtype}"
    for name in names:
        if name in wrapper.lora_variant or wrapper.lora_bias.get(name):
            return f"the adapter {name} has DoRA, a bias or another variant of LoRA"
        if not isinstance(wrapper.lora_dropout[name], nn.Identity):
            return f"the adapter {name} has dropout"
    return None


def _pair_of(wrapper: Any, name: str) -> ops.LoRA:
    """Returns A and B of a ParamWrapper in the orientation of the operator."""
    a, b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
    return ops.LoRA(*_from_peft(a, b, wrapper.num_experts), wrapper.scaling[name])


def _from_peft(a: Tensor, b: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Returns A [E, fan_in, r] and B [E, r, width] of the weights of PEFT's linear layers.

    PEFT has A as [E · r, fan_in], and B as [width, r · E]: the expert is the innermost index of B.
    """
    rank = a.shape[0] // num_experts
    # These two copies take half the time of a single one that reverses three dimensions.
    by_rank = b.mT.contiguous().view(rank, num_experts, b.shape[0])
    return a.reshape(num_experts, rank, a.shape[1]).mT, by_rank.transpose(0, 1).contiguous()


def _to_peft(pair: ops.LoRA) -> tuple[Tensor, Tensor]:
    """Undoes `_from_peft`."""
    a, b = pair.a.detach(), pair.b.detach()
    return a.mT.flatten(0, 1).contiguous(), b.permute(2, 1, 0).flatten(1).contiguous()


# Files

_Names = Callable[[str], str | None]


def save_adapter(
    model: nn.Module,
    folder: str | os.PathLike[str],
    adapter: str = "default",
    *,
    names: _Names | None = None,
    **config: Any,
) -> None:
    """Writes an adapter of a model's `moe_ext.LoRAExperts` as PEFT does, without its dropout.

    PEFT's adapters of the same name on linear layers, such as those of attention, are written too.
    ``PeftModel.from_pretrained(model of transformers, folder)`` reads the files.

    Args:
        model: a model on a single rank, or a PeftModel of it.
        folder: where ``adapter_model.safetensors`` and ``adapter_config.json`` are written.
        adapter: the name of the adapter.
        names: a function from the path of the `LoRAExperts` to that of the experts module in the
            model of transformers, such as the ``get`` of a dictionary. None: the path of the
            experts module that contains them, or else the same path.
        config: more options of PEFT's LoraConfig, such as ``task_type="CAUSAL_LM"``.

    Raises:
        ValueError: there is no such adapter, or its options differ between the layers. Or the
            experts do not have two layers, or are sharded over ranks. Or an adapter of PEFT is of
            another kind.
    """
    owner = "save_adapter"
    model = _without_peft(model)
    chosen = {p: e for p, e in lora_experts(model).items() if adapter in e.adapters}
    adapters = {name for module in lora_experts(model).values() for name in module.adapters}
    rule = f"be one of {', '.join(sorted(adapters)) or 'the adapters of the model, which has none'}"
    require(bool(chosen), f"{owner}: adapter", rule, adapter)
    rule = "have all experts on one rank"
    require(not expert_parameters(model), f"{owner}: model", rule, "experts of several ranks")
    path_of = names or _default_names(model)
    tensors, targets = {}, []
    options = set()
    for path, experts in chosen.items():
        made = cast(LoRAAdapter, experts.adapters[adapter])
        options.add((made.rank, made.alpha, made.rslora))
        target = required(path_of(path), f"{owner}: names", f"return a path for {path}")
        weights = _weights_of(owner, experts)
        for i, prefix in zip(made.layers, _wrappers(len(made.layers)), strict=True):
            pair = made.pair(i)
            assert pair is not None
            targets.append(f"{target}.{weights[i]}")
            for letter, value in zip("AB", _to_peft(pair), strict=True):
                tensors[f"{_PREFIX}{target}.{prefix}lora_{letter}.weight"] = value
    linear = _linear_layers(owner, model, adapter)
    for path, layer in linear.items():
        options.add((layer.r[adapter], layer.lora_alpha[adapter], layer.use_rslora[adapter]))
        for letter in "AB":
            weight = getattr(layer, f"lora_{letter}")[adapter].weight.detach().contiguous()
            tensors[f"{_PREFIX}{path}.lora_{letter}.weight"] = weight
    rule = "have one rank, alpha and rslora in all layers"
    require(len(options) == 1, f"{owner}: adapter", rule, sorted(options))
    ((rank, alpha, rslora),) = options
    described = peft.LoraConfig(
        **({"r": rank, "lora_alpha": alpha, "use_rslora": rslora} | config),
        target_modules=[*linear],
        target_parameters=targets,
        inference_mode=True,
    )
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_file(tensors, Path(folder, SAFETENSORS_WEIGHTS_NAME), metadata={"format": "pt"})
    described.save_pretrained(str(folder))


def load_adapter(
    model: nn.Module,
    folder: str | os.PathLike[str],
    adapter: str = "default",
    *,
    names: _Names | None = None,
    dtype: torch.dtype | None = None,
) -> LoRAReport:
    """Adds an adapter of PEFT's files to a model, and makes it the active one.

    The experts that the files have become `moe_ext.LoRAExperts`. The linear layers that they have,
    such as those of attention, get adapters of PEFT. Other parameters stay as they are. With a
    process group, each rank reads the matrices of its experts.

    Args:
        model: a model with `moe_ext.FeedForwardExperts` or `moe_ext.QuantizedExperts`, or a
            PeftModel of it.
        folder: a folder, or a name on the Hugging Face hub, that PEFT's ``save_pretrained`` or
            `save_adapter` wrote.
        adapter: the name of the new adapter.
        names: see `save_adapter`.
        dtype: see `moe_ext.LoRAExperts`.

    Returns:
        What is trained now; see `moe_ext.add_lora`.

    Raises:
        ValueError: the files have an option that `moe_ext.LoRAExperts` do not have, or tensors that
            belong to none of the model's experts or linear layers, or that do not fit them.
    """
    owner = "load_adapter"
    model = _without_peft(model)
    config = peft.LoraConfig.from_pretrained(str(folder))
    _require_plain(owner, config)
    tensors = load_peft_weights(str(folder), device="cpu")
    path_of = names or _default_names(model)
    by_target: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, value in tensors.items():
        target, _, rest = name.removeprefix(_PREFIX).rpartition(".lora_")
        prefix = "base_layer." if target.endswith(".base_layer") else ""
        by_target[target.removesuffix(".base_layer")][f"{prefix}lora_{rest}"] = value
    places = {path: path_of(path) for path in _paths_of_experts(model)}
    known = {target for target in places.values() if target is not None}
    linear = {
        target: by_target.pop(target)
        for target in [*by_target]
        if target not in known and _is_linear(model, target)
    }
    unknown = sorted({*by_target} - known)
    rule = f"have tensors of the experts at {', '.join(sorted(known)) or 'no path'}"
    rule += ", and of linear layers"
    require(not unknown, f"{owner}: folder", rule, ", ".join(unknown))
    layers = _layers_of(owner, config, {t: len(tensors) // 2 for t, tensors in by_target.items()})
    pairs_of_path = {
        path: _matrices(f"{owner}: {target}", model, path, by_target[target], layers, config.r)
        for path, target in places.items()
        if target in by_target
    }
    _check_linear(owner, model, linear, config.r, adapter)
    _add_to_linear(model, linear, config, adapter, dtype)
    try:
        report = add_lora(
            model,
            config.r,
            config.lora_alpha,
            rslora=config.use_rslora,
            layers=layers,
            adapter=adapter,
            dtype=dtype,
            where=lambda path: path in pairs_of_path,
            train_rest=True,
        )
    except Exception:
        for path in linear:
            cast(Any, model.get_submodule(path)).delete_adapter(adapter)
        raise
    for path, pairs in pairs_of_path.items():
        made = cast(LoRAExperts, model.get_submodule(path)).adapters[adapter]
        for name, value in pairs.items():
            made.get_parameter(name).detach().copy_(value)
    return report


def _without_peft(model: Any) -> nn.Module:
    """Returns the model in a PeftModel, or the model itself."""
    base: nn.Module = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    return base


def _linear_layers(owner: str, model: nn.Module, adapter: str) -> dict[str, Any]:
    """Returns PEFT's adapted layers by path, after a check that they are plain linear layers."""
    layers: dict[str, Any] = {}
    for path, module in model.named_modules():
        names = getattr(module, "adapter_layer_names", ())
        if not any(adapter in getattr(module, name, ()) for name in names):
            continue
        plain = isinstance(module, LinearLoRA)
        plain = plain and isinstance(module.get_base_layer(), nn.Linear | PackedLinear)
        plain = plain and not module.lora_variant.get(adapter) and not module.lora_bias.get(adapter)
        rule = "have LoRA of PEFT on a linear layer, without DoRA or a bias"
        require(plain, f"{owner}: {path}", rule, type(module).__name__)
        layers[path] = module
    return layers


def _is_linear(model: nn.Module, path: str) -> bool:
    """Returns whether there is a linear layer at a path, with adapters or without."""
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return False
    return isinstance(module, nn.Linear | PackedLinear | LinearLoRA)


def _check_linear(
    owner: str,
    model: nn.Module,
    linear: Mapping[str, Mapping[str, Tensor]],
    rank: int,
    adapter: str,
) -> None:
    """Requires that the matrices of linear layers fit them, and that the adapter is new."""
    for path, given in linear.items():
        module: Any = model.get_submodule(path)
        is_new = adapter not in getattr(module, "lora_A", ())
        require(is_new, f"{owner}: adapter", "be a new name", adapter)
        shapes = (rank, module.in_features), (module.out_features, rank)
        sizes = tuple(tuple(given[f"lora_{letter}.weight"].shape) for letter in "AB")
        rule = f"have A and B of shape {shapes[0]} and {shapes[1]}"
        require(shapes == sizes, f"{owner}: {path}", rule, f"{sizes[0]} and {sizes[1]}")


def _add_to_linear(
    model: nn.Module,
    linear: Mapping[str, Mapping[str, Tensor]],
    config: Any,
    adapter: str,
    dtype: torch.dtype | None,
) -> None:
    """Adds adapters of PEFT to linear layers, and makes them the active ones."""
    if not linear:
        return
    options = {"r": config.r, "lora_alpha": config.lora_alpha, "use_rslora": config.use_rslora}
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    described = peft.LoraConfig(target_modules=[*linear], **options)
    peft.inject_adapter_in_model(described, model, adapter)
    for parameter, was_trained in trained:  # PEFT freezes all others
        parameter.requires_grad_(was_trained)
    for path, given in linear.items():
        module: Any = model.get_submodule(path)
        module.set_adapter(adapter)
        for letter in "AB":
            layer = getattr(module, f"lora_{letter}")[adapter].to(dtype or torch.float32)
            layer.weight.detach().copy_(given[f"lora_{letter}.weight"])


def _matrices(
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
        for letter, value in zip("ab", _from_peft(a, b, total), strict=True):
            matrices[f"{letter}_{layer}"] = value[first:last]
    return matrices


def _require_plain(owner: str, config: Any) -> None:
    """Raises ValueError for options of PEFT that change more than A, B and the scale."""
    wanted = {
        "use_dora": False,
        "lora_bias": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": None,
        "bias": "none",
    }
    for name, value in wanted.items():
        given = getattr(config, name, value)
        require(given == value, f"{owner}: {name} of adapter_config.json", f"be {value}", given)
    rule = "have target_parameters"
    require(bool(config.target_parameters), f"{owner}: adapter_config.json", rule, "none")


def _layers_of(owner: str, config: Any, sizes: Mapping[str, int]) -> list[int]:
    """Returns the layers that all experts in the files have; sizes: the number of each target's."""
    kinds = {name.rpartition(".")[2] for name in config.target_parameters}
    rule = f"name {', '.join(WEIGHT_NAMES)}"
    require(kinds <= {*WEIGHT_NAMES}, f"{owner}: target_parameters", rule, sorted(kinds))
    layers = sorted({int(name == "down_proj") for name in kinds})
    rule = f"have {len(layers)} adapted parameters for all experts"
    require({*sizes.values()} <= {len(layers)}, f"{owner}: folder", rule, dict(sizes))
    return layers


def _wrappers(num_layers: int) -> list[str]:
    """Returns where the wrapper of each layer is in PEFT's nest: that of the last is outermost."""
    return ["base_layer.", ""][2 - num_layers :]


def _weights_of(owner: str, experts: LoRAExperts) -> list[str]:
    """Returns the names that transformers gives to the weights of experts."""
    rule = "have two layers, as the experts of transformers"
    require(experts.base.num_layers == 2, f"{owner}: experts", rule, experts.base.num_layers)
    return weight_names(experts.base.activation in ops.GATED_ACTIVATIONS)


def _default_names(model: nn.Module) -> _Names:
    """Returns the function that maps experts to the module of transformers that contains them."""

    def path_of(path: str) -> str:
        parent, _, _ = path.rpartition(".")
        return parent if parent and is_of_transformers(model.get_submodule(parent)) else path

    return path_of


def _paths_of_experts(model: nn.Module) -> list[str]:
    """Returns the paths of the experts that have adapters or can have them."""
    adapted = lora_experts(model)
    paths = [path for path, module in model.named_modules() if isinstance(module, _Networks)]
    return [*adapted, *(path for path in paths if path.rpartition(".")[0] not in adapted)]
