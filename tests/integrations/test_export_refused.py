"""What an exported format cannot hold, and adapters that cannot be merged."""

import importlib

import pytest
import torch
from expert_kinds import random_weight

from moe_ext import QuantizedExperts

transformers = pytest.importorskip("transformers", minversion="5.23")
peft = pytest.importorskip("peft")

from exports import MODELS, adapted, refused, save, small  # noqa: E402
from packed_checkpoints import WIDE, different_files, load, write  # noqa: E402
from tiny_models import error, logits_of, tiny  # noqa: E402

plug = importlib.import_module("moe_ext.integrations.transformers")


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob .* must be True for qwen3moe"),
        ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act .* must be silu for qwen3moe"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv .* must be None for olmoe"),
        ("olmoe", {"num_key_value_heads": 2}, "num_key_value_heads must be 4 for olmoe"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 2}, "layer_types must alternate"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave .* must be True"),
        (
            "qwen3_moe",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type for GGUF must be one of default, linear, yarn, got 'dynamic'",
        ),
    ],
)
def test_configurations_that_llama_cpp_computes_otherwise(name, sizes, message, tmp_path):
    model_type, own = MODELS[name]
    model = tiny(model_type, **{**WIDE, **own, **sizes})
    refused(message, model, tmp_path / "model.gguf", "gguf_f32")


def test_what_a_format_cannot_hold(tmp_path):
    path = tmp_path / "model.gguf"
    write(tmp_path / "fp8", "qwen3_moe", "fp8", norm_topk_prob=True)
    fp8 = load(tmp_path / "fp8")
    refused("must have a format of GGUF .pass format=.*, got 'fp8'", fp8, path, "gguf")
    refused("model must have active adapters, got 'none'", fp8, path, "gguf_adapter")
    refused("^save: path must have the suffix .gguf, got ", fp8, tmp_path / "folder", "gguf")
    refused("^save: path must be a folder, not end with .gguf", fp8, path, "bfloat16")
    refused("^save: format must be one of unchanged, merged, ", fp8, path, "gguf_q4_k")
    mixtral = tiny("mixtral", **WIDE)
    refused(
        "model_type for GGUF must be one of gpt_oss, .*, got 'mixtral'", mixtral, path, "gguf_f32"
    )
    narrow = tiny("qwen3_moe", norm_topk_prob=True)
    plug.quantize_experts(narrow, "fp8", quiet=True)
    refused("must have a multiple of 32 inputs for gguf_q8_0, got 16", narrow, path, "gguf_q8_0")


