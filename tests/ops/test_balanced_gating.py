"""ops.batchwise_topm and ops.selected_softmax: the batchwise mask and the gates of App. F."""

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
from operators import tie_break

from moe_ext import ops

pytestmark = pytest.mark.emulated

SHAPES = [(1, 1, 1), (5, 3, 2), (7, 16, 3), (16, 17, 16), (40, 5, 7), (33, 32, 1), (100, 40, 31)]


def expected_topm(scores, m):
    """For [G, N, E], in plain loops: larger first, NaN last, then the tie break, then the row."""
    G, N, E = scores.shape
    rows, mth = torch.empty(G, E, m, dtype=torch.int64), scores.new_full((G, E), math.inf)
    for g in range(G):
        for e in range(E):
            column = scores[g, :, e].tolist()
            column = [-math.inf if math.isnan(v) else v for v in column], column

            def order(r, nan=column[1], value=column[0], e=e, g=g):
                return (math.isnan(nan[r]), -value[r], -tie_break(g * E + e, r), r)

            best = sorted(range(N), key=order)[:m]
            rows[g, e] = torch.tensor(sorted(best))
            if m:
                mth[g, e] = column[1][best[-1]]
    return rows, mth


def check(scores, m):
    actual = ops.batchwise_topm(scores, m)
    rows, mth = expected_topm(scores.cpu(), m)
    assert_same_bits(actual.row_index, rows)
    assert actual.mth_score.dtype == scores.dtype
    torch.testing.assert_close(actual.mth_score.cpu(), mth, rtol=0, atol=0, equal_nan=True)
    return actual


@pytest.mark.parametrize("N, E, m", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_topm_of_every_column(device, N, E, m, dtype):
    """Half types have ties by themselves."""
    check(torch.randn(2, N, E).to(dtype).to(device), m)


@pytest.mark.parametrize("m", [0, 1, 29, 30])
def test_m_from_none_to_all(device, m):
    check(torch.randn(1, 30, 5, device=device), m)


def test_paper_mask(device):
    """M_batchwise of the reference, as a mask over the batch."""
    scores = torch.rand(12, 5, dtype=torch.float64, device=device)
    rows = ops.batchwise_topm(scores, 4).row_index
    mask = torch.zeros(12, 5, dtype=torch.float64).scatter(0, rows.cpu().t(), 1)
    assert_exact(mask, ref.M_batchwise(scores.cpu(), 4))


def test_ties(device):
    """Values on a coarse grid, -0 equal to 0, infinities."""
    values = torch.tensor([-math.inf, -1.0, -0.0, 0.0, 1.0, math.inf], device=device)
    scores = values[torch.randint(6, (2, 50, 20), device=device)]
    for m in (1, 7, 25, 49):
        check(scores, m)


def test_all_scores_equal(device):
    """Every column gets m rows of its own, no row is favoured: the number of columns of a row is
    binomial, so that its variance over 1000 rows is within a factor 1.3 of E p (1 - p) (6 standard
    errors)."""
    N, E, m = 1000, 200, 250
    rows = check(torch.full((1, N, E), 1 / E, device=device), m).row_index[0]
    assert len({tuple(row.tolist()) for row in rows}) == E
    count = torch.bincount(rows.flatten().cpu(), minlength=N).double()
    p = m / N
    assert 1 / 1.3 < count.var() / (E * p * (1 - p)) < 1.3
    overlap = (torch.zeros(E, N).scatter(1, rows.cpu(), 1) @ torch.ones(N)).unique()
    assert overlap.tolist() == [m]


def test_columns_are_numbered_over_the_batches(device):
    scores = torch.zeros(3, 20, 4, device=device)
    assert not torch.equal(*ops.batchwise_topm(scores, 5).row_index[:2])
    flat = ops.batchwise_topm(torch.zeros(20, 12, device=device), 5).row_index
    assert_same_bits(ops.batchwise_topm(scores, 5).row_index.flatten(0, 1), flat)


def test_nan_ranks_below_every_number(device):
    scores = torch.randn(1, 20, 6, device=device)
    scores[0, torch.randint(20, (40,)), torch.randint(6, (40,))] = math.nan
    scores[0, 3] = -math.inf
    for m in (1, 8, 15, 20):
        check(scores, m)
    check(torch.full((1, 9, 2), math.nan, device=device), 4)


def test_without_batches(device):
    scores = torch.randn(30, 7, device=device)
    row_index, mth_score = ops.batchwise_topm(scores, 4)
    assert row_index.shape == (7, 4) and mth_score.shape == (7,)
    expected = ops.batchwise_topm(scores[None], 4)
    assert_same_bits(row_index, expected.row_index[0])
    assert_same_bits(mth_score, expected.mth_score[0])


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 5, 0)])
def test_topm_of_nothing(device, shape):
    row_index, mth_score = ops.batchwise_topm(torch.randn(shape, device=device), 0)
    assert row_index.shape == (shape[0], shape[2], 0)
    assert mth_score.shape == (shape[0], shape[2]) and torch.all(mth_score == math.inf)


