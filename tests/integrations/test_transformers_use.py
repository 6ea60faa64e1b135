"""Models of transformers with our experts in the tools that people use, against "eager".

Each test runs one tool twice, with the same seeds: with experts_implementation "moe_ext" and with
"eager". The models are tiny.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

transformers = pytest.importorskip("transformers", minversion="5.23")

from test_transformers import (  # noqa: E402
    ONE_GRAPH,
    assert_close,
    error,
    losses_of,
    tiny,
    tokens,
)

MODELS = ["mixtral", "qwen3_moe", "gpt_oss"]
each_model = pytest.mark.parametrize("model_type", MODELS)
STEPS = 4
LAYERS = 2


def both(run, *arguments):
    """Returns run("moe_ext", ...) and run("eager", ...), each after the same seed."""
    results = []
    for implementation in ("moe_ext", "eager"):
        torch.manual_seed(3)
        results.append(run(implementation, *arguments))
    return results


def load(folder, implementation, **options):
    """Loads a saved model with an implementation of its experts."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, experts_implementation=implementation, **options
    )


def assert_within_twice_eager(found, eager, exact):
    """Asserts that the errors of bfloat16 are at most twice those of eager."""
    for name, each in exact.items():
        bound = 2 * max(error(eager[name], each), 2**-9)
        assert error(found[name], each) <= bound, name


def backward_calls(model):
    """Returns (needs_x, needs_parameters) of each backward call of the operator."""
    with torch.profiler.profile(record_shapes=True) as profile:
        model(tokens(), labels=tokens()).loss.backward()
    calls = [each for each in profile.events() if each.name == "moe_ext::_experts_backward"]
    return [each.concrete_inputs[10:12] for each in calls]


# transformers.Trainer


def trainer(model, folder, **options):
    """Builds a Trainer that takes STEPS steps; the data are the same for each call."""
    pytest.importorskip("accelerate")
    ids = torch.randint(1, 48, (16, 9), generator=torch.Generator().manual_seed(2))
    arguments = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return transformers.Trainer(
        model,
        transformers.TrainingArguments(str(folder), **(arguments | options)),
        train_dataset=[{"input_ids": each, "labels": each} for each in ids],
    )


def history(trained):
    """Returns the losses and the norms of the gradient, one value a step."""
    logs = [each for each in trained.state.log_history if "loss" in each]
    return {key: torch.tensor([each[key] for each in logs]) for key in ("loss", "grad_norm")}


def run_trainer(implementation, folder, model_type, options):
    trained = trainer(tiny(model_type, implementation), folder, **options)
    trained.train()
    assert trained.model.get_experts_implementation() == {"": implementation}
    return history(trained)


CHECKPOINTING = {
    f"use_reentrant={value}": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": value},
    }
    for value in (False, True)
}
OPTIONS = {"plain": {}, "accumulation": {"gradient_accumulation_steps": 2}} | CHECKPOINTING


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@each_model
def test_trainer(tmp_path, model_type, options):
    found, expected = both(run_trainer, tmp_path, model_type, options)
    assert len(found["loss"]) == STEPS
    assert_close(found, expected, 1e-4)


@each_model
def test_trainer_with_autocast(tmp_path, model_type):
    exact = run_trainer("eager", tmp_path, model_type, {})
    found, eager = both(run_trainer, tmp_path, model_type, {"bf16": True})
    assert_within_twice_eager(found, eager, exact)
    assert not torch.equal(found["loss"], exact["loss"])


