"""Exported models: merged as floats, in the format of the checkpoint, and as GGUF."""

import filecmp
import importlib
import json
import math
import re
import sys

import numpy as np
import pytest
import torch
from assertions import MIB, assert_same_bits, peak_mib
from expert_kinds import random_weight

from moe_ext import QuantizedExperts, add_lora
from moe_ext.formats import quantize
from moe_ext.lora import disable_lora, lora_experts, merge_lora

transformers = pytest.importorskip("transformers", minversion="5.23")
peft = pytest.importorskip("peft")

import gguf  # noqa: E402
from llama import llama_logits, llama_tokens  # noqa: E402
from packed_checkpoints import (  # noqa: E402
    CHECKPOINTS,
    GGUF,
    PROJECTIONS,
    SCHEMES,
    TYPES,
    WIDE,
    compressed,
    config_for,
    different_files,
    edited,
    files_of,
    load,
    scheme_of,
    write,
    write_gguf,
)
from safetensors.torch import load_file  # noqa: E402
from tiny_models import MODEL_TYPES, error, logits_of, tiny, tokens  # noqa: E402

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


def merged_experts(model):
    """Returns the merged float weights [E, in, out] of each layer, by the path of the experts."""
    weights = {}
    for path, experts in lora_experts(model).items():
        own = experts.merged_experts(torch.float32)
        weights[path.removesuffix(".packed")] = [weight.detach() for weight in own.weights]
    return weights


def merged_linear(model):
    """Returns the merged weights of linear layers, as PEFT computes them, by their names."""
    weights = {}
    for path, module in model.named_modules():
        if hasattr(module, "get_delta_weight"):
            weight = module.get_base_layer().weight.detach()
            weights[f"{path}.weight"] = weight + module.get_delta_weight("default").detach()
    return weights


@pytest.fixture(scope="module", params=CHECKPOINTS)
def checkpoint(request, tmp_path_factory):
    """Returns the folder of a checkpoint, and its model with adapters."""
    folder = tmp_path_factory.mktemp(request.param)
    model_type, kind, sizes = CHECKPOINTS[request.param]
    write(folder, model_type, kind, **sizes)
    (folder / "tokenizer.json").write_text("{}")
    return folder, adapted(load(folder))


# Floats


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_floats(checkpoint, dtype, tmp_path):
    """The loader of transformers gives the logits of the model with its adapters.

    The names are those of the checkpoint. Each merged weight is rounded once.
    """
    folder, model = checkpoint
    name = str(dtype).removeprefix("torch.")
    save(model, tmp_path, name, shard_size=100_000)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert type(plain) is type(model) and not hasattr(plain, "hf_quantizer")
    assert {p.dtype for p in plain.parameters()} >= {dtype}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == name and "quantization_config" not in config
    assert (tmp_path / "tokenizer.json").read_text() == "{}"
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    packed = {re.sub(r"(_packed|_blocks)$", "", name) for name in names_of(folder)}
    assert {*names_of(tmp_path)} == {
        name for name in packed if not re.search("_scale|_scales|_shape$", name)
    }
    for path, weights in merged_experts(model).items():
        module = plain.get_submodule(path)
        parts = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
        for part, weight in zip(parts, weights, strict=True):
            actual = module.get_parameter(part)
            actual = actual if module.is_transposed else actual.mT
            assert torch.equal(actual, weight.to(dtype))
    for path, weight in merged_linear(model).items():
        assert error(plain.get_parameter(path), weight) < 2**-8
    difference = error(logits_of(plain.float()), logits_of(model))
    assert difference < (1e-5 if dtype == torch.float32 else 0.1)


def names_of(folder):
    names = []
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        names += [name for name in header if name != "__metadata__"]
    return sorted(names)


def test_a_float_model_that_was_packed_in_memory(tmp_path):
    model = tiny("qwen3_moe", **WIDE).eval()
    plug.quantize_experts(model, "mxfp4", quiet=True)
    save(adapted(model), tmp_path / "floats", "float32")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "floats")
    assert error(logits_of(plain), logits_of(model)) < 1e-5
    for format in ("unchanged", "merged"):
        with pytest.raises(ValueError, match="^save: model must come from load, got 'Qwen3MoeFor"):
            save(model, tmp_path / "other", format)


