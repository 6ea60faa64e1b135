"""Models of transformers with our experts in the tools that people use, against "eager".

Each test runs one tool twice, with the same seeds: with experts_implementation "moe_ext" and with
"eager". The models are tiny. A tool runs with one model, unless the models differ for it.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

transformers = pytest.importorskip("transformers", minversion="5.23")

from tiny_models import (  # noqa: E402
    MODEL_TYPES,
    ONE_GRAPH,
    PADDED,
    assert_close,
    error,
    losses_of,
    tiny,
    tokens,
    trainer,
)

MODELS = ["mixtral", "qwen3_moe", "gpt_oss"]
each_model = pytest.mark.parametrize("model_type", MODELS)
STEPS = 4
LAYERS = 2


def twice(run, *arguments):
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


def assert_within_twice_eager(actual, eager, exact):
    """Asserts that the errors of bfloat16 are at most twice those of eager."""
    for name, value in exact.items():
        bound = 2 * max(error(eager[name], value), 2**-9)
        assert error(actual[name], value) <= bound, name


def backward_calls(model):
    """Returns (needs_x, needs_parameters) of each backward call of the operator."""
    with torch.profiler.profile(record_shapes=True) as profile:
        model(tokens(), labels=tokens()).loss.backward()
    calls = [event for event in profile.events() if event.name == "moe_ext::_experts_backward"]
    return [call.concrete_inputs[10:12] for call in calls]


# transformers.Trainer


def history(trained):
    """Returns the losses and the norms of the gradient, one value a step."""
    logs = [entry for entry in trained.state.log_history if "loss" in entry]
    return {key: torch.tensor([entry[key] for entry in logs]) for key in ("loss", "grad_norm")}


def run_trainer(implementation, folder, model_type, options):
    trained = trainer(tiny(model_type, implementation), folder, **options)
    trained.train()
    assert trained.model.get_experts_implementation() == {"": implementation}
    return history(trained)


def checkpointing(use_reentrant):
    kwargs = {"use_reentrant": use_reentrant}
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": kwargs}


@pytest.mark.parametrize(
    "model_type, options",
    [
        ("qwen3_moe", {}),
        ("qwen3_moe", {"gradient_accumulation_steps": 2}),
        ("mixtral", checkpointing(use_reentrant=False)),
        ("gpt_oss", checkpointing(use_reentrant=True)),
    ],
)
def test_trainer(tmp_path, model_type, options):
    actual, expected = twice(run_trainer, tmp_path, model_type, options)
    assert len(actual["loss"]) == STEPS
    assert_close(actual, expected, 1e-4)


def test_trainer_with_autocast(tmp_path):
    exact = run_trainer("eager", tmp_path, "mixtral", {})
    actual, eager = twice(run_trainer, tmp_path, "mixtral", {"bf16": True})
    assert_within_twice_eager(actual, eager, exact)
    assert not torch.equal(actual["loss"], exact["loss"])


def test_trainer_resumes_from_a_checkpoint(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2}
    expected = trainer(tiny("qwen3_moe"), tmp_path, **options)
    expected.train()
    # Trainer alone would leave the experts of Mixtral and Qwen3-MoE as they are in the new model.
    checkpoint = tmp_path / "checkpoint-2"
    resumed = trainer(load(checkpoint, "moe_ext"), tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert torch.equal(history(resumed)["loss"], history(expected)["loss"])
    weights = expected.model.state_dict()
    for name, value in resumed.model.state_dict().items():
        assert torch.equal(value, weights[name]), name


# Loops


def run_with_router_losses(implementation, model_type):
    model = tiny(model_type, implementation, output_router_logits=True)
    output = model(tokens(), labels=tokens())
    output.loss.backward()
    assert output.aux_loss > 0
    gradients = {name: p.grad for name, p in model.named_parameters()}
    logits = {f"router_logits {i}": logits for i, logits in enumerate(output.router_logits)}
    return {"loss": output.loss, "aux_loss": output.aux_loss, **logits, **gradients}


@each_model
def test_router_losses_equal_eager(model_type):
    assert_close(*twice(run_with_router_losses, model_type))


@pytest.mark.parametrize(
    "model_type", [pytest.param("qwen3_moe", marks=pytest.mark.long), "gpt_oss"]
)
def test_compiled_training_step(model_type):
    model = tiny(model_type, num_hidden_layers=1).train()
    compiled = torch.compile(model, fullgraph=ONE_GRAPH, backend="aot_eager")
    output = compiled(tokens(), labels=tokens())
    output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    expected = losses_of(tiny(model_type, "eager", num_hidden_layers=1).train())
    assert_close({"logits": output.logits.detach(), **gradients}, expected)


@pytest.mark.parametrize("autocast", [False, True])
@each_model
def test_bfloat16(model_type, autocast):
    """Models in bfloat16, and models in float32 under autocast."""
    exact = losses_of(tiny(model_type, "eager"))

    def run(implementation):
        model = tiny(model_type, implementation)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return losses_of(model if autocast else model.bfloat16())

    actual, eager = twice(run)
    assert actual["logits"].dtype == torch.bfloat16
    assert_within_twice_eager(actual, eager, exact)


@pytest.mark.parametrize(
    "model_type, trained",
    [
        ("qwen3_moe", []),
        ("gpt_oss", ["gate_up_proj"]),
        ("gpt_oss", ["down_proj"]),
        ("mixtral", ["gate_up_proj", "down_proj"]),
    ],
)
def test_frozen_experts(model_type, trained):
    def make(implementation):
        model = tiny(model_type, implementation)
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.requires_grad_(any(f".{weight}" in name for weight in trained))
        return model

    assert_close(*twice(lambda name: losses_of(make(name))))
    weights = [weight in trained for weight in ("gate_up_proj", "down_proj")]
    needed = weights + (weights if model_type == "gpt_oss" else [])  # the biases
    assert backward_calls(make("moe_ext")) == [[True, needed]] * LAYERS


# FSDP2 and DDP on two ranks


def sharded(model, dtype):
    options = {}
    if dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(dtype, torch.float32)
    contiguous = []
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(
            lambda module, _: contiguous.extend(p.is_contiguous() for p in module.parameters())
        )
    return contiguous


def losses_of_rank(group, rank, model_type, implementation, wrapper, dtype=None):
    """Runs a step under FSDP2 or DDP on this rank's row of tokens; returns loss and gradients."""
    model = tiny(model_type, implementation)
    contiguous = sharded(model, dtype) if wrapper == "fsdp" else [True]
    replica = DistributedDataParallel(model) if wrapper == "ddp" else model
    ids = tokens()[rank : rank + 1]
    loss = replica(input_ids=ids, labels=ids).loss
    loss.backward()
    assert contiguous and all(contiguous)
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    gradients = {
        name: p.grad.full_tensor() if wrapper == "fsdp" else p.grad
        for name, p in model.named_parameters()
    }
    return {"loss": loss / group.size(), **gradients}


