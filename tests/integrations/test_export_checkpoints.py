"""Models in safetensors files: merged as floats, and in the format of the checkpoint."""

import filecmp
import importlib
import json
import re

import pytest
import torch
from assertions import assert_same_bits

from moe_ext.formats import quantize
from moe_ext.lora import disable_lora, lora_experts, merge_lora

transformers = pytest.importorskip("transformers", minversion="5.23")
peft = pytest.importorskip("peft")

from exports import LINEAR, PLAIN_ROPE, adapted, refused, save  # noqa: E402
from packed_checkpoints import (  # noqa: E402
    CHECKPOINTS,
    PROJECTIONS,
    SCHEMES,
    TYPES,
    WIDE,
    compressed,
    different_files,
    edited,
    files_of,
    load,
    scheme_of,
    write,
    write_gguf,
)
from safetensors.torch import load_file  # noqa: E402
from tiny_models import error, logits_of, tiny  # noqa: E402

plug = importlib.import_module("moe_ext.integrations.transformers")


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