def test_models_in_a_peft_model_and_without_adapters(tmp_path):
    write(tmp_path / "model", "qwen3_moe", "fp8")
    model = load(tmp_path / "model")
    save(model, tmp_path / "without", "float32")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "without")
    assert error(logits_of(plain), logits_of(model)) < 1e-5
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config)
    for format in ("float32", "merged"):
        save(wrapped, tmp_path / format, format)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "float32")
    assert error(logits_of(plain), logits_of(wrapped)) < 1e-5
    assert error(logits_of(load(tmp_path / "merged")), logits_of(wrapped)) < 0.1


def test_disabled_adapters_are_not_merged(tmp_path):
    write(tmp_path / "model", "gpt_oss", "mxfp4", **PLAIN_ROPE)
    model = load(tmp_path / "model")
    save(model, tmp_path / "base.gguf", "gguf")
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    adapted(tuned, linear=None, train_rest=True)
    with disable_lora(tuned), tuned.disable_adapter():
        save(tuned, tmp_path / "model.gguf", "gguf")
        save(tuned, tmp_path / "merged", "merged")
        refused("must have active adapters", tuned, tmp_path / "adapter.gguf", "gguf_adapter")
    assert filecmp.cmp(tmp_path / "base.gguf", tmp_path / "model.gguf", shallow=False)
    assert different_files(tmp_path / "model", tmp_path / "merged") == []
    save(tuned, tmp_path / "again", "merged")
    assert different_files(tmp_path / "model", tmp_path / "again") != []


def test_merged_lora(tmp_path):
    """Experts that merge_lora made are floats."""
    write(tmp_path / "model", "gpt_oss", "mxfp4")
    model = adapted(load(tmp_path / "model"), linear=None)
    expected = logits_of(model)
    merge_lora(model)
    save(model, tmp_path / "floats", "float32")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "floats")
    assert error(logits_of(plain), expected) < 1e-5
    with pytest.raises(ValueError, match="must have packed experts as in the checkpoint"):
        save(model, tmp_path / "other", "merged")
    rule = (
        "must have a format of GGUF .pass format='gguf_mxfp4', 'gguf_q4_0', 'gguf_q8_0', .*floats"
    )
    with pytest.raises(ValueError, match=rule):
        save(model, tmp_path / "model.gguf", "gguf")


# In the format of the checkpoint


def test_merged_in_the_format_of_the_checkpoint(checkpoint, request, tmp_path):
    """Codes and scales are those of the reference package for the merged weight, bit for bit."""
    folder, model = checkpoint
    kind = CHECKPOINTS[request.node.callspec.params["checkpoint"]][1]
    save(model, tmp_path / "merged", "merged")
    save(model, tmp_path / "floats", "float32")
    actual, old = tensors_of(tmp_path / "merged"), tensors_of(folder)
    assert files_of(tmp_path / "merged") == files_of(folder)
    assert [*actual] == [*old]
    adapted = re.compile(rf"experts\..*|self_attn\.({'|'.join(LINEAR)})\.weight$")
    expected = dict(old)
    for name, weight in tensors_of(tmp_path / "floats").items():
        if adapted.search(name) and "bias" not in name:
            expected |= reference(name, weight, kind)
    for name, value in expected.items():
        assert_same_bits(actual[name], value)
    assert len(different(old, actual)) > 8
    model = load(tmp_path / "merged")
    assert 0 < error(logits_of(model), logits_of(checkpoint[1])) < 0.3
    save(model, tmp_path / "again")
    assert different_files(tmp_path / "merged", tmp_path / "again") == []


def reference(name, weight, kind):
    """Returns the tensors of a weight in the format of a checkpoint, by the reference package."""
    if kind == "mxfp4" and weight.dim() == 3:
        codes, scales = quantize(weight.mT.contiguous(), "mxfp4")
        return {f"{name}_blocks": codes.unflatten(-1, (-1, 16)), f"{name}_scales": scales}
    if kind == "fp8" and PROJECTIONS.search(name):
        codes, scales = quantize(weight, "fp8")
        return {name: codes, f"{name}_scale_inv": scales}
    if kind in SCHEMES and PROJECTIONS.search(name):
        packed, _ = compressed(weight, *scheme_of(kind))
        return {f"{name.removesuffix('weight')}{key}": tensor for key, tensor in packed.items()}
    return {name: weight}


def different(old, new):
    """Returns the names of the tensors with other bits."""

    def bits(tensor):
        return tensor.contiguous().view(-1).view(torch.uint8)

    return {name for name in old if not torch.equal(bits(old[name]), bits(new[name]))}