@each_model
def test_trainer_resumes_from_a_checkpoint(tmp_path, model_type):
    options = {"save_strategy": "steps", "save_steps": 2}
    expected = trainer(tiny(model_type), tmp_path, **options)
    expected.train()
    # Trainer alone would leave the experts of Mixtral and Qwen3-MoE as they are in the new model.
    checkpoint = tmp_path / "checkpoint-2"
    resumed = trainer(load(checkpoint, "moe_ext"), tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert torch.equal(history(resumed)["loss"], history(expected)["loss"])
    weights = expected.model.state_dict()
    for name, each in resumed.model.state_dict().items():
        assert torch.equal(each, weights[name]), name


# Loops


def run_loop(implementation, model_type):
    """Returns the losses of STEPS steps with fused AdamW."""
    model = tiny(model_type, implementation).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for _ in range(STEPS):
        loss = model(tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {"loss": torch.stack(losses)}


@each_model
def test_loop_with_fused_adamw(model_type):
    found, expected = both(run_loop, model_type)
    assert found["loss"][-1] < found["loss"][0]
    assert_close(found, expected)


@pytest.mark.parametrize(
    "model_type", [pytest.param("qwen3_moe", marks=pytest.mark.long), "gpt_oss"]
)
def test_compiled_training_step(model_type):
    model = tiny(model_type).train()
    compiled = torch.compile(model, fullgraph=ONE_GRAPH, backend="aot_eager")
    output = compiled(tokens(), labels=tokens())
    output.loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    expected = losses_of(tiny(model_type, "eager").train())
    assert_close({"logits": output.logits.detach(), **gradients}, expected)


@each_model
def test_autocast(model_type):
    exact = losses_of(tiny(model_type, "eager"))

    def run(implementation):
        with torch.autocast("cpu", torch.bfloat16):
            return losses_of(tiny(model_type, implementation))

    found, eager = both(run)
    assert_within_twice_eager(found, eager, exact)


@each_model
def test_bfloat16(model_type):
    exact = losses_of(tiny(model_type, "eager"))
    found, eager = both(lambda name: losses_of(tiny(model_type, name).bfloat16()))
    assert found["logits"].dtype == torch.bfloat16
    assert_within_twice_eager(found, eager, exact)


@pytest.mark.parametrize("trained", ["none", "gate_up_proj", "down_proj", "both"])
@each_model
def test_frozen_experts(model_type, trained):
    def run(implementation):
        model = tiny(model_type, implementation)
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.requires_grad_(trained == "both" or f".{trained}" in name)
        return model

    found, expected = both(lambda name: losses_of(run(name)))
    assert_close(found, expected)
    weights = [trained in (name, "both") for name in ("gate_up_proj", "down_proj")]
    needed = weights + (weights if model_type == "gpt_oss" else [])  # the biases
    assert backward_calls(run("moe_ext")) == [[True, needed]] * LAYERS


# PEFT


def lora(model, **options):
    """Adds LoRA adapters with random weights to a model."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(4)
    config = peft.LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(model, config)


def gradients_of(model):
    """Returns the logits and the gradients that exist."""
    return {name: each for name, each in losses_of(model).items() if each is not None}


ATTENTION = {"target_modules": ["q_proj", "v_proj"]}


@each_model
def test_lora_on_the_attention(model_type):
    found, expected = both(lambda name: gradients_of(lora(tiny(model_type, name), **ATTENTION)))
    assert len(found) == 1 + LAYERS * 4
    assert_close(found, expected)
    calls = backward_calls(lora(tiny(model_type), **ATTENTION))
    needed = [False] * (4 if model_type == "gpt_oss" else 2)
    assert calls == [[True, needed]] * LAYERS


EXPERTS = {
    "target_modules": [],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}


@each_model
def test_lora_on_the_experts(model_type):
    found, expected = both(lambda name: gradients_of(lora(tiny(model_type, name), **EXPERTS)))
    assert len(found) == 1 + LAYERS * 4
    assert_close(found, expected)
    plain = losses_of(tiny(model_type))["logits"]
    assert error(found["logits"], plain) > 1e-3  # the adapters are in use


@each_model
def test_lora_on_the_experts_is_merged(model_type):
    model = lora(tiny(model_type), **EXPERTS).eval()
    with torch.no_grad():
        expected = model(tokens()).logits
        merged = model.merge_and_unload()
        assert error(merged(tokens()).logits, expected) < 1e-5


# FSDP2 and DDP on two ranks


def sharded_losses(group, rank, model_type, implementation, dtype):
    """Runs a step under FSDP2 on this rank's row of tokens; returns the loss and gradients."""
    model = tiny(model_type, implementation)
    options = {}
    if dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(dtype, torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    contiguous = []
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(
            lambda module, _: contiguous.extend(
                each.is_contiguous() for each in module.parameters()
            )
        )
    ids = tokens()[rank : rank + 1]
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert contiguous and all(contiguous)
    results = {name: each.grad.full_tensor() for name, each in model.named_parameters()}
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return {"loss": loss / group.size(), **results}


def replicated_losses(group, rank, model_type, implementation):
    """Runs a step under DDP on this rank's row of tokens; returns the loss and gradients."""
    model = tiny(model_type, implementation)
    ids = tokens()[rank : rank + 1]
    replica = DistributedDataParallel(model)
    loss = replica(input_ids=ids, labels=ids).loss
    loss.backward()
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    results = {name: each.grad for name, each in model.named_parameters()}
    return {"loss": loss / group.size(), **results}


def one_process(model_type):
    """Returns the loss and gradients of a step of eager on all tokens in one process."""
    model = tiny(model_type, "eager")
    loss = model(tokens(), labels=tokens()).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@each_model
def test_fsdp2_equals_one_process(workers, model_type):
    for found in workers.run(2, sharded_losses, model_type, "moe_ext", None):
        assert_close(found, one_process(model_type))


@each_model
def test_fsdp2_with_mixed_precision(workers, model_type):
    found, eager = both(
        lambda name: workers.run(2, sharded_losses, model_type, name, torch.bfloat16)[0]
    )
    assert_within_twice_eager(found, eager, one_process(model_type))


@each_model
def test_ddp_equals_one_process(workers, model_type):
    for found in workers.run(2, replicated_losses, model_type, "moe_ext"):
        assert_close(found, one_process(model_type))


# Loading, saving and generation


@pytest.fixture
def saved(tmp_path):
    """Returns a function that saves a tiny model and returns the folder."""

    def save(model_type, implementation="eager"):
        folder = tmp_path / f"{model_type}-{implementation}"
        tiny(model_type, implementation).save_pretrained(folder)
        return folder

    return save


@pytest.mark.parametrize("device_map", ["cpu", "auto"])
@each_model
def test_device_map(saved, model_type, device_map):
    pytest.importorskip("accelerate")
    folder = saved(model_type)
    found, expected = both(lambda name: losses_of(load(folder, name, device_map=device_map)))
    assert_close(found, expected)


def test_experts_on_the_disk(saved, tmp_path):
    pytest.importorskip("accelerate")
    folder = saved("qwen3_moe")
    device_map = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    device_map |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    options = {"device_map": device_map, "offload_folder": tmp_path / "offload"}
    model = load(folder, "moe_ext", **options)
    assert model.model.layers[1].mlp.experts.down_proj.is_meta
    with torch.no_grad():
        assert error(model(tokens()).logits, load(folder, "eager")(tokens()).logits) < 1e-5


@each_model
def test_saved_files_have_the_same_bytes(saved, model_type):
    ours, eager = saved(model_type, "moe_ext"), saved(model_type, "eager")
    names = {each.name for each in eager.iterdir()}
    assert names == {each.name for each in ours.iterdir()} >= {"model.safetensors", "config.json"}
    for name in names:
        assert (ours / name).read_bytes() == (eager / name).read_bytes(), name
    with torch.no_grad():
        expected = tiny(model_type)(tokens()).logits
        assert error(load(ours, "eager")(tokens()).logits, expected) < 1e-5
        assert torch.equal(load(ours, "moe_ext")(tokens()).logits, expected)


PADDED = torch.tensor([[0, 0, 0, 5, 7, 11], [1, 2, 3, 4, 5, 6]])  # padding at the left
GENERATE = {
    "dynamic cache": {},
    "static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "padding": {"input_ids": PADDED, "attention_mask": (PADDED > 0).long()},
    "beams": {"num_beams": 3},
}


@pytest.mark.parametrize("options", GENERATE.values(), ids=GENERATE)
@each_model
def test_generated_tokens_equal_those_of_eager(model_type, options):
    arguments = {"input_ids": tokens(), "max_new_tokens": 8, "do_sample": False} | options

    def run(implementation):
        return tiny(model_type, implementation).eval().generate(**arguments)

    found, expected = both(run)
    assert found.shape[1] > arguments["input_ids"].shape[1]
    assert torch.equal(found, expected)


@each_model
def test_aux_loss(model_type):
    def run(implementation):
        model = tiny(model_type, implementation, output_router_logits=True)
        output = model(tokens(), labels=tokens())
        output.loss.backward()
        gradients = {name: each.grad for name, each in model.named_parameters()}
        return {"loss": output.loss.detach(), "aux_loss": output.aux_loss.detach(), **gradients}

    found, expected = both(run)
    assert found["aux_loss"] > 0
    assert_close(found, expected)
