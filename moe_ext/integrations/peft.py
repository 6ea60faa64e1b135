"""PEFT's LoRA on the experts of transformers' models, computed by the operators of moe_ext.

``import moe_ext.integrations.peft`` changes how PEFT computes a model with
``LoraConfig(target_parameters=[...])`` and ``experts_implementation="moe_ext"``: the operator gets
the matrices A and B of the adapters, and W + B A is never formed. Other models do not change. What
the operator cannot compute is left to PEFT, with one warning for each reason.

The import also lets PEFT add LoRA to `moe_ext.integrations.transformers.PackedLinear`. Such a layer
has no DoRA or other variants, and its adapters cannot be merged in memory: use
`moe_ext.integrations.transformers.save`.

`save_adapter` and `load_adapter` exchange the adapters of `moe_ext.LoRAExperts` with PEFT's files,
together with those of PEFT on linear layers of the same model. After the import, a PeftModel whose
model has `moe_ext.LoRAExperts` writes and reads their adapters too, in ``save_pretrained`` and
``load_adapter``. So the checkpoints of ``Trainer`` are complete.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# Registers experts_implementation="moe_ext".
import moe_ext.integrations.transformers  # noqa: F401
from moe_ext.checks import require, require_dtype
from moe_ext.integrations._packed.linear import PackedLinear
from moe_ext.integrations._peft.files import (
    PREFIX,
    Names,
    by_target,
    default_names,
    matrices_of_files,
    paths_of_experts,
    set_matrices,
    tensors_of_experts,
)
from moe_ext.integrations._peft.layers import has_adapter, has_variant, is_lora_of_linear
from moe_ext.lora import LoRAReport, add_lora, lora_experts
from moe_ext.lora.models import _trained

try:
    import peft
    from peft.tuners.lora.layer import Linear as LinearLoRA
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import SAFETENSORS_WEIGHTS_NAME, load_peft_weights
    from safetensors.torch import save_file

    from moe_ext.integrations._peft.checkpoints import keep_experts_in_files
    from moe_ext.integrations._peft.forward import adapt_experts
    from moe_ext.integrations._peft.linear import adapt_packed_linear
except (ImportError, AttributeError) as _error:
    raise ImportError(
        "moe_ext.integrations.peft needs the ParamWrapper of PEFT: pip install 'peft>=0.21'"
    ) from _error

__all__ = ["TESTED_VERSIONS", "load_adapter", "save_adapter"]

TESTED_VERSIONS: tuple[str, ...] = ("0.21.2",)
"""The versions of PEFT that the tests ran with."""

adapt_experts()
adapt_packed_linear()
keep_experts_in_files()


def save_adapter(
    model: nn.Module,
    folder: str | os.PathLike[str],
    adapter: str = "default",
    *,
    names: Names | None = None,
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
            another kind, or has trained more than A and B.
    """
    owner = "save_adapter"
    configs, model = _configs(model), _without_peft(model)
    tensors, targets, options = tensors_of_experts(
        owner, model, adapter, names or default_names(model)
    )
    linear = _linear_layers(owner, model, adapter)
    known = {name for module in lora_experts(model).values() for name in module.adapters}
    known |= {*configs}
    rule = f"be one of {', '.join(sorted(known)) or 'the adapters of the model, which has none'}"
    require(bool(tensors or linear), f"{owner}: adapter", rule, adapter)
    if linear and adapter in configs:
        _require_plain(f"{owner}: {{}} of PEFT's adapter {adapter}", configs[adapter])
    for path, layer in linear.items():
        options.add((layer.r[adapter], layer.lora_alpha[adapter], layer.use_rslora[adapter]))
        for letter in "AB":
            weight = getattr(layer, f"lora_{letter}")[adapter].weight.detach().contiguous()
            tensors[f"{PREFIX}{path}.lora_{letter}.weight"] = weight
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
    names: Names | None = None,
    dtype: torch.dtype | None = None,
) -> LoRAReport:
    """Adds an adapter of PEFT's files to a model, and makes it the active one.

    The experts that the files have become `moe_ext.LoRAExperts`. The linear layers that they have,
    such as those of attention, get adapters of PEFT. Layers that the files do not have are computed
    without adapters. Other parameters stay as they are. With a
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
    require_dtype(owner, dtype)
    config: Any = peft.LoraConfig.from_pretrained(str(folder))
    _require_plain(f"{owner}: {{}} of adapter_config.json", config)
    groups = by_target(load_peft_weights(str(folder), device="cpu"))
    path_of = names or default_names(model)
    places = {path: path_of(path) for path in paths_of_experts(model)}
    known = {target for target in places.values() if target is not None}
    linear = {
        target: groups.pop(target)
        for target in [*groups]
        if target not in known and _is_linear(model, target)
    }
    unknown = sorted({*groups} - known)
    rule = f"have tensors of the experts at {', '.join(sorted(known)) or 'no path'}"
    rule += ", and of linear layers"
    require(not unknown, f"{owner}: folder", rule, ", ".join(unknown))
    layers, matrices = matrices_of_files(owner, model, config, groups, places)
    _check_linear(owner, model, linear, config.r)
    _require_new(owner, model, adapter)
    _add_to_linear(model, linear, config, adapter, dtype)
    report = LoRAReport((), {}, {})
    if matrices:
        report = add_lora(
            model,
            config.r,
            config.lora_alpha,
            rslora=config.use_rslora,
            layers=layers,
            adapter=adapter,
            dtype=dtype,
            where=lambda path: path in matrices,
            train_rest=True,
        )
    set_matrices(model, adapter, matrices)
    _activate(model, adapter)
    return report._replace(trained=_trained(model))


def _configs(model: Any) -> Mapping[str, Any]:
    """Returns the configurations of PEFT's adapters, by name."""
    configs: Mapping[str, Any] = getattr(model, "peft_config", {})
    return configs