def tensors_of(folder):
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return dict(sorted(tensors.items()))


def test_experts_without_a_change_keep_their_bytes(tmp_path):
    write(tmp_path / "model", "qwen3_moe", "fp8")
    model = adapted(load(tmp_path / "model"), linear=None)
    for experts in lora_experts(model).values():
        experts.adapters["default"].b_0.data[:4] = 0
        experts.adapters["default"].b_1.data[1:] = 0
    save(model, tmp_path / "merged", "merged")
    old, new = tensors_of(tmp_path / "model"), tensors_of(tmp_path / "merged")
    changed = different(old, new)
    touched = {tuple(re.search(r"experts\.(\d)\.(\w+)\.weight", name).groups()) for name in changed}
    first = {(str(e), name) for e in (4, 5) for name in ("gate_proj", "up_proj")}
    assert touched == first | {("0", "down_proj")}
    for experts in lora_experts(model).values():
        experts.set_adapter()
    save(model, tmp_path / "none", "merged")
    assert different_files(tmp_path / "model", tmp_path / "none") == []


def merged_and_floats(folder, suffix, change):
    """Changes scales of a checkpoint; returns the tensors of two ways to save it with adapters."""

    def edit(tensors):
        tensors |= {n: change(scales) for n, scales in tensors.items() if n.endswith(suffix)}

    model = adapted(load(edited(folder, folder / "model", edit)))
    save(model, folder / "merged", "merged")
    save(model, folder / "floats", "float32")
    return tensors_of(folder / "merged"), tensors_of(folder / "floats")


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.bfloat16])
def test_scales_of_fp8_keep_their_dtype(dtype, tmp_path):
    """The codes are those of the weight divided by the rounded scales."""
    write(tmp_path, "qwen3_moe", "fp8", hidden_size=256, moe_intermediate_size=144)
    actual, floats = merged_and_floats(tmp_path, "_scale_inv", lambda scales: scales.to(dtype))
    names = [name for name in actual if name.endswith("_scale_inv") and ".experts." in name]
    for name in names:
        scales, weight = actual[name], floats[name.removesuffix("_scale_inv")]
        assert scales.dtype == dtype
        wide = torch.kron(scales.float(), torch.ones(128, 128))[: len(weight), : weight.shape[1]]
        codes = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(codes.float(), actual[name.removesuffix("_scale_inv")].float())
        largest = weight[:128, :128].abs().max()
        assert largest / 448 <= scales[0, 0].float() * (1 + 2**-8) < 2.02 * largest / 448
    assert len(names) == 36


def test_one_scale_for_a_matrix(tmp_path):
    """Some files in FP8 have one scale for each matrix."""
    write(tmp_path, "qwen3_moe", "compressed_fp8")
    actual, floats = merged_and_floats(tmp_path, "weight_scale", lambda s: s.amax().view(1))
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    scale = floats[name].abs().max() / 448
    assert torch.equal(actual[f"{name}_scale"], scale.view(1))
    codes = (floats[name] / scale).to(torch.float8_e4m3fn)
    assert torch.equal(codes.float(), actual[name].float())


def test_a_changed_packed_weight_is_quantized_again(tmp_path):
    write(tmp_path / "model", "qwen3_moe", "fp8")
    model = load(tmp_path / "model")
    weight = model.model.layers[0].self_attn.k_proj.weight
    with torch.no_grad():
        weight.mul_(1.7)
    save(model, tmp_path / "merged", "merged")
    old, new = tensors_of(tmp_path / "model"), tensors_of(tmp_path / "merged")
    changed = different(old, new)
    name = "model.layers.0.self_attn.k_proj.weight"
    assert changed <= {name, f"{name}_scale_inv"} and changed
    assert torch.equal(new[name].float(), quantize(weight.detach(), "fp8").codes.float())


