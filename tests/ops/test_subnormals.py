"""Subnormal numbers, which cost many processors more than a hundred cycles each.

A processor of x86-64 notes in its control register that an operation had a subnormal operand. So
these tests find them on any such processor, also if they cost it nothing.
"""

import ctypes
import platform
from functools import partial

import pytest
import torch
from operators import as_tuple, upstream_of

from moe_ext import ops

needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="needs MXCSR of x86-64")
pytestmark = [needs_x86, pytest.mark.usefixtures("one_thread")]

LIBM = ctypes.CDLL("libm.so.6")
FLAGS, SUBNORMAL, AT = 0x3F, 0x02, 28  # of MXCSR, and its place in fenv_t
FLUSH = 0x8040  # FTZ and DAZ


def control():
    """Returns the floating-point environment of this thread and its MXCSR."""
    environment = ctypes.create_string_buffer(32)
    LIBM.fegetenv(environment)
    return environment, int.from_bytes(environment[AT : AT + 4], "little")


def has_subnormal_operands(function):
    """Returns whether an operation of this thread has a subnormal operand, but not which."""
    environment, flags = control()
    environment[AT : AT + 4] = (flags & ~FLAGS).to_bytes(4, "little")
    LIBM.fesetenv(environment)
    function()
    after = control()[1]
    assert after & FLUSH == flags & FLUSH, "the operator must restore the modes"
    return bool(after & SUBNORMAL)


def test_the_flag_is_seen():
    tiny = torch.full((20,), 1e-39)
    assert has_subnormal_operands(lambda: tiny + tiny)
    assert not has_subnormal_operands(lambda: torch.ones(20) + 1)


def differentiate(function, *inputs):
    """Runs a forward and a backward pass; no function of torch sees the results."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = as_tuple(function(*leaves))
    torch.autograd.grad(outputs, leaves, upstream_of(outputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"reduction": "sum"}])
def test_linear_cross_entropy(dtype, options):
    """Of logits of standard deviation 22, many probabilities are below 1e-38."""
    torch.manual_seed(0)
    x, w = torch.randn(60, 32), torch.randn(1500, 32)
    target = torch.randint(1500, (60,))
    inputs = (x * (22 / 32**0.5)).to(dtype), w.to(dtype)
    assert not has_subnormal_operands(
        lambda: differentiate(
            lambda x, w: ops.linear_cross_entropy(x, w, target, **options), *inputs
        )
    )


def test_probabilities_that_are_subnormal_are_zero():
    """With W = I, the gradient of x is P; an element differs from float64 by less than 1e-37."""
    torch.manual_seed(0)
    x, target = (22 * torch.randn(40, 600)).requires_grad_(), torch.randint(600, (40,))
    (grad,) = torch.autograd.grad(
        ops.linear_cross_entropy(x, torch.eye(600), target, reduction="sum"), x
    )
    probabilities = x.detach().double().softmax(1)
    tiny = torch.finfo(torch.float32).tiny
    wrong = torch.ones(40, 600).bool().scatter(1, target[:, None], False)
    rounded_to_zero = wrong & (probabilities < tiny) & (probabilities > 0)
    assert rounded_to_zero.sum() > 1000
    assert not ((grad != 0) & (grad.abs() < tiny)).any()
    assert grad[rounded_to_zero].abs().max() <= 2 * tiny


SATURATED = [a for a in ops.ACTIVATIONS if a not in ops.CLAMPED_ACTIVATIONS]


@pytest.mark.parametrize("activation", SATURATED)
@pytest.mark.parametrize("scale", [1.0, 30.0, 100.0])
def test_experts(activation, scale):
    torch.manual_seed(0)
    gated = 2 if activation in ops.GATED_ACTIVATIONS else 1
    x, offsets = scale * torch.randn(40, 16), torch.tensor([0, 15, 40])
    weights = [torch.randn(2, 16, 32 * gated) / 4, torch.randn(2, 32, 16)]

    def experts(x, *weights):
        return ops.experts(x, weights, activation=activation, offsets=offsets)

    assert not has_subnormal_operands(lambda: differentiate(experts, x, *weights))


@pytest.mark.parametrize("scale", [1.0, 30.0, 100.0])
def test_lstm(scale):
    torch.manual_seed(0)
    x, *weights = scale * torch.randn(5, 4, 16), torch.randn(64, 16), torch.randn(64, 16) / 4
    assert not has_subnormal_operands(
        lambda: differentiate(lambda x, *w: ops.lstm(x, *w).m, x, *weights)
    )
    gates, c_0 = scale * torch.randn(40, 64), torch.randn(40, 16)
    assert not has_subnormal_operands(lambda: differentiate(ops.lstm_cell, gates, c_0))


@pytest.mark.parametrize("scale", [1.0, 22.0, 100.0])
def test_gates(scale):
    torch.manual_seed(0)
    logits, noise = scale * torch.randn(40, 24), torch.randn(40, 24)
    rows = torch.randn(320, 16)
    index, offsets = torch.arange(24).repeat(40), 24 * torch.arange(41)
    inverse = torch.randperm(320).view(40, 8)

    def selected(logits):
        return ops.selected_softmax(logits, index, offsets)

    def gating(logits):
        chosen = ops.noisy_topk_gating(logits, noise, noise, 8)
        load = ops.load(logits, chosen.noise_stddev, chosen.threshold, chosen.expert_index)
        return load, ops.combine(rows, chosen.gates, inverse)

    def routing(score, logits):
        gates = ops.topk_routing(logits, 8, score=score).gates
        return ops.combine(rows, gates, inverse)

    scores = [partial(routing, score) for score in ("softmax", "sigmoid", "sqrt_softplus")]
    for function in (selected, gating, *scores):
        assert not has_subnormal_operands(partial(differentiate, function, logits))
