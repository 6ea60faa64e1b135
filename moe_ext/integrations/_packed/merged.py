"""The weights of a model with its adapters merged, by the names that transformers gives them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moe_ext import ops
from moe_ext.checks import refuse, require
from moe_ext.experts import _Networks
from moe_ext.formats import PackedWeight
from moe_ext.integrations._packed.checkpoint import plain_config, skeleton_of
from moe_ext.integrations._packed.experts import PackedExperts
from moe_ext.integrations._packed.linear import PackedLinear
from moe_ext.integrations._peft.layers import (
    active_layers,
    has_variant,
    is_lora_of_linear,
    sum_of,
)
from moe_ext.integrations._transformers.experts import by_outputs, experts_modules, weight_names
from moe_ext.lora import LoRAExperts

__all__ = ["MergedExperts", "MergedModel"]

_PAIRS = torch.float32  # the dtype in which adapters are added to weights
_TIED = "be tied to {}, without adapters (or set config.tie_word_embeddings to False)"


class MergedExperts:
    """The experts of a `PackedExperts` with their active adapters merged, one expert at a time.

    Args:
        path: the path of the module.
        module: the module.
        plain: the module that transformers has in its place, on the meta device.

    Attributes:
        names: the names of the weights in transformers: of each layer.
        biases: the biases [E, out] of each layer; () without biases.
    """

    def __init__(self, path: str, module: PackedExperts, plain: nn.Module) -> None:
        own = module.packed
        self._lora: LoRAExperts | None = own if isinstance(own, LoRAExperts) else None
        base = own.base if isinstance(own, LoRAExperts) else own
        rule = "be QuantizedExperts or FeedForwardExperts, with adapters or without"
        known = isinstance(base, _Networks)
        require(known, path, rule, type(base).__name__)
        self._weights: tuple[Tensor | PackedWeight, ...] = tuple(base.weights)
        self.biases: tuple[Tensor, ...] = tuple(bias.detach() for bias in base.biases or ())
        self.plain: Any = plain
        self.num_experts: int = module.num_experts
        self.names: list[str] = weight_names(self.plain.has_gate)

    @property
    def num_layers(self) -> int:
        """The number of weights of an expert."""
        return len(self._weights)

    @property
    def is_adapted(self) -> bool:
        """Whether there is an active adapter."""
        return any(self.pair(layer) is not None for layer in range(self.num_layers))

    def packed(self, layer: int) -> PackedWeight | None:
        """Returns the packed weights of a layer, without adapters; None if they are floats."""
        weight = self._weights[layer]
        return None if isinstance(weight, Tensor) else weight

    def pair(self, layer: int, experts: slice = slice(None)) -> ops.LoRA | None:
        """Returns A [E, in, r], B [E, r, out] and the scale of the sum of the active adapters."""
        if self._lora is None:
            return None
        return _detached(self._lora._pair(layer, _PAIRS, experts))

    def change(self, layer: int, expert: int) -> Tensor | None:
        """Returns what the adapters add to the weight [out, in] of an expert; None if nothing."""
        pair = self.pair(layer, slice(expert, expert + 1))
        if pair is None:
            return None
        change = pair.scale * (pair.a[0] @ pair.b[0]).mT
        return change if bool(change.any()) else None

    def weight(self, layer: int, expert: int) -> Tensor:
        """Returns the merged weight [out, in] of an expert in float32."""
        weight, change = self._weights[layer], self.change(layer, expert)
        if isinstance(weight, Tensor):
            own = weight.detach()[expert].mT.float()
        else:
            panels = weight.panels[expert : expert + 1]
            own = weight._replace(panels=panels).dequantize(torch.float32)[0]
        return own if change is None else own + change

    def parameter(self, key: str, dtype: torch.dtype) -> Tensor:
        """Returns a parameter of transformers' module in a dtype."""
        if key.endswith("_bias"):
            return self.biases[self.names.index(key.removesuffix("_bias"))].to(dtype)
        layer = self.names.index(key)
        whole = torch.empty(self.plain.get_parameter(key).shape, dtype=dtype)
        for expert, target in enumerate(by_outputs(self.plain, whole)):
            target.copy_(self.weight(layer, expert))
        return whole