@pytest.mark.parametrize("kind", ["mxfp4", "fp8", "gguf"])
def test_weights_in_a_wider_dtype_are_not_changed(kind, tmp_path):
    """The files have norms in float32, and packed dense weights."""
    folder = tmp_path / "old"
    if kind == "gguf":
        folder.mkdir()
        write_gguf(folder / "model.gguf", "qwen3_moe", TYPES.Q8_0)
    else:
        write(folder, {"mxfp4": "gpt_oss", "fp8": "qwen3_moe"}[kind], kind)
    model = load(folder, dtype=torch.bfloat16).to(torch.float32)
    for format in ("unchanged", "merged"):
        save(model, tmp_path / format, format)
        assert different_files(folder, tmp_path / format) == []
    weight = model.model.norm.weight
    with torch.no_grad():
        weight.add_(2**-12)
    save(model, tmp_path / "changed")
    loaded = load(tmp_path / "changed")
    assert torch.equal(loaded.model.norm.weight, weight)


# GGUF


@pytest.mark.parametrize("name", GGUF)
def test_merged_in_the_file_of_gguf(name, tmp_path):
    """Tensors with adapters are those of the package gguf for the merged weight, bit for bit."""
    model_type, kind, options = GGUF[name]
    (tmp_path / "old").mkdir()
    path = tmp_path / "old" / "model.gguf"
    config = config_for(write_gguf(path, model_type, kind, **options))
    model = adapted(load(path, config=config))
    save(model, tmp_path / "merged", "merged")
    save(model, tmp_path / "floats.gguf", "gguf_f32")
    old, actual = gguf_of(path), gguf_of(tmp_path / "merged" / "model.gguf")
    floats = gguf_of(tmp_path / "floats.gguf")
    changed = re.compile(r"_exps\.weight|attn_(q|q_b|output)\.weight")
    assert [*old] == [*actual]
    for name, tensor in actual.items():
        expected = old[name].data
        if changed.search(name):
            expected = gguf.quantize(floats[name].data, tensor.tensor_type)
            assert not np.array_equal(expected, old[name].data)
        assert tensor.tensor_type == old[name].tensor_type
        assert np.array_equal(tensor.data, expected), name
    again = load(tmp_path / "merged" / "model.gguf", config=config)
    assert error(logits_of(again), logits_of(model)) < 0.3


def gguf_of(path):
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def test_experts_in_an_unknown_format_of_gguf(tmp_path, capsys):
    """They fall back to floats, and are quantized again."""
    (tmp_path / "old").mkdir()
    path = tmp_path / "old" / "model.gguf"
    expected = write_gguf(path, "qwen3_moe", TYPES.Q8_0, down=TYPES.Q5_0)
    model = load(path, quiet=False)
    reason = "model.layers.0.mlp.experts and 1 more (its weights are Q5_0 in the file)"
    assert reason in capsys.readouterr().err
    assert error(logits_of(model), logits_of(expected)) < 1e-5
    save(model, tmp_path / "same")
    assert different_files(tmp_path / "old", tmp_path / "same") == []
    experts = model.model.layers[1].mlp.experts
    with torch.no_grad():
        experts.down_proj.mul_(1.3)
        experts.gate_up_proj[:, :32] *= 1.3
    rule = r"^save: model.layers.1.mlp.experts.\w+ must be unchanged, because it is packed"
    with pytest.raises(ValueError, match=rule):
        save(model, tmp_path / "other")
    save(model, tmp_path / "merged", "merged")
    tensors = gguf_of(tmp_path / "merged" / "model.gguf")
    expected = gguf.quantize(experts.down_proj.detach().numpy(), TYPES.Q5_0)
    assert np.array_equal(tensors["blk.1.ffn_down_exps.weight"].data, expected)
    expected = gguf.quantize(experts.gate_up_proj[:, :32].detach().numpy(), TYPES.Q8_0)
    assert np.array_equal(tensors["blk.1.ffn_gate_exps.weight"].data, expected)
    same = gguf_of(path)["blk.1.ffn_up_exps.weight"].data
    assert np.array_equal(tensors["blk.1.ffn_up_exps.weight"].data, same)


def test_gguf_in_several_files(tmp_path):
    (tmp_path / "old").mkdir()
    path = tmp_path / "old" / "model.gguf"
    expected = write_gguf(path, "qwen3_moe", TYPES.Q8_0, num_tensors=10)
    first, _, last = sorted(path.parent.iterdir())
    assert (first.name, last.name) == ("model-00001-of-00003.gguf", "model-00003-of-00003.gguf")
    model = load(first)
    assert error(logits_of(model), logits_of(expected)) < 1e-5
    save(model, tmp_path / "same")
    assert different_files(path.parent, tmp_path / "same") == []
    model = adapted(load(path.parent))
    for format in ("gguf", "gguf_adapter"):
        with pytest.raises(ValueError, match="^save: path must differ from the files that were"):
            save(model, last, format)
    assert different_files(path.parent, tmp_path / "same") == []
    save(model, tmp_path / "merged", "merged")
    assert error(logits_of(load(tmp_path / "merged")), logits_of(model)) < 0.1
    last.unlink()
    with pytest.raises(FileNotFoundError, match=last.name):
        load(path.parent)


