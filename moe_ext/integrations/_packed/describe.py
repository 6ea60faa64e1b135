"""Describes the experts of a model of transformers in a line."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from moe_ext.formats import PackedWeight
from moe_ext.integrations._packed.experts import PackedExperts
from moe_ext.integrations._packed.linear import PackedLinear
from moe_ext.integrations._transformers.experts import experts_modules

__all__ = ["describe"]


def describe(model: nn.Module) -> str:
    """Returns a line about the experts of a model of transformers.

    The line has the number of layers and experts, the formats and bytes, and the number of trained
    parameters. It also has the reason for each layer that is not packed, and the tensors of the
    checkpoint that the model does not use.
    """
    modules = experts_modules(model)
    owners = [module for module in modules.values() if isinstance(module, PackedExperts)]
    packed = [owner.quantized for owner in owners if owner.quantized is not None]
    counts = " or ".join(sorted({str(module.num_experts) for module in modules.values()}))
    formats = Counter("/".join({w.format: 0 for w in module.weights}) for module in packed)
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    linear = [weight for layer in layers for weight in layer.weights]
    weights = [weight for module in packed for weight in module.weights]
    panels = {id(weight.panels) for weight in [*weights, *linear]}
    plain = [p for p in model.parameters() if id(p) not in panels]
    dtypes = Counter(str(p.dtype).removeprefix("torch.") for p in plain)
    trained = sum(p.numel() for p in plain if p.requires_grad)
    own = Counter(weight.format for weight in linear)
    quantizer = getattr(model, "hf_quantizer", None)
    fallbacks = getattr(quantizer, "fallbacks", {})
    unused = getattr(quantizer, "unused", [])
    parts = [
        f"{len(modules)} layer{'s' * (len(modules) > 1)} of {counts} experts",
        f"packed: {_counted(formats, weights)}",
        *([f"packed linear layers: {_counted(own, linear)}"] if linear else []),
        f"other weights: {sum(p.nbytes for p in plain):,} bytes in {' and '.join(dtypes)}",
        f"trained: {trained:,} parameters",
        f"not packed: {_grouped(fallbacks) or 'none'}",
    ]
    if unused:
        parts.append(f"not used: {len(unused)} tensors of the checkpoint, such as {unused[0]}")
    return f"{type(model).__name__}: {'; '.join(parts)}"


def _counted(formats: Counter[Any], weights: list[PackedWeight]) -> str:
    """Formats how many modules have each format, and the bytes of their weights."""
    panels = {id(weight.panels): weight.panels.nbytes for weight in weights}
    counts = ", ".join(f"{count} in {name}" for name, count in formats.items())
    return f"{counts or 'none'} ({sum(panels.values()):,} bytes)"


def _grouped(reasons: dict[str, str]) -> str:
    """Formats the reason of each module, once for each reason."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return ", ".join(
        f"{own[0]}{f' and {len(own) - 1} more' * (len(own) > 1)} ({reason})"
        for reason, own in names.items()
    )
