"""The matrix products of the experts, at the edges of their tiles, blocks and panels.

The last test runs the others again on every instruction set that the processor has.
"""

import os
import subprocess
import sys

import pytest
import torch
from assertions import (
    assert_as_accurate,
    assert_exact,
    assert_same_bits,
    gradients,
)
from machine import instruction_sets

from moe_ext import _C, ops

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# On both sides of vectors, tiles, and the squares that B is packed in.
WIDTHS = [1, 2, 15, 16, 17, 31, 33, 255, 256, 257, 258, 513]


def normal(*shape, dtype):
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def offsets_of(counts):
    return torch.tensor([0, *counts]).cumsum(0)


def linear(x, weight, counts):
    return ops.experts(x, [weight], offsets=offsets_of(counts))


def assert_product(actual, a, b):
    """actual = a b, within what the roundings of one sum for each element can add up to.

    With depth k, u half a unit in the last place of the type that is summed in and v of the type of
    the result: 2 k u |a| |b| for a rounded product and a rounded sum for each term, as much again
    for float64's own errors, and v |a b| for the result.
    """
    dtype, k = actual.dtype, a.shape[1]
    a, b = a.double(), b.double()
    exact, scale = a @ b, a.abs() @ b.abs()
    summed = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    stored = torch.finfo(dtype)
    bound = 2 * k * summed * scale + stored.eps * exact.abs() + stored.tiny * stored.eps
    error = (actual.double() - exact).abs()
    assert torch.all(error <= bound), f"{tuple(a.shape)} by {tuple(b.shape)}: {error.max()}"


def check_linear(counts, D, F, dtype):
    """y = x W, dx = dy W^T and dW = x^T dy of every expert."""
    x, dy = normal(sum(counts), D, dtype=dtype), normal(sum(counts), F, dtype=dtype)
    weight = normal(len(counts), D, F, dtype=dtype)
    leaves = x.requires_grad_(), weight.requires_grad_()
    y = linear(*leaves, counts)
    dx, dW = torch.autograd.grad(y, leaves, dy)
    x, weight, y = x.detach(), weight.detach(), y.detach()
    parts = [t.split(counts) for t in (x, dy, y, dx)]
    for *rows, W, grad in zip(*parts, weight, dW, strict=True):
        x_e, dy_e, y_e, dx_e = rows
        assert_product(y_e, x_e, W)
        assert_product(dx_e, dy_e, W.T)
        assert_product(grad, x_e.T, dy_e)  # of an expert without rows: zero


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_width(dtype):
    for shift in (0, 1, 5):
        for D, F in zip(WIDTHS, WIDTHS[shift:] + WIDTHS[:shift], strict=True):
            check_linear([3, 0, 29], D, F, dtype)
    check_linear([3, 0, 29], 300, 2064, dtype)  # B in place for few rows, in two parts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D, F", [(17, 33), (48, 32), (258, 1)])