def small(name, format="gguf_q8_0"):
    """Returns a model with packed experts, of the sizes of `MODELS`."""
    model_type, sizes = MODELS[name]
    model = tiny(model_type, **{**WIDE, **sizes}).eval()
    plug.quantize_experts(model, format, quiet=True)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_gguf_gives_the_logits_of_the_model(name, dtype, tmp_path):
    model = adapted(small(name)).to(dtype)
    path = tmp_path / "model.gguf"
    save(model, path, "gguf_f32")
    loaded = load(path, config=config_for(model), dtype=dtype)
    assert error(logits_of(loaded), logits_of(model)) < (1e-5 if dtype == torch.float32 else 0.1)
    config = loaded.config
    for key in ("hidden_size", "num_hidden_layers", "rms_norm_eps", "vocab_size"):
        value = getattr(config, key)
        assert value == pytest.approx(getattr(model.config, key)), key
    types = {tensor.tensor_type.name for tensor in gguf_of(path).values()}
    assert types == ({"F32"} if dtype == torch.float32 else {"F32", "BF16"})


@pytest.mark.parametrize(
    "format", ["gguf_q8_0", "gguf_q4_0", "gguf_mxfp4", "gguf_bf16", "gguf_f16"]
)
def test_the_format_of_experts_in_gguf(format, tmp_path):
    """Codes are those of the package gguf for the merged weight, bit for bit."""
    model = adapted(small("gpt_oss", "mxfp4"))
    save(model, tmp_path / "floats.gguf", "gguf_f32")
    save(model, tmp_path / "model.gguf", format)
    floats, actual = gguf_of(tmp_path / "floats.gguf"), gguf_of(tmp_path / "model.gguf")
    kind = TYPES[format.removeprefix("gguf_").upper()]
    experts = [name for name in actual if name.endswith("_exps.weight")]
    assert len(experts) == 6
    for name in experts:
        assert actual[name].tensor_type == kind
        expected = gguf.quantize(floats[name].data, kind)
        assert np.array_equal(actual[name].data.view(np.uint8), expected.view(np.uint8)), name


@pytest.mark.parametrize("format", ["gguf_q8_0", "gguf_q4_0", "gguf_mxfp4", "gguf_bf16"])
@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe"])
def test_the_format_of_float_experts_in_gguf(name, format, tmp_path):
    model_type, sizes = MODELS[name]
    model = tiny(model_type, **{**WIDE, **sizes}).eval()
    save(model, tmp_path / "floats.gguf", "gguf")
    save(model, tmp_path / "model.gguf", format)
    floats, actual = gguf_of(tmp_path / "floats.gguf"), gguf_of(tmp_path / "model.gguf")
    kind = TYPES[format.removeprefix("gguf_").upper()]
    experts = {name for name in actual if name.endswith("_exps.weight")}
    assert len(experts) == 6
    for name, tensor in actual.items():
        expected = floats[name].data
        if name in experts:
            assert tensor.tensor_type == kind
            expected = gguf.quantize(expected, kind)
        assert np.array_equal(tensor.data.view(np.uint8), expected.view(np.uint8)), name
    narrow = tiny("qwen3_moe", norm_topk_prob=True)
    if format != "gguf_bf16":
        rule = "experts.down_proj must have a multiple of 32 inputs"
        refused(rule, narrow, tmp_path / "narrow.gguf", format)


@pytest.mark.parametrize("format", ["mxfp4", "gguf_mxfp4", "gguf_q4_0", "gguf_q8_0"])
def test_codes_in_gguf_stay_as_they_are(format, tmp_path):
    """The values of experts without adapters do not change."""
    model = small("gpt_oss", format)
    save(model, tmp_path / "model.gguf", "gguf")
    save(model, tmp_path / "floats.gguf", "gguf_f32")
    floats = gguf_of(tmp_path / "floats.gguf")
    for name, tensor in gguf_of(tmp_path / "model.gguf").items():
        assert np.array_equal(gguf.dequantize(tensor.data, tensor.tensor_type), floats[name].data)
    loaded = load(tmp_path / "model.gguf")
    assert error(logits_of(loaded), logits_of(model)) < 1e-6
    own = [module.packed.weights for module in plug.experts_modules(model).values()]
    again = [module.packed.weights for module in plug.experts_modules(loaded).values()]
    for value, expected in zip(own, again, strict=True):
        for a, b in zip(value, expected, strict=True):
            assert b.format == {"mxfp4": "gguf_mxfp4"}.get(a.format, a.format)
            assert torch.equal(a.dequantize(), b.dequantize())


