"""Our layers against those of transformers, with copied weights, routers included."""

import importlib
from functools import partial

import pytest
import torch

from moe_ext import MoE, SharedExpert, TopKGate, presets

transformers = pytest.importorskip("transformers", minversion="5.23")

D, H, E, K, T = 12, 10, 8, 3, 40
SIZES = dict(hidden_size=D, num_experts_per_tok=K, moe_topk=K, moe_intermediate_size=H)
SWIGLU = dict(hidden_sizes=[H], activation="swiglu")


def qwen2_moe():
    shared = SharedExpert(D, [H], activation="swiglu", gated=True)
    return MoE(D, E, K, gate=TopKGate(D, E, K), shared_expert=shared, **SWIGLU)


def longcat_flash():
    gate = TopKGate(D, E + 2, K, renormalize=False, scale=2.5, bias_update_rate=0)
    return MoE(D, E, K, gate=gate, num_identity_experts=2, **SWIGLU)


PRESETS = {name: partial(getattr(presets, name), D, H, E, K) for name in presets.__all__}
PRESETS["deepseek_v3"] = partial(PRESETS["deepseek_v3"], num_groups=4, groups_per_token=2)

# Our layer, transformers' class and its configuration.
MODELS = {
    "deepseek_v3": ("DeepseekV3MoE", dict(n_routed_experts=E, n_group=4, topk_group=2)),
    "mixtral": ("MixtralSparseMoeBlock", dict(intermediate_size=H, num_local_experts=E)),
    "qwen3_moe": ("Qwen3MoeSparseMoeBlock", dict(num_experts=E, norm_topk_prob=True)),
    "olmoe": ("OlmoeSparseMoeBlock", dict(intermediate_size=H, num_experts=E)),
    "gpt_oss": ("GptOssMLP", dict(intermediate_size=H, num_local_experts=E)),
    "qwen2_moe": (
        "Qwen2MoeSparseMoeBlock",
        dict(num_experts=E, norm_topk_prob=True, shared_expert_intermediate_size=H),
    ),
    "longcat_flash": (
        "LongcatFlashMoE",
        dict(expert_ffn_hidden_size=H, n_routed_experts=E, zero_expert_num=2)
        | dict(routed_scaling_factor=2.5),
    ),
}
LAYERS = PRESETS | {"qwen2_moe": qwen2_moe, "longcat_flash": longcat_flash}


def peer_of(name):
    """Makes transformers' float64 module with random weights and biases."""
    cls, config = MODELS[name]
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    kinds = [k for k in vars(module) if k.endswith("Config") and k.startswith(cls[:4])]
    (kind,) = [k for k in kinds if getattr(module, k).model_type == name]
    peer = getattr(module, cls)(getattr(module, kind)(**SIZES | config)).double()
    for value in peer.parameters():
        torch.nn.init.normal_(value, std=0.5)
    for bias in peer.buffers():
        torch.nn.init.normal_(bias, std=0.05)
    return peer


def state_of(peer, value_of=lambda parameter: parameter):
    """Returns our state dict; `value_of` returns the weight or the gradient of a parameter."""
    router = peer.router if hasattr(peer, "router") else peer.gate
    router_weight = router.classifier.weight if hasattr(router, "classifier") else router.weight
    # LongCat-Flash allocates unused weights for the identity experts too.
    weights = value_of(peer.experts.gate_up_proj)[:E], value_of(peer.experts.down_proj)
    state = {"gate.w_gate": value_of(router_weight).T}
    for i, weight in enumerate(weights):
        state[f"experts.weight_{i}"] = weight if hasattr(router, "bias") else weight.mT
    if hasattr(router, "bias"):  # gpt-oss
        state["gate.b_gate"] = value_of(router.bias)
        state["experts.bias_0"] = value_of(peer.experts.gate_up_proj_bias)
        state["experts.bias_1"] = value_of(peer.experts.down_proj_bias)
    if hasattr(router, "e_score_correction_bias"):
        state["gate.selection_bias"] = router.e_score_correction_bias
    shared = getattr(peer, "shared_experts", getattr(peer, "shared_expert", None))
    if shared is not None:
        columns = torch.cat([value_of(shared.gate_proj.weight), value_of(shared.up_proj.weight)])
        state["shared_expert.expert.weight_0"] = columns.T[None]
        state["shared_expert.expert.weight_1"] = value_of(shared.down_proj.weight).T[None]
    if hasattr(peer, "shared_expert_gate"):
        state["shared_expert.w_gate"] = value_of(peer.shared_expert_gate.weight).T
    return state


@pytest.mark.parametrize("name", MODELS)
def test_equals_transformers(name):
    """Outputs and all gradients; transformers' routers compute in float32.

    The scores of DeepSeek-V3 and the softmax of the others are rounded to float32 there, with an
    error of 6e-8. In float64 the outputs agree within some of those errors. For gpt-oss, whose
    router has no float32, they agree to 1e-10.
    """
    peer, layer = peer_of(name), LAYERS[name]().double()
    layer.load_state_dict(state_of(peer))
    x = torch.randn(1, T, D, dtype=torch.float64)
    x_own, x_peer = (x.clone().requires_grad_() for _ in range(2))
    (y, aux), expected = layer(x_own), peer(x_peer)
    expected = expected[0] if isinstance(expected, tuple) else expected
    tolerance = dict(rtol=0, atol=1e-10) if name == "gpt_oss" else dict(rtol=1e-5, atol=5e-6)
    assert aux.tokens_per_expert.min() > 0
    torch.testing.assert_close(y, expected, **tolerance)
    weight = torch.randn_like(y)
    (y * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(x_own.grad, x_peer.grad, **tolerance)
    gradients = state_of(peer, lambda parameter: parameter.grad)
    for key, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[key], **tolerance)


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


def test_no_weight_of_a_loss_is_zero():
    layer = presets.mixtral(16, 8, 4, 2, w_importance=None, w_load=0.3)
    assert (layer.w_importance, layer.w_load) == (0, 0.3)
