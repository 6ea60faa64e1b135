"""ops.load: P(x, i) and Load(X) of App. A, with the gradient that passes through the thresholds."""

import math
from itertools import pairwise

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

NU = 1e-2
SHAPES = [(1, 1, 1), (3, 2, 1), (3, 2, 2), (7, 8, 1), (7, 8, 2), (7, 8, 7), (7, 8, 8), (40, 5, 3)]


def make(T, E, device="cpu", dtype=torch.float64):
    return torch.randn(3, T, E, dtype=torch.float64).to(dtype).to(device)


def load_of(clean, raw, noise, k, detach_threshold=False):
    """Load as a layer computes it: the gating op, then the load op."""
    gating = ops.noisy_topk_gating(clean, raw, noise, k)
    return ops.load(
        clean, gating.noise_stddev, gating.threshold, gating.expert_index, detach_threshold
    )


def reference_load(clean, raw, noise, k, detach_threshold=False):
    S = ref.Softplus(raw) + NU
    H_X = torch.stack([ref.H(*row, NU) for row in zip(clean, raw, noise, strict=True)])
    return ref.Load(clean, S, H_X.detach() if detach_threshold else H_X, k)


def op_arguments(T, E, k, device="cpu", dtype=torch.float64):
    """clean, stddev, threshold, expert_index of a random batch, as independent tensors."""
    clean, raw, noise = make(T, E)
    stddev = ref.Softplus(raw) + NU
    ordered = (clean + noise * stddev).sort(descending=True)
    threshold = torch.nn.functional.pad(ordered.values, (0, 1), value=-math.inf)[:, k - 1 : k + 1]
    floats = [x.to(dtype).to(device) for x in (clean, stddev, threshold)]
    return *floats, ordered.indices[:, :k].to(device).contiguous()


def plain(clean, stddev, threshold, expert_index):
    """Load in plain torch, at the precision of the arguments."""
    inside = torch.zeros_like(clean, dtype=torch.bool).scatter(1, expert_index, True)
    bound = torch.where(inside, threshold[:, 1:], threshold[:, :1])
    z = (clean - bound) / stddev
    return (torch.erfc(-z / math.sqrt(2)) / 2).sum(0)


@pytest.mark.parametrize("T, E, k", SHAPES)
def test_equals_reference(device, T, E, k):
    clean, raw, noise = make(T, E)
    actual = load_of(clean.to(device), raw.to(device), noise.to(device), k)
    assert actual.shape == (E,)
    assert_exact(actual, reference_load(clean, raw, noise, k))


@pytest.mark.parametrize("E, k", [(255, 2), (256, 17), (257, 64), (1000, 1), (4096, 4095)])
def test_many_experts(device, E, k):
    arguments = op_arguments(3, E, k, device)
    assert_exact(ops.load(*arguments), plain(*arguments))


def test_one_expert_takes_all_and_one_gets_nothing(device):
    """A margin of 30 standard deviations: P is 1 and 0, the derivative vanishes, nothing is NaN."""
    clean = torch.zeros(6, 3, dtype=torch.float64, device=device)
    clean[:, 1], clean[:, 2] = 30, -30
    leaves = clean.requires_grad_(), torch.zeros_like(clean).requires_grad_()
    actual = load_of(*leaves, torch.zeros_like(clean), 1)
    assert actual[1] == 6 and 0 <= actual[2] < 1e-100
    for gradient in torch.autograd.grad(actual.sum(), leaves):
        assert gradient.isfinite().all() and gradient.abs().max() < 1e-100


def test_empty_batch(device):
    clean, stddev, threshold, index = op_arguments(0, 4, 2, device)
    leaves = [x.requires_grad_() for x in (clean, stddev, threshold)]
    actual = ops.load(*leaves, index)
    assert_exact(actual, torch.zeros(4, dtype=torch.float64))
    for leaf, gradient in zip(leaves, torch.autograd.grad(actual.sum(), leaves), strict=True):
        assert gradient.shape == leaf.shape


