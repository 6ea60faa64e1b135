"""Packed checkpoints of transformers: logits of the dequantized model, bytes, memory, errors."""

import copy
import errno
import importlib
import io
import math
import pickle
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from assertions import MIB, peak_mib

from moe_ext import QuantizedExperts, add_lora, count_parameters, empty_cache

transformers = pytest.importorskip("transformers", minversion="5.23")

from packed_checkpoints import (  # noqa: E402
    CHECKPOINTS,
    GGUF,
    TYPES,
    config_for,
    different_files,
    edited,
    linear_layers,
    load,
    write,
    write_gguf,
)
from tiny_models import error, logits_of, tiny, tokens, trainer  # noqa: E402

plug = importlib.import_module("moe_ext.integrations.transformers")


@pytest.fixture(scope="module", params=[*CHECKPOINTS, *(f"gguf {name}" for name in GGUF)])
def checkpoint(request, tmp_path_factory):
    """Returns a folder, its checkpoint (a file or the folder) and the dequantized model."""
    folder = tmp_path_factory.mktemp("checkpoint")
    if request.param in CHECKPOINTS:
        model_type, kind, sizes = CHECKPOINTS[request.param]
        (folder / "tokenizer.json").write_text("{}")
        return folder, folder, write(folder, model_type, kind, **sizes)
    model_type, kind, options = GGUF[request.param.removeprefix("gguf ")]
    path = folder / "model.gguf"
    return folder, path, write_gguf(path, model_type, kind, **options)


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp8")
    return folder, write(folder, "qwen3_moe", "fp8")


def packed_experts(model):
    return [module.packed for module in plug.experts_modules(model).values()]


# These checkpoints have packed experts alone.
EXPERTS_ALONE = "mxfp4", "gguf deepseek", "gguf deepseek_with_two_parts_of_kv_b"


@pytest.mark.parametrize("packed_linear", [False, True])
def test_values_and_unchanged_files(checkpoint, packed_linear, tmp_path, request):
    """Logits are those of the dequantized model; saved files have the bytes of those loaded."""
    folder, path, expected = checkpoint
    config = config_for(expected) if path.is_file() else None
    options = {"config": config, "packed_linear": packed_linear}
    model = load(path, **options)
    assert all(isinstance(experts, QuantizedExperts) for experts in packed_experts(model))
    has_linear = request.node.callspec.params["checkpoint"] not in EXPERTS_ALONE
    assert bool(linear_layers(model)) == (packed_linear and has_linear)
    for name, layer in linear_layers(model).items():
        assert torch.equal(layer.weight, expected.get_parameter(f"{name}.weight"))
    assert error(logits_of(model), logits_of(expected)) < 1e-5
    assert count_parameters(model) == count_parameters(expected)
    for dtype in (torch.float32, torch.bfloat16):
        plug.save(load(path, dtype=dtype, **options), tmp_path / str(dtype))
        assert different_files(folder, tmp_path / str(dtype)) == []


@pytest.mark.parametrize("name", ["fp8", "fp8_of_deepseek", "int4", "mxfp4"])
def test_logits_are_those_of_the_loader_of_transformers(name, tmp_path):
    model_type, kind, sizes = CHECKPOINTS[name]
    write(tmp_path, model_type, kind, **sizes)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert error(logits_of(load(tmp_path)), logits_of(expected)) < 1e-5


@pytest.mark.parametrize(
    "change",
    [
        copy.deepcopy,
        lambda model: pickle.loads(pickle.dumps(model)),
        lambda model: plug.quantize_experts(model, "mxfp4") or model,  # they are packed already
    ],
)
def test_copies(change, fp8, tmp_path):
    folder, _ = fp8
    model = load(folder)
    expected = logits_of(model)
    model = change(model)
    assert torch.equal(logits_of(model), expected)
    plug.save(model, tmp_path / "saved")
    assert different_files(folder, tmp_path / "saved") == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases_have_the_dtype_of_the_model(dtype, tmp_path):
    """Autocast gives the experts other rows than the dtype of their biases."""
    expected = write(tmp_path, "gpt_oss", "mxfp4")
    model = load(tmp_path, dtype=dtype)
    assert {bias.dtype for experts in packed_experts(model) for bias in experts.biases} == {dtype}
    assert error(logits_of(model), logits_of(expected)) < (1e-5 if dtype == torch.float32 else 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        assert error(logits_of(model), logits_of(expected)) < 0.1


def test_a_changed_float_weight_is_saved(fp8, tmp_path):
    folder, _ = fp8
    model = load(folder)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    plug.save(model, tmp_path / "saved")
    assert different_files(folder, tmp_path / "saved") == ["model-00002-of-00002.safetensors"]
    assert torch.equal(logits_of(load(tmp_path / "saved")), logits_of(model))
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(2)
    with pytest.raises(ValueError, match=r"^save: model.layers.0.self_attn.q_proj.weight must be "):
        plug.save(model, tmp_path / "other")


def test_what_cannot_be_saved(fp8, tmp_path):
    folder, _ = fp8
    with pytest.raises(ValueError, match="^save: model must come from load, got "):
        plug.save(tiny(), tmp_path / "saved")
    model = load(folder)
    with pytest.raises(ValueError, match="^save: folder must differ from the loaded one"):
        plug.save(model, folder)
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "saved")


