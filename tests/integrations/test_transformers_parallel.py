"""Expert parallelism of transformers with "moe_ext": equal to one process, sums of gradients."""

import importlib
import os

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

transformers = pytest.importorskip("transformers", minversion="5.23")
plug = importlib.import_module("moe_ext.integrations.transformers")
hf_parallel = importlib.import_module("transformers.distributed.expert_parallel")

from tiny_models import tiny, tiny_config  # noqa: E402
from transformers import Qwen3MoeForCausalLM  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts  # noqa: E402

K, WIDTH = 2, 32


def make_experts(num_experts):
    torch.manual_seed(1)
    config = tiny_config("qwen3_moe", num_experts=num_experts)
    config._experts_implementation = "moe_ext"
    experts = Qwen3MoeExperts(config).double()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return experts


def make_batch(rank, num_tokens, num_experts):
    generator = torch.Generator().manual_seed(10 + rank)
    x = torch.randn(num_tokens, WIDTH, generator=generator, dtype=torch.float64)
    gates = torch.rand(num_tokens, K, generator=generator, dtype=torch.float64)
    index = torch.rand(num_tokens, num_experts, generator=generator).topk(K).indices
    weight = torch.randn(num_tokens, WIDTH, generator=generator, dtype=torch.float64)
    return x.requires_grad_(), index, gates.requires_grad_(), weight


def step(experts, batch):
    x, index, gates, weight = batch
    y = experts(x, index, gates)
    (y * weight).sum().backward()
    parameters = {
        name: getattr(p.grad, "_local_tensor", p.grad) for name, p in experts.named_parameters()
    }
    return {"y": y.detach(), "x": x.grad, "gates": gates.grad, **parameters}


def experts_step_of_process(group, rank, counts, num_experts, style, shared):
    """Runs a step; with `shared`, all ranks have the batch of rank 0."""
    world = len(counts)
    if shared:
        ep_mesh = tp_mesh = init_device_mesh("cpu", (world,))
    else:
        mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("ep", "tp"))
        ep_mesh, tp_mesh = mesh["ep"], mesh["tp"]
    experts = make_experts(num_experts)
    plan = {"gate_up_proj": style, "down_proj": style, "": "ep_dispatch_experts"}
    hf_parallel.apply_expert_parallelism(experts, ep_mesh, tp_mesh, plan, "moe_ext")
    source = 0 if shared else rank
    return step(experts, make_batch(source, counts[source], num_experts))


def check_experts(results, counts, num_experts, shared):
    """Compares with one process that has the sum of the losses."""
    experts = make_experts(num_experts)
    sources = [0] if shared else range(len(counts))
    expected = [step(experts, make_batch(r, counts[r], num_experts)) for r in sources]
    for rank, result in enumerate(results):
        for name in ("y", "x", "gates"):
            close(result[name], expected[0 if shared else rank][name])
    for name, parameter in experts.named_parameters():
        close(torch.cat([result[name] for result in results]), parameter.grad)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("num_experts", "style", "counts", "shared"),
    [
        (6, "grouped_gemm", [7, 5], False),
        (6, "grouped_gemm", [7, 0, 3], True),
        (5, "moe_ext_experts", [7, 0, 3], False),
        (5, "moe_ext_experts", [7, 5], True),
        (4, "moe_ext_experts", [1, 1, 1], False),  # no experts on the last rank
        (4, "moe_ext_experts", [7, 0, 3], True),
        (6, "grouped_gemm", [1, 1, 1], True),
        pytest.param(5, "moe_ext_experts", [7], False, marks=pytest.mark.long),
    ],
)
def test_experts_equal_one_process(workers, num_experts, style, counts, shared):
    arguments = (counts, num_experts, style, shared)
    results = workers.run(len(counts), experts_step_of_process, *arguments)
    check_experts(results, counts, num_experts, shared)


def make_plan(style):
    experts = "model.layers.*.mlp.experts"
    return {f"{experts}.gate_up_proj": style, f"{experts}.down_proj": style}