def test_topm_of_any_layout(device):
    scores = torch.randn(2, 30, 7, device=device)
    expected = ops.batchwise_topm(scores, 4)
    moved = ops.batchwise_topm(scores.permute(2, 1, 0).contiguous().permute(2, 1, 0), 4)
    assert_same_bits(moved.row_index, expected.row_index)


def test_topm_has_no_gradient(device):
    row_index, mth_score = ops.batchwise_topm(torch.randn(9, 4, requires_grad=True), 2)
    assert not row_index.requires_grad and not mth_score.requires_grad


def test_topm_is_deterministic(threads):
    scores = torch.softmax(torch.randn(2000, 80), 1)
    scores[:, :20] = scores[:, :20].mul(50).round()
    assert_deterministic(lambda: tuple(ops.batchwise_topm(scores, 100)), threads)


# selected_softmax


def make_selection(T, E, p=0.5):
    """A random mask with tokens that have no expert, and its slots."""
    mask = torch.rand(T, E) < p
    mask[3::4] = False
    offsets = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
    return mask, mask.nonzero()[:, 1], offsets


def plain(logits, index, offsets):
    """In plain torch, with the softmax over all experts."""
    token = torch.repeat_interleave(offsets.diff())
    p = torch.softmax(logits, 1)[token, index]
    return p / p.new_zeros(len(logits)).index_add(0, token, p)[token]


@pytest.mark.parametrize("T, E, p", [(1, 1, 1), (9, 5, 0.5), (9, 5, 1), (8, 40, 0.2), (6, 4, 0)])
def test_gates_equal_reference(device, T, E, p):
    logits = torch.randn(T, E, dtype=torch.float64)
    mask, index, offsets = make_selection(T, E, p)
    leaf, expected_leaf = logits.to(device).requires_grad_(), logits.clone().requires_grad_()
    gates = ops.selected_softmax(leaf, index.to(device), offsets.to(device))
    rows = [
        ref.G_strict(ref.Softmax(x), M) for x, M in zip(expected_leaf, mask.double(), strict=True)
    ]
    expected = torch.stack(rows)[mask] + 0 * expected_leaf.sum()  # differentiable if empty, too
    assert_exact(gates.detach(), expected.detach())
    cotangent = torch.randn(len(index), dtype=torch.float64)
    (actual,) = gradients([gates], [leaf], [cotangent.to(device)])
    (wanted,) = gradients([expected], [expected_leaf], [cotangent])
    assert_exact(actual, wanted)
    assert torch.count_nonzero(actual.cpu()[~mask]) == 0


def test_gates_sum_to_1_without_underflow(device):
    """The selected experts' own share of the softmax over all is e^-300."""
    logits = torch.tensor([[300.0, 0.0, 1.0], [-1e30, -1e30, 1e30]], device=device)
    index, offsets = torch.tensor([1, 2, 0, 1]).to(device), torch.tensor([0, 2, 4]).to(device)
    gates = ops.selected_softmax(logits, index, offsets)
    expected = torch.tensor([1 / (1 + math.e), math.e / (1 + math.e), 0.5, 0.5])
    torch.testing.assert_close(gates.cpu(), expected)


def test_an_expert_selected_twice_gets_both_gradients(device):
    logits = torch.randn(2, 3, dtype=torch.float64, device=device).requires_grad_()
    index = torch.tensor([2, 0, 2, *[1] * 40]).to(device)  # more than the lanes of a warp
    offsets = torch.tensor([0, 3, 43]).to(device)
    gates = ops.selected_softmax(logits, index, offsets)
    parts = logits.detach()[0, [2, 0, 2]], logits.detach()[1, [1] * 40]
    assert_exact(gates.detach(), torch.cat([part.softmax(0) for part in parts]))
    assert torch.autograd.gradcheck(lambda x: ops.selected_softmax(x, index, offsets), logits)


def test_gradcheck(device):
    logits = torch.randn(8, 5, dtype=torch.float64, device=device).requires_grad_()
    _, index, offsets = make_selection(8, 5)
    index, offsets = index.to(device), offsets.to(device)
    assert torch.autograd.gradcheck(lambda x: ops.selected_softmax(x, index, offsets), logits)


def test_an_expert_selected_twice(device):
    """Its two gates are those of two experts of the same logit."""
    logits = torch.randn(1, 3, dtype=torch.float64, device=device).requires_grad_()
    index, offsets = torch.tensor([2, 0, 2]).to(device), torch.tensor([0, 3]).to(device)
    gates = ops.selected_softmax(logits, index, offsets)
    assert_exact(gates.detach(), torch.softmax(logits[0, index], 0).detach())
    assert torch.autograd.gradcheck(lambda x: ops.selected_softmax(x, index, offsets), logits)