def test_no_experts(device):
    logits, threshold = torch.zeros(5, 0, device=device), torch.zeros(5, 2, device=device)
    index = torch.zeros(5, 0, dtype=torch.int64, device=device)
    assert ops.load(logits, logits, threshold, index).shape == (0,)


@pytest.mark.parametrize("E, k", [(8, 2), (8, 7), (64, 4), (256, 4)])
def test_probability_by_sampling(device, E, k):
    """P(x, i) is the frequency of i in the top k when the noise on i alone is drawn anew.

    i is in the top k when fewer than k others lie above it. 4 sigma: a right P fails for one
    component in 16,000, so for (256, 4) in 1.6% of the seeds; the seed is fixed. The 2 / draws
    covers probabilities so small that a count is far from normal.
    """
    draws = 20_000
    clean, raw, noise = make(1, E)
    gating = ops.noisy_topk_gating(*(x.to(device) for x in (clean, raw, noise)), k)
    P = ops.load(clean.to(device), gating.noise_stddev, gating.threshold, gating.expert_index).cpu()
    stddev = ref.Softplus(raw[0]) + NU
    h = clean[0] + noise[0] * stddev
    others = h.repeat(E, 1)[~torch.eye(E, dtype=torch.bool)].reshape(E, E - 1).sort().values
    redrawn = clean[0, :, None] + stddev[:, None] * torch.randn(E, draws, dtype=torch.float64)
    above = (E - 1) - torch.searchsorted(others, redrawn, right=True)
    frequency = (above < k).double().mean(1)
    sigma = torch.sqrt(P * (1 - P) / draws)
    assert torch.all((frequency - P).abs() <= 4 * sigma + 2 / draws)
    assert P.max() > 0.2 and P.min() < 0.8  # there is something to see


@pytest.mark.parametrize("E, k", [(8, 1), (8, 2), (16, 15)])
def test_expected_sum_is_k(device, E, k):
    """Over fresh noise the P of a row sum to k on average: the mean of 100 batches within 4
    standard errors (a right result fails with probability 6e-5; the seed is fixed)."""
    clean, raw = torch.randn(2, E, dtype=torch.float64, device=device)
    totals = torch.tensor(
        [
            load_of(
                clean.expand(200, E),
                raw.expand(200, E),
                torch.randn(200, E, dtype=torch.float64, device=device),
                k,
            ).sum()
            / 200
            for _ in range(100)
        ]
    )
    assert (totals.mean() - k).abs() <= 4 * totals.std() / 10
    assert totals.std() > 1e-3


@pytest.mark.parametrize("T, E, k", SHAPES)
@pytest.mark.parametrize("detach_threshold", [False, True])
def test_gradients_equal_reference(device, T, E, k, detach_threshold):
    clean, raw, noise = make(T, E)
    cotangent = torch.randn(E, dtype=torch.float64)
    expected_leaves = [x.clone().requires_grad_() for x in (clean, raw)]
    expected = reference_load(*expected_leaves, noise, k, detach_threshold)
    if k == E:
        expected_grads = [torch.zeros(T, E, dtype=torch.float64)] * 2
    else:
        expected_grads = gradients([expected], expected_leaves, [cotangent])
    leaves = [x.to(device).requires_grad_() for x in (clean, raw)]
    actual = load_of(*leaves, noise.to(device), k, detach_threshold)
    for a, e in zip(
        gradients([actual], leaves, [cotangent.to(device)]), expected_grads, strict=True
    ):
        assert_exact(a, e)


def test_common_shift_of_the_logits_has_no_gradient(device):
    """P depends on differences of logits only, so with the gradient through the thresholds each row
    sums to 0; without it a spurious common pull is left."""
    clean, raw, noise = make(20, 8, device)
    clean.requires_grad_()
    cotangent = torch.randn(8, dtype=torch.float64, device=device)
    for detach, vanishes in ((False, True), (True, False)):
        (gradient,) = torch.autograd.grad(load_of(clean, raw, noise, 3, detach) @ cotangent, clean)
        assert bool(torch.all(gradient.sum(1).abs() < 1e-12)) == vanishes
        assert gradient.abs().max() > 1e-3


