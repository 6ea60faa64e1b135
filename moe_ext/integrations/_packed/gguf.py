"""Reads GGUF files: the configuration of a model, and which weights its tensors are."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from moe_ext.checks import require, require_one_of, required
from moe_ext.integrations._packed.found_tensors import FoundTensors, Place, expert_keys
from moe_ext.integrations._packed.gguf_names import (
    GGUFNames,
    join_halves,
    names_of_experts,
    with_first,
    without_first,
)
from moe_ext.integrations._packed.layer_tensors import LayerTensors
from moe_ext.integrations._packed.stored_tensors import Metadata, Stored
from moe_ext.integrations._transformers.experts import by_outputs

__all__ = ["FIELDS", "MODELS", "YARN", "find_in_gguf", "gguf_config"]

MODELS = {"gpt-oss": "gpt_oss", "olmoe": "olmoe", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
_KNOWN = (*MODELS, "deepseek2")  # its configuration is not in the fields of the file
FIELDS = {
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
YARN = {
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
}
_ROPE = {**YARN, "rope_theta": "rope.freq_base", "rope_type": "rope.scaling.type"}


def gguf_config(metadata: Metadata, stored: dict[str, Stored]) -> Any:
    """Returns the configuration that the fields of a GGUF file describe."""
    architecture = metadata.architecture
    require_one_of("the architecture of a GGUF file", _KNOWN, architecture)
    rule = f"be a folder with the config.json of the model for GGUF files of {architecture}"
    require(architecture in MODELS, "config", rule, None)
    model_type = MODELS[architecture]
    usual = transformers.AutoConfig.for_model(model_type)
    values = {name: metadata.get(key) for name, key in FIELDS.items() if hasattr(usual, name)}
    values["head_dim"] = metadata.get("attention.key_length")  # not all have a usual value
    if not hasattr(usual, "moe_intermediate_size"):
        values["intermediate_size"] = metadata.get("expert_feed_forward_length") or metadata.get(
            "feed_forward_length"
        )
    rope = {name: metadata.get(key) for name, key in _ROPE.items()}
    rope = {name: value for name, value in rope.items() if value not in (None, "none")}
    defaults = {"rope_type": "default"} | (usual.rope_parameters or {})
    if "rope_type" not in rope:  # the file has no scaling, even if models of this type usually do
        defaults = {"rope_type": "default", "rope_theta": defaults.get("rope_theta", 10000.0)}
    values["rope_parameters"] = {**defaults, **rope}
    values["norm_topk_prob"] = True if model_type == "qwen3_moe" else None
    for name in ("bos", "eos", "pad"):
        values[f"{name}_token_id"] = metadata.token("padding" if name == "pad" else name)
    name = "token_embd.weight"
    embeddings = required(stored.get(name), "a GGUF file", f"have {name}", [*stored][:3])
    return transformers.AutoConfig.for_model(
        model_type,
        vocab_size=embeddings.codes.shape[0],
        tie_word_embeddings="output.weight" not in stored,
        **{name: value for name, value in values.items() if value is not None},
    )


def find_in_gguf(skeleton: Any, metadata: Metadata, stored: dict[str, Stored]) -> FoundTensors:
    """Finds out what each weight of a GGUF file belongs to."""
    require_one_of("the architecture of a GGUF file", _KNOWN, metadata.architecture)
    names = GGUFNames(metadata.architecture, skeleton.config)
    found_tensors, used = FoundTensors(), set()
    experts = {f"{module}.{key}": (module, key) for module, key in expert_keys(skeleton)}
    for name, tensor in skeleton.state_dict().items():
        if name in experts:
            module, key = experts[name]
            owner = skeleton.get_submodule(module)
            tensors, sources = _gguf_experts(module, key, owner, stored)
            if tensors is not None:
                found_tensors.experts[module][key] = tensors
                found_tensors.dense[name] = partial(_numbers, tensors, owner)
                found_tensors.places[name] = [
                    Place(stored[source], partial(_rows, tensors, i, owner))
                    for i, source in enumerate(sources)
                ]
                found_tensors.names[module].append(name)
        else:
            halves = names.halves(name)
            whole = [source for source in names.whole(name) if source in stored][:1]
            sources = whole or [source for source, _ in halves]
            if not {*sources} <= {*stored}:
                continue
            weights = [stored[source] for source in sources]
            if whole:
                found_tensors.dense[name] = partial(_shaped, weights[0], tuple(tensor.shape))
                part = None if len(weights[0].codes.shape) == tensor.dim() else without_first
                found_tensors.places[name] = [Place(weights[0], part)]
                found_tensors.whole[name] = name
            elif halves:
                found_tensors.dense[name] = partial(_kv_b, weights[0], weights[1])
                found_tensors.places[name] = [
                    Place(weight, part) for weight, (_, part) in zip(weights, halves, strict=True)
                ]
        used |= {*sources}
    found_tensors.unused = sorted(stored.keys() - used)
    return found_tensors


def _gguf_experts(
    module: str, key: str, owner: nn.Module, stored: dict[str, Stored]
) -> tuple[LayerTensors | None, list[str]]:
    """Returns the tensors of a parameter of an experts module and their names."""
    names = names_of_experts(module, key)
    fused = names[0].replace("ffn_gate_exps", "ffn_gate_up_exps")
    if len(names) == 2 and fused in stored and owner.is_concatenated:
        names = [fused]
    if not {*names} <= {*stored}:
        return None, []
    return LayerTensors(tuple(stored[source] for source in names), not owner.is_concatenated), names


def _numbers(tensors: LayerTensors, owner: nn.Module, dtype: torch.dtype) -> Tensor:
    """Reads a parameter of experts that do not stay packed."""
    return by_outputs(owner, tensors.numbers(dtype))


def _rows(tensors: LayerTensors, part: int, owner: nn.Module, numbers: Tensor) -> Tensor:
    """Returns the rows of a tensor; undoes `_numbers`."""
    return tensors.own_rows(by_outputs(owner, numbers), part)


def _shaped(weight: Stored, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Reads a weight that is one tensor of the file."""
    return with_first(weight.read(dtype), shape)


def _kv_b(k_b: Stored, v_b: Stored, dtype: torch.dtype) -> Tensor:
    """Reads kv_b_proj of DeepSeek, of which GGUF files have two parts."""
    return join_halves(k_b.read(dtype), v_b.read(dtype))
