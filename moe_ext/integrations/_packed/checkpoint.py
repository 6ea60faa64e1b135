"""A checkpoint of a mixture, and which of its tensors belong to which part of the model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub import hf_hub_download, snapshot_download
from torch import nn

from moe_ext._panel_parameters import pack_floats
from moe_ext.checks import require, require_one_of, required
from moe_ext.formats import FORMATS, FormatName, PackedWeight
from moe_ext.formats._panels import PANEL_OUTPUTS
from moe_ext.integrations._packed.errors import errors_of_weight
from moe_ext.integrations._packed.found_tensors import (
    FoundTensors,
    Place,
    Read,
    find_in_safetensors,
)
from moe_ext.integrations._packed.gguf import find_in_gguf, gguf_config
from moe_ext.integrations._packed.layer_tensors import LayerTensors
from moe_ext.integrations._packed.stored_tensors import files_of_gguf, read_gguf, read_safetensors
from moe_ext.integrations._transformers.activation import activation_of
from moe_ext.integrations._transformers.experts import by_outputs, experts_modules, weight_names

__all__ = [
    "Checkpoint",
    "ModuleTensors",
    "head_dim",
    "open_checkpoint",
    "plain_config",
    "skeleton_of",
]


@dataclass
class ModuleTensors:
    """The tensors of one experts module: for each layer the weight, and the bias if it has one."""

    weights: list[LayerTensors]
    biases: list[LayerTensors] | None


class LinearTensor(NamedTuple):
    """The weight of a linear layer in the files.

    Attributes:
        weight: the tensor, as that of one expert.
        name: its name in `Checkpoint.dense`.
        layout: the layout of the packed weight; None: the files have floats.
        is_quantized: whether the files have floats, which are quantized in the format of `layout`.
    """

    weight: LayerTensors
    name: str
    layout: PackedWeight | None
    is_quantized: bool = False

    def pack(self) -> PackedWeight:
        """Reads the weight, and quantizes it if it is not packed."""
        if not self.is_quantized:
            return self.weight.pack()
        assert self.layout is not None
        return pack_floats("its weight", self.weight.numbers(torch.float32).mT, self.layout.format)


@dataclass
class Checkpoint:
    """An open checkpoint.

    Attributes:
        path: the folder, or the GGUF file.
        config: the configuration of the model, without a quantization.
        quantization: the quantization of the configuration, as in its file.
        skeleton: the model of transformers on the meta device.
        experts: the tensors of each experts module that stays packed.
        linear: the tensor of each linear layer that can be packed: it fills a panel, and no other
            part of the model has its weight.
        dense: how to read each other tensor, by the name that transformers' loader takes.
        places: where the files have each weight of `dense`, and those of experts that are no packed
            experts.
        fallbacks: the reason for each experts module that does not stay packed.
        unused: the weights of the files that the model does not have.
    """

    path: Path
    config: Any
    quantization: Any
    skeleton: Any
    experts: dict[str, ModuleTensors] = field(default_factory=dict)
    linear: dict[str, LinearTensor] = field(default_factory=dict)
    dense: dict[str, Read] = field(default_factory=dict)
    places: dict[str, list[Place]] = field(default_factory=dict)
    fallbacks: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)

    @property
    def is_gguf(self) -> bool:
        """Whether the checkpoint is a GGUF file."""
        return self.path.is_file()

    def packed_linear(self, choice: bool | FormatName) -> dict[str, LinearTensor]:
        """Returns the linear layers that are packed, each with its layout; see `load`."""
        if isinstance(choice, bool):
            return {path: own for path, own in self.linear.items() if choice and own.layout}
        require_one_of("packed_linear", FORMATS, choice)
        layers = {}
        for path, own in self.linear.items():
            if own.layout is None:
                weight = self.skeleton.get_submodule(path).weight
                with errors_of_weight(path):
                    layout = pack_floats("its weight", weight[None].mT, choice)
                own = own._replace(layout=layout, is_quantized=True)
            layers[path] = own
        return layers


def open_checkpoint(name_or_folder: str | Path, config: Any = None) -> Checkpoint:
    """Reads the headers of a checkpoint; see `moe_ext.integrations.transformers.load`."""
    try:
        path = _local(name_or_folder)
    except OSError as error:
        error.add_note(f"{name_or_folder} is no file or folder here, but a name of the hub")
        raise
    if path.is_file():
        metadata, stored = read_gguf(path)
        config = _config(path, config) or gguf_config(metadata, stored)
    else:
        config = _config(path, config)
        require(config is not None, str(path), "have a config.json", "none")
        stored = read_safetensors(path)
    for name, weight in stored.items():
        weight.check(name)
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        _require_known(path, quantization)
        del config.quantization_config
    checkpoint = Checkpoint(path, config, quantization, skeleton_of(config))
    _require_mixture(path, checkpoint.skeleton)
    if path.is_file():
        _assign(checkpoint, find_in_gguf(checkpoint.skeleton, metadata, stored))
    else:
        _assign(checkpoint, find_in_safetensors(checkpoint.skeleton, stored))
    return checkpoint


def _local(name: str | Path) -> Path:
    """Returns the folder or file; downloads a model of the hub."""
    path = Path(name)
    if path.is_file():
        require(path.suffix == ".gguf", "a file", "have the suffix .gguf", str(path))
        return path
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if any(path.glob("*.safetensors")) or not files:
            return path
        whole = [file for file in files if not re.search(r"-(?!00001)\d{5}-of-\d{5}$", file.stem)]
        rule = "have safetensors files or one GGUF file; or pass the file"
        require(len(whole) == 1, str(path), rule, [file.name for file in whole])
        return whole[0]
    rule = "be a folder, a GGUF file, or a name of the hub: owner/model or owner/model/file.gguf"
    known = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:/(.+\.gguf))?", str(name))
    match = required(known, "name_or_folder", rule, str(name))
    if match[2]:
        parts = files_of_gguf(PurePosixPath(match[2]))
        first, *_ = [hf_hub_download(match[1], str(part)) for part in parts]
        return Path(first)
    # Folders have other formats of the same weights, and GGUF files come in many formats.
    return _local(snapshot_download(match[1], ignore_patterns=["*/*", "*.gguf", "*.bin", "*.pth"]))


def _config(path: Path, config: Any) -> Any:
    """Returns the given configuration, or that of the folder, as a copy; None without one."""
    if isinstance(config, transformers.PretrainedConfig):
        return type(config).from_dict(config.to_dict())
    folder = Path(config) if config is not None else path if path.is_dir() else path.parent
    if config is None and not (folder / "config.json").exists():
        return None
    return transformers.AutoConfig.from_pretrained(folder if config is None else config)


_METHODS = ("mxfp4", "fp8", "compressed-tensors")


def _require_known(path: Path, quantization: Any) -> None:
    """Requires that a quantization of a configuration is known."""
    values = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method = values.get("quant_method")
    require_one_of(f"{path}: quant_method", _METHODS, getattr(method, "value", method))
    for name, group in (values.get("config_groups") or {}).items():
        bits = (group.get("weights") or {}).get("num_bits")
        packed = "pack" in (group.get("format") or values.get("format") or "")
        widths = (4,) if packed else (4, 8)
        require_one_of(f"{path}: num_bits of {name}", widths, bits)


def _require_mixture(path: Path, skeleton: nn.Module) -> None:
    """Requires that a model has experts."""
    try:
        experts_modules(skeleton)
    except ValueError as error:
        raise ValueError(
            f"{path} must be a mixture of experts with the experts interface of "
            f"transformers, got {type(skeleton).__name__}; from_pretrained loads other models"
        ) from error


def plain_config(config: Any) -> Any:
    """Returns a copy of a configuration without its quantization."""
    copied = type(config).from_dict(config.to_dict())
    if hasattr(copied, "quantization_config"):
        del copied.quantization_config
    return copied


def head_dim(config: Any) -> int:
    """Returns the size of an attention head."""
    size: int | None = getattr(config, "head_dim", None)
    return size or int(config.hidden_size) // int(config.num_attention_heads)


def skeleton_of(config: Any) -> Any:
    """Returns the model on the meta device."""
    auto: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config, experts_implementation="moe_ext")


def _assign(checkpoint: Checkpoint, found_tensors: FoundTensors) -> None:
    """Decides which experts stay packed, and fills the fields of a checkpoint."""
    checkpoint.dense, checkpoint.unused = found_tensors.dense, found_tensors.unused
    checkpoint.places = found_tensors.places
    for name, module in experts_modules(checkpoint.skeleton).items():
        parameters = found_tensors.experts[name]
        names = weight_names(module.has_gate)
        biases = [f"{weight_name}_bias" for weight_name in names] if module.has_bias else []
        for key in [*names, *biases]:
            require(key in parameters, name, f"have tensors of {key}", [*parameters])
        reason = _not_packable(module, [parameters[key] for key in names])
        if reason is not None:
            checkpoint.fallbacks[name] = reason
            continue
        tensors = {key: tensor for key, tensor in parameters.items() if tensor is not None}
        _require_shapes(name, module, {key: tensors[key] for key in names})
        layers = [[tensors[key] for key in keys] for keys in (names, biases)]
        checkpoint.experts[name] = ModuleTensors(layers[0], layers[1] or None)
        for tensor_name in found_tensors.names[name]:
            del checkpoint.dense[tensor_name]
            del checkpoint.places[tensor_name]
    checkpoint.linear = dict(_linear(checkpoint, found_tensors.whole))


def _linear(checkpoint: Checkpoint, whole: dict[str, str]) -> Iterator[tuple[str, LinearTensor]]:
    """Yields the linear layers that can be packed; see `Checkpoint`."""
    counts = Counter(map(id, checkpoint.skeleton.state_dict(keep_vars=True).values()))
    for path, module in checkpoint.skeleton.named_modules():
        name = whole.get(f"{path}.weight")
        if type(module) is not nn.Linear or name is None or module.out_features < PANEL_OUTPUTS:
            continue
        if counts[id(module.weight)] == 1:
            weight, layout = LayerTensors(([checkpoint.places[name][0].stored],)), None
            if weight.format is not None:
                with suppress(ValueError):  # scales that panels cannot hold
                    layout = weight.layout()
            yield path, LinearTensor(weight, name, layout)


def _not_packable(module: nn.Module, weights: list[LayerTensors | None]) -> str | None:
    """Returns why the experts of a module cannot stay packed; None if they can."""
    activation = activation_of(module)
    if isinstance(activation, str):
        return activation
    for tensors in weights:
        if tensors is None:
            return "transformers computes its weights from the tensors of the file"
        if tensors.format is None:
            return f"its weights are {tensors.kind} in the file"
        try:
            tensors.layout()
        except ValueError as error:
            return str(error)
    return None


def _require_shapes(name: str, module: nn.Module, weights: dict[str, LayerTensors]) -> None:
    """Requires that packed weights have the sizes of the configuration."""
    for key, tensors in weights.items():
        counts, expected = tensors.num_experts(), module.num_experts
        rule = f"have {expected} experts"
        require({*counts} == {expected}, f"{name}.{key}", rule, counts)
        for part in tensors.parts:
            shapes = sorted({w.codes.shape for w in part}) if isinstance(part, list) else []
            require(len(shapes) <= 1, f"{name}.{key}", "have experts of one shape", shapes)
        outputs, inputs = by_outputs(module, getattr(module, key)).shape[1:]
        layout = tensors.layout()
        actual = layout.outputs, layout.inputs
        rule = f"have {outputs} x {inputs} values for each expert"
        require(actual == (outputs, inputs), f"{name}.{key}", rule, actual)
