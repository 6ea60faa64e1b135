"""The memory that a checkpoint will need, from its headers alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import get_layer_types_and_kwargs

from moe_ext._counting import experts_per_token
from moe_ext.checks import require_at_least, require_dtype, require_sizes
from moe_ext.formats import FormatName
from moe_ext.integrations._packed.checkpoint import Checkpoint, head_dim, open_checkpoint
from moe_ext.integrations._packed.errors import errors_of_function
from moe_ext.integrations._transformers.experts import experts_modules

__all__ = ["MemoryPlan", "memory_plan"]

_FLOAT = torch.float32.itemsize


@dataclass(frozen=True)
class MemoryPlan:
    """The bytes that a model will need; ``print`` shows them as a table.

    Attributes:
        experts: the packed experts.
        dense: the other weights, packed or not.
        kv_cache: the keys and values of a generation; 0 for training. The states of convolutions
            and of recurrent layers are not counted, because they do not grow with the tokens.
        lora: the adapters, in float32.
        optimizer: the gradients and the two moments of Adam, in float32.
        activations: an estimate. For a generation: the largest layer. For training: the inputs of
            all layers, which gradient checkpointing keeps, one layer, and the logits.
        advice: what to do if the model does not fit; "" if it fits or no memory was given.
    """

    experts: int
    dense: int
    kv_cache: int
    lora: int
    optimizer: int
    activations: int
    advice: str = ""

    @property
    def total(self) -> int:
        """The sum."""
        return sum(getattr(self, field.name) for field in fields(self) if field.name != "advice")

    def __str__(self) -> str:
        rows = [(field.name, getattr(self, field.name)) for field in fields(self)]
        sizes = [(name, size) for name, size in rows if name != "advice"]
        lines = [
            f"{name:<12}{size / 1e9:9.2f} GB" for name, size in [*sizes, ("total", self.total)]
        ]
        return "\n".join([*lines, *([self.advice] if self.advice else [])])


@errors_of_function("memory_plan")
def memory_plan(
    name_or_folder: str | Path,
    *,
    batch: int = 1,
    tokens: int = 2048,
    lora_rank: int = 0,
    memory: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
    config: Any = None,
    packed_linear: bool | FormatName = False,
) -> MemoryPlan:
    """Computes the memory that a checkpoint will need, without reading its weights.

    The bytes of weights, cache, adapters and optimizer are exact, those of activations an estimate.

    Args:
        name_or_folder, dtype, config, packed_linear: see `load`.
        batch: the number of sequences at a time.
        tokens: the number of tokens of a sequence, prompt and answer together.
        lora_rank: the rank of adapters on all experts and attention layers, to train them; 0: the
            model generates.
        memory: the bytes of the machine. If the model does not fit, the plan has an advice.

    Example:
        >>> print(memory_plan("path/to/model", batch=1, tokens=4096, memory=24e9))  # doctest: +SKIP
    """
    require_sizes("", batch=batch, tokens=tokens)
    require_sizes("", 0, lora_rank=lora_rank)
    require_dtype("memory_plan", dtype)
    if memory is not None:
        require_at_least(0, memory=memory)
    checkpoint = open_checkpoint(name_or_folder, config)

    weights = _weights(checkpoint, dtype, packed_linear)

    def with_usage(batch: int, tokens: int, lora_rank: int) -> MemoryPlan:
        return MemoryPlan(*weights, *_usage(checkpoint.skeleton, batch, tokens, lora_rank, dtype))

    plan = with_usage(batch, tokens, lora_rank)
    if memory is None or plan.total <= memory:
        return plan
    advice = f"does not fit in {memory / 1e9:.2f} GB: "
    if plan.experts + plan.dense > memory:
        advice += "the weights alone are larger; choose a checkpoint with fewer bits per weight"
        return replace(plan, advice=advice)

    def fits(**changed: int) -> bool:
        values = {"batch": batch, "tokens": tokens, "lora_rank": lora_rank, **changed}
        return with_usage(**values).total <= memory

    largest = {
        name: _largest(value, lambda number, name=name: fits(**{name: number}))  # type: ignore[misc]
        for name, value in {"batch": batch, "tokens": tokens, "lora_rank": lora_rank}.items()
    }
    choices = [f"{name}={value}" for name, value in largest.items() if value > 0]
    if choices:
        return replace(plan, advice=f"{advice}it fits with {' or '.join(choices)}")
    return replace(plan, advice=f"{advice}make batch, tokens and lora_rank smaller together")


def _largest(value: int, fits: Callable[[int], bool]) -> int:
    """Returns the largest number in (0, value) that fits, by bisection; 0 without one."""
    low, high = 0, value
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _weights(
    checkpoint: Checkpoint, dtype: torch.dtype, packed_linear: bool | FormatName
) -> tuple[int, int]:
    """Returns the bytes of the packed experts and of the other weights."""
    skeleton = checkpoint.skeleton
    experts = 0
    for name, tensors in checkpoint.experts.items():
        weights = [weight.layout().shape(weight.num_experts()[0]) for weight in tensors.weights]
        experts += sum(prod(shape) for shape in weights)
        module = skeleton.get_submodule(name)
        biases = [p for key, p in module.named_parameters() if key.endswith("_bias")]
        experts += sum(bias.numel() * dtype.itemsize for bias in biases)
    packed = tuple(f"{name}." for name in checkpoint.experts)
    linear = {
        f"{path}.weight": prod(tensor.layout.shape(1))
        for path, tensor in checkpoint.packed_linear(packed_linear).items()
        if tensor.layout
    }
    dense = {
        id(parameter): linear.get(name, parameter.numel() * dtype.itemsize)
        for name, parameter in skeleton.named_parameters()
        if not packed or not name.startswith(packed)
    }
    return experts, sum(dense.values())


def _usage(
    skeleton: Any, batch: int, tokens: int, lora_rank: int, dtype: torch.dtype
) -> tuple[int, int, int, int]:
    """Returns the bytes of the cache, the adapters, the optimizer and the activations."""
    adapters = _lora_numbers(skeleton, lora_rank)
    cached = 0 if lora_rank else batch * _cached_numbers(skeleton, tokens)
    activations = _activations(skeleton, batch, tokens, lora_rank > 0, dtype)
    return cached * dtype.itemsize, adapters * _FLOAT, 3 * adapters * _FLOAT, activations


def _cached_numbers(skeleton: Any, tokens: int) -> int:
    """Returns the number of keys and values of a sequence in a cache."""
    config = skeleton.config.get_text_config()
    heads = config.num_key_value_heads or config.num_attention_heads
    if hasattr(config, "kv_lora_rank"):  # DeepSeek: the latent vector, and a key for the position
        size = config.kv_lora_rank + config.qk_rope_head_dim
    else:
        size = 2 * heads * head_dim(config)
    lengths: list[int] = []
    for kind, options in zip(*get_layer_types_and_kwargs(config), strict=True):
        if "sliding_window" in options:  # the cache leaves out the next token
            lengths.append(min(tokens, int(options["sliding_window"]) - 1))
        elif not re.search("linear|conv|mamba|dummy", kind):
            lengths.append(tokens)
    return sum(lengths) * int(size)


def _lora_numbers(skeleton: Any, rank: int) -> int:
    """Returns the number of parameters of adapters on all experts and attention layers."""
    sizes = sum(
        module.in_features + module.out_features
        for name, module in skeleton.named_modules()
        if isinstance(module, nn.Linear) and "attn" in name
    )
    for module in experts_modules(skeleton).values():
        weights = [p for p in module.parameters(recurse=False) if p.dim() == 3]
        sizes += sum(len(weight) * (weight.shape[1] + weight.shape[2]) for weight in weights)
    return rank * sizes


def _activations(skeleton: Any, batch: int, tokens: int, trains: bool, dtype: torch.dtype) -> int:
    config = skeleton.config.get_text_config()
    rows, d = batch * tokens, config.hidden_size
    k = experts_per_token(skeleton) or 1
    widths = [
        sum(p.shape[1] + p.shape[2] for p in module.parameters() if p.dim() == 3)
        for module in experts_modules(skeleton).values()
    ]
    attention = 4 * config.num_attention_heads * head_dim(config)
    layer = rows * (attention + 6 * d + k * max(widths)) * dtype.itemsize
    vocab = config.vocab_size
    if not trains:
        return int(layer + batch * vocab * _FLOAT)
    inputs = config.num_hidden_layers * rows * d * dtype.itemsize
    logits = rows * vocab * (dtype.itemsize + 2 * _FLOAT)
    return int(inputs + 2 * layer + logits)
