"""The configuration of a model and its tensors in a GGUF file, by the names that gguf knows."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from moe_ext.checks import require, require_one_of
from moe_ext.integrations._packed.found_tensors import FoundTensors, expert_parameters
from moe_ext.integrations._packed.layer_tensors import LayerTensors
from moe_ext.integrations._packed.stored_tensors import Metadata, Stored

__all__ = ["find_in_gguf", "gguf_config"]

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


def gguf_config(metadata: Metadata, stored: dict[str, Stored]) -> Any:
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


def find_in_gguf(skeleton: Any, metadata: Metadata, stored: dict[str, Stored]) -> FoundTensors:
    """Finds out what each weight of a GGUF file belongs to."""
    import gguf

    require_one_of("load: the architecture of a GGUF file", _KNOWN, metadata.architecture)
    architectures = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(
        architectures[metadata.architecture], skeleton.config.num_hidden_layers
    )
    found, used = FoundTensors(), set()
    experts = {f"{module}.{key}": (module, key) for module, key in expert_parameters(skeleton)}
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
