"""PEFT's LoRA on the experts: computed by the operator, and its files in both directions."""

import copy
import importlib
import json
import re
import sys
import warnings

import pytest
import torch
from assertions import assert_all_same_bits, assert_same_bits
from optional import Optional
from pairwise import pairwise
from tiny_models import MODEL_TYPES, assert_close, error, logits_of, losses_of, tiny, tokens
from torch import nn
from torch.distributed.fsdp import fully_shard

from moe_ext import FeedForwardExperts, add_lora
from moe_ext.integrations import transformers as integration
from moe_ext.integrations._transformers import warnings as once
from moe_ext.lora import disable_lora, lora_experts

peft = Optional("peft")
integration_of_peft = Optional("moe_ext.integrations.peft")

LAYERS = ["gate_up_proj", "down_proj"]
PREFIX = "base_model.model.model.layers"


@pytest.fixture(scope="module", autouse=True)
def plugged():
    """Makes PEFT call the operator, as the import does."""
    pytest.importorskip("moe_ext.integrations.peft")


def config(layers=LAYERS, **options):
    names = [f"mlp.experts.{layer}" for layer in layers]
    options = {"r": 2, "init_lora_weights": False, "task_type": "CAUSAL_LM"} | options
    return peft.LoraConfig(**{"target_modules": [], "target_parameters": names} | options)


def adapted(model, seed=4, **options):
    """Adds adapters with random weights to a model."""
    torch.manual_seed(seed)
    return peft.get_peft_model(model, config(**options))


@pytest.fixture
def formed(monkeypatch):
    """Records the parameters that PEFT parametrizes: those whose W + B A it forms."""
    formed_weights = []
    register = nn.utils.parametrize.register_parametrization

    def record(module, name, *arguments, **options):
        formed_weights.append(name)
        return register(module, name, *arguments, **options)

    monkeypatch.setattr(nn.utils.parametrize, "register_parametrization", record)
    return formed_weights


def compare(make, formed, tolerance=1e-5):
    """Compares logits and gradients with those of PEFT's own path, which alone forms W + B A."""
    results = []
    for implementation in ("moe_ext", "grouped_mm"):
        formed.clear()
        results.append(losses_of(make(implementation)))
        assert bool(formed) == (implementation == "grouped_mm")
    assert_close(*results, tolerance)
    assert sum(value is not None for value in results[0].values()) > 1
    return results[0]


# Values


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_equals_peft(model_type, formed):
    actual = compare(lambda name: adapted(tiny(model_type, name)), formed)
    assert error(actual["logits"], losses_of(tiny(model_type))["logits"]) > 1e-3  # they are in use


OPTIONS = {
    "gate_up_proj": {"layers": LAYERS[:1]},
    "down_proj": {"layers": LAYERS[1:]},
    "rslora": {"use_rslora": True, "lora_alpha": 3},
    "attention too": {"target_modules": ["q_proj", "v_proj"]},
}


def several_adapters(model):
    model.add_adapter("second", config(r=3, lora_alpha=5))
    model.base_model.set_adapter(["default", "second"])


def activation_checkpointing(model):
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()


CHANGES = {
    "several adapters": several_adapters,
    "trained weights of the base": lambda model: model.requires_grad_(),
    "activation checkpointing": activation_checkpointing,
}


@pytest.mark.parametrize("options", [*OPTIONS, *CHANGES])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_options(model_type, options, formed):
    def make(name):
        model = adapted(tiny(model_type, name), **OPTIONS.get(options, {}))
        CHANGES.get(options, lambda model: None)(model)
        return model

    gradients = compare(make, formed)
    if options == "trained weights of the base":
        assert all(g is not None for name, g in gradients.items() if name.endswith(tuple(LAYERS)))


def test_half_precision(formed):
    """PEFT keeps the adapters of a model in bfloat16 in float32, and computes in bfloat16."""
    models = [adapted(tiny("qwen3_moe", name).bfloat16()) for name in ("moe_ext", "grouped_mm")]
    assert {p.dtype for n, p in models[0].named_parameters() if "lora" in n} == {torch.float32}
    actual, expected = map(losses_of, models)
    exact = losses_of(adapted(tiny("qwen3_moe", "eager")).double())
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        if value is not None and value.numel():
            wanted = exact[name]
            assert error(value, wanted) < max(2 * error(expected[name], wanted), 0.02), name