@pytest.mark.parametrize("format", ["unchanged", "bfloat16", "gguf_q8_0"])
def test_the_error_of_a_full_disk_has_the_free_bytes(format, fp8, tmp_path, monkeypatch):
    files = importlib.import_module("moe_ext.integrations._packed.save")

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("rewrite", "write_floats", "write_gguf_model"):
        monkeypatch.setattr(files, name, fail)
    path = tmp_path / ("saved.gguf" if format == "gguf_q8_0" else "saved")
    with pytest.raises(OSError, match="No space left") as raised:
        plug.save(load(fp8[0]), path, format)
    (note,) = raised.value.__notes__
    assert re.fullmatch(
        rf"save: {re.escape(str(path))} is incomplete; its disk has [\d,]+ bytes free", note
    )


def test_a_float_checkpoint_falls_back(tmp_path, capsys):
    expected = tiny()
    expected.save_pretrained(tmp_path)
    model = load(tmp_path, quiet=False)
    assert "its weights are float32 in the file" in capsys.readouterr().err
    assert error(logits_of(model), logits_of(expected)) < 1e-5


def test_the_line_says_what_happened(fp8, tmp_path, capsys):
    model = load(edited(fp8[0], tmp_path, num_hidden_layers=1), quiet=False)
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line == plug.describe(model)
    assert line.startswith("Qwen3MoeForCausalLM: 1 layer of 6 experts; packed: 1 in fp8 (")
    not_used = "not used: 27 tensors of the checkpoint, such as model.layers.1."
    assert f"; not packed: none; {not_used}" in line
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert f"; trained: {trained:,} parameters;" in line


@pytest.mark.parametrize("model_type", ["gpt_oss", "mixtral", "qwen3_moe"])
def test_quantize_experts(model_type, capsys):
    sizes = {"hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32}
    model = tiny(model_type, **sizes).eval()
    plug.quantize_experts(model, "mxfp4")
    assert "packed: 2 in mxfp4 (" in capsys.readouterr().err
    actual = logits_of(model)
    dequantized = copy.deepcopy(model)
    for module in plug.experts_modules(dequantized).values():
        module.packed = module.packed.dequantize()
    assert torch.equal(actual, logits_of(dequantized))
    float_logits = logits_of(tiny(model_type, **sizes).eval())
    assert 1e-4 < error(actual, float_logits) < 0.5


def test_models_of_the_hub(fp8, tmp_path, monkeypatch):
    files = importlib.import_module("moe_ext.integrations._packed.checkpoint")
    calls = []

    def download(*arguments, **options):
        calls.append(arguments)
        return str(fp8[0] if len(arguments) == 1 else tmp_path / Path(arguments[1]).name)

    for name in ("snapshot_download", "hf_hub_download"):
        monkeypatch.setattr(files, name, download)
    load("owner/model")
    write_gguf(tmp_path / "model.gguf", "qwen3_moe", TYPES.Q8_0)
    load("owner/model/Q8_0/model.gguf")
    assert calls == [("owner/model",), ("owner/model", "Q8_0/model.gguf")]


def test_split_files_of_the_hub(tmp_path, monkeypatch):
    """All parts are downloaded, whichever is named."""
    files = importlib.import_module("moe_ext.integrations._packed.checkpoint")
    calls = []
    monkeypatch.setattr(
        files, "hf_hub_download", lambda *call: calls.append(call) or tmp_path / call[1]
    )
    names = [f"Q8_0/model-{i}-of-00002.gguf" for i in ("00001", "00002")]
    for name in names:
        assert files._local(f"owner/model/{name}") == tmp_path / names[0]
    assert calls == 2 * [("owner/model", name) for name in names]


def test_a_missing_folder_that_looks_like_a_name_of_the_hub(monkeypatch):
    files = importlib.import_module("moe_ext.integrations._packed.checkpoint")

    def download(*_, **__):
        raise FileNotFoundError("no connection")

    monkeypatch.setattr(files, "snapshot_download", download)
    with pytest.raises(FileNotFoundError, match="no connection") as raised:
        load("models/tuned")
    assert raised.value.__notes__ == [
        "models/tuned is no file or folder here, but a name of the hub"
    ]


def test_a_dense_model(fp8, tmp_path):
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, vocab_size=32)
    heads = dict(num_attention_heads=2, num_key_value_heads=1)
    dense = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    dense.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^load: .* must be a mixture of experts .*LlamaForC"):
        load(tmp_path)


