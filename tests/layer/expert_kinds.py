"""Float experts, packed experts and experts with adapters, with random weights."""

import re
from functools import partial

import torch
from torch import nn

from moe_ext import FeedForwardExperts, LoRAExperts, QuantizedExperts
from moe_ext.formats import FORMATS, PackedWeight

D, HIDDEN = 64, 128
OFFSETS = torch.tensor([0, 5, 5, 16, 20])
# Formats without a rule of rounding: the bytes of 256 numbers, and the places of their scales.
RANDOM = {
    "gguf_q4_k": (144, [slice(0, 2), slice(2, 4)]),
    "gguf_q6_k": (210, [slice(208, 210)]),
}


def make_experts(num_experts=4, d_model=D, hidden=HIDDEN, **options):
    """Makes float experts; their biases are random too."""
    options = {"activation": "swiglu", "bias": True} | options
    experts = FeedForwardExperts(num_experts, d_model, [hidden], **options)
    for bias in experts.biases or ():
        nn.init.normal_(bias)
    return experts


def make_packed(formats="mxfp4", num_experts=4, **options):
    if not isinstance(formats, str) or formats not in RANDOM:
        experts = make_experts(num_experts, **options)
        return QuantizedExperts.from_experts(experts, formats)
    weights = [random_weight(formats, num_experts, 256 * factor) for factor in (2, 1)]
    biases = [torch.randn(num_experts, 512), torch.randn(num_experts, 256)]
    return QuantizedExperts(weights, biases, activation="swiglu")


def random_weight(format, num_experts, outputs, inputs=256):
    """Makes a weight of a GGUF type that quantize does not write; the numbers are finite."""
    size, factors = RANDOM[format]
    blocks = torch.randint(256, (num_experts * outputs * inputs // 256, size), dtype=torch.uint8)
    for factor in factors:
        numbers = torch.rand(len(blocks), 1, dtype=torch.float16).mul_(2e-3)
        blocks[:, factor] = numbers.view(torch.uint8)
    blocks = blocks.view(num_experts, outputs, inputs // 256 * size)
    return PackedWeight.pack(blocks, format=format)


BASES = {"float": make_experts, "packed": partial(make_packed, ["mxfp4", "int8"])}


def shake(module):
    """Gives random numbers to the adapters, which start with B = 0."""
    for name, param in module.named_parameters():
        if re.search(r"adapters\.\w+\.[ab]_\d+$", name):
            nn.init.normal_(param.data, std=0.3)
    return module


def make_lora(kind="float", rank=3, alpha=6, dtype=None, num_experts=4, **options):
    """Adds adapters to float or packed experts."""
    base = BASES[kind](dtype=dtype, num_experts=num_experts)
    return shake(LoRAExperts(base, rank, alpha, **options))


def make_two_adapters(kind, **options):
    lora = make_lora(kind, **options)
    lora.add_adapter("second", 2, 4, layers=[0])
    return lora


# Functions that take num_experts.
KINDS = {format: partial(make_packed, format) for format in FORMATS} | {
    "adapters": partial(make_two_adapters, "float"),
    "adapters of packed experts": partial(make_two_adapters, "packed"),
    "adapters with a shared A": partial(make_two_adapters, "packed", shared_a=True),
}