def test_autocast(formed):
    losses = []
    for name in ("moe_ext", "grouped_mm"):
        model = adapted(tiny("qwen3_moe", name))
        exact = logits_of(model)
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(error(logits_of(model), exact))
    assert 0 < losses[0] < 2 * losses[1]


def test_disabled_and_merged_adapters(formed):
    model = adapted(tiny("gpt_oss")).eval()
    expected, plain = logits_of(model), logits_of(tiny("gpt_oss").eval())
    with model.disable_adapter():
        assert_same_bits(logits_of(model), plain)
    model.merge_adapter()
    assert error(logits_of(model), expected) < 1e-5
    model.unmerge_adapter()
    assert error(logits_of(model), expected) < 1e-5
    assert error(logits_of(model.merge_and_unload()), expected) < 1e-5
    assert not formed


def test_compile(formed):
    model = adapted(tiny("qwen3_moe")).eval()
    expected = logits_of(model)
    compiled = torch.compile(model, backend="aot_eager")
    assert error(logits_of(compiled), expected) < 1e-5


def losses_of_rank(group, rank):
    """Runs a step under FSDP2 on this rank's row of tokens; returns the gradients."""
    model = adapted(tiny("qwen3_moe"))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    ids = tokens()[rank : rank + 1]
    model(input_ids=ids, labels=ids).loss.backward()
    named = model.named_parameters()
    return {name: p.grad.full_tensor() for name, p in named if p.grad is not None}


def test_fsdp2(workers):
    expected = losses_of(adapted(tiny("qwen3_moe", "grouped_mm")))
    for losses in workers.run(2, losses_of_rank):
        assert len(losses) == 8
        assert_close(losses, {name: expected[name] for name in losses})


# Training


def train(model, steps=50):
    """Returns the losses of a run."""
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    torch.manual_seed(7)
    data = torch.randint(1, 48, (5, 2, 9))
    losses = []
    for step in range(steps):
        ids = data[step % len(data)]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_training_equals_peft(model_type, tmp_path, formed):
    """50 steps have the same losses, and the adapters of one load in the other."""
    models = {
        name: adapted(tiny(model_type, name), init_lora_weights=True, r=4)
        for name in ("moe_ext", "grouped_mm")
    }
    losses = {name: train(model) for name, model in models.items()}
    assert losses["moe_ext"] == pytest.approx(losses["grouped_mm"], rel=1e-5)
    assert losses["moe_ext"][-1] < 0.95 * losses["moe_ext"][0]
    for name, model in models.items():
        model.eval().save_pretrained(tmp_path / name)
        expected = logits_of(model)
        for implementation in models:
            base = tiny(model_type, implementation).eval()
            loaded = peft.PeftModel.from_pretrained(base, tmp_path / name)
            assert error(logits_of(loaded), expected) < 1e-5
        assert error(expected, logits_of(tiny(model_type).eval())) > 1e-2


# What is left to PEFT


@pytest.fixture
def fresh_warnings(monkeypatch):
    monkeypatch.setattr(once, "_messages", set())


def test_adapters_of_a_bias(fresh_warnings, formed):
    names = ["gate_up_proj", "gate_up_proj_bias"]

    def make(name):
        return adapted(tiny("gpt_oss", name), layers=names)

    message = "PEFT forms W . B A of gate_up_proj_bias in GptOssExperts: the operator has adapters"
    with pytest.warns(UserWarning, match=message):
        actual = losses_of(make("moe_ext"))
    assert {*formed} == {"gate_up_proj_bias"}
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error", UserWarning)
        logits_of(make("moe_ext"))
    assert_close(actual, losses_of(make("grouped_mm")))


@pytest.mark.parametrize("reason", ["variant", "dropout"])
def test_options_that_the_operator_lacks(reason, fresh_warnings, formed):
    """PEFT refuses them today; a later version may not."""
    model = adapted(tiny("qwen3_moe")).eval()
    expected = logits_of(model)
    assert not formed
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.layer.ParamWrapper):
            if reason == "variant":
                module.lora_variant["default"] = object()
            else:
                module.lora_dropout["default"] = nn.Dropout(0.1).eval()
    with pytest.warns(UserWarning, match=f"the adapter default has .*{reason}"):
        assert error(logits_of(model), expected) < 1e-5
    assert {*formed} == {*LAYERS}


