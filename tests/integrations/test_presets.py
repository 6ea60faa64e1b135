"""moe_ext.presets against the layers of transformers, with copied weights, routers included."""

import importlib
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_ext import presets, update_gates

transformers = pytest.importorskip("transformers", minversion="5.23")

D, H, E, K, T = 12, 10, 8, 3, 40
SIZES = dict(hidden_size=D, num_experts_per_tok=K)

# Our options, transformers' module (model, class) and its configuration.
MODELS = {
    "deepseek_v3": (
        dict(num_groups=4, groups_per_token=2),
        "deepseek_v3.DeepseekV3MoE",
        SIZES | dict(moe_intermediate_size=H, n_routed_experts=E, n_group=4, topk_group=2),
    ),
    "mixtral": (
        {},
        "mixtral.MixtralSparseMoeBlock",
        SIZES | dict(intermediate_size=H, num_local_experts=E),
    ),
    "qwen3_moe": (
        {},
        "qwen3_moe.Qwen3MoeSparseMoeBlock",
        SIZES | dict(moe_intermediate_size=H, num_experts=E, norm_topk_prob=True),
    ),
    "olmoe": (
        {},
        "olmoe.OlmoeSparseMoeBlock",
        SIZES | dict(intermediate_size=H, num_experts=E, norm_topk_prob=False),
    ),
    "gpt_oss": ({}, "gpt_oss.GptOssMLP", SIZES | dict(intermediate_size=H, num_local_experts=E)),
}


def peer_of(name):
    """Makes transformers' float64 module with random weights and biases."""
    _, path, config = MODELS[name]
    model, _, cls = path.partition(".")
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    kinds = [k for k in vars(module) if k.endswith("Config") and k.startswith(cls[:4])]
    (kind,) = [k for k in kinds if getattr(module, k).model_type == model]
    peer = getattr(module, cls)(getattr(module, kind)(**config)).double()
    for value in [*peer.parameters(), *peer.buffers()]:
        torch.nn.init.normal_(value.data, std=0.5)
    return peer


def ours_with_weights_of(name, peer):
    layer = getattr(presets, name)(D, H, E, K, **MODELS[name][0]).double()
    router = peer.router if name == "gpt_oss" else peer.gate
    experts = peer.experts
    transposed = name != "gpt_oss"
    state = {
        "gate.w_gate": router.weight.T,
        "experts.weight_0": experts.gate_up_proj.mT if transposed else experts.gate_up_proj,
        "experts.weight_1": experts.down_proj.mT if transposed else experts.down_proj,
    }
    if name == "gpt_oss":
        state["gate.b_gate"] = router.bias
        state["experts.bias_0"] = experts.gate_up_proj_bias
        state["experts.bias_1"] = experts.down_proj_bias
    if name == "deepseek_v3":
        state["gate.selection_bias"] = router.e_score_correction_bias
        shared = peer.shared_experts
        columns = torch.cat([shared.gate_proj.weight, shared.up_proj.weight])
        state["shared_expert.expert.weight_0"] = columns.T[None]
        state["shared_expert.expert.weight_1"] = shared.down_proj.weight.T[None]
    layer.load_state_dict(state)
    return layer, state


def output_of(name, peer, x):
    return peer(x)[0] if name == "gpt_oss" else peer(x)


@pytest.mark.parametrize("name", MODELS)
def test_equals_transformers(name):
    """Outputs, experts, gates and gradients; transformers' routers compute in float32.

    The scores of DeepSeek-V3 and the softmax of the others are rounded to float32 there, with an
    error of 6e-8. In float64 the outputs agree within some of those errors. For gpt-oss, whose
    router has no float32, they agree to 1e-10.
    """
    peer = peer_of(name)
    layer, state = ours_with_weights_of(name, peer)
    x = torch.randn(1, T, D, dtype=torch.float64)
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    y, aux = layer(mine)
    expected = output_of(name, peer, theirs)
    tolerance = dict(rtol=0, atol=1e-10) if name == "gpt_oss" else dict(rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(y, expected, **tolerance)

    router = peer.router if name == "gpt_oss" else peer.gate
    _, gates, index = router(x.view(T, D))
    order, right = aux.expert_index.sort(-1), index.sort(-1)
    assert torch.equal(order.values, right.values)
    pairs = aux.gates.gather(1, order.indices), gates.double().gather(1, right.indices)
    torch.testing.assert_close(*pairs, **tolerance)

    weight = torch.randn_like(y)
    (y * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, **tolerance)
    found = dict(layer.named_parameters())
    for key, value in state.items():
        if key == "gate.selection_bias" or "shared_expert" in key:
            continue
        source = next(p for p in peer.parameters() if p.data_ptr() == value.data_ptr())
        grad = source.grad if source.shape == value.shape and key != "gate.w_gate" else None
        grad = source.grad.mT if value.stride() != source.stride() else grad
        assert grad is not None
        torch.testing.assert_close(found[key].grad, grad, **tolerance)
    if name == "deepseek_v3":
        shared = peer.shared_experts
        columns = torch.cat([shared.gate_proj.weight.grad, shared.up_proj.weight.grad])
        mine = layer.shared_expert.expert
        torch.testing.assert_close(mine.weight_0.grad[0], columns.T, **tolerance)
        torch.testing.assert_close(
            mine.weight_1.grad[0], shared.down_proj.weight.grad.T, **tolerance
        )


def test_full_sizes():
    """The parameters of one layer, from the papers' numbers of experts and widths."""
    expected = {
        "deepseek_v3": 256 * (7168 + 3 * 7168 * 2048) + 3 * 7168 * 2048,
        "mixtral": 8 * (4096 + 3 * 4096 * 14336),
        "qwen3_moe": 128 * (2048 + 3 * 2048 * 768),
        "olmoe": 64 * (2048 + 3 * 2048 * 1024),
        "gpt_oss": 128 * (2880 + 1 + 3 * 2880 * 2880 + 2 * 2880 + 2880),
    }
    assert expected.keys() == {*presets.__all__}
    for name, number in expected.items():
        with torch.device("meta"):
            layer = getattr(presets, name)()
        assert sum(p.numel() for p in layer.parameters()) == number
        assert layer.w_importance == layer.w_load == 0


def test_deepseek_v3_trains_with_its_bias():
    sizes = D, H, E, K
    layer = presets.deepseek_v3(*sizes, num_groups=4, groups_per_token=2, num_shared_experts=0)
    assert layer.shared_expert is None
    x = torch.randn(T, D, requires_grad=True)
    checkpoint(lambda x: layer(x)[0], x, use_reentrant=False).sum().backward()
    assert layer.gate.tokens_since_update.sum() == T * K
    update_gates(layer)
    assert layer.gate.selection_bias.abs().max() == torch.tensor(1e-3)


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_compiles_to_a_whole_graph(name):
    torch._dynamo.reset()
    layer = getattr(presets, name)(D, H, E, K, **MODELS[name][0])
    x = torch.randn(T, D)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    y, _ = compiled(x)
    assert torch.equal(y, layer(x)[0])
    y.sum().backward()


def test_optional_parts_are_imported_on_request():
    code = """
import sys, moe_ext
assert "moe_ext.presets" not in sys.modules
import moe_ext.integrations._transformers_balance
assert not {"transformers", "matplotlib"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