def test_detached_threshold_gets_no_gradient(device):
    clean, stddev, threshold, index = op_arguments(5, 6, 2, device)
    threshold.requires_grad_()
    clean.requires_grad_()
    actual = ops.load(clean, stddev, threshold, index, True)
    assert_same_bits(actual, ops.load(clean, stddev, threshold, index))
    (gradient,) = gradients([actual], [threshold], [torch.ones_like(actual)])
    assert torch.count_nonzero(gradient) == 0


@pytest.mark.parametrize("T, E, k", [(4, 6, 1), (4, 6, 3), (4, 6, 5)])
def test_gradcheck(device, T, E, k):
    clean, stddev, threshold, index = op_arguments(T, E, k, device)
    leaves = [x.requires_grad_() for x in (clean, stddev, threshold)]
    assert torch.autograd.gradcheck(lambda *a: ops.load(*a, index), leaves)


def test_gradcheck_through_gating(device):
    """Finite differences move the thresholds too."""
    clean, raw, noise = make(4, 6, device)
    assert torch.autograd.gradcheck(
        lambda c, r: load_of(c, r, noise, 2), (clean.requires_grad_(), raw.requires_grad_())
    )


def test_k_equal_to_n(device):
    """Nobody can fall out of the top n: P = 1, Load = T, all derivatives 0 and none NaN."""
    clean, raw, noise = make(9, 4, device)
    leaves = clean.requires_grad_(), raw.requires_grad_()
    actual = load_of(*leaves, noise, 4)
    assert actual.tolist() == [9.0] * 4
    for gradient in torch.autograd.grad((actual * torch.randn_like(actual)).sum(), leaves):
        assert torch.count_nonzero(gradient) == 0


def test_vanishing_noise(device):
    """A deviation of 1e-300 makes P a step: 0 or 1, with no gradient and no NaN."""
    clean, _, threshold, index = op_arguments(5, 6, 2, device)
    stddev = torch.full_like(clean, 1e-300)
    leaves = [x.requires_grad_() for x in (clean, stddev, threshold)]
    actual = ops.load(*leaves, index)
    assert set(actual.tolist()) <= {0.0, 1.0, 2.0, 3.0, 4.0, 5.0}
    for gradient in torch.autograd.grad(actual.sum(), leaves):
        assert torch.count_nonzero(gradient) == 0


def test_gradient_below_the_least_noise(device):
    """There P is that of a deviation of 1e-6, whatever it is: it has no derivative by it."""
    _, _, threshold, index = op_arguments(4, 6, 2, device)
    clean = threshold[:, :1] + 1e-6 * make(4, 6, device)[0]
    stddev = torch.full_like(clean, 4e-7)
    leaves = [x.requires_grad_() for x in (clean, stddev, threshold)]
    actual = ops.load(*leaves, index)
    at_least = ops.load(clean, torch.full_like(stddev, 1e-6), threshold, index)
    weight = torch.randn_like(actual)
    of_clean, of_stddev, of_threshold = torch.autograd.grad(actual, leaves, weight)
    assert torch.count_nonzero(of_stddev) == 0 and torch.count_nonzero(of_clean) > 6
    expected = torch.autograd.grad(at_least, (clean, threshold), weight)
    assert_same_bits(of_clean, expected[0])
    assert_same_bits(of_threshold, expected[1])


def test_lower_tail_keeps_its_digits(device):
    """0.5 (1 + erf) has no digit left below z = -6. An error of a few roundings in z changes P by
    z² times as much, which is the tolerance."""
    z = -torch.linspace(0, 12, 49)
    clean, one = z[None].to(device), torch.ones(1, 49, device=device)
    zero = torch.zeros(1, 2, device=device)
    index = torch.zeros(1, 1, dtype=torch.int64, device=device)
    actual = ops.load(clean, one, zero, index).cpu().double()
    exact = torch.erfc(-z.double() / math.sqrt(2)) / 2
    tolerance = (8 + 2 * z.double() ** 2) * torch.finfo(torch.float32).eps
    assert torch.all((actual / exact - 1).abs() <= tolerance)


