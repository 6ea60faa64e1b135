"""ops.importance: Importance(X) = sum over the batch of G(x) (Eq. 6)."""

import math

import pytest
import reference as ref
import torch
from assertions import (
    assert_as_accurate,
    assert_deterministic,
    assert_exact,
    assert_same_bits,
    opcheck_all,
)

from moe_ext import ops

pytestmark = pytest.mark.emulated

SHAPES = [(1, 1, 1), (3, 2, 1), (7, 8, 2), (7, 8, 7), (7, 8, 8), (40, 5, 3), (0, 4, 2)]


def make(T, E, k, device="cpu", dtype=torch.float64):
    logits = torch.randn(T, E, dtype=torch.float64)
    top = logits.topk(k)
    return top.values.softmax(-1).to(dtype).to(device), top.indices.to(device)


def dense(gates, expert_index, E):
    return gates.new_zeros(len(gates), E).scatter(1, expert_index, gates)


@pytest.mark.parametrize("T, E, k", SHAPES)
def test_equals_reference(device, T, E, k):
    gates, index = make(T, E, k)
    actual = ops.importance(gates.to(device), index.to(device), E)
    assert actual.shape == (E,)
    assert_exact(actual, ref.Importance(dense(gates, index, E)))
    assert_exact(actual.sum(), torch.tensor(float(T), dtype=torch.float64))


@pytest.mark.parametrize("E, k", [(255, 2), (256, 17), (257, 64), (1000, 1), (4096, 4096)])
def test_many_experts(device, E, k):
    gates, index = make(3, E, k, device)
    assert_exact(ops.importance(gates, index, E), dense(gates, index, E).sum(0))


def test_expert_without_tokens_gets_exactly_zero(device):
    gates = torch.tensor([[0.75, 0.25], [0.5, 0.5]], device=device)
    index = torch.tensor([[3, 1], [1, 3]], device=device)
    assert ops.importance(gates, index, 5).tolist() == [0, 0.75, 0, 1.25, 0]


def test_no_choices(device):
    gates, index = torch.zeros(5, 0), torch.zeros(5, 0, dtype=torch.int64)
    assert ops.importance(gates.to(device), index.to(device), 3).tolist() == [0, 0, 0]


def test_one_expert_takes_all(device):
    gates = torch.ones(1000, 1, device=device)
    index = torch.full((1000, 1), 2, device=device)
    assert ops.importance(gates, index, 4).tolist() == [0, 0, 1000, 0]


@pytest.mark.parametrize("T, E, k", SHAPES)
def test_gradient_equals_reference(device, T, E, k):
    gates, index = make(T, E, k)
    cotangent = torch.randn(E, dtype=torch.float64)
    leaf = gates.to(device).requires_grad_()
    (actual,) = torch.autograd.grad(
        ops.importance(leaf, index.to(device), E) @ cotangent.to(device), leaf
    )
    expected = torch.zeros(T, k, dtype=torch.float64)
    if T:
        (expected,) = torch.autograd.grad(
            ref.Importance(dense(gates.requires_grad_(), index, E)) @ cotangent, gates
        )
    assert_exact(actual, expected)


def test_gradcheck(device):
    gates, index = make(5, 6, 3, device)
    assert torch.autograd.gradcheck(
        lambda g: ops.importance(g, index, 6), (gates.requires_grad_(),)
    )


@pytest.mark.parametrize("T", [10, 5000])
def test_float32(device, T):
    gates, index = make(T, 8, 2, device, torch.float32)
    actual = ops.importance(gates, index, 8)
    assert_as_accurate(
        actual, dense(gates, index, 8).sum(0), dense(gates.double(), index, 8).sum(0)
    )


def test_sum_over_batch_parts(device):
    gates, index = make(10, 6, 2, device)
    parts = ops.importance(gates[:3], index[:3], 6) + ops.importance(gates[3:], index[3:], 6)
    assert_exact(parts, ops.importance(gates, index, 6))


def test_any_layout(device):
    gates, index = make(6, 8, 3, device)
    moved = gates.t().contiguous().t().requires_grad_(), index.t().contiguous().t()
    out = ops.importance(*moved, 8)
    assert_same_bits(out, ops.importance(gates, index, 8))
    (gradient,) = torch.autograd.grad(out.sum(), moved[0])  # an expanded gradient
    assert torch.all(gradient == 1)


def test_nan_stays_in_its_expert(device):
    gates = torch.tensor([[math.nan, 0.25], [0.5, 0.5]], device=device)
    actual = ops.importance(gates, torch.tensor([[0, 1], [1, 2]], device=device), 3)
    assert actual[0].isnan() and actual[1:].tolist() == [0.75, 0.5]


@pytest.mark.parametrize("T, E, k", [(5, 6, 2), (5, 6, 6), (0, 4, 2)])
@pytest.mark.parametrize("transposed", [False, True])
def test_opcheck(device, T, E, k, transposed):
    gates, index = make(T, E, k, device, torch.float32)
    if transposed:
        gates, index = gates.t().contiguous().t(), index.t().contiguous().t()

    def function():
        ops.importance(gates.detach().requires_grad_(), index, E).sum().backward()

    opcheck_all(function, {"importance"})


def test_second_derivative(device):
    """The map is linear, so its derivative can be taken again."""
    gates, index = make(4, 5, 2, device)
    assert torch.autograd.gradgradcheck(
        lambda g: ops.importance(g, index, 5), (gates.requires_grad_(),)
    )


@pytest.mark.parametrize("T, E, k", [(5000, 16, 4), (3000, 2000, 2)])
def test_deterministic(threads, T, E, k):
    gates, index = make(T, E, k, dtype=torch.float32)
    cotangent = torch.randn(E)

    def function():
        leaf = gates.clone().requires_grad_()
        out = ops.importance(leaf, index, E)
        return out, *torch.autograd.grad(out @ cotangent, leaf)

    assert_deterministic(function, threads)