def test_gates_of_no_tokens(device):
    logits = torch.randn(0, 5, device=device, requires_grad=True)
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    gates = ops.selected_softmax(logits, empty, torch.zeros(1, dtype=torch.int64, device=device))
    assert gates.shape == (0,)
    (gradient,) = torch.autograd.grad(gates.sum(), logits)
    assert gradient.shape == (0, 5)


def test_gates_in_float32(device):
    logits = torch.randn(300, 20, device=device)
    _, index, offsets = make_selection(300, 20)
    index, offsets = index.to(device), offsets.to(device)
    cotangent = torch.randn(len(index), device=device)
    results, grads = [], []
    for function, dtype in (
        (ops.selected_softmax, torch.float32),
        (plain, torch.float32),
        (plain, torch.float64),
    ):
        leaf = logits.to(dtype).requires_grad_()
        results.append(function(leaf, index, offsets))
        grads += gradients([results[-1]], [leaf], [cotangent.to(dtype)])
    assert_as_accurate(*results)
    assert_as_accurate(*grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits(device, dtype):
    logits = torch.randn(20, 6, device=device).to(dtype).requires_grad_()
    _, index, offsets = make_selection(20, 6)
    index, offsets = index.to(device), offsets.to(device)
    gates = ops.selected_softmax(logits, index, offsets)
    wide = logits.detach().float().requires_grad_()
    expected = ops.selected_softmax(wide, index, offsets)
    assert_same_bits(gates, expected)
    (a,) = torch.autograd.grad(gates.square().sum(), logits)
    (e,) = torch.autograd.grad(expected.square().sum(), wide)
    assert_same_bits(a, e.to(dtype))


def test_gates_of_any_layout(device):
    logits = torch.randn(6, 9, device=device).t()
    _, index, offsets = make_selection(9, 6)
    index, offsets = index.to(device), offsets.to(device)
    leaf = logits.detach().requires_grad_()
    gates = ops.selected_softmax(leaf, index.repeat_interleave(2)[::2], offsets)
    assert_same_bits(gates, ops.selected_softmax(logits.contiguous(), index, offsets))
    (gradient,) = torch.autograd.grad(gates.sum(), leaf)  # an expanded gradient
    assert gradient.abs().max() < 1e-6  # the gates of a token sum to 1


def test_second_derivative_is_refused(device):
    _, index, offsets = make_selection(5, 4)
    index, offsets = index.to(device), offsets.to(device)
    logits = torch.randn(5, 4, dtype=torch.float64, device=device).requires_grad_()
    assert_second_derivative_refused(lambda x: ops.selected_softmax(x, index, offsets), (logits,))


@pytest.mark.parametrize("T, E, m", [(7, 5, 2), (0, 4, 0)])
def test_opcheck(device, T, E, m):
    def function():
        logits = torch.randn(T, E, device=device).requires_grad_()
        ops.batchwise_topm(logits, m)
        ops.batchwise_topm(torch.randn(E, T, device=device).t(), m)
        _, index, offsets = make_selection(T, E)
        ops.selected_softmax(logits, index.to(device), offsets.to(device)).sum().backward()

    opcheck_all(function, {"batchwise_topm", "selected_softmax", "_selected_softmax_backward"})


def test_gates_are_deterministic(threads):
    logits = torch.randn(4000, 64)
    _, index, offsets = make_selection(4000, 64, 0.1)
    cotangent = torch.randn(len(index))

    def function():
        leaf = logits.clone().requires_grad_()
        gates = ops.selected_softmax(leaf, index, offsets)
        return gates, *torch.autograd.grad(gates @ cotangent, leaf)

    assert_deterministic(function, threads)


@pytest.mark.emulated(False)  # takes too long
@pytest.mark.parametrize("T", [65_535, 65_536, 200_000])
def test_many_tokens(device, T):
    """As in plain torch, where no scores are equal: no limit in a kernel."""
    E, k = 4, 2
    logits = torch.randn(T, E, dtype=torch.float64).to(device).requires_grad_()
    m = k * T // E
    chosen = ops.batchwise_topm(logits.detach(), m)
    best = logits.detach().topk(m, dim=0)
    assert torch.equal(chosen.row_index, best.indices.sort(0).values.T)
    assert torch.equal(chosen.mth_score, best.values[-1])

    mask = torch.zeros(T, E, dtype=torch.bool, device=device)
    mask[chosen.row_index, torch.arange(E, device=device)[:, None]] = True
    offsets = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
    gates = ops.selected_softmax(logits, mask.nonzero()[:, 1].contiguous(), offsets)
    masked = torch.where(mask, logits.exp(), 0)
    expected = (masked / masked.sum(1, keepdim=True))[mask]
    assert_exact(gates.detach(), expected.detach())
    cotangent = torch.linspace(-1, 1, len(gates), dtype=torch.float64, device=device)
    for a, e in zip(
        torch.autograd.grad(gates, logits, cotangent),
        torch.autograd.grad(expected, logits, cotangent),
        strict=True,
    ):
        assert_exact(a, e.nan_to_num())  # of a token without an expert 0 / 0
