"""The layers of PEFT in a model, and their A and B; works without PEFT too."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from moe_ext import ops
from moe_ext.integrations._packed.linear import PackedLinear
from moe_ext.lora._pairs import joined

__all__ = [
    "active_layers",
    "from_peft",
    "has_adapter",
    "has_variant",
    "is_lora_of_linear",
    "sum_of",
    "to_peft",
]


def active_layers(model: nn.Module) -> dict[str, Any]:
    """Returns the layers with active adapters that are neither disabled nor merged, by path."""
    peft: Any = sys.modules.get("peft")
    if peft is None:
        return {}
    return {
        path: layer
        for path, layer in model.named_modules()
        if isinstance(layer, peft.tuners.tuners_utils.BaseTunerLayer)
        and not (layer.disable_adapters or layer.merged)
        and any(has_adapter(layer, name) for name in layer.active_adapters)
    }


def has_adapter(module: nn.Module, adapter: str) -> bool:
    """Returns whether a module is a layer of PEFT with an adapter of this name."""
    names = getattr(module, "adapter_layer_names", ())
    return any(adapter in getattr(module, name, ()) for name in names)


def is_lora_of_linear(layer: Any) -> bool:
    """Returns whether a layer of PEFT is LoRA on a linear layer, which may be packed."""
    kind = sys.modules["peft"].tuners.lora.layer.Linear
    return isinstance(layer, kind) and isinstance(layer.get_base_layer(), nn.Linear | PackedLinear)


def has_variant(layer: Any, adapter: str) -> bool:
    """Returns whether LoRA has more than A, B and the scale, such as DoRA or a bias."""
    return adapter in layer.lora_variant or bool(layer.lora_bias.get(adapter))


def sum_of(layer: Any, adapters: Iterable[str], dtype: torch.dtype) -> ops.LoRA | None:
    """Returns A [E, in, r], B [E, r, out] and the scale of the sum of adapters; None without any.

    The layer is LoRA on the experts of transformers or on a linear layer, where E is 1.
    """
    pairs = []
    for name in adapters:
        a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
        if hasattr(layer, "num_experts"):
            a, b = from_peft(a, b, layer.num_experts)
        else:
            a, b = a.mT[None], b.mT[None]
        pairs.append(ops.LoRA(a, b, layer.scaling[name]))
    return joined(pairs, dtype)


def from_peft(a: Tensor, b: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Returns A [E, fan_in, r] and B [E, r, width] of the weights of PEFT's linear layers.

    PEFT has A as [E · r, fan_in], and B as [width, r · E]: the expert is the innermost index of B.
    """
    rank = a.shape[0] // num_experts
    # These two copies take half the time of a single one that reverses three dimensions.
    by_rank = b.mT.contiguous().view(rank, num_experts, b.shape[0])
    return a.reshape(num_experts, rank, a.shape[1]).mT, by_rank.transpose(0, 1).contiguous()


def to_peft(pair: ops.LoRA) -> tuple[Tensor, Tensor]:
    """Undoes `from_peft`."""
    a, b = pair.a.detach(), pair.b.detach()
    return a.mT.flatten(0, 1).contiguous(), b.permute(2, 1, 0).flatten(1).contiguous()
