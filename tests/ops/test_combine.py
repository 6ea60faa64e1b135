"""ops.combine: y = sum_i G(x)_i E_i(x) from the rows of the chosen experts (Eq. 1)."""

import math

import pytest
import reference as ref
import torch
from assertions import (
    assert_as_accurate,
    assert_deterministic,
    assert_exact,
    assert_same_bits,
    assert_second_derivative_refused,
    gradients,
    opcheck_all,
)

from moe_ext import ops

pytestmark = pytest.mark.emulated

SHAPES = [(1, 1, 1), (3, 2, 1), (7, 8, 1), (7, 8, 2), (7, 8, 7), (7, 8, 8), (40, 5, 3), (0, 4, 2)]


def make(T, E, k, D, device="cpu", dtype=torch.float64):
    """expert_output, gates, inverse, expert_index"""
    top = torch.randn(T, E, dtype=torch.float64).topk(k)
    index = top.indices.to(device)
    gates = top.values.softmax(-1).to(device)
    gates = gates if dtype == torch.float64 else gates.float()
    output = torch.randn(T * k, D, dtype=torch.float64).to(dtype).to(device)
    return output, gates, ops.dispatch_plan(index, E).inverse, index


def by_reference(output, gates, index, E):
    batches = ref.dispatch(index, E)
    split = output.split([len(batch) for batch in batches])
    return ref.combine(split, batches, gates, output.shape[1])


def plain(output, gates, inverse):
    return (output[inverse] * gates[..., None]).sum(1)


@pytest.mark.parametrize("T, E, k", SHAPES)
@pytest.mark.parametrize("D", [1, 5])
def test_equals_reference(device, T, E, k, D):
    output, gates, inverse, index = make(T, E, k, D)
    leaves = [x.requires_grad_() for x in (output, gates)]
    expected = by_reference(*leaves, index, E)
    moved = [x.detach().to(device).requires_grad_() for x in leaves]
    actual = ops.combine(*moved, inverse.to(device))
    assert actual.shape == (T, D) and actual.is_contiguous()
    assert_exact(actual.detach(), expected.detach())
    cotangent = torch.randn(T, D, dtype=torch.float64)
    if not T:
        actual.sum().backward()
        assert moved[0].grad.shape == (0, D) and moved[1].grad.shape == (0, k)
        return
    for a, e in zip(
        gradients([actual], moved, [cotangent.to(device)]),
        gradients([expected], leaves, [cotangent]),
        strict=True,
    ):
        assert_exact(a, e)


@pytest.mark.parametrize("T, E, k", [(20, 300, 17), (20, 300, 64), (32_768, 8, 2), (50_000, 64, 4)])
def test_many_slots_and_rows(device, T, E, k):
    output, gates, inverse, _ = make(T, E, k, 3, device)
    assert_exact(ops.combine(output, gates, inverse), plain(output, gates, inverse))


