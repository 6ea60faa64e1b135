"""Loads packed checkpoints into models of transformers, and packs the experts of float models."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from moe_ext._packed_weights import NO_INTEGERS, Arithmetic
from moe_ext.checks import require, require_one_of
from moe_ext.experts import FeedForwardExperts
from moe_ext.formats import FORMATS, FormatName, PackedWeight
from moe_ext.integrations._packed.checkpoint import Checkpoint, ModuleTensors, open_checkpoint
from moe_ext.integrations._packed.errors import errors_of_function, errors_of_weight
from moe_ext.integrations._packed.experts import PackedExperts
from moe_ext.integrations._packed.linear import PackedLinear
from moe_ext.integrations._transformers_activation import activation_of
from moe_ext.integrations._transformers_attention import GROUPED_MODELS
from moe_ext.integrations._transformers_experts import experts_modules, weight_names
from moe_ext.quantized import QuantizedExperts

__all__ = ["describe", "load", "quantize_experts"]


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
            layers whose weight is tied to another one, stay floats. PEFT cannot add adapters to
            packed layers.
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
        quantization_config=_PackedConfig([*checkpoint.experts], [*linear]),
        dtype=dtype,
        experts_implementation="moe_ext",
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # the error is below
        **options,
    )
    missing = sorted(info["missing_keys"])
    require(not missing, str(checkpoint.path), "have all weights", f"no {missing}")
    for name, actual, expected in sorted(info["mismatched_keys"]):
        require(False, name, f"have shape {tuple(expected)}", tuple(actual))
    for name, tensors in checkpoint.experts.items():
        skeleton = checkpoint.skeleton.get_submodule(name)
        with errors_of_weight(name):
            model.get_submodule(name).packed = _pack(tensors, skeleton, dtype, arithmetic)
    for name, tensor in linear.items():
        layer = model.get_submodule(name)
        layer.arithmetic = arithmetic
        with errors_of_weight(name):
            layer.set_weight(tensor.pack())
    quantizer = model.hf_quantizer
    checkpoint.dense.clear()
    checkpoint.skeleton = None
    quantizer.checkpoint = checkpoint
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


@register_quantization_config("moe_ext")
class _PackedConfig(QuantizationConfigMixin):
    """Names the experts modules and linear layers that transformers' loader leaves out."""

    def __init__(self, experts: Sequence[str] = (), linear: Sequence[str] = ()) -> None:
        self.quant_method = "moe_ext"  # type: ignore[assignment]
        self.experts = experts
        self.linear = linear


@register_quantizer("moe_ext")
class _PackedQuantizer(HfQuantizer):
    """Tells transformers what it can do with a model that has packed experts.

    Attributes:
        checkpoint: the checkpoint of the model; None if its experts were float.
        fallbacks: the reason for each experts module that is not packed.
        unused: the tensors of the checkpoint that the model does not have.
    """

    checkpoint: Checkpoint | None = None
    quantization_config: _PackedConfig

    def __init__(self, quantization_config: Any, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self.fallbacks: dict[str, str] = {}
        self.unused: list[str] = []

    def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        for name in self.quantization_config.experts:
            model.set_submodule(name, PackedExperts(model.get_submodule(name)))
        for name in self.quantization_config.linear:
            model.set_submodule(name, PackedLinear(model.get_submodule(name)))
        return model

    def is_serializable(self) -> bool:
        """Returns False: `save` writes the model."""
        transformers.utils.logging.get_logger("transformers").warning(
            "save_pretrained: the model has packed experts; call "
            "moe_ext.integrations.transformers.save(model, folder)"
        )
        return False

    @property
    def is_trainable(self) -> bool:
        """Whether adapters and dense weights can be trained."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """Whether `Trainer` accepts the model without an adapter of PEFT."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Whether ``torch.compile`` supports the model."""
        return True


def quantize_experts(
    model: nn.Module, format: FormatName, *, group: int | None = None, quiet: bool = False
) -> None:
    """Packs the experts of a float model of transformers in place, one module after the other.

    The float weights of a module are freed before the next module. The peak of memory is the model
    plus the packed experts of one module. At the end, a line is printed to stderr; see `describe`.

    Args:
        model: the model. Experts that cannot be packed stay as they are; the line says why.
        format, group: see `moe_ext.QuantizedExperts.from_experts`.
        quiet: print nothing.

    Raises:
        ValueError: the model has no experts, or the format is unknown or does not fit the weights.
    """
    require_one_of("quantize_experts: format", FORMATS, format)
    fallbacks: dict[str, str] = {}
    modules = experts_modules(model).items()
    names = [name for name, module in modules if not isinstance(module, PackedExperts)]
    del modules  # which would keep the float weights alive
    for name in names:
        module = model.get_submodule(name)
        activation = activation_of(module)
        if isinstance(activation, str):
            fallbacks[name] = activation
            continue
        keys = weight_names(module.has_gate)
        weights = [getattr(module, key).detach() for key in keys]
        if not module.is_transposed:
            weights = [weight.mT for weight in weights]
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
        model.set_submodule(name, PackedExperts(module, packed))
        del module, experts, weights, weight
    if names:
        quantizer = _PackedQuantizer(_PackedConfig())
        quantizer.fallbacks = fallbacks
        model.hf_quantizer = quantizer  # type: ignore[assignment]
    if not quiet:
        print(describe(model), file=sys.stderr)


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