def _without_peft(model: Any) -> nn.Module:
    """Returns the model in a PeftModel, or the model itself."""
    base: nn.Module = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    return base


def _linear_layers(owner: str, model: nn.Module, adapter: str) -> dict[str, Any]:
    """Returns PEFT's adapted layers by path, after a check that they are plain linear layers."""
    layers: dict[str, Any] = {}
    for path, module in model.named_modules():
        if not has_adapter(module, adapter):
            continue
        plain = is_lora_of_linear(module) and not has_variant(module, adapter)
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
    owner: str, model: nn.Module, linear: Mapping[str, Mapping[str, Tensor]], rank: int
) -> None:
    """Requires that the matrices of linear layers fit them."""
    for path, given in linear.items():
        module: Any = model.get_submodule(path)
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
        for letter in "AB":
            layer = getattr(module, f"lora_{letter}")[adapter].to(dtype or torch.float32)
            layer.weight.detach().copy_(given[f"lora_{letter}.weight"])


def _require_new(owner: str, model: nn.Module, adapter: str) -> None:
    """Requires that no part of the model has an adapter of this name, or merged ones."""
    experts = lora_experts(model).values()
    layers: list[Any] = [m for m in model.modules() if isinstance(m, BaseTunerLayer)]
    names = {name for module in experts for name in module.adapters}
    names |= {name for layer in layers for name in layer._get_available_adapters()}
    require(adapter not in names, f"{owner}: adapter", "be a new name", adapter)
    merged = any(module.merged for module in [*experts, *layers])
    require(not merged, f"{owner}: model", "have no merged adapters", "merged ones")


def _activate(model: nn.Module, adapter: str) -> None:
    """Makes an adapter the only active one, also where a layer does not have it."""
    for experts in lora_experts(model).values():
        experts.set_adapter(*(name for name in experts.adapters if name == adapter))
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            layer.set_adapter(adapter)


def _require_plain(name: str, config: Any) -> None:
    """Raises ValueError for options of PEFT that change more than A, B and the scale."""
    wanted = {
        "use_dora": False,
        "lora_bias": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": None,
        "trainable_token_indices": None,
        "bias": "none",
    }
    for option, value in wanted.items():
        given = getattr(config, option, value)
        require(given == value, name.format(option), f"be {value}", given)
