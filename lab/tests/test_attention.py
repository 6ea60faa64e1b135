"""Attention (App. G), compared with a double loop over source and target steps."""

import pytest
import reference as ref
import torch
from assertions import assert_exact
from moe_lab.models import Attention

FUNCTIONS = {"product": ref.A, "gnmt": ref.A_GNMT}
B, S, T, D_SOURCE, D_TARGET, UNITS = 3, 5, 4, 6, 3, 7
LENGTHS = torch.tensor([5, 1, 3])


@pytest.fixture(params=FUNCTIONS)
def attention(request):
    torch.manual_seed(1)
    return Attention(D_SOURCE, D_TARGET, UNITS, request.param).double()


def inputs():
    source = torch.randn(B, S, D_SOURCE, dtype=torch.float64, requires_grad=True)
    target = torch.randn(B, T, D_TARGET, dtype=torch.float64, requires_grad=True)
    return source, target, torch.arange(S) < LENGTHS[:, None]


def attend(attention, source, target, mask):
    return attention(target, attention.keys(source), source, mask)


def test_equals_the_double_loop(attention):
    source, target, mask = inputs()
    U, W, V = attention.u, attention.w, attention.v
    expected_context, expected_weights = [], source.new_zeros(B, T, S)
    for b in range(B):
        for t in range(T):
            X = source[b, : LENGTHS[b]]
            p, context = ref.attend(FUNCTIONS[attention.kind], X, target[b, t], U, W, V)
            expected_weights[b, t, : LENGTHS[b]] = p
            expected_context.append(context)
    expected_context = torch.stack(expected_context).view(B, T, D_SOURCE)
    context, weights = attend(attention, source, target, mask)
    assert_exact(context, expected_context)
    assert_exact(weights, expected_weights)

    leaves = [source, target, U, W, V]
    cotangents = torch.randn_like(context), torch.randn_like(weights)
    actual = torch.autograd.grad([context, weights], leaves, cotangents)
    expected = torch.autograd.grad([expected_context, expected_weights], leaves, cotangents)
    for grad, loop_grad in zip(actual, expected, strict=True):
        assert_exact(grad, loop_grad)


def test_autocast(attention):
    """GEMMs run in bfloat16, the softmax in float32; gradients have the dtype of the parameters."""
    source, target, mask = inputs()
    expected, exact_weights = attend(attention, source, target, mask)
    attention = attention.float()
    with torch.autocast("cpu", torch.bfloat16):
        context, weights = attend(attention, source.float(), target.float(), mask)
    assert weights.dtype == torch.float32
    context.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in attention.parameters())
    # The error of a score of size 3 is about 3 · 2^-8.
    torch.testing.assert_close(weights.double(), exact_weights, rtol=0.1, atol=0.02)
    torch.testing.assert_close(context.double(), expected, rtol=0.1, atol=0.05)


def test_weights_have_unit_gain():
    attention = Attention(300, 200, 100)
    for weight, fan_in in ((attention.u, 300), (attention.w, 200), (attention.v, 100)):
        assert weight.var().item() == pytest.approx(1 / fan_in, rel=0.25)


def test_errors():
    with pytest.raises(ValueError, match="Attention: units must .*got 0"):
        Attention(2, 2, 0)
    with pytest.raises(ValueError, match="Attention: kind must .*got 'dot'"):
        Attention(2, 2, 2, "dot")