@pytest.mark.parametrize("T, E, k", [(1, 64, 4), (300, 8, 2), (3000, 16, 15)])
def test_float32(device, T, E, k):
    clean, stddev, threshold, index = op_arguments(T, E, k, device, torch.float32)
    cotangent = torch.randn(E, device=device)
    results, grads = [], []
    for function, dtype in (
        (ops.load, torch.float32),
        (plain, torch.float32),
        (plain, torch.float64),
    ):
        leaves = [
            x.to(dtype).requires_grad_() for x in (clean.clone(), stddev.clone(), threshold.clone())
        ]
        out = function(*leaves, index)
        results.append(out)
        grads.append(gradients([out], leaves, [cotangent.to(dtype)]))
    assert_as_accurate(*results)
    for actual, at_float32, exact in zip(*grads, strict=True):
        assert_as_accurate(actual, at_float32, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits(device, dtype):
    """The subtraction happens in float32; the gradient comes back in the logits' type."""
    clean, raw, noise = make(200, 8, device, dtype)
    leaves = [x.clone().requires_grad_() for x in (clean, raw)]
    actual = load_of(*leaves, noise, 2)
    assert actual.dtype == torch.float32
    grads = torch.autograd.grad(actual @ torch.arange(8.0, device=device), leaves)
    wide = [x.float().requires_grad_() for x in (clean, raw)]
    expected = load_of(*wide, noise.float(), 2)
    assert_same_bits(actual, expected)
    for a, e in zip(
        grads, torch.autograd.grad(expected @ torch.arange(8.0, device=device), wide), strict=True
    ):
        # one rounding to the input's type for each of the paths that meet in a logit
        assert a.dtype == dtype
        tolerance = 2 * torch.finfo(dtype).eps * e.abs().max()
        assert (a.float() - e).abs().max() <= tolerance


def test_sum_over_batch_parts(device):
    """Load is a sum over the batch: what parts contribute adds up, before any CV²."""
    clean, raw, noise = make(10, 6, device)
    whole = load_of(clean, raw, noise, 2)
    parts = sum(load_of(clean[i], raw[i], noise[i], 2) for i in (slice(0, 3), slice(3, 10)))
    assert_exact(parts, whole)


GROUPS = [[0, 7], [0, 3, 7], [0, 0, 2, 2, 7, 7], [0, 1, 2, 3, 4, 5, 6, 7]]


def load_by_group(clean, stddev, threshold, index, offsets, detach_threshold=False):
    """The definition: the load of each group's rows alone."""
    arguments = clean, stddev, threshold, index
    return torch.stack(
        [
            ops.load(*(x[begin:end] for x in arguments), detach_threshold)
            for begin, end in pairwise(offsets.tolist())
        ]
    )


@pytest.mark.parametrize("offsets", GROUPS)
@pytest.mark.parametrize("detach_threshold", [False, True])
def test_groups_are_loads_of_their_rows(device, offsets, detach_threshold):
    """To the last bit, gradients too; a group without rows has load 0."""
    arguments = op_arguments(7, 6, 2, device)
    offsets = torch.tensor(offsets, device=device)
    results = []
    for function in (
        lambda *a: ops.load(*a, detach_threshold, group_offsets=offsets),
        lambda *a: load_by_group(*a, offsets, detach_threshold),
    ):
        leaves = [x.clone().requires_grad_() for x in arguments[:3]]
        out = function(*leaves, arguments[3])
        cotangent = torch.arange(1, out.numel() + 1, dtype=out.dtype, device=device)
        results.append([out, *gradients([out], leaves, [cotangent.reshape(out.shape)])])
    assert results[0][0].shape == (len(offsets) - 1, 6)
    for actual, expected in zip(*results, strict=True):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("T, E", [(0, 3), (1, 5), (300, 7), (1000, 64)])
def test_one_group_is_the_whole_batch(device, T, E):
    arguments = op_arguments(T, E, 2, device, torch.float32)
    cotangent = torch.randn(E, device=device)
    results = []
    for options in ({}, {"group_offsets": torch.tensor([0, T], device=device)}):
        leaves = [x.clone().requires_grad_() for x in arguments[:3]]
        out = ops.load(*leaves, arguments[3], **options).reshape(E)
        results.append([out, *gradients([out], leaves, [cotangent])])
    for grouped, whole in zip(*results, strict=True):
        assert_same_bits(grouped, whole)


def test_groups_add_up_to_the_whole(device):
    arguments = op_arguments(1000, 5, 2, device)
    bounds = torch.tensor([0, 40, 41, 41, 500, 1000], device=device)
    assert_exact(ops.load(*arguments, group_offsets=bounds).sum(0), ops.load(*arguments))


def test_gradcheck_in_groups(device):
    clean, stddev, threshold, index = op_arguments(5, 4, 2, device)
    bounds = torch.tensor([0, 2, 2, 5], device=device)
    leaves = [x.requires_grad_() for x in (clean, stddev, threshold)]
    assert torch.autograd.gradcheck(lambda *a: ops.load(*a, index, group_offsets=bounds), leaves)


def test_any_layout(device):
    clean, stddev, threshold, index = op_arguments(6, 8, 3, device)
    expected = ops.load(clean, stddev, threshold, index)
    moved = [x.t().contiguous().t() for x in (clean, stddev, threshold, index)]
    assert not any(x.is_contiguous() for x in moved)
    assert_same_bits(ops.load(*moved), expected)
    leaves = [x.clone().requires_grad_() for x in (clean, stddev, threshold)]
    moved = [x.detach().requires_grad_() for x in moved[:3]] + moved[3:]
    ones = torch.ones(8, dtype=torch.float64, device=device)
    for a, e in zip(
        torch.autograd.grad(ops.load(*moved).sum(), moved[:3]),  # an expanded gradient
        gradients([ops.load(*leaves, index)], leaves, [ones]),
        strict=True,
    ):
        assert_same_bits(a, e)


def test_nan_stays_in_its_expert(device):
    clean, stddev, threshold, index = op_arguments(6, 5, 2, device)
    expected = ops.load(clean, stddev, threshold, index)
    clean = clean.clone()
    clean[2, 3] = math.nan
    actual = ops.load(clean, stddev, threshold, index)
    assert actual[3].isnan()
    rest = torch.arange(5, device=device) != 3
    assert_same_bits(actual[rest], expected[rest])


@pytest.mark.parametrize("T, E, k", [(5, 6, 2), (5, 6, 6), (0, 4, 2)])
@pytest.mark.parametrize("detach_threshold", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_opcheck(device, T, E, k, detach_threshold, grouped):
    arguments = op_arguments(T, E, k, device, torch.float32)
    bounds = torch.tensor([0, T // 2, T // 2, T], device=device) if grouped else None

    def function():
        leaves = [x.clone().requires_grad_() for x in arguments[:3]]
        ops.load(*leaves, arguments[3], detach_threshold, bounds).sum().backward()

    opcheck_all(function, {"load", "_load_backward"})


def test_opcheck_transposed(device):
    arguments = [x.t().contiguous().t() for x in op_arguments(5, 6, 2, device, torch.float32)]

    def function():
        leaves = [x.detach().requires_grad_() for x in arguments[:3]]
        ops.load(*leaves, arguments[3]).sum().backward()

    opcheck_all(function, {"load", "_load_backward"})


def test_second_derivative_is_refused(device):
    clean, stddev, threshold, index = op_arguments(4, 5, 2, device)
    assert_second_derivative_refused(
        lambda c, s, t: ops.load(c, s, t, index),
        tuple(x.requires_grad_() for x in (clean, stddev, threshold)),
    )


@pytest.mark.parametrize("bounds", [None, [0, 3, 3, 1000, 1001, 3000]])
def test_deterministic(threads, bounds):
    """The sum over tokens does not depend on how threads share them."""
    clean, stddev, threshold, index = op_arguments(3000, 64, 4, dtype=torch.float32)
    cotangent = torch.randn(64)
    groups = None if bounds is None else torch.tensor(bounds)

    def function():
        leaves = [x.clone().requires_grad_() for x in (clean, stddev, threshold)]
        out = ops.load(*leaves, index, group_offsets=groups)
        return out, *torch.autograd.grad((out @ cotangent).sum(), leaves)

    assert_deterministic(function, threads)