@pytest.mark.parametrize("T", [0, 1, 2, 7, 64, 1000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_identity_experts(device, T, dtype):
    """combine(dispatch(x)) = x · sum of gates, and the gates sum to 1."""
    _, gates, inverse, _ = make(T, 8, 3, 1, device, dtype)
    x = torch.randn(T, 16, device=device).to(dtype)
    actual = ops.combine(ops.dispatch(x, inverse), gates, inverse)
    assert actual.dtype == dtype
    torch.testing.assert_close(
        actual,
        x,
        rtol=4 * torch.finfo(dtype).eps,
        atol=0,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [1, 2, 16])
@pytest.mark.parametrize("D", [3, 64])
def test_lower_precision(device, dtype, k, D):
    """Gates stay float32 beside half-precision outputs, and the sum is kept in float32."""
    output, gates, inverse, _ = make(100, 16, k, D, device, dtype)
    cotangent = torch.randn(100, D, device=device).to(dtype)
    results, grads = [], []
    for function, cast in (
        (ops.combine, lambda x: x),
        (plain, lambda x: x.float()),
        (plain, lambda x: x.double()),
    ):
        leaves = [cast(x.clone()).requires_grad_() for x in (output, gates)]
        out = function(*leaves, inverse)
        results.append(out)
        grads.append(gradients([out], leaves, [cast(cotangent)]))
    actual, at_float32, exact = results
    assert actual.dtype == dtype
    assert_as_accurate(actual, at_float32.to(dtype), exact)
    for i, expected_dtype in enumerate((dtype, torch.float32)):
        assert grads[0][i].dtype == expected_dtype
        assert_as_accurate(grads[0][i], grads[1][i].to(expected_dtype), grads[2][i])


def test_float16_does_not_overflow_on_the_way(device):
    """6e4 · 0.5 twice is in range; so is a sum whose partial sums are not."""
    output = torch.tensor([[6e4], [6e4], [-6e4]], dtype=torch.float16, device=device)
    inverse = torch.tensor([[0, 1, 2]], device=device)
    for gates, expected in (([0.5, 0.5, 0.0], 6e4), ([1.0, 1.0, 1.0], 6e4)):
        y = ops.combine(output, torch.tensor([gates], device=device), inverse)
        assert y.dtype == torch.float16
        assert y.item() == torch.tensor(expected).half().item()


def test_gates_of_the_outputs_type(device):
    output, gates, inverse, _ = make(6, 5, 2, 4, device, torch.bfloat16)
    y = ops.combine(output, gates.bfloat16(), inverse)
    assert y.dtype == torch.bfloat16
    assert_same_bits(y, ops.combine(output, gates.bfloat16().float(), inverse))


def test_gradcheck(device):
    output, gates, inverse, _ = make(5, 6, 3, 4, device)
    leaves = output.requires_grad_(), gates.requires_grad_()
    assert torch.autograd.gradcheck(lambda o, g: ops.combine(o, g, inverse), leaves)


def test_only_what_needs_a_gradient_gets_one(device):
    output, gates, inverse, _ = make(5, 6, 3, 4, device)
    for needs in ((True, False), (False, True)):
        leaves = [x.clone().requires_grad_(r) for x, r in zip((output, gates), needs, strict=True)]
        ops.combine(*leaves, inverse).sum().backward()
        assert [x.grad is not None for x in leaves] == list(needs)


def test_nan_stays_in_its_token(device):
    output, gates, inverse, _ = make(6, 5, 2, 4, device)
    expected = ops.combine(output, gates, inverse)
    output[inverse[3, 1], 2] = math.nan
    actual = ops.combine(output, gates, inverse)
    assert actual.isnan().nonzero().tolist() == [[3, 2]]
    keep = ~actual.isnan()
    assert_same_bits(actual[keep], expected[keep])


def test_any_layout(device):
    output, gates, inverse, _ = make(6, 8, 3, 5, device)
    base = [x.clone().requires_grad_() for x in (output, gates)]
    expected = ops.combine(*base, inverse)
    moved = [x.t().contiguous().t().requires_grad_() for x in (output, gates)]
    actual = ops.combine(*moved, inverse.t().contiguous().t())
    assert_same_bits(actual, expected)
    for a, e in zip(
        torch.autograd.grad(actual.sum(), moved),  # an expanded gradient
        gradients([expected], base, [torch.ones_like(expected)]),
        strict=True,
    ):
        assert_same_bits(a, e)


@pytest.mark.parametrize("T, E, k", [(5, 6, 2), (5, 6, 6), (0, 4, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_opcheck(device, T, E, k, dtype, transposed):
    output, gates, inverse, _ = make(T, E, k, 3, device, dtype)
    if transposed:
        output, gates, inverse = (x.t().contiguous().t() for x in (output, gates, inverse))

    def function():
        leaves = output.detach().requires_grad_(), gates.detach().requires_grad_()
        ops.combine(*leaves, inverse).sum().backward()

    opcheck_all(function, {"combine", "_combine_backward"})


def test_second_derivative_is_refused(device):
    output, gates, inverse, _ = make(4, 5, 2, 3, device)
    assert_second_derivative_refused(
        lambda o, g: ops.combine(o, g, inverse), (output.requires_grad_(), gates.requires_grad_())
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic(threads, dtype):
    output, gates, inverse, _ = make(1000, 64, 4, 64, dtype=dtype)
    cotangent = torch.randn(1000, 64).to(dtype)

    def function():
        leaves = output.clone().requires_grad_(), gates.clone().requires_grad_()
        y = ops.combine(*leaves, inverse)
        return y, *torch.autograd.grad(y, leaves, cotangent)

    assert_deterministic(function, threads)