def one_process(model_type):
    """Returns the loss and gradients of a step of eager on all tokens in one process."""
    model = tiny(model_type, "eager")
    loss = model(tokens(), labels=tokens()).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize(
    "wrapper, model_type", [("fsdp", "mixtral"), ("fsdp", "gpt_oss"), ("ddp", "qwen3_moe")]
)
def test_ranks_equal_one_process(workers, wrapper, model_type):
    expected = one_process(model_type)
    for losses in workers.run(2, losses_of_rank, model_type, "moe_ext", wrapper):
        assert_close(losses, expected)


def test_fsdp2_with_mixed_precision(workers):
    arguments = "fsdp", torch.bfloat16
    actual, eager = twice(
        lambda name: workers.run(2, losses_of_rank, "gpt_oss", name, *arguments)[0]
    )
    assert_within_twice_eager(actual, eager, one_process("gpt_oss"))


# Loading, saving and generation


def saved(folder, model_type, implementation="eager"):
    """Saves a tiny model and returns its folder."""
    folder = folder / f"{model_type}-{implementation}"
    tiny(model_type, implementation).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("model_type, device_map", [("mixtral", "cpu"), ("gpt_oss", "auto")])
def test_device_map(tmp_path, model_type, device_map):
    pytest.importorskip("accelerate")
    folder = saved(tmp_path, model_type)
    assert_close(*twice(lambda name: losses_of(load(folder, name, device_map=device_map))))


def test_experts_on_the_disk(tmp_path):
    pytest.importorskip("accelerate")
    folder = saved(tmp_path, "qwen3_moe")
    device_map = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    device_map |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    options = {"device_map": device_map, "offload_folder": tmp_path / "offload"}
    model = load(folder, "moe_ext", **options)
    assert model.model.layers[1].mlp.experts.down_proj.is_meta
    with torch.no_grad():
        assert error(model(tokens()).logits, load(folder, "eager")(tokens()).logits) < 1e-5


@each_model
def test_saved_files_have_the_same_bytes(tmp_path, model_type):
    fused, eager = saved(tmp_path, model_type, "moe_ext"), saved(tmp_path, model_type, "eager")
    names = {file.name for file in eager.iterdir()}
    assert names == {file.name for file in fused.iterdir()} >= {"model.safetensors", "config.json"}
    for name in names:
        assert (fused / name).read_bytes() == (eager / name).read_bytes(), name
    with torch.no_grad():
        expected = tiny(model_type)(tokens()).logits
        assert error(load(fused, "eager")(tokens()).logits, expected) < 1e-5
        loaded = load(eager, "moe_ext")
        assert loaded.get_experts_implementation() == {"": "moe_ext"}
        assert torch.equal(loaded(tokens()).logits, expected)


@pytest.mark.parametrize(
    "model_type, options",
    [
        *((model_type, {}) for model_type in MODEL_TYPES),
        ("qwen3_moe", {"cache_implementation": "static"}),
        ("gpt_oss", {"use_cache": False}),
        ("mixtral", {"input_ids": PADDED, "attention_mask": (PADDED > 0).long()}),
        ("gpt_oss", {"num_beams": 3}),
    ],
)
def test_generated_tokens_equal_those_of_eager(model_type, options):
    arguments = {"input_ids": tokens(), "max_new_tokens": 8, "do_sample": False} | options

    def run(implementation):
        model = tiny(model_type, implementation).eval()
        tokens = model.generate(**arguments)
        assert model.get_experts_implementation() == {"": implementation}
        return tokens

    actual, expected = twice(run)
    assert actual.shape[1] > arguments["input_ids"].shape[1]
    assert torch.equal(actual, expected)