def load(folder, **distributed):
    """Loads a model in this process; `distributed` are arguments of DistributedConfig."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    options = dict(ep_size=world, ep_implementation="moe_ext") | distributed
    return Qwen3MoeForCausalLM.from_pretrained(
        folder,
        dtype=torch.float64,
        experts_implementation="moe_ext",
        distributed_config=DistributedConfig(**options),
    )


def refusals_of_process(group, rank, folder):
    """Returns the messages for 5 experts on 2 ranks without what they need."""
    messages = []
    for options in (
        dict(ep_plan=make_plan("grouped_gemm")),
        dict(ep_plan=make_plan("moe_ext_experts"), ep_implementation="all_to_all"),
        dict(ep_plan=make_plan("replicate")),
    ):
        with pytest.raises(ValueError) as caught:
            load(folder, tp_size=2, **options)
        messages.append(str(caught.value))
    return messages


def test_refuses(workers, tmp_path):
    save_model(tmp_path, 5)
    for uneven, second, whole in workers.run(2, refusals_of_process, str(tmp_path)):
        assert uneven.startswith("Cannot evenly shard 5 experts across 2")
        assert "ep_implementation must be 'moe_ext', got 'all_to_all'" in second
        assert whole.startswith("ep_implementation='moe_ext': ep_plan must shard each parameter")


def save_model(folder, num_experts):
    model = tiny("qwen3_moe", "eager", num_experts=num_experts).double()
    model.save_pretrained(folder)
    return model


def model_of_process(group, rank, folder, style):
    """Loads the model on 2 ranks; returns tokens, logits, loads; saves it again."""
    model = load(folder, tp_size=2, ep_plan=make_plan(style))
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad(), plug.balance(model) as measured:
        logits = model(ids).logits
    tokens = model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=True)
    model.save_pretrained(f"{folder}/saved")
    return tokens, logits, [layer.load for layer in measured.layers]


@pytest.mark.parametrize(("num_experts", "style"), [(6, "grouped_gemm"), (5, "moe_ext_experts")])
def test_model_on_two_ranks(workers, tmp_path, num_experts, style):
    """generate, balance, and the saved files agree with one process."""
    model = save_model(tmp_path, num_experts)
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad(), plug.balance(model) as measured:
        logits = model(ids).logits
    expected = model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=True)
    for tokens, parallel_logits, loads in workers.run(2, model_of_process, str(tmp_path), style):
        assert torch.equal(tokens, expected)
        close(parallel_logits, logits)
        assert all(map(torch.equal, loads, [layer.load for layer in measured.layers]))
    saved = Qwen3MoeForCausalLM.from_pretrained(
        tmp_path / "saved", dtype=torch.float64, experts_implementation="eager"
    )
    with torch.no_grad():
        close(saved(ids).logits, logits)


def losses_of(model, rows):
    return [model(input_ids=ids[None], labels=ids[None]).loss for ids in rows]


def training_step_of_process(group, rank, folder):
    model = load(folder, fsdp_size=2)
    ids = torch.arange(12).view(2, 6)
    with plug.balance(model) as measured:
        (loss,) = losses_of(model, ids[rank : rank + 1])
    loss.backward()
    gradients = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    return loss.detach(), gradients, [layer.load for layer in measured.layers]


def test_training_with_fsdp(workers, tmp_path):
    """Each rank has its own batch. The gradients are those of the mean of the ranks' losses."""
    model = save_model(tmp_path, 4)
    with plug.balance(model) as measured:
        losses = losses_of(model, torch.arange(12).view(2, 6))
    torch.stack(losses).mean().backward()
    # transformers 5.23 with torch 2.15 and Gloo divides the gradients of the experts twice.
    expected = {
        name: parameter.grad / (2 if ".experts." in name else 1)
        for name, parameter in model.named_parameters()
    }
    results = workers.run(2, training_step_of_process, str(tmp_path))
    for (loss, gradients, _), expected_loss in zip(results, losses, strict=True):
        close(loss, expected_loss.detach())
        torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-12)
    for loads in zip(*(result[2] for result in results), measured.layers, strict=True):
        assert torch.equal(loads[0] + loads[1], loads[2].load)
