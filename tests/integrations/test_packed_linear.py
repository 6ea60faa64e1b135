"""Models whose linear layers stay packed, like the experts."""

import copy
import importlib
import pickle

import pytest
import torch

from moe_ext import add_lora
from moe_ext.formats import PackedWeight, dequantize, quantize

transformers = pytest.importorskip("transformers", minversion="5.23")

from packed_checkpoints import (  # noqa: E402
    CHECKPOINTS,
    TYPES,
    different_files,
    linear_layers,
    load,
    write,
    write_gguf,
)
from tiny_models import error, logits_of, tokens  # noqa: E402

plug = importlib.import_module("moe_ext.integrations.transformers")


def load_packed(path, **options):
    return load(path, packed_linear=True, **options)


def test_which_layers_are_packed(mixed):
    path, _ = mixed
    model = load_packed(path)
    layers = linear_layers(model)
    assert [*layers] == [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]
    size = sum(weight.panels.nbytes for layer in layers.values() for weight in layer.weights)
    assert size == 2 * 32 * 64 * 34 // 32
    assert f"packed linear layers: 2 in gguf_q8_0 ({size:,} bytes)" in plug.describe(model)
    assert "packed linear layers" not in plug.describe(load(path))
    assert "format=gguf_q8_0, 2,176 bytes" in str(model)
    plan = plug.memory_plan(path, dtype=torch.float32, packed_linear=True)
    assert plan.experts + plan.dense == sum(p.nbytes for p in model.parameters())
    assert plan.dense < plug.memory_plan(path, dtype=torch.float32).dense