def test_formats_without_a_rule_of_rounding(tmp_path):
    """Q4_K stays as it is, and cannot have merged adapters."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "norm_topk_prob": True}
    model = tiny("qwen3_moe", **sizes).eval()
    plug.quantize_experts(model, "gguf_q8_0", quiet=True)
    for module in plug.experts_modules(model).values():
        weights = [random_weight("gguf_q4_k", 6, outputs) for outputs in (512, 256)]
        module.packed = QuantizedExperts(weights, activation="swiglu")
    path = tmp_path / "old" / "model.gguf"
    save(model, path, "gguf")
    loaded = load(path)
    modules = plug.experts_modules(loaded).values()
    assert {module.packed.weights[0].format for module in modules} == {"gguf_q4_k"}
    assert error(logits_of(loaded), logits_of(model)) < 1e-5
    adapted(loaded)
    rule = "must have no adapters, because gguf_q4_k has no rule"
    refused(rule, loaded, tmp_path / "a.gguf", "gguf")
    message = "experts cannot be written in gguf_q4_k: format must be one of fp8, "
    with pytest.raises(ValueError, match=message):
        save(loaded, tmp_path / "merged", "merged")
    save(loaded, tmp_path / "merged.gguf", "gguf_q8_0")
    assert error(logits_of(load(tmp_path / "merged.gguf")), logits_of(loaded)) < 0.05


def test_adapters_that_cannot_be_merged(tmp_path):
    write(tmp_path / "model", "qwen3_moe", "fp8")
    rule = "must have LoRA of PEFT on a linear layer alone"
    for options in ({"use_dora": True}, {"lora_bias": True}):
        model = load(tmp_path / "model")
        config = peft.LoraConfig(target_modules=["lm_head"], **options)
        peft.inject_adapter_in_model(config, model)
        refused(rule, model, tmp_path / "other", "float32")
    model = load(tmp_path / "model")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["embed_tokens"]), model)
    refused(rule, model, tmp_path / "other", "float32")
    parameters = peft.LoraConfig(target_parameters=["q_proj.weight"])
    refused(
        rule, peft.get_peft_model(load(tmp_path / "model"), parameters), tmp_path / "o", "merged"
    )
    model = adapted(small("deepseek_v3"), linear=["kv_b_proj"])
    refused(
        "must be one tensor of GGUF, to have adapters", model, tmp_path / "a.gguf", "gguf_adapter"
    )
    model = adapted(small("deepseek_v3"), linear=["q_a_proj"])
    refused("which llama.cpp would ignore there", model, tmp_path / "a.gguf", "gguf_adapter")


OTHER_METHODS = {
    "ia3": peft.IA3Config(
        target_modules=["k_proj"], feedforward_modules=[], init_ia3_weights=False
    ),
    "loha": peft.LoHaConfig(r=2, target_modules=["k_proj"], init_weights=False),
    "lokr": peft.LoKrConfig(r=2, target_modules=["k_proj"], init_weights=False),
    "vera": peft.VeraConfig(r=2, target_modules=["k_proj"], init_weights=False),
    "oft": peft.OFTConfig(oft_block_size=4, target_modules=["k_proj"], init_weights=False),
    "adalora": peft.AdaLoraConfig(init_r=2, total_step=9, target_modules=["k_proj"]),
    "tokens": peft.TrainableTokensConfig(token_indices=[3], target_modules=["embed_tokens"]),
}


@pytest.mark.parametrize("method", OTHER_METHODS)
def test_other_methods_of_peft(method, tmp_path):
    """They are refused, unless they are disabled, inactive or merged."""
    write(tmp_path / "model", "qwen3_moe", "fp8")
    model = load(tmp_path / "model")
    tuned = peft.get_peft_model(model, OTHER_METHODS[method])
    path = "embed_tokens" if method == "tokens" else "layers.0.self_attn.k_proj"
    rule = rf"^save: model.{path} must have LoRA of PEFT .* got 'peft.tuners.\w*{method}"
    refused(rule, tuned, tmp_path / "merged", "merged")
    refused("must have LoRA of PEFT", model, tmp_path / "floats", "bfloat16")
    save(tuned, tmp_path / "same")
    assert different_files(tmp_path / "model", tmp_path / "same") == []
    with tuned.disable_adapter():
        save(tuned, tmp_path / "merged", "merged")
    assert different_files(tmp_path / "model", tmp_path / "merged") == []
    for module in model.modules():
        if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer):
            module.set_adapter([])
    save(tuned, tmp_path / "again", "merged")
    assert different_files(tmp_path / "model", tmp_path / "again") == []


def test_a_learned_prompt(tmp_path):
    """It is no part of a weight, so it cannot be merged."""
    write(tmp_path / "model", "qwen3_moe", "fp8")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    tuned = peft.get_peft_model(load(tmp_path / "model"), config)
    for format in ("merged", "bfloat16"):
        refused("^save: model must have no learned prompt", tuned, tmp_path / "other", format)
    refused("^save: model must have no", tuned, tmp_path / "other.gguf", "gguf_adapter")
    save(tuned, tmp_path / "same")
    assert different_files(tmp_path / "model", tmp_path / "same") == []


def test_merged_adapters_of_another_method(tmp_path):
    write(tmp_path / "model", "qwen3_moe", "fp8")
    tuned = peft.get_peft_model(load(tmp_path / "model"), OTHER_METHODS["loha"])
    tuned.merge_adapter()
    save(tuned, tmp_path / "floats", "float32")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "floats")
    assert error(logits_of(plain), logits_of(tuned)) < 1e-5


def changed_head(kind):
    """Returns a model whose last layer differs from the embedding, to which it is tied."""
    model = tiny("qwen3_moe", **WIDE, norm_topk_prob=True, tie_word_embeddings=True).eval()
    plug.quantize_experts(model, "gguf_q8_0", quiet=True)
    if kind == "untied":
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 2)
    elif kind == "modules_to_save":
        config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
        model = peft.get_peft_model(model, config)
        model.base_model.lm_head.modules_to_save.default.weight.data.mul_(2)
    else:
        adapted(model, linear=["lm_head"])
    return model


@pytest.mark.filterwarnings("ignore")  # PEFT warns of tied layers
@pytest.mark.parametrize("kind", ["untied", "modules_to_save", "adapter"])
def test_a_last_layer_that_is_no_longer_tied(kind, tmp_path):
    model = changed_head(kind)
    rule = "^save: lm_head.weight must be tied to model.embed_tokens.weight, without adapters .*"
    rule += "'adapters'" if kind == "adapter" else "'other values'"
    refused(rule, model, tmp_path / "floats", "float32")
    refused(rule, model, tmp_path / "model.gguf", "gguf")
    model.config.tie_word_embeddings = False
    save(model, tmp_path / "floats", "float32")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "floats")
    assert error(logits_of(plain), logits_of(model)) < 1e-5
    save(model, tmp_path / "model.gguf", "gguf_f32")
    assert error(logits_of(load(tmp_path / "model.gguf")), logits_of(model)) < 1e-5


def test_a_last_layer_that_the_files_do_not_have(tmp_path):
    write(tmp_path / "model", "qwen3_moe", "fp8", tie_word_embeddings=True)
    model = load(tmp_path / "model")
    save(model, tmp_path / "same")
    assert different_files(tmp_path / "model", tmp_path / "same") == []
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 2)
    model.config.tie_word_embeddings = False
    rule = "^save: lm_head.weight must be a weight of the checkpoint"
    for format in ("unchanged", "merged"):
        refused(rule, model, tmp_path / format, format)


@pytest.mark.filterwarnings("ignore")
def test_an_equal_or_disabled_copy_of_a_tied_layer(tmp_path):
    model = changed_head("modules_to_save")
    with model.disable_adapter():
        save(model, tmp_path / "floats", "float32")
        plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "floats")
        assert error(logits_of(plain), logits_of(model)) < 1e-5
    model.base_model.lm_head.modules_to_save.default.weight.data.div_(2)
    save(model, tmp_path / "again", "float32")
    assert different_files(tmp_path / "floats", tmp_path / "again") == []
