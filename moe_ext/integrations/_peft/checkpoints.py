"""`PeftModel.save_pretrained` and `load_adapter` for models that also have `LoRAExperts`.

PEFT alone would leave out the adapters of experts, such as in the checkpoints of `Trainer`.
"""

from __future__ import annotations

import os
import warnings
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any

import peft
from peft.utils import SAFETENSORS_WEIGHTS_NAME, load_peft_weights
from safetensors.torch import load_file, save

from moe_ext.checks import require
from moe_ext.files import atomic_file
from moe_ext.integrations._peft.files import (
    AdapterTensors,
    by_target,
    default_names,
    matrices_of_files,
    paths_of_experts,
    set_matrices,
    tensors_of_experts,
)
from moe_ext.lora import lora_experts

__all__ = ["keep_experts_in_files"]

_save_pretrained = peft.PeftModel.save_pretrained
_signature = signature(_save_pretrained)
_load_adapter = peft.PeftModel.load_adapter


def keep_experts_in_files() -> None:
    """Lets PEFT's models write and read the adapters of `LoRAExperts` with their own."""
    peft.PeftModel.save_pretrained = _save  # type: ignore[method-assign]
    peft.PeftModel.load_adapter = _load  # type: ignore[method-assign]


@wraps(_save_pretrained)
def _save(self: Any, *args: Any, **options: Any) -> None:
    call = _signature.bind(self, *args, **options)
    call.apply_defaults()
    given = call.arguments
    adapters = _adapters_of_experts(self, given["selected_adapters"], given["safe_serialization"])
    _save_pretrained(self, *args, **options)
    for adapter, (tensors, targets, _) in adapters.items() if given["is_main_process"] else ():
        folder = Path(given["save_directory"], "" if adapter == "default" else adapter)
        path = folder / SAFETENSORS_WEIGHTS_NAME
        with atomic_file(path) as file:
            file.write(save(load_file(path) | tensors, metadata={"format": "pt"}))
        config = peft.LoraConfig.from_pretrained(str(folder))
        config.target_parameters = [*(config.target_parameters or ()), *targets]
        config.save_pretrained(str(folder))


def _adapters_of_experts(
    model: Any, selected: list[str] | None, safe_serialization: bool
) -> dict[str, AdapterTensors]:
    """Returns the adapters of experts that belong into the files, after all checks."""
    owner, base = "save_pretrained", model.get_base_model()
    experts = lora_experts(base)
    names = dict.fromkeys(name for module in experts.values() for name in module.adapters)
    if selected is not None:
        names = {name: None for name in names if name in selected}
    adapters = {}
    for adapter in names:
        rule = f"have an adapter of PEFT named {adapter}, as its experts have"
        require(adapter in model.peft_config, f"{owner}: model", rule, [*model.peft_config])
        adapters[adapter] = tensors_of_experts(owner, base, adapter, default_names(base))
        config = model.peft_config[adapter]
        own = (config.r, config.lora_alpha, config.use_rslora)
        rule = f"have the rank, alpha and rslora of PEFT's adapter {adapter}, {own}"
        require(
            adapters[adapter].options == {own}, f"{owner}: experts", rule, adapters[adapter].options
        )
        require(safe_serialization, f"{owner}: safe_serialization", "be True", safe_serialization)
    return adapters


@wraps(_load_adapter)
def _load(
    self: Any, model_id: str | os.PathLike[str], adapter_name: str, *args: Any, **options: Any
) -> Any:
    base = self.get_base_model()
    paths = paths_of_experts(base)
    if not paths:
        return _load_adapter(self, model_id, adapter_name, *args, **options)
    hub, _ = self._split_kwargs(dict(options))
    config = peft.PeftConfig.from_pretrained(str(model_id), **hub)
    groups = by_target(load_peft_weights(str(model_id), device="cpu", **hub))
    path_of = default_names(base)
    places = {path: path_of(path) for path in paths}
    owner = "PeftModel.load_adapter"
    _, matrices = matrices_of_files(owner, base, config, groups, places)
    adapted = {path: [*module.adapters] for path, module in lora_experts(base).items()}
    for path in matrices:
        rule = f"have the adapter {adapter_name}, as the files do (load_adapter of "
        rule += "moe_ext.integrations.peft adds it, and add_lora)"
        names = adapted.get(path, [])
        require(adapter_name in names, f"{owner}: {path}", rule, names)
    if not matrices and any(adapter_name in names for names in adapted.values()):
        warnings.warn(
            f"{owner}: {model_id} has no adapters of experts; those of the model stay as they are",
            stacklevel=2,
        )
    result = _load_adapter(self, model_id, adapter_name, *args, **options)
    set_matrices(base, adapter_name, matrices)
    return result
