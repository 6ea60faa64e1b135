"""The GEMMs of the experts, at the edges of tiles, blocks and panels.

test_instruction_sets.py repeats some tests on every instruction set of the processor.
"""

import pytest
import torch
from assertions import assert_all_same_bits, assert_as_accurate, assert_exact, assert_same_bits
from operators import DTYPES, TABLE, evaluate, moved, sample
from samples.draw import normal, offsets_of

from moe_ext import ops

pytestmark = pytest.mark.usefixtures("one_thread")

# On both sides of the sizes of vectors, tiles and packed blocks of B.
WIDTHS = [1, 2, 15, 16, 17, 31, 33, 255, 256, 257, 258, 513]


def linear(x, weight, counts):
    return ops.experts(x, [weight], offsets=offsets_of(counts))


def assert_product(actual, a, b):
    """Checks actual = a b within the largest possible rounding error of one sum per element.

    With depth k, u is half a unit in the last place of the accumulation type, and v of the result
    type. A rounded product and a rounded sum for each term give 2 k u |a| |b|. The errors of
    float64 are allowed as much again, and the result adds v |a b|.
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
    """Checks y = x W, dx = dy W^T and dW = x^T dy of every expert."""
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
        assert_product(grad, x_e.T, dy_e)  # for an expert without rows: zero


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_width(dtype):
    for shift in (0, 1, 5):
        for D, F in zip(WIDTHS, WIDTHS[shift:] + WIDTHS[:shift], strict=True):
            check_linear([3, 0, 29], D, F, dtype)
    check_linear([3, 0, 29], 300, 2064, dtype)  # B in place for few rows, in two parts
    check_linear([3, 0, 29], 16400, 33, dtype)  # A is too deep to be packed as a whole


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D, F", [(17, 33), (48, 32), (258, 1)])
def test_any_number_of_rows(dtype, D, F):
    check_linear([*range(35), 512, 513, 639, 640, 641, 642], D, F, dtype)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_large_gradients(dtype):
    """Gradients of more than 8 MiB in total bypass the caches.

    They are sums over one to three K-blocks, or more in float64. Their columns are in several
    parts, the last with half a tile.
    """
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
    assert_all_same_bits(*results)


ROW = TABLE["experts"]  # its gradients: x, each weight, each bias, the gates


def make_layer(expert_index, E, widths, activation, dtype):
    """Returns the arguments of Eq. 1 for given experts of each token."""
    T, k = expert_index.shape
    sizes = dict(T=T, E=E, k=k, widths=widths, activation=activation, bias=True)
    plan = ops.dispatch_plan(expert_index, E)
    return sample("experts", dtype=dtype, **sizes) | dict(
        gates=torch.rand(T, k, dtype=torch.float64).to(dtype),
        inverse=plan.inverse,
        offsets=plan.offsets,
    )


def draw_experts(T, E, k):
    """Returns the experts of each token, without expert 1."""
    used = torch.tensor([0, *range(2, E)])
    return used[torch.rand(T, E - 1).argsort(1)[:, :k]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_with_several_blocks(dtype, threads):
    """Their gradients are one sum over all blocks, computed in parts by any thread."""
    counts = torch.tensor([700, 0, 1300, 3, 641, 650])
    expert_index = torch.arange(6).repeat_interleave(counts)[:, None]
    call = make_layer(expert_index, 6, (17, 700, 5), "swiglu", dtype)
    dy = normal(int(counts.sum()), 5, dtype=dtype)
    _, grads = evaluate(ROW, call, upstream=[dy])
    _, plain = evaluate(ROW, call, ROW.plain, [dy])
    _, exact = evaluate(ROW, moved(call, dtype=torch.float64), ROW.plain, [dy.double()])
    for a, p, e in zip(grads, plain, exact, strict=True):
        if dtype == torch.float64:
            assert_exact(a, e)
        else:
            assert_as_accurate(a, p, e)
    for number in (2, 3, 8):
        threads(number)
        assert_all_same_bits(evaluate(ROW, call, upstream=[dy])[1], grads)


FEW_BLOCKS = [
    dict(widths=(1000, 300), bias=True),
    dict(widths=(320, 272, 261), bias=True, recompute=True),
    dict(widths=(130, 288, 530, 257), activation="swiglu", bias=True),
    dict(widths=(130, 288, 260), activation="swiglu", ranks=[3, None], dropout=True),
    dict(widths=(130, 296, 260), activation="swiglu"),  # its halves cannot be split
    dict(widths=(260, 264, 256), activation="interleaved_clamped_swiglu", ranks=[None, 5]),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", FEW_BLOCKS)
@pytest.mark.parametrize("counts", [[1], [0, 9, 1], [150, 3, 0]])
def test_threads_share_few_blocks(counts, sizes, dtype, threads):
    """By columns in forward, and by rows in backward; the bits are those of one thread."""
    call = sample("experts", dtype=dtype, counts=counts, **sizes)
    with torch.no_grad():
        alone = ops.experts(**call)
    y, grads = evaluate(ROW, call)
    for number in (2, 3, 8):
        threads(number)
        with torch.no_grad():
            assert_same_bits(ops.experts(**call), alone)
        for actual, expected in zip(evaluate(ROW, call), (y, grads), strict=True):
            assert_all_same_bits(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [[3], [0, 70, 0], [650, 1]])
@pytest.mark.parametrize("transposed", [False, True])
def test_threads_share_a_frozen_layer(transposed, counts, dtype, threads):
    """By columns of the gradient of its input; the bits are those of one thread."""
    E, D, F = len(counts), 330, 37
    weight = normal(E, F, D, dtype=dtype).mT if transposed else normal(E, D, F, dtype=dtype)
    x = normal(sum(counts), D, dtype=dtype).requires_grad_()
    dy = normal(sum(counts), F, dtype=dtype)
    results = []
    for number in (1, 2, 3, 8):
        threads(number)
        results += torch.autograd.grad(linear(x, weight, counts), x, dy)
    for dx in results[1:]:
        assert_same_bits(dx, results[0])
    for rows, dy_e, W in zip(results[0].split(counts), dy.split(counts), weight, strict=True):
        assert_product(rows, dy_e, W.T)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("D, F", [(513, 18), (1000, 257), (4096, 32)])
def test_long_sums_are_as_accurate_as_torch(dtype, D, F):
    x, W = normal(37, D, dtype=dtype), normal(1, D, F, dtype=dtype)
    y = linear(x, W, [37])
    assert_as_accurate(y, x @ W[0], x.double() @ W[0].double())


# One row, or one expert, that is not finite


SPOILT_COUNTS = [1, 13, 0, 30, 33]
SPOILT_ROW = 20  # a row of expert 3, after 14 rows of other experts


def run_layer(call, dy):
    """Returns y and the gradients of x and the gates, then the gradients of weights and biases."""
    (y,), (dx, *grads, dgates) = evaluate(ROW, call, upstream=[dy])
    return [y, dx, dgates], grads


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["x", "dy", "weights"])
def test_what_is_not_finite_stays_where_it_is(dtype, value, where):
    """All other results are bitwise identical, even in memory that held NaN before.

    The padding of panels reaches no result.
    """
    E, T = len(SPOILT_COUNTS), sum(SPOILT_COUNTS)
    expert_index = torch.arange(E).repeat_interleave(torch.tensor(SPOILT_COUNTS))[:, None]
    call = make_layer(expert_index, E, (33, 257, 17), "relu", dtype)
    dy = normal(T, 17, dtype=dtype)
    clean, clean_grads = run_layer(call, dy)
    if where == "x":
        call["x"][SPOILT_ROW] = value
    elif where == "dy":
        dy[SPOILT_ROW] = value
    else:
        call["weights"][0][3] = value
    for _ in range(2):
        spoilt, spoilt_grads = run_layer(call, dy)
    touched = torch.zeros(T, dtype=torch.bool)
    if where == "weights":
        touched[expert_index[:, 0] == 3] = True
    else:
        touched[SPOILT_ROW] = True
    reached = spoilt[1] if where == "dy" else spoilt[0]
    assert not reached[touched].isfinite().any()
    for actual, expected in zip(spoilt, clean, strict=True):
        assert_same_bits(actual[~touched], expected[~touched])
    unspoilt = torch.arange(E) != 3
    for actual, expected in zip(spoilt_grads, clean_grads, strict=True):
        assert_same_bits(actual[unspoilt], expected[unspoilt])
    assert not spoilt_grads[1][3].isfinite().all()


# What a token's results depend on


COUNTS = [1, 13, 14, 15, 640, 641, 1281]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k, widths", [(1, (33, 529, 17)), (2, (48, 544, 32))])
def test_rows_do_not_depend_on_each_other(dtype, k, widths, threads):
    """y, dx and the gates' gradients of a token are bitwise identical alone and in any batch.

    The order of the tokens and the number of threads (one or two) do not matter.
    """
    T, E = max(COUNTS), k + 1
    expert_index = draw_experts(T, E, k)  # each token has all experts but one
    call = make_layer(expert_index, E, widths, "relu", dtype)
    dy = normal(T, widths[-1], dtype=dtype)
    expected, grads = run_layer(call, dy)
    threads(2)
    actual, actual_grads = run_layer(call, dy)
    assert_all_same_bits(actual + actual_grads, expected + grads)
    threads(1)
    for count in COUNTS:
        chosen = torch.randperm(T)[:count]
        plan = ops.dispatch_plan(expert_index[chosen], E)
        some = dict(x=call["x"][chosen], gates=call["gates"][chosen])
        some |= dict(inverse=plan.inverse, offsets=plan.offsets)
        results, _ = run_layer(call | some, dy[chosen])
        for actual, alone in zip(results, expected, strict=True):
            assert_same_bits(actual, alone[chosen])


# Depths of a GEMM: every depth up to 70, and some around vectors and K-blocks above that.
DEPTHS = [*range(1, 71), 95, 97, 127, 128, 130, 131, 191, 193, 255, 256, 257, 258, 259, 263]
DEPTHS += [301, 383, 387, 449, 511, 512, 513]
# Widths of one full vector or several on every instruction set, and of parts of a vector.
WHOLE_AND_PART = [1, 16, 17, 48]


def check_each_row_alone(D, F, counts, dtype, *, transposed=False, bias=False):
    """Compares y and dx of the first 1, 2, ... rows with those of each row alone."""
    num_rows = max(counts)
    rows = torch.cat([torch.arange(num_rows), *(torch.arange(count) for count in counts)])
    offsets = offsets_of([*[1] * num_rows, *counts])
    x, dy = normal(num_rows, D, dtype=dtype)[rows], normal(num_rows, F, dtype=dtype)[rows]
    E = len(offsets) - 1
    weight = normal(1, D, F, dtype=dtype)
    weight = weight.mT.repeat(E, 1, 1).mT if transposed else weight.expand(E, D, F)
    biases = [normal(1, F, dtype=dtype).expand(E, F)] if bias else None
    x.requires_grad_()
    y = ops.experts(x, [weight], biases, offsets=offsets)
    (dx,) = torch.autograd.grad(y, x, dy)
    for result in (y.detach(), dx):
        alone, batches = result.split([num_rows, sum(counts)])
        assert_same_bits(batches, alone[rows[num_rows:]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WHOLE_AND_PART)
def test_a_row_has_the_bits_that_it_has_alone(dtype, width):
    """At every depth, forward and backward, among 1 to 100 rows."""
    for i, depth in enumerate(DEPTHS):
        counts = [*range(2, 21), *range(21 + i % 20, 101, 20)]
        check_each_row_alone(depth, width, counts, dtype)
        check_each_row_alone(width, depth, counts, dtype)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.itemsize == 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_row_in_half_precision_has_the_bits_that_it_has_alone(dtype, transposed):
    """Few rows read the weight in place: in one or two K-blocks, and columns in two parts."""
    for D, F in [(32, 64), (512, 96), (544, 1056)]:
        for bias in (False, True):
            check_each_row_alone(D, F, range(2, 14), dtype, transposed=transposed, bias=bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WHOLE_AND_PART)
def test_a_row_of_dW_has_the_bits_that_it_has_alone(dtype, width):
    """At every depth, which is the number of rows of x: dW of the first columns of x."""
    num_columns, offsets = 100, offsets_of(DEPTHS)
    x, dy = normal(sum(DEPTHS), num_columns, dtype=dtype), normal(sum(DEPTHS), width, dtype=dtype)

    def weight_gradient(columns):
        weight = torch.zeros(len(DEPTHS), columns.shape[1], width, dtype=dtype, requires_grad=True)
        y = ops.experts(columns, [weight], offsets=offsets)
        return torch.autograd.grad(y, weight, dy)[0]

    expected = weight_gradient(x)
    for count in [*range(1, 17), 28, 29, 57]:
        assert_same_bits(weight_gradient(x[:, :count]), expected[:, :count])