def test_tied_layers_stay_floats(tmp_path):
    """The embedding needs the numbers of the weight that the last layer has too."""
    path = tmp_path / "model.gguf"
    expected = write_gguf(path, "qwen3_moe", TYPES.Q8_0, tied=TYPES.Q8_0)
    model = load_packed(path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head" not in linear_layers(model)
    assert error(logits_of(model), logits_of(expected)) < 1e-5


def test_biases_belong_to_packed_layers(tmp_path):
    path = tmp_path / "model.gguf"
    expected = write_gguf(path, "qwen2_moe", TYPES.Q8_0, shared_expert_intermediate_size=24)
    model = load_packed(path)
    layers = linear_layers(model)
    assert layers and all(layer.bias is not None for layer in layers.values())
    with torch.no_grad():
        for owner in (model, expected):
            for name in layers:
                owner.get_submodule(name).bias.normal_(generator=torch.Generator().manual_seed(0))
    assert error(logits_of(model), logits_of(expected)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_go_through(mixed, dtype):
    path, expected = mixed
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    grads = []
    for model in (load_packed(path, dtype=dtype), copy.deepcopy(expected).to(dtype)):
        model(tokens(), labels=tokens()).loss.backward()
        grads.append(model.model.embed_tokens.weight.grad.float())
    assert error(*grads) < tolerance


def test_dtype_and_copies(mixed):
    model = load_packed(mixed[0])
    (layer, *_) = linear_layers(model).values()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits_of(copied), logits_of(model))
    panels = layer.weights[0].panels.clone()
    model.bfloat16()
    assert layer.weight.dtype == torch.bfloat16
    assert torch.equal(layer.weights[0].panels, panels)
    assert layer(torch.zeros(0, 64)).shape == (0, 32)


def test_integer_arithmetic(mixed):
    exact, integer = (load_packed(mixed[0], arithmetic=name) for name in ("exact", "integer"))
    assert {layer.arithmetic for layer in linear_layers(integer).values()} == {"integer"}
    layer, rounded = (linear_layers(m)["model.layers.0.self_attn.q_proj"] for m in (exact, integer))
    x = torch.randn(5, 64)
    assert 0 < error(rounded(x), layer(x)) < 0.02


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_merged_files(name, tmp_path):
    """Adapters of experts are merged; packed linear layers keep their bytes."""
    model_type, kind, sizes = CHECKPOINTS[name]
    (tmp_path / "source").mkdir()
    write(tmp_path / "source", model_type, kind, **sizes)
    models = [load(tmp_path / "source"), load_packed(tmp_path / "source")]
    for i, model in enumerate(models):
        torch.manual_seed(0)
        add_lora(model, rank=2, alpha=2)
        for key, parameter in model.named_parameters():
            if parameter.requires_grad:
                torch.manual_seed(len(key))
                torch.nn.init.normal_(parameter, std=0.1)
        for format in ("merged", "float32"):
            plug.save(model, tmp_path / f"{format}_{i}", format)
    for format in ("merged", "float32"):
        assert different_files(tmp_path / f"{format}_0", tmp_path / f"{format}_1") == []


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("arithmetic", ["exact", "integer"])
def test_few_rows_have_the_bits_of_many(bias, arithmetic):
    linear = torch.nn.Linear(64, 1544, bias=bias)
    layer = plug.PackedLinear(linear, arithmetic)
    packed = quantize(linear.weight.detach()[None], "gguf_q4_0")
    layer.set_weight(PackedWeight.pack(*packed, format="gguf_q4_0"))
    x = torch.randn(40, 64)
    with torch.no_grad():
        expected = layer(x)
        assert error(expected, torch.nn.functional.linear(x, layer.weight, layer.bias)) < 0.02
        for size in (0, 1, 5, 16, 17):
            assert torch.equal(layer(x[:size]), expected[:size])
    if arithmetic == "exact":
        assert torch.equal(layer(x[:3].requires_grad_()), expected[:3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float_layers_are_quantized(dtype, tmp_path):
    """The experts of gpt-oss are packed in the files, and its linear layers are not."""
    source, saved = tmp_path / "source", tmp_path / "saved"
    source.mkdir()
    model_type, kind, sizes = CHECKPOINTS["mxfp4"]
    expected = write(source, model_type, kind, **sizes)
    model = load(source, packed_linear="gguf_q8_0", dtype=dtype)
    floats = {name for name, m in expected.named_modules() if type(m) is torch.nn.Linear}
    assert linear_layers(model).keys() == floats and len(floats) == 9
    for name, layer in linear_layers(model).items():
        packed = quantize(expected.get_submodule(name).weight.detach(), "gguf_q8_0")
        assert torch.equal(layer.weight, dequantize(*packed, format="gguf_q8_0", dtype=dtype))
    assert 0 < error(logits_of(model), logits_of(expected)) < 0.2
    plug.save(model, saved)
    assert different_files(source, saved) == []
    plan = plug.memory_plan(source, dtype=dtype, packed_linear="gguf_q8_0")
    assert plan.experts + plan.dense == sum(p.nbytes for p in model.parameters())


def test_layers_that_stay_floats(tmp_path):
    """A layer with one output does not fill a panel."""
    path = tmp_path / "model.gguf"
    write_gguf(path, "qwen2_moe", TYPES.Q8_0, shared_expert_intermediate_size=32)
    model = load(path, packed_linear="int8")
    floats = {name for name, m in model.named_modules() if type(m) is torch.nn.Linear}
    assert floats == {f"model.layers.{i}.mlp.shared_expert_gate" for i in range(2)}
    formats = {weight.format for m in linear_layers(model).values() for weight in m.weights}
    assert formats == {"gguf_q8_0", "int8"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"packed_linear": "q8"}, "load: packed_linear must be one of .*, got 'q8'"),
        (
            {"packed_linear": "gguf_q4_k"},
            "load: model.layers.0.self_attn.k_proj: its weight cannot be packed in gguf_q4_k",
        ),
        (
            {"packed_linear": "fp8", "arithmetic": "integer"},
            "load: arithmetic must be exact for weights in fp8, got 'integer'",
        ),
    ],
)
def test_errors(mixed, options, message):
    with pytest.raises(ValueError, match=message):
        load(mixed[0], **options)


def test_compiles(mixed):
    model = load_packed(mixed[0])
    expected = logits_of(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert error(compiled(tokens()).logits, expected) < 1e-5
