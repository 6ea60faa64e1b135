"""PEFT's LoRA on packed linear layers."""

import copy
import importlib
import warnings

import pytest
import torch
from assertions import assert_all_same_bits

from moe_ext import add_lora
from moe_ext.lora import disable_lora

peft = pytest.importorskip("peft")
pytest.importorskip("transformers", minversion="5.23")

from packed_checkpoints import (  # noqa: E402
    CHECKPOINTS,
    different_files,
    linear_layers,
    load,
    write,
)
from tiny_models import assert_close, error, logits_of, losses_of, tokens, trainer  # noqa: E402

plug = importlib.import_module("moe_ext.integrations.transformers")
integration = importlib.import_module("moe_ext.integrations.peft")

ATTENTION = ["q_proj", "v_proj"]  # in the mixed file, queries are packed and values are floats


def adapted(model, targets=ATTENTION, seed=4, **options):
    """Adds adapters with random weights to a model."""
    torch.manual_seed(seed)
    options = {"r": 2, "lora_alpha": 6, "init_lora_weights": False} | options
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, **options))


def packed_and_floats(path, **options):
    """Loads a file with packed linear layers and with floats."""
    return [load(path, packed_linear=packed, **options) for packed in (True, False)]


def adapters_of(model):
    return {name: p for name, p in model.named_parameters() if "lora_" in name}


OPTIONS = {
    "rslora": {"use_rslora": True},
    "bias of B": {"lora_bias": True},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "all linear layers": {"targets": "all-linear"},
}


@pytest.mark.parametrize("options", [None, *OPTIONS])
def test_equals_float_layers(mixed_path, options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`lora_bias=True`")  # PEFT cannot merge it
        models = [
            adapted(model, **OPTIONS.get(options, {})) for model in packed_and_floats(mixed_path)
        ]
    packed, floats = map(losses_of, models)
    assert adapters_of(models[0]).keys() == adapters_of(models[1]).keys()
    trained = {name: floats[name] for name in adapters_of(models[1])}
    assert all(gradient is not None for gradient in trained.values())
    assert_close(packed, {"logits": floats["logits"], **trained})
    if options != "orthogonal":  # its A B is zero at first
        with models[0].disable_adapter():
            assert error(logits_of(models[0]), floats["logits"]) > 1e-3


def test_no_warning_and_no_dequantized_weight(mixed_path, monkeypatch):
    model = load(mixed_path, packed_linear=True)
    kind = plug.PackedLinear
    monkeypatch.setattr(kind, "dequantize", lambda *_: pytest.fail("it was dequantized"))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Unsupported layer type")
        wrapped = adapted(model)
        logits_of(wrapped)
    assert "PackedLinearLoRA" in str(wrapped)


def test_half_precision(mixed_path):
    """The adapters are in float32, as PEFT's on float layers, unless they are not to be cast."""
    exact, packed, floats = (
        adapted(model)
        for model in (load(mixed_path), *packed_and_floats(mixed_path, dtype=torch.bfloat16))
    )
    for model in (packed, floats):
        assert {p.dtype for p in adapters_of(model).values()} == {torch.float32}
    actual, expected, wanted = map(losses_of, (packed, floats, exact))
    for name in ["logits", *adapters_of(exact)]:
        reached = error(expected[name], wanted[name])
        assert error(actual[name], wanted[name]) < max(2 * reached, 0.02), name
    model = load(mixed_path, packed_linear=True, dtype=torch.bfloat16)
    config = peft.LoraConfig(target_modules=["q_proj"])
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    assert {p.dtype for p in adapters_of(model).values()} == {torch.bfloat16}


def test_all_linear_layers(mixed_path):
    """The last layer and the layers within adapters are left out, as for floats."""
    model = load(mixed_path, packed_linear="gguf_q8_0")
    wrapped = adapted(model, "all-linear")
    names = {path for path, m in wrapped.named_modules() if hasattr(m, "lora_A")}
    projections = {path for path in names if path.endswith("_proj")}
    assert len(projections) == 2 * 4
    assert not any("lm_head" in path for path in names)
    wrapped.add_adapter("second", peft.LoraConfig(r=3, target_modules="all-linear"))
    assert {path for path, m in wrapped.named_modules() if hasattr(m, "lora_A")} == names
    assert len(linear_layers(wrapped)) == len(projections) + 1


def test_several_adapters_and_unload(mixed_path):
    expected = logits_of(load(mixed_path, packed_linear=True))
    model = adapted(load(mixed_path, packed_linear=True))
    first = logits_of(model)
    model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["q_proj"]))
    assert torch.equal(logits_of(model), first)
    model.set_adapter("second")  # its B is zero
    assert torch.equal(logits_of(model), expected)
    model.delete_adapter("second")
    model.set_adapter("default")
    assert torch.equal(logits_of(model), first)
    plain = model.unload()
    assert len(linear_layers(plain)) == 2
    assert torch.equal(logits_of(plain), expected)


def test_files_of_peft(mixed_path, tmp_path):
    """PEFT's files fit the packed layer and the float one."""
    model = adapted(load(mixed_path, packed_linear=True))
    model.save_pretrained(tmp_path)
    for base in packed_and_floats(mixed_path):
        loaded = peft.PeftModel.from_pretrained(base, tmp_path)
        assert error(logits_of(loaded), logits_of(model)) < 1e-5


