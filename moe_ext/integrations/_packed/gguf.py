"""The configuration of a model and its tensors in a GGUF file, by the names that gguf knows."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from moe_ext.checks import require, require_one_of, required
from moe_ext.integrations._packed.found_tensors import FoundTensors, Place, expert_keys
from moe_ext.integrations._packed.gguf_package import gguf_package
from moe_ext.integrations._packed.layer_tensors import LayerTensors
from moe_ext.integrations._packed.stored_tensors import Metadata, Stored

__all__ = [
    "FIELDS",
    "MODELS",
    "YARN",
    "find_in_gguf",
    "gguf_config",
    "names_of_experts",
    "part_of_kv_b",
]

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
    gguf = gguf_package()
    require_one_of("the architecture of a GGUF file", _KNOWN, metadata.architecture)
    architectures = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(
        architectures[metadata.architecture], skeleton.config.num_hidden_layers
    )
    found_tensors, used, config = FoundTensors(), set(), skeleton.config
    experts = {f"{module}.{key}": (module, key) for module, key in expert_keys(skeleton)}
    for name, tensor in skeleton.state_dict().items():
        if name in experts:
            module, key = experts[name]
            owner = skeleton.get_submodule(module)
            tensors, sources = _gguf_experts(module, key, owner, stored)
            if tensors is not None:
                found_tensors.experts[module][key] = tensors
                found_tensors.dense[name] = partial(_numbers, tensors, owner.is_transposed)
                found_tensors.places[name] = [
                    Place(stored[source], partial(_rows, tensors, i, owner.is_transposed))
                    for i, source in enumerate(sources)
                ]
                found_tensors.names[module].append(name)
        else:
            sources = _gguf_names(names, name, stored)
            weights = [stored[source] for source in sources]
            if len(sources) == 1:
                found_tensors.dense[name] = partial(_shaped, weights[0], tuple(tensor.shape))
                found_tensors.places[name] = [Place(weights[0])]
                found_tensors.whole[name] = name
            elif sources:
                found_tensors.dense[name] = partial(_kv_b, weights[0], weights[1])
                sizes = [config.qk_nope_head_dim, config.v_head_dim]
                found_tensors.places[name] = [
                    Place(w, partial(part_of_kv_b, i, sizes)) for i, w in enumerate(weights)
                ]
        used |= {*sources}
    found_tensors.unused = sorted(stored.keys() - used)
    return found_tensors


def names_of_experts(module: str, key: str) -> list[str]:
    """Returns the names in a GGUF file of the parts of a parameter of an experts module."""
    rule = "have the number of its layer"
    layer = required(re.search(r"\.(\d+)\.", module), module, rule, module)
    suffix = "bias" if key.endswith("_bias") else "weight"
    kinds = {"gate_up_proj": ["gate", "up"], "up_proj": ["up"], "down_proj": ["down"]}
    parts = kinds[key.removesuffix("_bias")]
    return [f"blk.{layer[1]}.ffn_{part}_exps.{suffix}" for part in parts]


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


def _gguf_names(names: Any, name: str, stored: dict[str, Stored]) -> list[str]:
    """Returns the names in a GGUF file of the tensors that form a parameter of transformers."""
    base, _, last = name.rpartition(".")
    for key, suffix in ((base, last), (name, "weight"), (name.removesuffix("_bias"), "bias")):
        stored_name = f"{names.get_name(key)}.{suffix}"
        if stored_name in stored:
            return [stored_name]
    if last == "weight" and base.endswith("kv_b_proj"):
        kv = str(names.get_name(base))
        halves = [f"{kv.replace('kv_b', half)}.weight" for half in ("k_b", "v_b")]
        return halves if {*halves} <= {*stored} else []
    return []


def _numbers(tensors: LayerTensors, transposed: bool, dtype: torch.dtype) -> Tensor:
    """Reads a parameter of experts that do not stay packed."""
    numbers = tensors.numbers(dtype)
    return numbers.mT if transposed and numbers.dim() == 3 else numbers


def _rows(tensors: LayerTensors, part: int, transposed: bool, numbers: Tensor) -> Tensor:
    """Returns the rows of a tensor; undoes `_numbers`."""
    return tensors.own_rows(numbers.mT if transposed and numbers.dim() == 3 else numbers, part)


def _shaped(weight: Stored, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Reads a weight; GGUF files leave out a first dimension of 1."""
    numbers = weight.read(dtype)
    return numbers[None] if shape == (1, *numbers.shape) else numbers


def _kv_b(k_b: Stored, v_b: Stored, dtype: torch.dtype) -> Tensor:
    """Reads kv_b_proj of DeepSeek, of which GGUF files have two parts."""
    return torch.cat([k_b.read(dtype).mT, v_b.read(dtype)], 1).flatten(0, 1)


def part_of_kv_b(part: int, sizes: list[int], weight: Tensor) -> Tensor:
    """Returns the part of keys [heads, rank, sizes[0]] or of values [heads, sizes[1], rank]."""
    heads: Tensor = weight.unflatten(0, (-1, sum(sizes)))
    own: Tensor = heads.split(sizes, 1)[part]
    return own if part else own.mT
