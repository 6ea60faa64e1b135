"""PEFT's LoRA on linear layers whose weight is packed."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners import tuners_utils
from peft.tuners.lora import LoraModel
from peft.tuners.lora.layer import Linear as LinearLoRA

from moe_ext.checks import refuse, require_one_of
from moe_ext.integrations._packed.linear import PackedLinear

__all__ = ["PackedLinearLoRA", "adapt_packed_linear"]

_create_module = LoraModel._create_new_module
_check_merge_allowed = LoraModel._check_merge_allowed
_include_all_linear = tuners_utils._maybe_include_all_linear_layers

# Others change the weight of the layer too.
_INITIAL = (True, False, "gaussian", "orthogonal", "eva")


class PackedLinearLoRA(LinearLoRA):  # type: ignore[misc, unused-ignore]
    """PEFT's LoRA on a `PackedLinear`, whose weight PEFT must not change."""

    @property
    def lora_variants(self) -> dict[tuple[str, ...], None]:
        """The variants of LoRA that can be chosen: no other one, such as DoRA."""
        return {(): None}

    def update_layer(
        self, adapter_name: str, r: int, lora_alpha: int, config: Any, **options: Any
    ) -> None:
        """Adds an adapter.

        Raises:
            ValueError: the initial values of the adapter would change the weight of the layer.
        """
        name = "LoraConfig: init_lora_weights for a packed linear layer"
        require_one_of(name, _INITIAL, config.init_lora_weights)
        super().update_layer(adapter_name, r, lora_alpha, config, **options)

    # PEFT would warn of an unknown class, and dequantize the weight to see its device.

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        return module.in_features, module.out_features

    def _get_base_layer_device_and_dtype(self, layer: Any) -> tuple[torch.device, torch.dtype]:
        return layer.qweight.device, layer.dtype

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Raises ValueError: `save` merges when it writes files."""
        rule = "be a float to merge adapters in memory (moe_ext.integrations.transformers.save "
        rule += "merges them into files)"
        layer: Any = self.get_base_layer()
        refuse("merge: weight of PackedLinear", rule, layer.weights[0].format)


def adapt_packed_linear() -> None:
    """Lets PEFT adapt packed linear layers, also with ``target_modules="all-linear"``."""
    LoraModel._create_new_module = staticmethod(_create)  # type: ignore[assignment]
    LoraModel._check_merge_allowed = _check_merge  # type: ignore[method-assign]
    tuners_utils._maybe_include_all_linear_layers = _include  # type: ignore[assignment]


def _create(config: Any, adapter: str, target: Any, **options: Any) -> Any:
    if isinstance(target, PackedLinear):
        return PackedLinearLoRA(target, adapter, config=config, **options)
    return _create_module(config, adapter, target, **options)


def _check_merge(self: Any) -> None:
    """Refuses to merge before PEFT merges the layers that are floats."""
    _check_merge_allowed(self)
    for module in self.modules():
        if isinstance(module, PackedLinearLoRA):
            module.merge()


def _include(config: Any, model: Any) -> Any:
    given = getattr(config, "target_modules", None)
    config = _include_all_linear(config, model)
    if getattr(config, "target_modules", None) is not given:  # they were "all-linear"
        last = getattr(model, "get_output_embeddings", lambda: None)()
        config.target_modules |= {
            path
            for path, module in model.named_modules()
            if isinstance(module, PackedLinear)
            and module is not last
            and not path.endswith(".base_layer")
        }
    return config