def test_gguf_of_a_packed_checkpoint(tmp_path):
    write(tmp_path / "model", "gpt_oss", "mxfp4", **PLAIN_ROPE)
    model = adapted(load(tmp_path / "model"))
    save(model, tmp_path / "model.gguf", "gguf")
    loaded = load(tmp_path / "model.gguf")
    assert error(logits_of(loaded), logits_of(model)) < 0.3
    save(loaded, tmp_path / "again.gguf", "gguf")
    assert filecmp.cmp(tmp_path / "model.gguf", tmp_path / "again.gguf", shallow=False)


def test_adapters_in_gguf(tmp_path):
    """W + alpha / r (B A) of the file is the merged weight."""
    for name in ("gpt_oss", "qwen3_moe"):
        model = small(name)
        save(model, tmp_path / "base.gguf", "gguf_f32")
        add_lora(model, rank=2, alpha=3, adapter="second", rslora=True)
        adapted(model)
        for experts in lora_experts(model).values():
            experts.set_adapter("second", "default")
        save(model, tmp_path / "merged.gguf", "gguf_f32")
        save(model, tmp_path / "adapter.gguf", "gguf_adapter")
        reader = gguf.GGUFReader(tmp_path / "adapter.gguf")
        values = {key: reader.fields[key].contents() for key in reader.fields}
        assert values["general.type"] == "adapter" and values["adapter.type"] == "lora"
        assert values["general.architecture"] == name.replace("_", "-" if "oss" in name else "")
        base, merged = gguf_of(tmp_path / "base.gguf"), gguf_of(tmp_path / "merged.gguf")
        adapter = gguf_of(tmp_path / "adapter.gguf")
        names = {name.rpartition(".")[0] for name in adapter}
        assert len(names) == 2 * (3 + 2)
        for name in names:
            a, b = (adapter[f"{name}.lora_{letter}"].data for letter in "ab")
            assert a.ndim == b.ndim == (3 if "_exps" in name else 2)
            scale = values["adapter.lora.alpha"] / b.shape[-1]
            actual = torch.from_numpy(base[name].data + scale * (b @ a))
            assert error(actual, torch.from_numpy(merged[name].data.copy())) < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_gives_the_logits_of_the_model(name, tmp_path):
    model = small(name)
    save(model, tmp_path / "base.gguf", "gguf_f32")
    assert error(llama_logits(tmp_path / "base.gguf", tokens()), logits_of(model)) < 1e-5
    adapted(model, linear=["q_proj", "k_proj", "v_proj", "o_proj"])
    expected = logits_of(model)
    save(model, tmp_path / "merged.gguf", "gguf_f32")
    assert error(llama_logits(tmp_path / "merged.gguf", tokens()), expected) < 1e-5
    save(model, tmp_path / "adapter.gguf", "gguf_adapter")
    actual = llama_logits(tmp_path / "base.gguf", tokens(), tmp_path / "adapter.gguf")
    assert error(actual, expected) < 1e-5


def test_llama_cpp_rounds_the_limits_of_yarn(tmp_path):
    """gpt-oss does not: truncate is False in its configuration."""
    model = tiny("gpt_oss", **WIDE).eval()
    assert model.config.rope_parameters["truncate"] is False
    plug.quantize_experts(model, "gguf_q8_0", quiet=True)
    save(model, tmp_path / "model.gguf", "gguf_f32")
    assert error(llama_logits(tmp_path / "model.gguf", tokens()), logits_of(model)) < 1e-3
    assert error(logits_of(load(tmp_path / "model.gguf")), logits_of(model)) < 1e-5


