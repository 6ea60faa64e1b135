"""The shared expert (DeepSeekMoE, arXiv 2401.06066), with the sigmoid of Qwen2-MoE."""

import pytest
import torch
from assertions import assert_all_same_bits, assert_same_bits
from layers import D, E, K, assert_equals_reference, layer_of, make_x, shake
from torch import nn

from moe_ext import BalancedGate, HierarchicalMoE, MoE, SharedExpert, TopKGate

SHARED = pytest.mark.equation("arXiv 2401.06066")


@SHARED
@pytest.mark.parametrize("options", [{}, {"gated": True}, {"activation": "swiglu", "bias": True}])
def test_equals_reference(device, options):
    """The statistics and the loss are those of a layer without the shared expert."""
    layer = layer_of(TopKGate(D, E, K), shared_expert=SharedExpert(D, [4, 3], **options))
    shake(layer).double().to(device)
    x = make_x(8, device=device)
    _, aux = assert_equals_reference(layer, x)
    layer.shared_expert = None
    assert_same_bits(layer(x)[1].loss, aux.loss)


def test_recompute_is_an_option_of_its_own():
    found = []
    for recompute in (False, True):
        torch.manual_seed(1)
        shared = shake(SharedExpert(D, [8], gated=True, recompute=recompute)).double()
        y = shared(make_x(9))
        found.append([y, *torch.autograd.grad(y.square().sum(), list(shared.parameters()))])
    assert_all_same_bits(*found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_token_does_not_depend_on_the_others(dtype):
    """The sigmoid too is bitwise identical for any number of tokens."""
    shared = shake(SharedExpert(D, [8], gated=True)).to(dtype)
    x = make_x(73).to(dtype)
    assert_same_bits(shared(x), torch.cat([shared(token) for token in x.split(1)]))


def test_it_has_the_dtype_of_the_experts():
    shared = SharedExpert(D, [4], dtype=torch.bfloat16, gated=True)
    layer = MoE(D, E, K, expert_dtype=torch.bfloat16, shared_expert=shared)
    y, aux = layer(torch.randn(9, D))
    assert y.dtype == torch.float32
    (y.sum() + aux.loss).backward()
    assert shared.w_gate.grad.dtype == torch.float32 and shared.w_gate.grad.abs().sum() > 0


def test_any_gate_and_any_module():
    module = nn.Linear(D, D)
    x = torch.randn(8, D)
    for make in (
        lambda **options: HierarchicalMoE(D, 2, 3, 1, **options).eval(),
        lambda **options: MoE(D, E, K, gate=BalancedGate(D, E, K), w_load=0, **options),
    ):
        layer = make(shared_expert=module)
        y, _ = layer(x)
        layer.shared_expert = None
        torch.testing.assert_close(y, layer(x)[0] + module(x))


def test_reset_parameters():
    shared = SharedExpert(D, [4], gated=True)
    before = shared.expert.weight_0.clone()
    nn.init.ones_(shared.w_gate)
    shared.reset_parameters()
    assert shared.w_gate.count_nonzero() == 0
    assert not torch.equal(shared.expert.weight_0, before)
