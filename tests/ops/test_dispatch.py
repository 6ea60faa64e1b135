"""ops.dispatch_plan and ops.dispatch: the batch of each expert, in one stable order."""

import pytest
import reference as ref
import torch
from assertions import (
    assert_deterministic,
    assert_same_bits,
    assert_second_derivative_refused,
    opcheck_all,
)

from moe_ext import ops

pytestmark = pytest.mark.emulated

SHAPES = [(1, 1, 1), (3, 2, 1), (7, 8, 1), (7, 8, 2), (7, 8, 7), (7, 8, 8), (40, 5, 3), (0, 4, 2)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def make_index(T, E, k, device="cpu"):
    return torch.rand(T, E).topk(k).indices.to(device)


@pytest.mark.parametrize("T, E, k", SHAPES)
def test_plan_equals_reference(device, T, E, k):
    index = make_index(T, E, k)
    plan = ops.dispatch_plan(index.to(device), E)
    batches = ref.dispatch(index, E)
    slots = [t * k + j for batch in batches for t, j in batch]
    assert plan.permutation.tolist() == slots
    assert plan.tokens_per_expert.tolist() == [len(batch) for batch in batches]
    assert plan.offsets.tolist() == [sum(len(b) for b in batches[:e]) for e in range(E + 1)]
    assert plan.inverse.shape == (T, k)
    inverse = plan.inverse.reshape(-1)
    assert [int(inverse[slot]) for slot in slots] == list(range(T * k))
    assert all(x.dtype == torch.int64 and x.device.type == device for x in plan)
    assert all(x.is_contiguous() for x in plan)


@pytest.mark.parametrize(
    "T, E, k",
    [
        (100, 1, 1),
        (100, 255, 2),
        (100, 256, 17),
        (100, 257, 64),
        (50, 1000, 1),
        (20, 4096, 4),
        (21_845, 8, 3),  # 65,535 rows
        (32_768, 8, 2),  # 65,536 rows
        (50_000, 64, 4),  # 200,000 rows
    ],
)
def test_plan_at_the_limits_of_narrow_counters(device, T, E, k):
    index = make_index(T, E, k, device)
    plan = ops.dispatch_plan(index, E)
    flat = index.reshape(-1)
    expected = flat.sort(stable=True).indices
    assert_same_bits(plan.permutation, expected)
    counts = torch.bincount(flat, minlength=E)
    assert_same_bits(plan.tokens_per_expert, counts)
    assert plan.offsets[0] == 0
    assert_same_bits(plan.offsets[1:], counts.cumsum(0))
    rows = torch.arange(T * k, device=device)
    assert_same_bits(plan.inverse.reshape(-1)[plan.permutation], rows)


def test_one_expert_takes_all(device):
    plan = ops.dispatch_plan(torch.full((9, 1), 3, device=device), 5)
    assert plan.permutation.tolist() == list(range(9))
    assert plan.tokens_per_expert.tolist() == [0, 0, 0, 9, 0]
    assert plan.offsets.tolist() == [0, 0, 0, 0, 9, 9]


@pytest.mark.parametrize("T, E, k", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [1, 7, 64])
def test_dispatch_equals_reference(device, T, E, k, dtype, D):
    """Rows are copied, so every type is exact."""
    index = make_index(T, E, k)
    x = torch.randn(T, D).to(dtype)
    rows = ops.dispatch(x.to(device), ops.dispatch_plan(index.to(device), E).inverse)
    expected = [x[t] for batch in ref.dispatch(index, E) for t, _ in batch]
    assert rows.shape == (T * k, D) and rows.is_contiguous()
    assert_same_bits(rows, torch.stack(expected) if T else x.new_empty(0, D))


@pytest.mark.parametrize("T, E, k", SHAPES)
def test_gradient_equals_reference(device, T, E, k):
    """A token's gradient is the sum over its k rows."""
    index = make_index(T, E, k)
    inverse = ops.dispatch_plan(index.to(device), E).inverse
    x = torch.randn(T, 5, dtype=torch.float64)
    cotangent = torch.randn(T * k, 5, dtype=torch.float64)
    expected = torch.zeros(T, 5, dtype=torch.float64)
    pairs = [pair for batch in ref.dispatch(index, E) for pair in batch]
    for row, (t, _) in zip(cotangent, pairs, strict=True):
        expected[t] += row
    leaf = x.to(device).requires_grad_()
    (actual,) = torch.autograd.grad(ops.dispatch(leaf, inverse), leaf, cotangent.to(device))
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradient_is_summed_in_float32(device, dtype):
    index = make_index(50, 16, 8, device)
    inverse = ops.dispatch_plan(index, 16).inverse
    leaf = torch.randn(50, 9, device=device).to(dtype).requires_grad_()
    cotangent = torch.randn(400, 9, device=device).to(dtype)
    (actual,) = torch.autograd.grad(ops.dispatch(leaf, inverse), leaf, cotangent)
    exact = cotangent[inverse].double().sum(1)
    assert actual.dtype == dtype
    # float32 sums of 8 are exact to 2^-20, so what is left is one rounding to the narrow type
    error = (actual.double() - exact).abs()
    assert torch.all(error <= 0.51 * torch.finfo(dtype).eps * exact.abs() + 1e-5)


def test_gradcheck(device):
    inverse = ops.dispatch_plan(make_index(5, 6, 3, device), 6).inverse
    x = torch.randn(5, 3, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: ops.dispatch(x, inverse), (x,))


def test_empty_batch(device):
    plan = ops.dispatch_plan(torch.empty(0, 2, dtype=torch.int64, device=device), 4)
    assert plan.permutation.shape == (0,) and plan.inverse.shape == (0, 2)
    assert plan.tokens_per_expert.tolist() == [0] * 4 and plan.offsets.tolist() == [0] * 5
    x = torch.empty(0, 3, device=device, requires_grad=True)
    rows = ops.dispatch(x, plan.inverse)
    assert rows.shape == (0, 3)
    rows.sum().backward()
    assert x.grad.shape == (0, 3)


def test_any_layout(device):
    index = make_index(6, 8, 3, device)
    plan = ops.dispatch_plan(index, 8)
    moved = ops.dispatch_plan(index.t().contiguous().t(), 8)
    for a, e in zip(moved, plan, strict=True):
        assert_same_bits(a, e)
    x = torch.randn(6, 5, device=device)
    expected = ops.dispatch(x, plan.inverse)
    transposed = x.t().contiguous().t().requires_grad_()
    rows = ops.dispatch(transposed, plan.inverse.t().contiguous().t())
    assert_same_bits(rows, expected)
    (gradient,) = torch.autograd.grad(rows.sum(), transposed)  # an expanded gradient
    assert torch.all(gradient == 3)
    row = x[:1].expand(6, 5)
    assert_same_bits(ops.dispatch(row, plan.inverse), ops.dispatch(row.clone(), plan.inverse))


def test_wide_index_of_one_column_is_expanded(device):
    index = torch.tensor([[2]], device=device).expand(6, 1)
    assert ops.dispatch_plan(index, 3).permutation.tolist() == list(range(6))


@pytest.mark.parametrize("T, E, k", [(5, 6, 2), (5, 6, 6), (0, 4, 2)])
@pytest.mark.parametrize("transposed", [False, True])
def test_opcheck(device, T, E, k, transposed):
    index, x = make_index(T, E, k, device), torch.randn(T, 3, device=device)
    if transposed:
        index, x = index.t().contiguous().t(), x.t().contiguous().t()

    def function():
        inverse = ops.dispatch_plan(index, E).inverse
        ops.dispatch(x.detach().requires_grad_(), inverse).sum().backward()

    opcheck_all(function, {"dispatch_plan", "dispatch", "_dispatch_backward"})


def test_second_derivative_is_refused(device):
    inverse = ops.dispatch_plan(make_index(4, 5, 2, device), 5).inverse
    x = torch.randn(4, 3, dtype=torch.float64, device=device, requires_grad=True)
    assert_second_derivative_refused(lambda x: ops.dispatch(x, inverse), (x,))


def test_deterministic(threads):
    index, x, cotangent = make_index(1000, 64, 4), torch.randn(1000, 64), torch.randn(4000, 64)

    def function():
        plan, leaf = ops.dispatch_plan(index, 64), x.clone().requires_grad_()
        rows = ops.dispatch(leaf, plan.inverse)
        return *plan, rows, *torch.autograd.grad(rows, leaf, cotangent)

    assert_deterministic(function, threads)