def test_exponents_as_scales_of_fp8(fp8, tmp_path):
    """Some files have the scales of FP8 as exponents, some of them as bytes."""

    def exponents(dtype):
        def edit(tensors):
            for name in tensors:
                if name.endswith("_scale_inv"):
                    tensors[name] = tensors[name].to(torch.float8_e8m0fnu).view(dtype)

        return edit

    logits = []
    for dtype in (torch.float8_e8m0fnu, torch.uint8):
        folder = edited(fp8[0], tmp_path / str(dtype) / "edited", exponents(dtype))
        model = load(folder)
        logits.append(logits_of(model))
        plug.save(model, tmp_path / str(dtype) / "saved")
        assert different_files(folder, tmp_path / str(dtype) / "saved") == []
    assert torch.equal(*logits)


def test_quantize_experts_errors():
    with pytest.raises(ValueError, match="^quantize_experts: format must be one of fp8, "):
        plug.quantize_experts(tiny(), "fp4")
    with pytest.raises(ValueError, match="cannot be packed in mxfp4"):
        plug.quantize_experts(tiny(), "mxfp4")


def test_an_error_of_quantize_experts_in_a_later_layer(tmp_path):
    """transformers does not save the model, of which one layer is packed."""
    model = tiny(hidden_size=64, moe_intermediate_size=32)
    weight = model.model.layers[1].mlp.experts.down_proj
    value = weight[0, 0, 0].item()
    weight.data[0, 0, 0] = math.inf
    with pytest.raises(ValueError, match="finite"):
        plug.quantize_experts(model, "mxfp4")
    assert "packed: 1 in mxfp4 (" in plug.describe(model)
    with pytest.raises(ValueError, match="is not serializable"):
        model.save_pretrained(tmp_path)
    weight.data[0, 0, 0] = value
    plug.quantize_experts(model, "gguf_q8_0")
    assert "packed: 1 in mxfp4, 1 in gguf_q8_0 (" in plug.describe(model)


def test_balance_counts_the_tokens_of_packed_experts(fp8):
    folder, expected = fp8
    measured = []
    for model in (load(folder), expected):
        with plug.balance(model) as balance:
            logits_of(model)
        measured.append([layer.load for layer in balance.layers])
    assert all(map(torch.equal, *measured))


def test_gradients_reach_the_dense_weights(fp8):
    folder, expected = fp8
    model = load(folder)
    for m in (model, expected):
        m.zero_grad()
        m(tokens(), labels=tokens()).loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert error(parameter.grad, expected.get_parameter(name).grad) < 1e-4, name


@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_adapters(name, tmp_path):
    """Gradients are those of adapters of the dequantized experts; saving leaves the bytes."""
    model_type, kind, sizes = CHECKPOINTS[name]
    write(tmp_path / "model", model_type, kind, **sizes)
    model, dequantized = load(tmp_path / "model"), load(tmp_path / "model")
    for module in plug.experts_modules(dequantized).values():
        module.packed = module.packed.dequantize()
    for m in (model, dequantized):
        torch.manual_seed(0)
        report = add_lora(m, rank=4, alpha=8)
        for name, parameter in m.named_parameters():
            if ".b_" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        m(tokens(), labels=tokens()).loss.backward()
    assert len(report.experts) == len(plug.experts_modules(model)) and not report.skipped
    own = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert f"trained: {sum(map(torch.numel, own.values())):,} parameters" in plug.describe(model)
    for name, gradient in own.items():
        assert error(gradient, dequantized.get_parameter(name).grad) < 1e-4, name
    plug.save(model, tmp_path / "saved")
    assert different_files(tmp_path / "model", tmp_path / "saved") == []