def test_a_weight_with_another_parametrization(fresh_warnings, formed):
    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    models = []
    for name in ("moe_ext", "grouped_mm"):
        model = adapted(tiny("qwen3_moe", name)).eval()
        for module in model.modules():
            if module.__class__.__name__ == "Qwen3MoeExperts":
                nn.utils.parametrize.register_parametrization(module, "down_proj", Double())
        models.append(model)
    formed.clear()
    with pytest.warns(UserWarning, match="of down_proj in .*Qwen3MoeExperts: it has another"):
        actual = logits_of(models[0])
    assert {*formed} == {"down_proj"}
    assert error(actual, logits_of(models[1])) < 1e-5


class Sine(nn.Module):
    def forward(self, x):
        return x.sin()


def test_an_experts_module_that_the_operator_cannot_compute(fresh_warnings, formed):
    """It falls back to grouped_mm, which reads W + B A."""
    models = [adapted(tiny("qwen3_moe", name)).eval() for name in ("moe_ext", "grouped_mm")]
    for model in models:
        for module in model.modules():
            if module.__class__.__name__ == "Qwen3MoeExperts":
                module.act_fn = Sine()
    with pytest.warns(UserWarning, match="uses 'grouped_mm': its activation is none of"):
        actual = logits_of(models[0])
    assert {*formed} == {*LAYERS}
    assert_same_bits(actual, logits_of(models[1]))


def test_without_the_import(fresh_warnings, formed, monkeypatch):
    """PEFT forms the weights in each call, which a warning says."""
    model = adapted(tiny("qwen3_moe")).eval()
    expected = logits_of(model)
    forward = importlib.import_module("moe_ext.integrations._peft.forward")
    wrapper, form = forward.ParamWrapper, forward._form
    monkeypatch.setattr(wrapper, "_activate_lora", form)
    monkeypatch.delitem(sys.modules, "moe_ext.integrations.peft")
    with pytest.warns(UserWarning, match=r"in each call: import moe_ext\.integrations\.peft"):
        assert error(logits_of(model), expected) < 1e-5
    assert {*formed} == {*LAYERS}


def test_other_models_are_not_changed(formed):
    model = nn.Sequential()
    model.experts = nn.Module()
    model.experts.weight = nn.Parameter(torch.randn(3, 4, 5))
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=[], target_parameters=["experts.weight"])
    )
    with wrapped.base_model.model.experts._activate_lora(["default"]):
        assert formed == ["weight"]


# Files


def bridged(model_type, packed=False):
    """Returns a model with the experts of moe_ext, and one of transformers with their values."""
    model, twin = (tiny(model_type).eval().requires_grad_(False) for _ in range(2))
    integration.quantize_experts(model, "int8", quiet=True)
    for path, module in integration.experts_modules(model).items():
        dequantized, last = module.packed.dequantize(), twin.get_submodule(path)
        with torch.no_grad():
            for name, weight in zip(LAYERS, dequantized.weights, strict=True):
                getattr(last, name).copy_(weight if last.is_transposed else weight.mT)
        if not packed:
            module.packed = dequantized
    return model, twin


LINEAR = ["q_proj", "o_proj", "q_b_proj"]
RANDOM_NAMES = re.compile(r"\.adapters\.|lora_")


def assert_same_files(folder, second):
    peer, own = (peft.utils.load_peft_weights(str(path)) for path in (folder, second))
    assert peer.keys() == own.keys()
    assert_all_same_bits([own[name] for name in peer], peer.values())