def test_files_with_experts(mixed_path, tmp_path):
    """The files of save_adapter have the adapters of the packed experts and linear layers."""
    model = load(mixed_path, packed_linear=True)
    wrapped = adapted(model, lora_alpha=2)
    add_lora(model, rank=2, alpha=2, train_rest=True)
    for name, parameter in model.named_parameters():
        if ".b_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    integration.save_adapter(model, tmp_path)
    for base in packed_and_floats(mixed_path):
        report = integration.load_adapter(base, tmp_path)
        assert "" in report.trained
        assert error(logits_of(base), logits_of(model)) < 1e-5
    with disable_lora(model), wrapped.disable_adapter():
        assert error(logits_of(model), logits_of(load(mixed_path))) < 1e-5


@pytest.mark.parametrize("name", ["fp8", "int4", "mxfp4"])
def test_merged_files(name, tmp_path):
    """Packed and float layers give the same files, with adapters on both."""
    model_type, kind, sizes = CHECKPOINTS[name]
    source = tmp_path / "source"
    source.mkdir()
    write(source, model_type, kind, **sizes)
    models = [adapted(model, ["q_proj", "o_proj"]) for model in packed_and_floats(source)]
    for format in ("merged", "float32"):
        for i, model in enumerate(models):
            plug.save(model, tmp_path / f"{format}_{i}", format)
        assert different_files(tmp_path / f"{format}_0", tmp_path / f"{format}_1") == []
    assert different_files(source, tmp_path / "merged_0") != []
    plug.save(models[0], tmp_path / "unchanged")
    assert different_files(source, tmp_path / "unchanged") == []
    merged = load(tmp_path / "merged_0", packed_linear=True)
    assert linear_layers(merged).keys() == {
        path.removeprefix("base_model.model.").removesuffix(".base_layer")
        for path in linear_layers(models[0])
    }
    assert error(logits_of(merged), logits_of(models[0])) < 0.3


def test_merged_weights_are_rounded_once(tmp_path):
    """An adapter is added to the exact weight, not to that in the dtype of the model."""
    (tmp_path / "source").mkdir()
    write(tmp_path / "source", "qwen3_moe", "fp8")
    path = "model.layers.0.self_attn.q_proj"
    models = packed_and_floats(tmp_path / "source", dtype=torch.bfloat16)
    exact = load(tmp_path / "source").get_submodule(path).weight.detach()
    errors = []
    for i, model in enumerate(models):
        wrapped = adapted(model, ["q_proj"])
        layer = wrapped.get_base_model().get_submodule(path)
        wanted = (exact + layer.get_delta_weight("default")).detach()
        plug.save(wrapped, tmp_path / f"{i}", "float32")
        merged = load(tmp_path / f"{i}").get_submodule(path).weight.detach()
        errors.append(error(merged, wanted))
    assert errors[0] < 1e-6 < errors[1]


@pytest.mark.parametrize("format", ["gguf", "gguf_adapter"])
def test_gguf(mixed_path, format, tmp_path):
    written = [tmp_path / f"{i}.gguf" for i in range(2)]
    for model, path in zip(packed_and_floats(mixed_path), written, strict=True):
        plug.save(adapted(model), path, format)
    assert written[0].read_bytes() == written[1].read_bytes()


def test_trainer_of_transformers(mixed_path, tmp_path):
    model = adapted(load(mixed_path, packed_linear=True), init_lora_weights=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer(model, tmp_path, max_steps=2).train()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == adapters_of(model).keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"init_lora_weights": "pissa"},
            "LoraConfig: init_lora_weights for a packed linear layer must be one of True, False, "
            "gaussian, orthogonal, eva, got 'pissa'",
        ),
        ({"use_dora": True}, "unsupported variant combination: .*use_dora"),
    ],
)
def test_options_that_need_the_float_weight(mixed_path, options, message):
    with pytest.raises(ValueError, match=message):
        adapted(load(mixed_path, packed_linear=True), **options)
    wrapped = adapted(load(mixed_path, packed_linear=True))
    with pytest.raises(ValueError, match=message):
        wrapped.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"], **options))


@pytest.mark.parametrize("merge", ["merge_adapter", "merge_and_unload"])
def test_packed_weights_cannot_be_merged_in_memory(mixed_path, merge):
    model = adapted(load(mixed_path, packed_linear=True), ["v_proj", "q_proj"])
    # PEFT merges in the order of the modules: a float layer would be the first.
    attention = model.base_model.model.model.layers[0].self_attn
    attention._modules = dict(sorted(attention._modules.items(), reverse=True))
    expected, state = logits_of(model), copy.deepcopy(model.state_dict())
    rule = "merge: weight of PackedLinear must be a float to merge .*, got 'gguf_q8_0'"
    with pytest.raises(ValueError, match=rule):
        getattr(model, merge)()
    assert torch.equal(logits_of(model), expected)
    assert_all_same_bits([*model.state_dict().values()], [*state.values()])
    assert [*model.state_dict()] == [*state]


def test_compiles(mixed_path):
    model = adapted(load(mixed_path, packed_linear=True))
    expected = logits_of(model)
    compiled = torch.compile(model.get_base_model(), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert error(compiled(tokens()).logits, expected) < 1e-5