class MergedModel:
    """A model of transformers, without the wrapper of PEFT.

    Attributes:
        model: the model.
        config: its configuration, without a quantization.
        skeleton: the model as transformers makes it, on the meta device.
        tensors: its tensors on the meta device, by name; each tied tensor once.
        experts: the packed experts, by the path of their module.
        linear: the paths of the layers with active adapters of PEFT.
    """

    def __init__(self, model: Any) -> None:
        self.model: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        config = getattr(model, "active_peft_config", None)
        self._learns_prompts: bool = getattr(config, "is_prompt_learning", False)
        rule = "be a model of transformers"
        is_known = hasattr(self.model, "config") and hasattr(self.model, "generation_config")
        require(is_known, "model", rule, type(model).__name__)
        self.config: Any = plain_config(self.model.config)
        self.skeleton: Any = skeleton_of(self.config)
        self.experts: dict[str, MergedExperts] = {
            path: MergedExperts(path, module, self.skeleton.get_submodule(path))
            for path, module in experts_modules(self.model).items()
            if isinstance(module, PackedExperts)
        }
        self._adapted: dict[str, Any] = active_layers(self.model)
        first: dict[int, str] = {}
        self.tensors: dict[str, Tensor] = {}
        self._tied: dict[str, str] = {}
        for name, tensor in self.skeleton.state_dict(keep_vars=True).items():
            if id(tensor) in first:
                self._tied[name] = first[id(tensor)]
            else:
                first[id(tensor)] = name
                self.tensors[name] = tensor
        for name, source in self._tied.items():
            own, tied = (self.weight(key, merge=False) for key in (name, source))
            is_tied = own.dtype == tied.dtype and torch.equal(own, tied)
            require(is_tied, name, _TIED.format(source), "other values")
        self.linear: list[str] = [*self._adapted]

    def require_mergeable(self) -> None:
        """Requires that all active adapters can be merged."""
        rule = "have no learned prompt, which cannot be merged into weights"
        require(not self._learns_prompts, "model", rule, "an adapter of PEFT that learns one")
        for name, source in self._tied.items():
            require(_path(name) not in self._adapted, name, _TIED.format(source), "adapters")
        for path in self.linear:
            self.pair(path)

    def owner(self, name: str) -> MergedExperts | None:
        """Returns the packed experts to which a tensor belongs; None for other tensors."""
        return self.experts.get(_path(name))

    def dense(self) -> Iterator[str]:
        """Yields the names of the tensors outside packed experts."""
        return (name for name in self.tensors if self.owner(name) is None)

    def packed_linear(self) -> set[str]:
        """Returns the names of the weights of packed linear layers."""
        return {
            name
            for name in self.dense()
            if name.endswith(".weight") and isinstance(self._layer(_path(name)), PackedLinear)
        }

    def pair(self, path: str) -> ops.LoRA | None:
        """Returns A [1, in, r], B [1, r, out] and the scale of a linear layer of PEFT."""
        layer = self._adapted.get(path)
        if layer is None:
            return None
        plain = is_lora_of_linear(layer)
        names = [name for name in layer.active_adapters if plain and name in layer.lora_A]
        variant = [name for name in names if has_variant(layer, name)]
        rule = "have LoRA of PEFT on a linear layer alone (call merge_and_unload before)"
        kind = f"{type(layer).__module__}.{type(layer).__name__}"
        require(plain and not variant, path, rule, variant or kind)
        return _detached(sum_of(layer, names, _PAIRS))

    def weight(self, name: str, merge: bool = True) -> Tensor:
        """Returns a tensor outside packed experts; in float32 if adapters are merged into it."""
        path, _, key = name.rpartition(".")
        module = self._layer(path)
        pair = self.pair(path) if merge and key == "weight" else None
        exact = pair is not None and isinstance(module, PackedLinear)
        value = module.dequantize(_PAIRS) if exact else getattr(module, key, None)
        if not isinstance(value, Tensor):
            refuse("model", f"have the weight {name}", "none")
        rule = "be a plain tensor"
        plain = not is_traceable_wrapper_subclass(value)
        require(plain, name, rule, type(value).__name__)
        value = value.detach()
        if pair is None:
            return value
        return value.to(_PAIRS) + pair.scale * (pair.a[0] @ pair.b[0]).mT

    def _layer(self, path: str) -> Any:
        """Returns the module at a path, without the adapters of PEFT around it."""
        module: Any = self._module(path)
        return module.get_base_layer() if hasattr(module, "get_base_layer") else module

    def _module(self, path: str) -> nn.Module:
        try:
            module: nn.Module = self.model.get_submodule(path)
        except AttributeError:
            rule = f"have the module {path}"
            raise ValueError(f"model must {rule}, got {type(self.model).__name__}") from None
        return module


def _detached(pair: ops.LoRA | None) -> ops.LoRA | None:
    return pair and pair._replace(a=pair.a.detach(), b=pair.b.detach())


def _path(name: str) -> str:
    return name.rpartition(".")[0]