@pairwise(
    model_type=["qwen3_moe", "gpt_oss", "deepseek_v3"],
    change=["none", "down_proj", "rslora"],
    packed=[False, True],
    linear=[False, True],
)
def test_files_of_peft(model_type, change, packed, linear, tmp_path):
    """PEFT's adapters of experts, and of attention, are loaded and saved again."""
    options = {"target_modules": LINEAR} if linear else {}
    model, twin = bridged(model_type, packed)
    assert error(logits_of(model), logits_of(twin)) < 1e-5
    saved = adapted(twin, **OPTIONS.get(change, {}), **options)
    saved.save_pretrained(tmp_path / "theirs")
    report = integration_of_peft.load_adapter(model, tmp_path / "theirs", "theirs")
    assert report.experts == tuple(lora_experts(model)) and not report.skipped
    assert error(logits_of(model), logits_of(saved)) < 1e-5
    plain = logits_of(bridged(model_type, packed)[1])
    assert error(logits_of(saved), plain) > 1e-3
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all(RANDOM_NAMES.search(name) for name in trained)
    attention = sum(number for name, number in trained.items() if "attn" in name)
    assert report.trained.get("", 0) == attention and (attention > 0) == linear
    if not linear:
        with disable_lora(model):
            assert error(logits_of(model), plain) < 1e-5
    # The file that we write has the same tensors.
    integration_of_peft.save_adapter(model, tmp_path / "ours", "theirs", task_type="CAUSAL_LM")
    assert_same_files(tmp_path / "theirs", tmp_path / "ours")
    loaded = peft.PeftModel.from_pretrained(bridged(model_type, packed)[1], tmp_path / "ours")
    assert error(logits_of(loaded), logits_of(saved)) < 1e-5


@pytest.mark.parametrize(
    "model_type, linear, options",
    [
        ("qwen3_moe", None, {}),
        ("gpt_oss", None, {"layers": [0]}),
        ("qwen3_moe", None, {"rslora": True, "shared_a": True}),
        ("gpt_oss", None, {"rslora": True, "shared_a": True}),
        ("qwen3_moe", "wrapped", {"train_rest": True}),
        ("qwen3_moe", "injected", {"train_rest": True}),
    ],
)
def test_our_files_in_peft(model_type, linear, options, tmp_path):
    """`add_lora` on experts, and PEFT on attention, with PEFT's wrapper or without."""
    packed = linear is not None
    model, twin = bridged(model_type, packed)
    whole, described = model, peft.LoraConfig(r=3, lora_alpha=6, target_modules=LINEAR)
    if linear == "wrapped":
        whole = peft.get_peft_model(model, described)
    elif linear == "injected":
        peft.inject_adapter_in_model(described, model)
    add_lora(model, 3, 6, **options)
    for name, param in model.named_parameters():
        if RANDOM_NAMES.search(name):
            nn.init.normal_(param, std=0.3)
    integration_of_peft.save_adapter(whole, tmp_path)
    loaded = peft.PeftModel.from_pretrained(twin, tmp_path)
    assert error(logits_of(loaded), logits_of(model)) < 1e-5
    assert error(logits_of(loaded), logits_of(bridged(model_type, packed)[1])) > 1e-3
    again = bridged(model_type, packed)[0]
    integration_of_peft.load_adapter(again, tmp_path)
    assert_same_bits(logits_of(again), logits_of(model))


def test_adapters_of_linear_layers_that_do_not_fit(tmp_path):
    def made(rank=2, **options):
        model = bridged("qwen3_moe", packed=True)[0]
        described = peft.LoraConfig(r=rank, lora_alpha=4, target_modules=["q_proj"], **options)
        peft.inject_adapter_in_model(described, model)
        add_lora(model, 2, 4)
        return model

    with pytest.raises(ValueError, match="must have one rank, alpha and rslora in all layers"):
        integration_of_peft.save_adapter(made(3), tmp_path)
    rule = "^save_adapter: model.layers.0.self_attn.q_proj must have LoRA of PEFT on a linear layer"
    with pytest.raises(ValueError, match=rule):
        integration_of_peft.save_adapter(made(use_dora=True), tmp_path)
    integration_of_peft.save_adapter(made(), tmp_path)
    wide = tiny("qwen3_moe", head_dim=16)
    integration.quantize_experts(wide, "int8", quiet=True)
    before = list(wide.state_dict())
    rule = r"^load_adapter: model.layers.0.self_attn.q_proj must have A and B of shape \(2, 32\)"
    with pytest.raises(ValueError, match=rule):
        integration_of_peft.load_adapter(wide, tmp_path)
    assert list(wide.state_dict()) == before
    model = made()
    with pytest.raises(ValueError, match="adapter must be a new name"):
        integration_of_peft.load_adapter(model, tmp_path)
    integration_of_peft.save_adapter(model, tmp_path / "again")