def test_generated_tokens(fp8):
    folder, expected = fp8
    options = {"max_new_tokens": 8, "do_sample": False}
    generated = load(folder).generate(tokens(), **options)
    assert torch.equal(generated, expected.generate(tokens(), **options))


def test_trainer_trains_the_dense_weights(fp8, tmp_path):
    folder, _ = fp8
    model = load(folder)
    before = copy.deepcopy(model.state_dict())
    trainer(model, tmp_path, max_steps=1).train()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == (".packed." in name), name


# Memory


def memory_of_load(folder, **options):
    """Returns the bytes of a model, and of resident memory at the peak of its load and after it."""
    model = load(folder, **options)  # what the first call imports stays in memory
    del model
    empty_cache()
    resident = resident_bytes("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak
    model = load(folder, dtype=torch.bfloat16, **options)
    size = sum(p.nbytes for p in model.parameters())
    return size, *(resident_bytes(name) - resident for name in ("VmHWM", "VmRSS"))


def resident_bytes(name):
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith(name)]
    return int(line.split()[1]) * 1024


def write_wide(folder, kind, **sizes):
    """Writes a checkpoint with large matrices."""
    sizes = {"hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 24, **sizes}
    if kind == "gguf":
        write_gguf(folder / "model.gguf", "qwen3_moe", TYPES.Q8_0, **sizes)
    else:
        write(folder, "qwen3_moe", kind, **sizes)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory from /proc")
@pytest.mark.parametrize("kind", ["fp8", "gguf"])
def test_peak_of_memory_while_loading(kind, tmp_path):
    write_wide(tmp_path, kind)
    largest = max(path.stat().st_size for path in tmp_path.iterdir())
    size, peak, _ = memory_of_load(tmp_path)
    assert size > 18 * MIB
    assert peak < size + min(largest, 10 * MIB)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory from /proc")
@pytest.mark.parametrize("kind", ["fp8", "gguf"])
def test_memory_of_large_linear_layers(kind, tmp_path):
    """One float weight is in memory at a time, and none of them afterwards."""
    write_wide(tmp_path, kind, vocab_size=2**15)
    size, peak, resident = memory_of_load(tmp_path, packed_linear="gguf_q8_0")
    weight = 2**15 * 512 * 4  # the last layer in the file, in float32
    assert size > 60 * MIB
    assert peak < size + weight + 10 * MIB
    assert resident < size + 10 * MIB


def test_peak_of_memory_of_quantize_experts():
    """The float weights of a layer are freed before the next layer."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 12}
    models = []
    without = peak_mib(lambda: models.append(tiny(num_hidden_layers=4, **sizes))) * MIB

    def quantized():
        model = tiny(num_hidden_layers=4, **sizes)
        plug.quantize_experts(model, "gguf_q8_0", quiet=True)
        models.append(model)

    peak = peak_mib(quantized) * MIB
    packed = [sum(p.nbytes for p in experts.parameters()) for experts in packed_experts(models[1])]
    assert peak < without + packed[0] + MIB < without + sum(packed)


def test_peak_of_memory_of_save(tmp_path):
    """One expert is unpacked at a time."""
    write_wide(tmp_path / "model", "fp8")
    model = load(tmp_path / "model", dtype=torch.bfloat16)
    assert sum(p.nbytes for p in model.parameters()) > 18 * MIB
    assert peak_mib(lambda: plug.save(model, tmp_path / "saved")) < 2


@pytest.mark.parametrize("name", ["fp8", "fp8_of_deepseek", "mxfp4"])
def test_memory_plan(name, tmp_path):
    """The bytes of the weights and of the cache are those of a loaded model."""
    model_type, kind, sizes = CHECKPOINTS[name]
    write(tmp_path, model_type, kind, **sizes)
    model = load(tmp_path)
    plan = plug.memory_plan(tmp_path, batch=2, tokens=9, dtype=torch.float32)
    experts = sum(p.nbytes for own in packed_experts(model) for p in own.parameters())
    assert plan.experts == experts
    assert plan.dense == sum(p.nbytes for p in model.parameters()) - experts
    with torch.no_grad():
        cache = model(tokens(), use_cache=True).past_key_values
    assert plan.kv_cache == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert plan.lora == plan.optimizer == 0
    measured = peak_mib(lambda: logits_of(model)) * MIB
    assert plan.activations / 3 < measured < 3 * plan.activations
    assert plan.total == sum(map(int, [*vars(plan).values()][:-1]))
    assert "experts" in str(plan) and "total" in str(plan)


CACHED = {
    "mixtral": {"sliding_window": 4},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 0},
}


@pytest.mark.parametrize("model_type", CACHED)
def test_layers_without_keys_for_all_tokens(model_type, tmp_path):
    tiny(model_type, **CACHED[model_type]).save_pretrained(tmp_path)
    model = load(tmp_path)
    with torch.no_grad():
        cache = model(tokens(), use_cache=True).past_key_values
    keys = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    plan = plug.memory_plan(tmp_path, batch=2, tokens=9, dtype=torch.float32)
    assert plan.kv_cache == sum(x.nbytes for x in keys if x is not None)
    config = model.config
    heads = config.num_key_value_heads * config.head_dim
    full = 2 * 2 * 2 * 9 * heads * 4  # of two layers
    assert 0 < plan.kv_cache < full


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lora_rank": -1}, ValueError, "lora_rank must be at least 0, got -1"),
        ({"lora_rank": 2.5}, ValueError, "lora_rank must be a whole number, got 2.5"),
        ({"memory": math.nan}, ValueError, "memory must be a finite number, got nan"),
        ({"memory": "24e9"}, ValueError, "memory must be a finite number, got '24e9'"),
        ({"dtype": "bfloat16"}, TypeError, "dtype must be a floating-point dtype, got 'bfloat16'"),
    ],
)
def test_errors_of_memory_plan(fp8, options, error, message):
    with pytest.raises(error, match=f"^memory_plan: {message}"):
        plug.memory_plan(fp8[0], **options)


def test_memory_plan_of_training(fp8):
    folder, expected = fp8
    plan = plug.memory_plan(folder, tokens=9, lora_rank=4)
    attention = [
        layer.in_features + layer.out_features
        for name, layer in expected.named_modules()
        if isinstance(layer, torch.nn.Linear) and "self_attn" in name
    ]
    matrices = [(64, 64), (32, 64)]  # gate and up, and down, of each of 6 experts in 2 layers
    sizes = sum(attention) + 2 * 6 * sum(a + b for a, b in matrices)
    assert plan.lora == 4 * 4 * sizes
    assert plan.optimizer == 3 * plan.lora
    assert plan.kv_cache == 0


def test_the_advice_of_a_memory_plan_fits(fp8):
    folder, _ = fp8
    sizes = {"batch": 8, "tokens": 512, "lora_rank": 16}
    plan = plug.memory_plan(folder, **sizes)
    assert plug.memory_plan(folder, **sizes, memory=plan.total).advice == ""
    small = plan.total * 0.8
    advice = plug.memory_plan(folder, **sizes, memory=small).advice
    assert advice.startswith(f"does not fit in {small / 1e9:.2f} GB: it fits with batch=")
    choices = re.findall(r"(\w+)=(\d+)", advice)
    assert {name for name, _ in choices} == {"batch", "tokens"}
    for name, value in choices:
        changed = {**sizes, name: int(value)}
        assert plug.memory_plan(folder, **changed).total <= small
        assert plug.memory_plan(folder, **{**changed, name: int(value) + 1}).total > small
    advice = plug.memory_plan(folder, **sizes, memory=plan.experts).advice
    assert "the weights alone are larger" in advice
    advice = plug.memory_plan(folder, **sizes, memory=plan.experts + plan.dense + 1).advice
    assert advice.endswith("make batch, tokens and lora_rank smaller together")


# Hostile files


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
DENSE = "model.layers.1.input_layernorm.weight"
HOSTILE = {
    "a missing expert": (
        lambda tensors: (tensors.pop(EXPERT, 0), tensors.pop(f"{EXPERT}_scale_inv", 0)),
        "load: model.layers.1.mlp.experts.gate_up_proj must have 6 experts, got [6, 5]",
    ),
    "missing scales": (
        lambda tensors: tensors.pop(f"{EXPERT}_scale_inv", 0),
        f"load: {EXPERT} must have scales, got 'no tensor {EXPERT}_scale_inv or {EXPERT}_scale'",
    ),
    "a missing dense weight": (
        lambda tensors: tensors.pop(DENSE, 0),
        f"must have all weights, got \"no ['{DENSE}']\"",
    ),
    "an expert of another shape": (
        lambda tensors: tensors.update(
            {name: tensor[:16].clone() for name, tensor in tensors.items() if name == EXPERT}
        ),
        "load: model.layers.1.mlp.experts.gate_up_proj must have experts of one shape, got",
    ),
    "scales of another shape": (
        lambda tensors: tensors.update(
            {f"{EXPERT}_scale_inv": torch.ones(2, 3)} if EXPERT in tensors else {}
        ),
        f"load: {EXPERT}: dequantize: scales must have shape",
    ),
    "a dense weight of another shape": (
        lambda tensors: tensors.update(
            {name: tensor[:16].clone() for name, tensor in tensors.items() if name == DENSE}
        ),
        f"load: {DENSE} must have shape (64,), got (16,)",
    ),
    "zero points": (
        lambda tensors: tensors.update(
            {"model.layers.0.mlp.experts.0.up_proj.weight_zero_point": torch.ones(1)}
        ),
        "load: model.layers.0.mlp.experts.0.up_proj must have no zero points",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_wrong_tensors(name, fp8, tmp_path):
    edit, message = HOSTILE[name]
    with pytest.raises(ValueError) as raised:
        load(edited(fp8[0], tmp_path, edit))
    assert str(raised.value).startswith("load: ") and message in str(raised.value)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "awq"}, "quant_method must be one of mxfp4, fp8, compressed-tensors"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 3}}},
            },
            "num_bits of group_0 must be one of 4, got 3",
        ),
    ],
)
def test_unknown_quantization(quantization, message, fp8, tmp_path):
    folder = edited(fp8[0], tmp_path, quantization_config=quantization)
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_incomplete_files(fp8, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(fp8[0], folder)
    path = folder / "model-00002-of-00002.safetensors"
    content = path.read_bytes()
    for size in (0, 4, 100, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(
            ValueError, match="00002.safetensors is not a complete safetensors file"
        ):
            load(folder)
    path.unlink()
    with pytest.raises(ValueError, match="must have all files of its index"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"must have a config\.json"):
        load(folder)
    with pytest.raises(ValueError, match="must be a folder, a GGUF file, or a name of the hub"):
        load(tmp_path / "none")


def test_errors_begin_with_the_function_that_was_called(fp8, tmp_path, monkeypatch):
    folder = tmp_path / "copy"
    shutil.copytree(fp8[0], folder)
    model, gguf = load(folder), tmp_path / "model.gguf"
    write_gguf(gguf, "qwen3_moe", TYPES.Q8_0)
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    monkeypatch.setitem(sys.modules, "gguf", None)
    for name, call in {
        "load": lambda: load(folder),
        "memory_plan": lambda: plug.memory_plan(folder),
        "save": lambda: plug.save(model, tmp_path / "saved"),
    }.items():
        message = f"^{name}: {re.escape(str(path))} is not a complete safetensors file: "
        with pytest.raises(ValueError, match=message):
            call()
    for name, call in {
        "load": lambda: load(gguf),
        "memory_plan": lambda: plug.memory_plan(gguf),
        "save": lambda: plug.save(model, tmp_path / "saved.gguf", "gguf_q8_0"),
    }.items():
        message = f"^{name}: GGUF files need gguf .pip install gguf., got: "
        with pytest.raises(ImportError, match=message):
            call()
    with pytest.raises(ValueError, match="^memory_plan: batch must be at least 1, got 0"):
        plug.memory_plan(folder, batch=0)
    with pytest.raises(ValueError, match="^save: shard_size must be at least 1, got 0"):
        plug.save(model, tmp_path / "saved", shard_size=0)


def test_incomplete_and_unknown_gguf_files(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, "qwen3_moe", TYPES.Q8_0)
    content = path.read_bytes()
    for size in (0, 3, 20, 300, 3000, len(content) // 2):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match="is not a complete GGUF file"):
            load(path)
    path.write_bytes(b"GGML" + content[4:])
    with pytest.raises(ValueError, match="is not a complete GGUF file: GGUF magic invalid"):
        load(path)
    path.write_bytes(content.replace(b"qwen3moe", b"qwen4moe"))
    with pytest.raises(ValueError, match="architecture of a GGUF file must be one of gpt-oss, "):
        load(path)


def test_gguf_of_deepseek_needs_a_configuration(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, "deepseek_v3", TYPES.Q8_0)
    with pytest.raises(ValueError, match=r"^load: config must be .* for GGUF files of deepseek2"):
        load(path)


# The command


@pytest.fixture
def with_tokenizer(fp8, tmp_path):
    """Returns a checkpoint whose tokens are letters."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path / "copy"
    shutil.copytree(fp8[0], folder)
    letters = {chr(ord("A") + i): i for i in range(48)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "template", [None, "{% for m in messages %}{{ m['content'] }}{% endfor %}"]
)
def test_chat(template, with_tokenizer, monkeypatch, capsys):
    """With a template, the second question comes after the first answer."""
    chat = importlib.import_module("moe_ext.chat")
    if template is not None:
        (with_tokenizer / "chat_template.jinja").write_text(template)
    monkeypatch.setattr("sys.stdin", io.StringIO("\nBCD\nEF\n"))
    assert chat.main([str(with_tokenizer), "--tokens", "5"]) == 0
    output = capsys.readouterr()
    assert "integer arithmetic: 0 of 10 packed layers" in output.err  # FP8 has none
    model = load(with_tokenizer, dtype=torch.bfloat16)
    first, second = output.out.splitlines()
    for prompt, line in (("BCD", first), ("EF" if template is None else f"BCD{first}EF", second)):
        ids = torch.tensor([[ord(letter) - ord("A") for letter in prompt]])
        answer = model.generate(ids, max_new_tokens=5, do_sample=False)[0, len(prompt) :]
        assert line == "".join(chr(ord("A") + int(i)) for i in answer)
    counts = re.findall(r"\[(\d) tokens; prompt: .* tokens/s, answer: .* tokens/s\]", output.err)
    assert counts == ["5", "5"]


def test_chat_with_the_folder_of_a_configuration(with_tokenizer, tmp_path, monkeypatch, capsys):
    """transformers reads no tokenizer of a GGUF file of DeepSeek; the folder has it."""
    chat = importlib.import_module("moe_ext.chat")
    path = tmp_path / "model.gguf"
    write_gguf(path, "deepseek_v3", TYPES.Q8_0).config.save_pretrained(with_tokenizer)
    monkeypatch.setattr("sys.stdin", io.StringIO("BCD\n"))
    command = [str(path), "--tokens", "5", "--config", str(with_tokenizer)]
    assert chat.main(command) == 0, capsys.readouterr().err
    assert len(capsys.readouterr().out.strip()) == 5


def test_integer_arithmetic(fp8, tmp_path, capsys):
    chat = importlib.import_module("moe_ext.chat")
    folder, _ = fp8
    with pytest.raises(ValueError, match="^load: arithmetic must be exact for weights in fp8"):
        load(folder, arithmetic="integer")
    write(tmp_path, "gpt_oss", "mxfp4")
    model, exact = load(tmp_path, arithmetic="integer"), load(tmp_path)
    assert {experts.arithmetic for experts in packed_experts(model)} == {"integer"}
    difference = error(logits_of(model), logits_of(exact))
    assert 0 < difference < 0.05
    chat._use_integers(exact)
    assert "integer arithmetic: 2 of 2 packed layers" in capsys.readouterr().err
    assert torch.equal(logits_of(exact), logits_of(model))


def test_chat_errors(tmp_path, capsys):
    chat = importlib.import_module("moe_ext.chat")
    assert chat.main([str(tmp_path)]) == 2
    message = f"moe-ext chat: {tmp_path} must have a config.json, got 'none'\n"
    assert message == capsys.readouterr().err


def test_chat_without_a_tokenizer_loads_no_weights(tmp_path, monkeypatch, capsys):
    chat = importlib.import_module("moe_ext.chat")
    write(tmp_path, "gpt_oss", "mxfp4")
    monkeypatch.setattr(chat, "load", lambda *_, **__: pytest.fail("loaded the weights"))
    assert chat.main([str(tmp_path)]) == 2
    assert "tokenizer" in capsys.readouterr().err
