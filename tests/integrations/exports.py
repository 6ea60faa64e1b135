"""What tests of exported models share."""

import importlib

import gguf
import peft
import pytest
import torch
from packed_checkpoints import WIDE
from tiny_models import MODEL_TYPES, tiny

from moe_ext import add_lora

plug = importlib.import_module("moe_ext.integrations.transformers")

# The sizes with which llama.cpp computes what transformers computes.
PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
MODELS = {
    "gpt_oss": ("gpt_oss", PLAIN_ROPE),
    "olmoe": ("olmoe", {"head_dim": 16, "num_key_value_heads": 4}),
    "qwen2_moe": (
        "qwen2_moe",
        {"shared_expert_intermediate_size": 32, "num_experts": 6, "head_dim": 16},
    ),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe_with_yarn": (
        "qwen3_moe",
        {
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "deepseek_v2": ("deepseek_v2", {**MODEL_TYPES["deepseek_v3"], "n_shared_experts": 1}),
    "deepseek_v3": ("deepseek_v3", {}),
}
LINEAR = ["q_proj", "o_proj", "q_b_proj"]


def save(model, path, *arguments, **options):
    plug.save(model, path, *arguments, **{"quiet": True, **options})


def adapted(model, *, linear=LINEAR, **options):
    """Adds adapters to the experts and to linear layers, with random weights."""
    torch.manual_seed(0)
    add_lora(model, **{"rank": 4, "alpha": 8, **options})
    if linear:
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=linear)
        peft.inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        if ".b_" in name or ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def small(name, format="gguf_q8_0"):
    """Returns a model with packed experts, of the sizes of `MODELS`."""
    model_type, sizes = MODELS[name]
    model = tiny(model_type, **{**WIDE, **sizes}).eval()
    plug.quantize_experts(model, format, quiet=True)
    return model


def gguf_of(path):
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def refused(message, model, path, format):
    with pytest.raises(ValueError, match=message):
        save(model, path, format)
    assert not path.exists() or path.is_dir()
    assert not [*path.parent.glob(f".{path.name}*")]