def test_names_of_other_models(tmp_path):
    """A custom model has its experts in other places."""
    saved = adapted(tiny("qwen3_moe"))
    saved.save_pretrained(tmp_path)
    experts = nn.ModuleList([FeedForwardExperts(6, 32, [16], activation="swiglu") for _ in "ab"])
    places = {str(i): f"model.layers.{i}.mlp.experts" for i in range(2)}
    with pytest.raises(ValueError, match="^load_adapter: folder must have tensors of the experts"):
        integration_of_peft.load_adapter(experts, tmp_path, names={"0": places["0"]}.get)
    report = integration_of_peft.load_adapter(experts, tmp_path, names=places.get)
    assert report.experts == ("0", "1")
    wrapper = saved.base_model.model.model.layers[1].mlp.experts
    pair = experts[1].adapters["default"].pair(1)
    lhs, rhs, scaling = wrapper.get_delta_factors("default")
    assert scaling == pair.scale
    torch.testing.assert_close(pair.a @ pair.b, (lhs @ rhs).mT)


def write(tmp_path, change):
    adapted(tiny("qwen3_moe")).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | change))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"use_dora": True}, "use_dora of adapter_config.json must be False, got True"),
        ({"rank_pattern": {"a": 3}}, "rank_pattern of adapter_config.json must be {}, got"),
        ({"r": 4}, r"model.layers.0.mlp.experts must have A and B of shape \(24, 32\) and "),
        ({"target_parameters": None}, "target_parameters must name gate_up_proj, "),
        ({"target_parameters": ["experts.bias"]}, "target_parameters must name gate_up_proj, "),
        ({"target_parameters": ["experts.down_proj"]}, "folder must have 1 adapted parameters"),
    ],
)
def test_files_that_do_not_fit(change, message, tmp_path):
    write(tmp_path, change)
    with pytest.raises(ValueError, match=f"^load_adapter: {message}"):
        integration_of_peft.load_adapter(bridged("qwen3_moe")[0], tmp_path)


def test_a_file_of_more_experts(tmp_path, monkeypatch):
    monkeypatch.setitem(MODEL_TYPES, "olmoe", {"num_experts": 8})
    adapted(tiny("olmoe")).save_pretrained(tmp_path)
    model = bridged("qwen3_moe")[0]
    before = list(model.state_dict())
    with pytest.raises(ValueError, match=r"A and B of shape \(12, 32\).* got '\(16, 32\)"):
        integration_of_peft.load_adapter(model, tmp_path)
    assert list(model.state_dict()) == before


def test_tensors_without_a_place(tmp_path):
    """None is left out silently."""
    adapted(tiny("qwen3_moe"), target_modules=["embed_tokens"]).save_pretrained(tmp_path)
    rule = "must have tensors of the experts at model.layers.0.mlp.experts, "
    with pytest.raises(ValueError, match=rf"^load_adapter: folder {rule}.*model.embed_tokens"):
        integration_of_peft.load_adapter(bridged("qwen3_moe")[0], tmp_path)


def test_adapters_that_peft_cannot_have(tmp_path):
    model, _ = bridged("qwen3_moe")
    with pytest.raises(ValueError, match="adapter must be one of the adapters of the model, which"):
        integration_of_peft.save_adapter(model, tmp_path)
    add_lora(model, 2, 2)
    first = next(iter(lora_experts(model).values()))
    first.add_adapter("other", 2, 2)
    with pytest.raises(ValueError, match="adapter must be one of default, other, got 'third'"):
        integration_of_peft.save_adapter(model, tmp_path, "third")
    first.delete_adapter("default")
    first.add_adapter("default", 3, 2)
    with pytest.raises(ValueError, match="must have one rank, alpha and rslora in all layers"):
        integration_of_peft.save_adapter(model, tmp_path)
    with pytest.raises(ValueError, match=r"names must return a path for .*packed, got None"):
        integration_of_peft.save_adapter(model, tmp_path, "default", names={}.get)
    one = nn.ModuleList([FeedForwardExperts(2, 4)])
    add_lora(one, 1, 1)
    with pytest.raises(ValueError, match="experts must have two layers"):
        integration_of_peft.save_adapter(one, tmp_path)
    assert copy.deepcopy(model).state_dict().keys() == model.state_dict().keys()
