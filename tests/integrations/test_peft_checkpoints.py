"""PeftModels with adapters of PEFT and of `add_lora`: their files, and checkpoints of Trainer."""

import copy
import importlib
import json
import re

import pytest
import torch

from moe_ext import add_lora
from moe_ext.lora import lora_experts

peft = pytest.importorskip("peft")
pytest.importorskip("transformers", minversion="5.23")

from assertions import assert_all_same_bits  # noqa: E402
from packed_checkpoints import load  # noqa: E402
from tiny_models import error, logits_of, tiny, trainer  # noqa: E402

integration = importlib.import_module("moe_ext.integrations.peft")

EXPERTS = "model.layers.0.mlp.experts"


def frozen(path, **options):
    return load(path, **options).requires_grad_(False)


def adapted(path, seed=0, adapter="default", rank=2, alpha=4, **options):
    """Loads a model, and adds adapters with random weights to its attention and its experts."""
    model = load(path, packed_linear=True)
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], **options)
    wrapped = peft.get_peft_model(model, config)
    add_lora(model, rank=rank, alpha=alpha, adapter=adapter, train_rest=True)
    randomize(wrapped, seed)
    return wrapped


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def randomize(model, seed=0):
    """Gives random values to the trained parameters."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in trained(model).values():
            parameter.normal_(std=0.1)


def tensors_of(folder):
    return peft.utils.load_peft_weights(str(folder), device="cpu")


def test_files_have_all_adapters(mixed_path, tmp_path):
    model = adapted(mixed_path)
    model.save_pretrained(tmp_path / "peft")
    integration.save_adapter(model, tmp_path / "ours")
    tensors, expected = tensors_of(tmp_path / "peft"), tensors_of(tmp_path / "ours")
    assert tensors.keys() == expected.keys() and len(tensors) == 2 * 2 * 4
    assert_all_same_bits([tensors[name] for name in expected], expected.values())
    again = adapted(mixed_path, seed=1)
    assert not torch.equal(logits_of(again), logits_of(model))
    again.load_adapter(tmp_path / "peft", "default", is_trainable=True)
    assert torch.equal(logits_of(again), logits_of(model))
    assert trained(again).keys() == trained(model).keys()


def test_the_files_fit_float_models(mixed, tmp_path):
    path, floats = mixed
    model = adapted(path)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    names = [
        f"model.layers.{i}.mlp.experts.{kind}"
        for i in range(2)
        for kind in ("gate_up_proj", "down_proj")
    ]
    assert sorted(config["target_parameters"]) == sorted(names)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(floats), tmp_path)
    assert error(logits_of(loaded), logits_of(model)) < 1e-5


def test_adapters_of_routers_too(mixed_path, tmp_path):
    """With "all-linear", PEFT adapts the parameter `weight` of routers."""
    models = []
    for seed in range(2):
        model = load(mixed_path)
        config = peft.LoraConfig(r=2, lora_alpha=4, target_modules="all-linear")
        models.append(peft.get_peft_model(model, config))
        add_lora(model, 2, 4, train_rest=True)
        randomize(models[-1], seed)
    assert any("mlp.gate.lora_" in name for name in trained(models[0]))
    models[0].save_pretrained(tmp_path)
    models[1].load_adapter(tmp_path, "default", is_trainable=True)
    assert torch.equal(logits_of(models[1]), logits_of(models[0]))


def test_training_continues_from_a_checkpoint(mixed_path, tmp_path):
    states = []
    for resumes in (False, True):
        model = adapted(mixed_path)
        options = {"max_steps": 4, "save_steps": 2, "save_strategy": "steps"}
        options["lr_scheduler_type"] = "constant"
        if resumes:
            trainer(adapted(mixed_path), tmp_path / "2", **options | {"max_steps": 2}).train()
            with torch.no_grad():  # the checkpoint has the values
                for parameter in trained(model).values():
                    parameter.fill_(0.5)
            trainer(model, tmp_path / "2", **options).train(resume_from_checkpoint=True)
        else:
            trainer(model, tmp_path / "1", **options).train()
        states.append(trained(model))
    assert states[0].keys() == states[1].keys() and any(".b_0" in name for name in states[0])
    for name, value in states[0].items():
        assert torch.allclose(value, states[1][name], atol=1e-6), name


@pytest.mark.parametrize(
    ("options", "save", "message"),
    [
        (
            {"adapter": "other"},
            {},
            "model must have an adapter of PEFT named other, as its experts",
        ),
        (
            {"rank": 3},
            {},
            r"experts must have the rank, alpha and rslora of PEFT's adapter default",
        ),
        ({}, {"safe_serialization": False}, "safe_serialization must be True, got False"),
    ],
)
def test_what_the_files_cannot_hold(mixed_path, options, save, message, tmp_path):
    model = adapted(mixed_path, **options)
    with pytest.raises(ValueError, match=f"^save_pretrained: {message}"):
        model.save_pretrained(tmp_path / "new", **save)
    assert not (tmp_path / "new").exists()


def test_several_adapters(mixed_path, tmp_path):
    model = adapted(mixed_path)
    model.add_adapter("second", peft.LoraConfig(r=3, lora_alpha=3, target_modules=["q_proj"]))
    add_lora(model, rank=3, alpha=3, adapter="second", train_rest=True)
    model.save_pretrained(tmp_path)
    assert len(tensors_of(tmp_path)) == 2 * 2 * 4
    assert len(tensors_of(tmp_path / "second")) == 2 * 2 * 3
    model.save_pretrained(tmp_path / "one", selected_adapters=["second"])
    assert not (tmp_path / "one" / "adapter_model.safetensors").exists()


def test_adapters_of_experts_without_a_place(mixed_path, tmp_path):
    adapted(mixed_path).save_pretrained(tmp_path)
    message = (
        f"PeftModel.load_adapter: {EXPERTS}.packed must have the adapter default, as the files"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        peft.PeftModel.from_pretrained(load(mixed_path), tmp_path)
    model = load(mixed_path)
    integration.load_adapter(model, tmp_path)
    assert lora_experts(model)


def test_files_without_adapters_of_experts(mixed_path, tmp_path):
    base = load(mixed_path, packed_linear=True)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    peft.get_peft_model(base, config).save_pretrained(tmp_path)
    model = adapted(mixed_path)
    with pytest.warns(UserWarning, match="has no adapters of experts; those of the model stay"):
        model.load_adapter(tmp_path, "default")


# save_adapter and load_adapter


def test_adapters_of_linear_layers_alone(mixed_path, tmp_path):
    model = load(mixed_path, packed_linear=True)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config)
    integration.save_adapter(wrapped, tmp_path)
    again = frozen(mixed_path)
    report = integration.load_adapter(again, tmp_path)
    assert not report.experts
    assert report.trained == {"": sum(p.numel() for p in trained(wrapped).values())}
    assert torch.allclose(logits_of(again), logits_of(model), atol=1e-5)


def test_a_loaded_adapter_is_the_only_active_one(mixed_path, tmp_path):
    """Also in layers that the files do not have."""
    experts = load(mixed_path)
    add_lora(experts, 2, 4, adapter="experts")
    randomize(experts)
    integration.save_adapter(experts, tmp_path / "experts", "experts")
    linear = peft.get_peft_model(
        load(mixed_path), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    integration.save_adapter(linear, tmp_path / "linear")
    for first, second, expected in (
        ("linear", "experts", experts),
        ("experts", "linear", linear),
    ):
        model = frozen(mixed_path)
        integration.load_adapter(model, tmp_path / first, first)
        integration.load_adapter(model, tmp_path / second, second)
        assert torch.allclose(logits_of(model), logits_of(expected), atol=1e-5)
        assert all(second in name for name in trained(model))


def test_a_name_in_use_leaves_the_model_as_it_is(mixed_path, tmp_path):
    integration.save_adapter(adapted(mixed_path), tmp_path)
    for has_linear in (False, True):
        model = load(mixed_path)
        if has_linear:
            peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["k_proj"]), model)
        else:
            add_lora(model, 2, 4)
        before, active = [*model.state_dict()], [*trained(model)]
        with pytest.raises(ValueError, match="^load_adapter: adapter must be a new name, got"):
            integration.load_adapter(model, tmp_path)
        with pytest.raises((TypeError, ValueError), match="^load_adapter: dtype must be"):
            integration.load_adapter(model, tmp_path, "new", dtype=torch.int8)
        assert [*model.state_dict()] == before and [*trained(model)] == active


def test_trained_biases_are_not_lost(tmp_path):
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], bias="lora_only")
    model = peft.get_peft_model(tiny("gpt_oss"), config)
    message = "save_adapter: bias of PEFT's adapter default must be none, got 'lora_only'"
    with pytest.raises(ValueError, match=message):
        integration.save_adapter(model, tmp_path)
