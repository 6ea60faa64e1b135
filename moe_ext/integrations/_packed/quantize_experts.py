"""Packs the experts of a float model of transformers."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from moe_ext.checks import require_one_of
from moe_ext.experts import FeedForwardExperts
from moe_ext.formats import FORMATS, FormatName
from moe_ext.integrations._packed.describe import describe
from moe_ext.integrations._packed.experts import PackedExperts
from moe_ext.integrations._packed.quantizer import PackedConfig, PackedQuantizer
from moe_ext.integrations._transformers.activation import activation_of
from moe_ext.integrations._transformers.experts import by_inputs, experts_modules, weight_names
from moe_ext.quantized import QuantizedExperts

__all__ = ["quantize_experts"]


def quantize_experts(
    model: nn.Module, format: FormatName, *, group: int | None = None, quiet: bool = False
) -> None:
    """Packs the experts of a float model of transformers in place, one module after the other.

    Experts that are packed already do not change. The float weights of a module are freed before
    the next module. The peak of memory is the model plus the packed experts of one module. At the
    end, a line is printed to stderr; see `describe`.

    Args:
        model: the model. Experts that cannot be packed stay as they are; the line says why.
        format, group: see `moe_ext.QuantizedExperts.from_experts`.
        quiet: print nothing.

    Raises:
        ValueError: the model has no experts, or the format is unknown or does not fit the weights.
            The modules before the one that does not fit are packed then.
    """
    require_one_of("quantize_experts: format", FORMATS, format)
    modules = experts_modules(model).items()
    names = [name for name, module in modules if not isinstance(module, PackedExperts)]
    del modules  # which would keep the float weights alive
    quantizer: Any = getattr(model, "hf_quantizer", None)
    if not isinstance(quantizer, PackedQuantizer):
        quantizer = PackedQuantizer(PackedConfig())
    for name in names:
        module = model.get_submodule(name)
        activation = activation_of(module)
        if isinstance(activation, str):
            quantizer.fallbacks[name] = activation
            model.hf_quantizer = quantizer
            continue
        keys = weight_names(module.has_gate)
        weights = [by_inputs(module, getattr(module, key).detach()) for key in keys]
        with torch.device("meta"):
            experts = FeedForwardExperts(
                weights[0].shape[0],
                weights[0].shape[1],
                [weights[1].shape[1]],
                activation=activation.name,
                activation_args=activation.args,
                bias=bool(module.has_bias),
                d_output=weights[1].shape[2],
            )
        for i, weight in enumerate(weights):
            setattr(experts, f"weight_{i}", nn.Parameter(weight, requires_grad=False))
            if module.has_bias:
                bias = getattr(module, f"{keys[i]}_bias").detach()
                setattr(experts, f"bias_{i}", nn.Parameter(bias, requires_grad=False))
        packed = QuantizedExperts.from_experts(experts, format, group=group)
        # Now, as a later module may have an error, and save_pretrained asks the quantizer.
        model.hf_quantizer = quantizer
        model.set_submodule(name, PackedExperts(module, packed))
        quantizer.fallbacks.pop(name, None)
        del module, experts, weights, weight
    if not quiet:
        print(describe(model), file=sys.stderr)
