"""The shared expert (DeepSeekMoE, arXiv 2401.06066), with the sigmoid of Qwen2-MoE."""

import pytest
import torch
from assertions import assert_same_bits
from layers import D, E, K, make_x, shake

from moe_ext import MoE, SharedExpert


@pytest.mark.equation("arXiv 2401.06066")
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
