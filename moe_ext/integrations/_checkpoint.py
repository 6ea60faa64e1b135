"""A checkpoint of a mixture, and which of its tensors belong to which part of the model."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import hf_hub_download, snapshot_download
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from moe_ext.checks import require, require_one_of
from moe_ext.integrations._packed_experts import LayerTensors
from moe_ext.integrations._stored_tensors import Metadata, Stored, read_gguf, read_safetensors
from moe_ext.integrations._transformers_activation import activation_of
from moe_ext.integrations._transformers_balance import experts_modules

_Read = Callable[[torch.dtype], Tensor]  # reads a tensor, and dequantizes it in a dtype

__all__ = ["Checkpoint", "ModuleTensors", "open_checkpoint"]


@dataclass
class ModuleTensors:
    """The tensors of one experts module: for each layer the weight, and the bias if it has one."""

    weights: list[LayerTensors]
    biases: list[LayerTensors] | None


@dataclass
class Checkpoint:
    """An open checkpoint.

    Attributes:
        path: the folder, or the GGUF file.
        config: the configuration of the model, without a quantization.
        quantization: the quantization of the configuration, as in its file.
        skeleton: the model of transformers on the meta device.
        experts: the tensors of each experts module that stays packed.
        dense: how to read each other tensor, by the name that transformers' loader takes.
        weights: the weights of `dense` in safetensors files.
        fallbacks: the reason for each experts module that does not stay packed.
        unused: the weights of the files that the model does not have.
    """

    path: Path
    config: Any
    quantization: Any
    skeleton: Any
    experts: dict[str, ModuleTensors] = field(default_factory=dict)
    dense: dict[str, _Read] = field(default_factory=dict)
    weights: dict[str, Stored] = field(default_factory=dict)
    fallbacks: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)

    @property
    def is_gguf(self) -> bool:
        """Whether the checkpoint is a GGUF file."""
        return self.path.is_file()


def open_checkpoint(name_or_folder: str | Path, config: Any = None) -> Checkpoint:
    """Reads the headers of a checkpoint; see `moe_ext.integrations.transformers.load`."""
    path = _local(name_or_folder)
    if path.is_file():
        metadata, stored = read_gguf(path)
        config = _config(path, config) or _gguf_config(metadata, stored)
    else:
        config = _config(path, config)
        require(config is not None, f"load: {path}", "have a config.json", "none")
        stored = read_safetensors(path)
    for name, weight in stored.items():
        weight.check(name)
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        _require_known(path, quantization)
        del config.quantization_config
    checkpoint = Checkpoint(path, config, quantization, _skeleton(config))
    if path.is_file():
        _assign(checkpoint, _of_gguf(checkpoint.skeleton, metadata, stored))
    else:
        _assign(checkpoint, _of_safetensors(checkpoint.skeleton, stored))
        checkpoint.weights = {name: stored[name] for name in checkpoint.dense}
    return checkpoint


def _local(name: str | Path) -> Path:
    """Returns the folder or file; downloads a model of the hub."""
    path = Path(name)
    if path.is_file():
        require(path.suffix == ".gguf", "load: a file", "have the suffix .gguf", str(path))
        return path
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if any(path.glob("*.safetensors")) or not files:
            return path
        whole = [each for each in files if not re.search(r"-(?!00001)\d{5}-of-\d{5}$", each.stem)]
        rule = "have safetensors files or one GGUF file; or pass the file"
        require(len(whole) == 1, f"load: {path}", rule, [each.name for each in whole])
        return whole[0]
    rule = "be a folder, a GGUF file, or a name of the hub: owner/model or owner/model/file.gguf"
    found = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:/(.+\.gguf))?", str(name))
    require(found is not None, "load: name_or_folder", rule, str(name))
    assert found is not None
    if found[2]:
        return Path(hf_hub_download(found[1], found[2]))
    # Folders have other formats of the same weights, and GGUF files come in many formats.
    return _local(snapshot_download(found[1], ignore_patterns=["*/*", "*.gguf", "*.bin", "*.pth"]))


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
    require_one_of(f"load: {path}: quant_method", _METHODS, getattr(method, "value", method))
    for name, group in (values.get("config_groups") or {}).items():
        bits = (group.get("weights") or {}).get("num_bits")
        packed = "pack" in (group.get("format") or values.get("format") or "")
        widths = (4,) if packed else (4, 8)
        require_one_of(f"load: {path}: num_bits of {name}", widths, bits)


def _skeleton(config: Any) -> Any:
    """Returns the model on the meta device."""
    auto: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config, experts_implementation="moe_ext")


@dataclass
class _Found:
    """The tensors of a checkpoint, by what they belong to.

    Attributes:
        experts: the tensors of each parameter of each experts module; None for tensors whose rows
            are not those of the parameter.
        dense: how to read each tensor, by the name that transformers' loader takes. Those of
            experts are there too.
        names: the names in `dense` of the tensors of each experts module.
        unused: the names of the weights that the model does not have.
    """

    experts: dict[str, dict[str, LayerTensors | None]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    dense: dict[str, _Read] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    unused: list[str] = field(default_factory=list)


def _assign(checkpoint: Checkpoint, found: _Found) -> None:
    """Decides which experts stay packed, and fills the fields of a checkpoint."""
    checkpoint.dense, checkpoint.unused = found.dense, found.unused
    for name, module in experts_modules(checkpoint.skeleton).items():
        parameters = found.experts[name]
        names = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
        biases = [f"{each}_bias" for each in names] if module.has_bias else []
        for key in [*names, *biases]:
            require(key in parameters, f"load: {name}", f"have tensors of {key}", [*parameters])
        reason = _not_packable(module, [parameters[key] for key in names])
        if reason is not None:
            checkpoint.fallbacks[name] = reason
            continue
        tensors = {key: each for key, each in parameters.items() if each is not None}
        _require_shapes(name, module, {key: tensors[key] for key in names})
        layers = [[tensors[key] for key in keys] for keys in (names, biases)]
        checkpoint.experts[name] = ModuleTensors(layers[0], layers[1] or None)
        for each in found.names[name]:
            del checkpoint.dense[each]


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
        require({*counts} == {expected}, f"load: {name}.{key}", rule, counts)
        for part in tensors.parts:
            shapes = sorted({each.codes.shape for each in part}) if isinstance(part, list) else []
            require(len(shapes) <= 1, f"load: {name}.{key}", "have experts of one shape", shapes)
        shape = tuple(getattr(module, key).shape[1:])
        outputs, inputs = reversed(shape) if module.is_transposed else shape
        layout = tensors.layout()
        found = layout.outputs, layout.inputs
        rule = f"have {outputs} x {inputs} values for each expert"
        require(found == (outputs, inputs), f"load: {name}.{key}", rule, found)


# safetensors: transformers knows the names


def _of_safetensors(skeleton: Any, stored: dict[str, Stored]) -> _Found:
    """Finds out what each weight of safetensors files belongs to."""
    mapping = get_model_conversion_mapping(skeleton)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    order = [pattern for each in converters for pattern in each.source_patterns]
    state = skeleton.state_dict()
    owners = {f"{module}.{key}": (module, key) for module, key in _parameters(skeleton)}
    parts: dict[tuple[str, str], dict[str, list[Stored]]] = defaultdict(lambda: defaultdict(list))
    found = _Found()
    for name, weight in sorted(stored.items(), key=lambda item: dot_natural_key(item[0])):
        target, pattern = rename_source_key(
            name, renamings, converters, skeleton.base_model_prefix, state
        )
        if target not in state and name in state:
            target, pattern = name, None
        if target not in state:
            found.unused.append(name)
            continue
        found.dense[name] = weight.read
        if target in owners:
            parts[owners[target]][pattern or ""].append(weight)
            found.names[owners[target][0]].append(name)
    for (module, key), by_pattern in parts.items():
        tensors = None
        if "" in by_pattern:
            tensors = LayerTensors(tuple(by_pattern[""]))
        elif all(_keeps_rows(pattern, converters) for pattern in by_pattern):
            tensors = LayerTensors(
                tuple(by_pattern[p] for p in sorted(by_pattern, key=order.index))
            )
        found.experts[module][key] = tensors
    return found


def _parameters(skeleton: Any) -> list[tuple[str, str]]:
    """Returns the module and the name of each weight and bias of experts."""
    keys = ("gate_up_proj", "up_proj", "down_proj")
    return [
        (name, key)
        for name, module in experts_modules(skeleton).items()
        for key, _ in module.named_parameters(recurse=False)
        if key.removesuffix("_bias") in keys
    ]


def _keeps_rows(pattern: str, converters: list[WeightConverter]) -> bool:
    """Returns whether a converter only stacks matrices and joins their rows."""
    (converter,) = [each for each in converters if pattern in each.source_patterns]
    return all(
        isinstance(each, MergeModulelist | Concatenate)
        and each.dim == (0 if isinstance(each, MergeModulelist) else 1)
        for each in converter.operations
    )


# GGUF: the package gguf knows the names


_MODELS = {"gpt-oss": "gpt_oss", "olmoe": "olmoe", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
_FIELDS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "moe_intermediate_size": "expert_feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "num_hidden_layers": "block_count",
    "num_key_value_heads": "attention.head_count_kv",
    "num_local_experts": "expert_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "sliding_window": "attention.sliding_window",
}
_ROPE = {
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "rope_theta": "rope.freq_base",
    "rope_type": "rope.scaling.type",
}


def _gguf_config(metadata: Metadata, stored: dict[str, Stored]) -> Any:
    """Returns the configuration that the fields of a GGUF file describe."""
    rule = f"be one of {', '.join(_MODELS)}, or pass config: a folder with config.json"
    architecture = metadata.architecture
    require(architecture in _MODELS, "load: the architecture of a GGUF file", rule, architecture)
    model_type = _MODELS[architecture]
    usual = transformers.AutoConfig.for_model(model_type)
    values = {name: metadata.get(key) for name, key in _FIELDS.items() if hasattr(usual, name)}
    values["head_dim"] = metadata.get("attention.key_length")  # not all have a usual value
    if not hasattr(usual, "moe_intermediate_size"):
        values["intermediate_size"] = metadata.get("expert_feed_forward_length") or metadata.get(
            "feed_forward_length"
        )
    rope = {name: metadata.get(key) for name, key in _ROPE.items()}
    rope = {name: value for name, value in rope.items() if value not in (None, "none")}
    values["rope_parameters"] = {**(usual.rope_parameters or {"rope_type": "default"}), **rope}
    values["norm_topk_prob"] = True if model_type == "qwen3_moe" else None
    for name in ("bos", "eos", "pad"):
        values[f"{name}_token_id"] = metadata.token("padding" if name == "pad" else name)
    embeddings = stored.get("token_embd.weight")
    require(embeddings is not None, "load: a GGUF file", "have token_embd.weight", [*stored][:3])
    assert embeddings is not None
    return transformers.AutoConfig.for_model(
        model_type,
        vocab_size=embeddings.codes.shape[0],
        tie_word_embeddings="output.weight" not in stored,
        **{name: value for name, value in values.items() if value is not None},
    )


_KNOWN = (*_MODELS, "deepseek2")


def _of_gguf(skeleton: Any, metadata: Metadata, stored: dict[str, Stored]) -> _Found:
    """Finds out what each weight of a GGUF file belongs to."""
    import gguf

    require_one_of("load: the architecture of a GGUF file", _KNOWN, metadata.architecture)
    architectures = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(
        architectures[metadata.architecture], skeleton.config.num_hidden_layers
    )
    found, used = _Found(), set()
    experts = {f"{module}.{key}": (module, key) for module, key in _parameters(skeleton)}
    for name, tensor in skeleton.state_dict().items():
        if name in experts:
            module, key = experts[name]
            owner = skeleton.get_submodule(module)
            tensors, sources = _gguf_experts(module, key, owner, stored)
            if tensors is not None:
                found.experts[module][key] = tensors
                found.dense[name] = partial(_numbers, tensors, owner.is_transposed)
                found.names[module].append(name)
        else:
            sources = _gguf_names(names, name, stored)
            weights = [stored[each] for each in sources]
            if len(sources) == 1:
                found.dense[name] = partial(_shaped, weights[0], tuple(tensor.shape))
            elif sources:
                found.dense[name] = partial(_kv_b, weights[0], weights[1])
        used |= {*sources}
    found.unused = sorted(stored.keys() - used)
    return found


def _gguf_experts(
    module: str, key: str, owner: nn.Module, stored: dict[str, Stored]
) -> tuple[LayerTensors | None, list[str]]:
    """Returns the tensors of a parameter of an experts module and their names."""
    layer = re.search(r"\.(\d+)\.", module)
    require(layer is not None, f"load: {module}", "have the number of its layer", module)
    assert layer is not None
    suffix = "bias" if key.endswith("_bias") else "weight"
    kinds = {"gate_up_proj": ["gate", "up"], "up_proj": ["up"], "down_proj": ["down"]}
    parts = kinds[key.removesuffix("_bias")]
    names = [f"blk.{layer[1]}.ffn_{part}_exps.{suffix}" for part in parts]
    fused = f"blk.{layer[1]}.ffn_gate_up_exps.{suffix}"
    if len(parts) == 2 and fused in stored and owner.is_concatenated:
        names = [fused]
    if not {*names} <= {*stored}:
        return None, []
    return LayerTensors(tuple(stored[each] for each in names), not owner.is_concatenated), names


def _gguf_names(names: Any, name: str, stored: dict[str, Stored]) -> list[str]:
    """Returns the names in a GGUF file of the tensors that form a parameter of transformers."""
    base, _, last = name.rpartition(".")
    for key, suffix in ((base, last), (name, "weight"), (name.removesuffix("_bias"), "bias")):
        found = f"{names.get_name(key)}.{suffix}"
        if found in stored:
            return [found]
    if last == "weight" and base.endswith("kv_b_proj"):
        kv = str(names.get_name(base))
        halves = [f"{kv.replace('kv_b', each)}.weight" for each in ("k_b", "v_b")]
        return halves if {*halves} <= {*stored} else []
    return []


def _numbers(tensors: LayerTensors, transposed: bool, dtype: torch.dtype) -> Tensor:
    """Reads a parameter of experts that do not stay packed."""
    numbers = tensors.numbers(dtype)
    return numbers.mT if transposed and numbers.dim() == 3 else numbers


def _shaped(weight: Stored, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Reads a weight; GGUF files leave out a first dimension of 1."""
    numbers = weight.read(dtype)
    return numbers[None] if shape == (1, *numbers.shape) else numbers


def _kv_b(k_b: Stored, v_b: Stored, dtype: torch.dtype) -> Tensor:
    """Reads kv_b_proj of DeepSeek, of which GGUF files have two parts."""
    return torch.cat([k_b.read(dtype).mT, v_b.read(dtype)], 1).flatten(0, 1)
