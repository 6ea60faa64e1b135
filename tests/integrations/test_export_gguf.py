"""Models and adapters as GGUF."""

import filecmp
import importlib
import re

import numpy as np
import pytest
import torch

from moe_ext import add_lora
from moe_ext.lora import lora_experts

pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("peft")

import gguf  # noqa: E402
from exports import MODELS, PLAIN_ROPE, adapted, gguf_of, refused, save, small  # noqa: E402
from packed_checkpoints import (  # noqa: E402
    GGUF,
    TYPES,
    WIDE,
    config_for,
    different_files,
    load,
    write,
    write_gguf,
)
from tiny_models import error, logits_of, tiny  # noqa: E402

plug = importlib.import_module("moe_ext.integrations.transformers")


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