def test_any_number_of_rows(dtype, D, F):
    check_linear([*range(35), 512, 513, 639, 640, 641, 642], D, F, dtype)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_large_gradients(dtype):
    """Together more than 8 MiB, they go past the caches: sums of one to three squares, of more in
    float64, and their columns in several parts, the last of half a tile."""
    check_linear([3, 200, 300, 700], 260, 2064, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layout_changes_nothing(dtype):
    counts, D, F = [5, 0, 30], 33, 48
    x, dy = normal(35, 2 * D, dtype=dtype)[:, ::2], normal(F, dtype=dtype).expand(35, F)
    weight = normal(3, F, D, dtype=dtype).mT
    results = []
    for change in (lambda t: t, torch.Tensor.contiguous):
        leaves = [change(t).detach().requires_grad_() for t in (x, weight)]
        y = linear(*leaves, counts)
        results.append([y, *torch.autograd.grad(y, leaves, change(dy))])
    assert not any(t.is_contiguous() for t in (x, dy, weight))
    for actual, expected in zip(*results, strict=True):
        assert_same_bits(actual, expected)


def layer(x, gates, weights, biases, activation, plan):
    """Eq. 1."""
    return ops.experts(
        x,
        weights,
        biases,
        activation,
        offsets=plan.offsets,
        inverse=plan.inverse,
        gates=gates,
    )


def plain_layer(x, gates, weights, biases, activation, expert_index):
    """Eq. 1 with torch's products, each expert on its tokens."""
    y = torch.zeros(len(x), weights[-1].shape[-1], dtype=x.dtype)
    for e in range(len(weights[0])):
        token, slot = torch.where(expert_index == e)
        h = x[token] @ weights[0][e] + biases[0][e]
        if activation == "swiglu":
            a, b = h.chunk(2, -1)
            h = torch.nn.functional.silu(a) * b
        else:
            h = h.relu()
        out = h @ weights[1][e] + biases[1][e]
        y = y.index_add(0, token, gates[token, slot, None] * out)
    return y


def make_layer(T, E, k, widths, activation, dtype):
    """x, gates, W_1, W_2, b_1, b_2, and the experts of each token: not expert 1."""
    D, F, d_out = widths
    columns = 2 * F if activation == "swiglu" else F
    others = torch.tensor([0, *range(2, E)])
    expert_index = others[torch.rand(T, E - 1).argsort(1)[:, :k]]
    tensors = [
        normal(T, D, dtype=dtype),
        torch.rand(T, k, dtype=torch.float64).to(dtype),
        normal(E, D, columns, dtype=dtype) / D**0.5,
        normal(E, F, d_out, dtype=dtype) / F**0.5,
        normal(E, columns, dtype=dtype),
        normal(E, d_out, dtype=dtype),
    ]
    return tensors, expert_index


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k, widths", [(1, (33, 257, 18)), (2, (48, 272, 32)), (3, (1, 15, 2))])
@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_two_layers(dtype, k, widths, activation):
    """As accurate as torch's products, with an expert that no token has chosen."""
    tensors, expert_index = make_layer(150, 5, k, widths, activation, dtype)
    plan = ops.dispatch_plan(expert_index, 5)
    dy = normal(150, widths[-1], dtype=dtype)
    results = []
    for function, routing, cast in (
        (layer, plan, lambda t: t),
        (plain_layer, expert_index, lambda t: t),
        (plain_layer, expert_index, torch.Tensor.double),
    ):
        leaves = [cast(t).clone().requires_grad_() for t in tensors]
        x, gates, *parameters = leaves
        y = function(x, gates, parameters[:2], parameters[2:], activation, routing)
        results.append([y, *gradients([y], leaves, [cast(dy)])])
    for actual, plain, exact in zip(*results, strict=True):
        if dtype == torch.float64:
            assert_exact(actual, exact)
        else:
            assert_as_accurate(actual, plain, exact)
    for gradient in results[0][3:]:
        assert torch.count_nonzero(gradient[1]) == 0


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("D, F", [(513, 18), (1000, 257), (4096, 32)])
def test_long_sums_are_as_accurate_as_torch(dtype, D, F):
    x, W = normal(37, D, dtype=dtype), normal(1, D, F, dtype=dtype)
    y = linear(x, W, [37])
    assert_as_accurate(y, x @ W[0], x.double() @ W[0].double())


# One row, or one expert, that is not finite


SPOILT_COUNTS = [1, 13, 0, 30, 33]
SPOILT_ROW = 20  # of expert 3, whose rows follow 14 others


def run_layer(tensors, dy, plan):
    """y, the gradients of x and the gates, and those of the weights and biases."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    x, gates, *parameters = leaves
    y = layer(x, gates, parameters[:2], parameters[2:], "relu", plan)
    dx, dgates, *grads = torch.autograd.grad(y, leaves, dy)
    return [y.detach(), dx, dgates], grads


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["x", "dy", "weights"])
def test_what_is_not_finite_stays_where_it_is(dtype, value, where):
    """All else has the same bits, in memory that held NaN before as well: what panels are padded
    with reaches no result."""
    E, T = len(SPOILT_COUNTS), sum(SPOILT_COUNTS)
    expert_index = torch.arange(E).repeat_interleave(torch.tensor(SPOILT_COUNTS))[:, None]
    tensors, _ = make_layer(T, E, 1, (33, 257, 17), "relu", dtype)
    dy = normal(T, 17, dtype=dtype)
    plan = ops.dispatch_plan(expert_index, E)
    clean, clean_grads = run_layer(tensors, dy, plan)
    if where == "x":
        tensors[0][SPOILT_ROW] = value
    elif where == "dy":
        dy[SPOILT_ROW] = value
    else:
        tensors[2][3] = value
    for _ in range(2):
        spoilt, spoilt_grads = run_layer(tensors, dy, plan)
    touched = torch.zeros(T, dtype=torch.bool)
    if where == "weights":
        touched[expert_index[:, 0] == 3] = True
    else:
        touched[SPOILT_ROW] = True
    reached = spoilt[1] if where == "dy" else spoilt[0]
    assert not reached[touched].isfinite().any()
    for actual, expected in zip(spoilt, clean, strict=True):
        assert_same_bits(actual[~touched], expected[~touched])
    others = torch.arange(E) != 3
    for actual, expected in zip(spoilt_grads, clean_grads, strict=True):
        assert_same_bits(actual[others], expected[others])
    assert not spoilt_grads[1][3].isfinite().all()


# What a token's results depend on


COUNTS = [1, 13, 14, 15, 640, 641, 1281]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k, widths", [(1, (33, 529, 17)), (2, (48, 544, 32))])
def test_rows_do_not_depend_on_each_other(dtype, k, widths, threads):
    """y, dx and the gates' gradients of a token: the same bits alone and in any batch, in any
    order, and on one thread and two."""
    T, E = max(COUNTS), k + 1
    tensors, expert_index = make_layer(T, E, k, widths, "relu", dtype)  # each token has all but one
    dy = normal(T, widths[-1], dtype=dtype)
    expected, grads = run_layer(tensors, dy, ops.dispatch_plan(expert_index, E))
    threads(2)
    actual, actual_grads = run_layer(tensors, dy, ops.dispatch_plan(expert_index, E))
    for on_two, on_one in zip(actual + actual_grads, expected + grads, strict=True):
        assert_same_bits(on_two, on_one)
    threads(1)
    for count in COUNTS:
        chosen = torch.randperm(T)[:count]
        some = [t[chosen] for t in tensors[:2]] + tensors[2:]
        results, _ = run_layer(some, dy[chosen], ops.dispatch_plan(expert_index[chosen], E))
        for actual, each in zip(results, expected, strict=True):
            assert_same_bits(actual, each[chosen])


@pytest.mark.parametrize("isa", [isa for isa in instruction_sets() if isa != _C.isa()])
def test_instruction_set(isa):
    """The tests above, on another instruction set than this process runs on."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
        + ["-k", "not test_instruction_set"],
        env={**os.environ, "MOE_EXT_ISA": isa},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout
