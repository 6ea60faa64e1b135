"""Loads packed checkpoints into models of transformers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from moe_ext._build import empty_cache
from moe_ext._panel_parameters import NO_INTEGERS, Arithmetic
from moe_ext.checks import refuse, require
from moe_ext.formats import FormatName
from moe_ext.integrations._packed.checkpoint import ModuleTensors, open_checkpoint
from moe_ext.integrations._packed.describe import describe
from moe_ext.integrations._packed.errors import errors_of_function, errors_of_weight
from moe_ext.integrations._packed.quantizer import PackedConfig
from moe_ext.integrations._transformers.activation import activation_of
from moe_ext.integrations._transformers.attention import GROUPED_MODELS
from moe_ext.quantized import QuantizedExperts

__all__ = ["load"]


@errors_of_function("load")
def load(
    name_or_folder: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    config: Any = None,
    arithmetic: Arithmetic = "exact",
    packed_linear: bool | FormatName = False,
    quiet: bool = False,
    **options: Any,
) -> Any:
    """Opens a checkpoint as a model of transformers on the CPU whose experts stay packed.

    The checkpoint is a folder of safetensors files or a GGUF file:

    - gpt-oss in MXFP4,
    - FP8 in blocks of 128 x 128 or with one scale for each row, as of DeepSeek-V3 and Qwen3,
    - compressed-tensors: "pack-quantized" with 4 bits, "mxfp4-pack-quantized", "int-quantized" and
      "float-quantized" with 8 bits,
    - GGUF of qwen2moe, qwen3moe, gpt-oss, olmoe, and deepseek2 with `config`.

    The experts become `moe_ext.QuantizedExperts`, frozen, with the bytes of the files. With
    ``packed_linear``, the linear layers become `PackedLinear`, frozen too. All other weights are
    dequantized. The function reads one tensor at a time: the peak of memory is the
    model plus the largest tensor. At the end, it prints a line to stderr; see `describe`.

    Args:
        name_or_folder: the folder, the GGUF file, or a name of the hub, such as
            ``openai/gpt-oss-20b`` or ``owner/model/file.gguf``, which is downloaded.
        dtype: the dtype of the other weights and of the biases of experts.
        config: the configuration of transformers, or a folder with config.json. None: the
            config.json of the checkpoint, or else the fields of the GGUF file.
        arithmetic: of the experts and the packed linear layers; see `moe_ext.QuantizedExperts`. FP8
            has no integer arithmetic.
        packed_linear: True: linear layers that are packed in the files stay packed. A format of
            `moe_ext.formats.quantize`: the other linear layers are quantized in this format, too.
            Then a step of `generate` reads fewer bytes. Layers with fewer than 16 outputs, and
            layers whose weight is tied to another one, stay floats. PEFT can add LoRA to packed
            layers after ``import moe_ext.integrations.peft``.
        quiet: print nothing.
        options: arguments of transformers' ``from_pretrained``, such as ``attn_implementation``.
            The default of ``attn_implementation`` is "moe_ext" for mixtral, qwen2_moe and
            qwen3_moe (see `attention_forward`), and that of transformers for other models.

    Returns:
        The model, in evaluation mode.

    Raises:
        ValueError: a file is incomplete, a tensor is missing or has another shape, or the
            quantization is unknown.
    """
    checkpoint = open_checkpoint(name_or_folder, config)
    linear = checkpoint.packed_linear(packed_linear)
    formats = {weight.format for own in checkpoint.experts.values() for weight in own.weights}
    formats |= {tensor.layout.format for tensor in linear.values() if tensor.layout}
    for format in sorted(NO_INTEGERS & formats):
        rule = f"be exact for weights in {format}"
        require(arithmetic == "exact", "arithmetic", rule, arithmetic)
    if checkpoint.config.model_type in GROUPED_MODELS:
        options.setdefault("attn_implementation", "moe_ext")
    unread = {tensor.name for tensor in linear.values()}
    dense = {name: read for name, read in checkpoint.dense.items() if name not in unread}
    model, info = type(checkpoint.skeleton).from_pretrained(
        None,
        config=checkpoint.config,
        state_dict={name: _Lazy(read, dtype) for name, read in dense.items()},
        quantization_config=PackedConfig([*checkpoint.experts], [*linear]),
        dtype=dtype,
        experts_implementation="moe_ext",
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # the error is below
        **options,
    )
    missing = sorted(info["missing_keys"])
    require(not missing, str(checkpoint.path), "have all weights", f"no {missing}")
    for name, actual, expected in sorted(info["mismatched_keys"]):
        refuse(name, f"have shape {tuple(expected)}", tuple(actual))
    for name, tensors in checkpoint.experts.items():
        skeleton = checkpoint.skeleton.get_submodule(name)
        with errors_of_weight(name):
            model.get_submodule(name).packed = _pack(tensors, skeleton, dtype, arithmetic)
    for name, tensor in linear.items():
        layer = model.get_submodule(name)
        layer.arithmetic = arithmetic
        with errors_of_weight(name):
            layer.set_weight(tensor.pack())
    empty_cache()  # the tensors of the files that were packed
    quantizer = model.hf_quantizer
    checkpoint.dense.clear()
    checkpoint.skeleton = None
    quantizer.checkpoint = checkpoint
    quantizer.dtype = dtype
    quantizer.fallbacks = checkpoint.fallbacks
    quantizer.unused = checkpoint.unused
    model.name_or_path = model.config._name_or_path = str(checkpoint.path)
    if (checkpoint.path / "generation_config.json").is_file():
        generation = transformers.GenerationConfig.from_pretrained(checkpoint.path)
        model.generation_config = generation
    if not quiet:
        print(describe(model), file=sys.stderr)
    return model


def _pack(
    tensors: ModuleTensors, module: nn.Module, dtype: torch.dtype, arithmetic: Arithmetic
) -> QuantizedExperts:
    """Reads and packs the experts of a module."""
    activation = activation_of(module)
    assert not isinstance(activation, str)
    biases = [bias.numbers(dtype).to(dtype) for bias in tensors.biases or ()]
    return QuantizedExperts(
        [weight.pack() for weight in tensors.weights],
        biases or None,
        activation=activation.name,
        activation_args=activation.args,
        arithmetic=arithmetic,
    )


class _Lazy:
    """A tensor that transformers' loader reads when it needs it."""

    def __init__(self, read: Callable[[torch.dtype], Tensor], dtype: torch.dtype) -> None:
        self._read = read
        self._dtype = dtype

    def __getitem__(self, _: object) -> Tensor:
        return self._read(self._dtype)
