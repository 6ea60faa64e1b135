"""The metadata of a GGUF file: the configuration of a model, and its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers

from moe_ext.checks import require, require_one_of
from moe_ext.integrations._packed.checkpoint import head_dim
from moe_ext.integrations._packed.gguf import FIELDS, MODELS, YARN
from moe_ext.integrations._packed.gguf_package import gguf_package

__all__ = ["add_config", "add_tokenizer", "architecture_of"]

_ARCHITECTURES = {model_type: name for name, model_type in MODELS.items()} | {
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
}
# What llama.cpp computes, whatever a file says.
_FIXED: dict[str, dict[str, object]] = {
    "deepseek2": {"hidden_act": "silu", "rope_interleave": True, "attention_bias": False},
    "gpt-oss": {"hidden_act": "silu", "tie_word_embeddings": False},
    "olmoe": {"hidden_act": "silu", "norm_topk_prob": False, "clip_qkv": None},
    "qwen2moe": {
        "hidden_act": "silu",
        "norm_topk_prob": False,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "qwen3moe": {
        "hidden_act": "silu",
        "norm_topk_prob": True,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
_DEEPSEEK_FIELDS = {
    "first_k_dense_replace": "leading_dense_block_count",
    "kv_lora_rank": "attention.kv_lora_rank",
    "n_group": "expert_group_count",
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "norm_topk_prob": "expert_weights_norm",
    "q_lora_rank": "attention.q_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "routed_scaling_factor": "expert_weights_scale",
    "topk_group": "expert_group_used_count",
    "v_head_dim": "attention.value_length_mla",
}
_SOFTMAX, _SIGMOID = 1, 2  # the functions of gates in GGUF


def architecture_of(config: Any) -> str:
    """Returns the name of GGUF for a type of model."""
    require_one_of("the model_type for GGUF", _ARCHITECTURES, config.model_type)
    return _ARCHITECTURES[config.model_type]


def add_config(writer: Any, config: Any) -> None:
    """Adds the fields of a configuration.

    Raises:
        ValueError: llama.cpp computes another model than the configuration describes.
    """
    architecture = architecture_of(config)
    for name, expected in _FIXED[architecture].items():
        value = getattr(config, name, expected)
        rule = f"be {expected} for {architecture} of GGUF"
        require((value or None) == (expected or None), f"{name} of the configuration", rule, value)
    values: dict[str, Any] = {}
    for name, key in FIELDS.items():
        value = getattr(config, name, None)
        values[key] = values.get(key) if value is None else value
    values["attention.key_length"] = head_dim(config)
    values["attention.value_length"] = head_dim(config)
    if architecture == "deepseek2":
        values |= _deepseek(config)
    elif values["expert_feed_forward_length"] is None:
        values["expert_feed_forward_length"] = config.intermediate_size
    if architecture == "olmoe":  # whose norm has all heads
        rule, heads = (
            f"be {config.num_attention_heads} for olmoe of GGUF",
            config.num_key_value_heads,
        )
        require(heads == config.num_attention_heads, "num_key_value_heads", rule, heads)
    values |= _rope(config)
    if architecture == "gpt-oss":
        kinds = ("sliding_attention", "full_attention")
        expected = [kinds[i % 2] for i in range(config.num_hidden_layers)]
        rule = "alternate, and begin with sliding_attention"
        require(config.layer_types == expected, "layer_types", rule, config.layer_types)
    else:
        values["attention.sliding_window"] = None
    values["vocab_size"] = config.vocab_size
    for key, value in values.items():
        if value is not None:
            _add(writer, f"{architecture}.{key}", value)


def _add(writer: Any, key: str, value: object) -> None:
    kinds = {bool: writer.add_bool, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_uint32)(key, value)


def _deepseek(config: Any) -> dict[str, Any]:
    """Returns the fields of latent attention and of the gate."""
    is_v3 = config.model_type == "deepseek_v3"
    values = {key: getattr(config, name, None) for name, key in _DEEPSEEK_FIELDS.items()}
    if not is_v3:
        rule = "be greedy for deepseek2 of GGUF"
        require(config.topk_method == "greedy", "topk_method", rule, config.topk_method)
        values |= {"expert_group_count": None, "expert_group_used_count": None}
    values["expert_weights_scale"] = float(config.routed_scaling_factor)
    return values | {
        "attention.head_count_kv": 1,  # keys and values of all heads come from one latent vector
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_gating_func": _SIGMOID if is_v3 else _SOFTMAX,
    }


def _rope(config: Any) -> dict[str, Any]:
    """Returns the fields of the rotary embedding."""
    given = config.rope_parameters
    kind = given.get("rope_type", "default")
    require_one_of("rope_type for GGUF", ("default", "linear", "yarn"), kind)
    values: dict[str, Any] = {"rope.freq_base": float(given["rope_theta"])}
    if kind == "default":
        return values
    values |= {key: given.get(name) for name, key in YARN.items()}
    for key in ("factor", "yarn_beta_fast", "yarn_beta_slow"):
        value = values[f"rope.scaling.{key}"]
        values[f"rope.scaling.{key}"] = None if value is None else float(value)
    values["rope.scaling.type"] = kind
    rule = "be None for GGUF, which computes it from the factor"
    value = given.get("attention_factor")
    require(value is None, "attention_factor of rope_parameters", rule, value)
    if given.get("mscale_all_dim"):
        values["rope.scaling.yarn_log_multiplier"] = 0.1 * given["mscale_all_dim"]
    return values


# Tokenizers

# How a tokenizer of byte-level BPE splits a text before it merges: the expressions of its
# tokenizer.json, and their name in llama.cpp (src/llama-vocab.cpp).
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"
_SPLITS = {
    (): "gpt-2",
    (rf"{_CONTRACTIONS}|{_START}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_END}",): "qwen2",
    (
        rf"{_START}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_START}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
        rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_END}",
    ): "gpt-4o",
    (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
        r"""|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|""" + _END,
    ): "deepseek-v3",
}


def add_tokenizer(writer: Any, source: Path | None, vocab_size: int) -> str:
    """Adds the tokenizer of a checkpoint: its tokens, merges, special tokens and chat template.

    Args:
        writer: the writer of gguf.
        source: a GGUF file, or a folder with a tokenizer.json or without one; None: the model has
            no checkpoint.
        vocab_size: the number of tokens of the model.

    Returns:
        What the file has, for a message.

    Raises:
        ValueError: the tokenizer is not byte-level BPE, or llama.cpp cannot split a text as it
            does.
    """
    if source is not None and source.is_file():
        return _copy_tokenizer(writer, source)
    folder = source
    if folder is None or not (folder / "tokenizer.json").exists():
        writer.add_tokenizer_model("none")
        reason = "model is not from load" if folder is None else "checkpoint has no tokenizer.json"
        return f"no tokenizer, because the {reason}"
    described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model = described["model"]
    require(model["type"] == "BPE", "the tokenizer for GGUF", "be of type BPE", model["type"])
    name = _split_name(described.get("pre_tokenizer"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = {index: text for text, index in tokenizer.get_vocab().items()}
    rule = f"have at most the {vocab_size} tokens of the model"
    require(max(texts) < vocab_size, "the tokenizer", rule, max(texts) + 1)
    special = {index: token.special for index, token in tokenizer.added_tokens_decoder.items()}
    gguf = gguf_package()
    kinds, types = gguf.TokenType, []
    for index in range(vocab_size):
        if index not in texts:
            types.append(kinds.UNUSED)
        elif index in special:
            types.append(kinds.CONTROL if special[index] else kinds.USER_DEFINED)
        else:
            types.append(kinds.NORMAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list([texts.get(i, f"[PAD{i}]") for i in range(vocab_size)])
    writer.add_token_types(types)
    gguf.SpecialVocab(folder, load_merges=True, n_vocab=vocab_size).add_to_gguf(writer, quiet=True)
    return f"the tokenizer with {len(texts)} tokens ({name})"


def _copy_tokenizer(writer: Any, source: Path) -> str:
    """Copies the tokenizer of a GGUF file."""
    fields = gguf_package().GGUFReader(source).fields
    names = [name for name in fields if name.startswith("tokenizer.")]
    for name in names:
        types = fields[name].types
        writer.add_key_value(name, fields[name].contents(), types[0], (*types, None)[1])
    return f"{len(names)} fields of the tokenizer of {source.name}"


def _split_name(described: Any) -> str:
    """Returns the name of llama.cpp for the pre_tokenizer of a tokenizer.json."""
    parts = (described or {}).get("pretokenizers", [described or {}])
    byte_level = [part for part in parts if part.get("type") == "ByteLevel"]
    rule = "split bytes (ByteLevel)"
    types = [part.get("type") for part in parts]
    require(len(byte_level) == 1, "the tokenizer for GGUF", rule, types)
    splits = tuple(
        str(part.get("pattern", {}).get("Regex")).replace("\r", r"\r").replace("\n", r"\n")
        for part in parts
        if part is not byte_level[0]
    )
    known = splits in _SPLITS and bool(splits) != bool(byte_level[0].get("use_regex", True))
    rule = f"split a text as {', '.join(_SPLITS.values())}"
    require(known, "the tokenizer for GGUF", rule, splits or types)
    return _SPLITS[splits]