@pytest.mark.parametrize("format", ["gguf_q8_0", "gguf_q4_0", "mxfp4"])
def test_llama_cpp_reads_packed_experts(format, tmp_path):
    """llama.cpp rounds the inputs of packed experts to 8 bits."""
    model = adapted(small("gpt_oss", format))
    save(model, tmp_path / "model.gguf", "gguf")
    expected = logits_of(load(tmp_path / "model.gguf"))
    assert error(llama_logits(tmp_path / "model.gguf", tokens()), expected) < 0.05


TEXT = "The experts' answers: they've 1234 choices,\n\n  but only  two!\tÄpfel, CamelCase 中文."
# The rules of splitting in the files of published models.
SPLITS = {
    "gpt-2": [],
    "qwen2": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "gpt-4o": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
        "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
}


@pytest.fixture(params=SPLITS)
def tokenizer(request, tmp_path):
    """Returns the name of a rule of splitting, and a tokenizer with it, saved with a model."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[request.param]]
    own = Tokenizer(models.BPE())
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splits)
    own.pre_tokenizer = pre_tokenizers.Sequence([*splits, last])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    own.train_from_iterator([TEXT] * 3, trainer)
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<|end|>")
    wrapped.chat_template = "{{ messages[0]['content'] }}"
    write(tmp_path / "model", "gpt_oss", "mxfp4", vocab_size=320)
    wrapped.save_pretrained(tmp_path / "model")
    return request.param, wrapped


def test_a_tokenizer_that_splits_in_another_way(tokenizer, tmp_path):
    name, _ = tokenizer
    path = tmp_path / "model" / "tokenizer.json"
    described = json.loads(path.read_text())
    first = described["pre_tokenizer"]["pretokenizers"][0]
    if name == "gpt-2":
        first["use_regex"] = False
    else:
        first["pattern"]["Regex"] += "|x"
    path.write_text(json.dumps(described))
    message = "^save: the tokenizer for GGUF must split a text as gpt-2, qwen2, "
    refused(message, load(tmp_path / "model"), tmp_path / "model.gguf", "gguf")


def tokenizer_in(path):
    fields = gguf.GGUFReader(path).fields
    return {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer")}


def test_tokenizers_in_gguf(tokenizer, tmp_path, capsys):
    name, own = tokenizer
    plug.save(load(tmp_path / "model"), tmp_path / "model.gguf", "gguf")
    count = len(own.get_vocab())
    assert f"the tokenizer with {count} tokens ({name})" in capsys.readouterr().err
    values = tokenizer_in(tmp_path / "model.gguf")
    texts = values["tokenizer.ggml.tokens"]
    assert len(texts) == 320
    assert {text: i for i, text in enumerate(texts[:count])} == own.get_vocab()
    assert values["tokenizer.ggml.token_type"][0] == gguf.TokenType.CONTROL
    assert {*values["tokenizer.ggml.token_type"][count:]} == {gguf.TokenType.UNUSED}
    assert values["tokenizer.ggml.eos_token_id"] == own.eos_token_id
    assert values["tokenizer.chat_template"] == own.chat_template
    save(load(tmp_path / "model.gguf"), tmp_path / "again.gguf", "gguf_q8_0")  # copies the fields
    assert tokenizer_in(tmp_path / "again.gguf") == values


def test_llama_cpp_gives_the_tokens_of_the_tokenizer(tokenizer, tmp_path):
    _, own = tokenizer
    save(load(tmp_path / "model"), tmp_path / "model.gguf", "gguf")
    text = f"{TEXT}<|end|>"
    actual = llama_tokens(tmp_path / "model.gguf", text)
    assert actual == own(text).input_ids and own.eos_token_id in actual


def test_gguf_needs_the_package(tmp_path, monkeypatch):
    write_gguf(tmp_path / "model.gguf", "qwen3_moe", TYPES.Q8_0)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match="load: GGUF files need gguf .pip install gguf"):
        load(tmp_path)
    for format in ("gguf", "gguf_adapter"):
        with pytest.raises(ImportError, match="save: GGUF files need gguf .pip install gguf"):
            save(adapted(small("gpt_oss")), tmp_path / "model.gguf", format)


def test_gguf_without_a_tokenizer_says_so(tmp_path, capsys):
    model = small("gpt_oss")
    plug.save(model, tmp_path / "model.gguf", "gguf")
    line = capsys.readouterr().err
    assert "no tokenizer, because the model is not from load" in line
    assert "GptOssForCausalLM as gguf; 1 files with " in line
    save(model, tmp_path / "floats", "float32")
    plug.save(load(tmp_path / "floats"), tmp_path / "model.gguf", "gguf")
    line = capsys.readouterr().err
    assert "no tokenizer, because the checkpoint has no tokenizer.json" in line


@pytest.mark.parametrize("tokenizer", ["gpt-2"], indirect=True)
def test_a_float_checkpoint_that_was_packed_in_memory(tokenizer, tmp_path):
    """Its other files and its tokenizer are those of the folder."""
    tiny("gpt_oss", **WIDE, **PLAIN_ROPE, vocab_size=320).save_pretrained(tmp_path / "two")
    tokenizer[1].save_pretrained(tmp_path / "two")
    options = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    folder = edited(tmp_path / "two", tmp_path / "plain", **options)
    model = load(folder)
    plug.quantize_experts(model, "gguf_q8_0", quiet=True)
    line = plug.describe(model)
    assert "packed: 1 in gguf_q8_0" in line and "not packed: none; not used: " in line
    save(model, tmp_path / "model.gguf", "gguf")
    assert len(tokenizer_in(tmp_path / "model.gguf")["tokenizer.ggml.tokens"]) == 320
    save(model, tmp_path / "floats", "float32")
    assert files_of(tmp_path / "floats") == files_of(folder)
    rule = "^save: model.layers.0.mlp.experts must have the experts of the checkpoint, got 'experts"
    for format in ("unchanged", "merged"):
        refused(rule, model, tmp_path / format, format)


# What a format cannot hold


def refused(message, model, path, format):
    with pytest.raises(ValueError, match=message):
        save(model, path, format)
    assert not path.exists() or path.is_dir()
    assert not [*path.parent.glob(f".{path.name}*")]


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


# Perplexity


def test_perplexity(tmp_path):
    model = small("qwen3_moe")
    model.config.output_router_logits = True  # then the loss of transformers has the routers' too
    logits = logits_of(model).double().log_softmax(-1)[:, :-1]
    losses = -logits.gather(-1, tokens()[:, 1:, None])
    model.train()
    assert plug.perplexity(model, tokens()) == pytest.approx(math.exp(losses.mean()), rel=1e-5)
    assert model.training
    for wrong in (tokens()[0], tokens()[:, :1], tokens()[:0]):
        with pytest.raises(ValueError, match="^perplexity: tokens must have the shape"):
            plug.perplexity(model, wrong)
    for wrong in (tokens().int(), tokens().tolist()):
        with pytest.raises(TypeError, match="^perplexity: tokens must"):
            plug.perplexity(model, wrong)


def test_perplexity_keeps_the_modes():
    model = tiny("qwen3_moe").train()
    model.model.layers[0].mlp.eval()
    modes = [module.training for module in model.modules()]
    plug.perplexity(model, tokens())
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(IndexError):
        plug.perplexity(model, tokens() + 50)
    assert [module.training for module in model.modules()] == modes


# Memory


@pytest.mark.parametrize("format", ["bfloat16", "merged", "gguf"])
def test_peak_of_memory_while_saving(format, tmp_path):
    """At most the float weights of one parameter of a layer are in memory."""
    sizes = {"hidden_size": 256, "intermediate_size": 128, "num_local_experts": 12, **PLAIN_ROPE}
    write(tmp_path / "model", "gpt_oss", "mxfp4", num_hidden_layers=4, **sizes)
    model = adapted(load(tmp_path / "model", dtype=torch.bfloat16))
    path = tmp_path / ("model.gguf" if format == "gguf" else "folder")
    peak = peak_mib(lambda: save(model, path, format))
    parameter = 12 * 256 * 256 * (2 if format == "bfloat16" else 17 / 32) / MIB
    expert = 256 * 256 * 4 / MIB
    assert peak < parameter + 12 * expert < 4 * 12 * 3 * 128 * 256 * 2 / MIB


@pytest.mark.parametrize("format", ["unchanged", "merged"])
def test_peak_of_memory_while_saving_float_experts(format, tmp_path):
    """The weights of one layer are converted at a time."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 12}
    tiny("qwen3_moe", num_hidden_layers=4, **sizes).save_pretrained(tmp_path / "model")
    model = load(tmp_path / "model")
    peak = peak_mib(lambda: save(model, tmp_path / format, format))
    assert different_files(tmp_path / "model", tmp_path / format) == []
    assert peak < 1.5 * 12 * 3 * 128 * 256 * 4 / MIB
