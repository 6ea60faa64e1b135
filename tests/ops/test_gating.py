"""ops.noisy_topk_gating: H, KeepTopK and G (Eq. 3-5), App. A's thresholds, and their gradients."""

import math

import pytest
import reference as ref
import torch
from assertions import assert_exact, assert_same_bits
from operators import reference_gating

from moe_ext import ops

pytestmark = [pytest.mark.emulated, pytest.mark.equation("Eq. 3", "Eq. 4", "Eq. 5")]

NU = 1e-2


def make(T, E, device="cpu", dtype=torch.float64):
    clean, raw, noise = torch.randn(3, T, E, dtype=torch.float64).to(dtype).to(device)
    return clean, raw, noise


@pytest.mark.parametrize("nu", [0.0, 0.3])
def test_noise_epsilon(device, nu):
    clean, raw, noise = make(5, 6)
    raw[0] = -800.0  # Softplus underflows: the floor is all that is left
    actual = ops.noisy_topk_gating(*(x.to(device) for x in (clean, raw, noise)), 2, nu)
    for a, e in zip(actual, reference_gating(clean, raw, noise, 2, nu), strict=True):
        assert_exact(a, e)
    assert torch.all(actual.noise_stddev[0] == nu)


@pytest.mark.parametrize(
    "E, k",
    [
        (E, k)
        for E in (1, 2, 3, 17, 64, 255, 256, 257, 1000, 4096)
        for k in sorted({1, 2, 17, 64, E})
        if k <= E
    ],
)
def test_any_number_of_experts(device, E, k):
    clean = torch.randn(3, E, dtype=torch.float64)
    gates, index, threshold, threshold_index, _ = ops.noisy_topk_gating(
        clean.to(device), None, None, k
    )
    ordered = clean.sort(descending=True, stable=True)
    assert_same_bits(index, ordered.indices[:, :k])
    assert_exact(gates, ordered.values[:, :k].softmax(-1))
    assert_exact(threshold[:, 0], ordered.values[:, k - 1])
    assert_same_bits(threshold_index[:, 0], ordered.indices[:, k - 1])
    if k < E:
        assert_exact(threshold[:, 1], ordered.values[:, k])
        assert_same_bits(threshold_index[:, 1], ordered.indices[:, k])
    else:
        assert torch.all(threshold[:, 1] == -math.inf)
        assert torch.all(threshold_index[:, 1] == -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("E, k", [(4, 1), (8, 3), (8, 7), (257, 17), (1000, 64), (6, 6)])
def test_ties_go_to_the_lower_index(device, E, k, dtype):
    """Exactly k distinct experts, at any position of the tie relative to the boundary."""
    clean = torch.randint(0, 3, (50, E)).to(dtype)
    clean[0] = 0
    actual = ops.noisy_topk_gating(clean.to(device), None, None, k)
    assert_same_bits(actual.expert_index, torch.tensor([ref.top_k(c, k) for c in clean.tolist()]))
    assert actual.expert_index[0].tolist() == list(range(k))
    order = clean.float().sort(descending=True, stable=True).indices
    assert_same_bits(actual.threshold_index[:, 0], order[:, k - 1])
    if k < E:
        assert_same_bits(actual.threshold_index[:, 1], order[:, k])


def test_zero_signs_tie(device):
    clean = torch.tensor([[-0.0, 0.0, -1.0, 0.0]], device=device)
    assert ops.noisy_topk_gating(clean, None, None, 3).expert_index.tolist() == [[0, 1, 3]]


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_nan_ranks_last(device, k):
    """NaN below -inf, among themselves by index; the ids stay distinct and in range."""
    nan, inf = math.nan, math.inf
    rows = [
        [nan, 1.0, -inf, 0.0, nan],
        [nan] * 5,
        [-inf] * 5,
        [inf, 0.0, inf, nan, -inf],
        [0.0, nan, 2.0, 1.0, 3.0],
    ]
    actual = ops.noisy_topk_gating(torch.tensor(rows, device=device), None, None, k)
    for row, index, gates in zip(rows, actual.expert_index.tolist(), actual.gates, strict=True):
        assert index == ref.top_k(row, k)
        if not math.isfinite(row[index[0]]):
            assert gates.isnan().all()
    if k < 5:
        expected = torch.tensor([3.0, 2.0, 1.0, 0.0])[:k].softmax(0)
        torch.testing.assert_close(actual.gates[4].cpu(), expected)


def test_minus_infinity_below_a_finite_top_gets_gate_zero(device):
    clean = torch.tensor([[-math.inf, 1.0, -math.inf]], device=device)
    gates, index, *_ = ops.noisy_topk_gating(clean, None, None, 2)
    assert index.tolist() == [[1, 0]] and gates.tolist() == [[1.0, 0.0]]


def test_nan_row_leaves_other_rows_alone(device):
    clean, raw, noise = (x.to(device) for x in make(6, 5))
    expected = ops.noisy_topk_gating(clean, raw, noise, 2)
    spoilt = clean.clone()
    spoilt[3] = math.nan
    actual = ops.noisy_topk_gating(spoilt, raw, noise, 2)
    for a, e in zip(actual, expected, strict=True):
        rest = torch.arange(6, device=device) != 3
        assert_same_bits(a[rest], e[rest])
    assert actual.gates[3].isnan().all()
    assert sorted(set(actual.expert_index[3].tolist())) == sorted(actual.expert_index[3].tolist())


def test_underflowed_gate_is_still_routed(device):
    clean = torch.tensor([[0.0, -1000.0, -2000.0]], device=device)
    gates, index, *_ = ops.noisy_topk_gating(clean, None, None, 2)
    assert gates.tolist() == [[1.0, 0.0]] and index.tolist() == [[0, 1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_logits(device, dtype):
    largest = torch.finfo(dtype).max
    clean = torch.tensor([[largest, -largest, largest, 0.0]], dtype=dtype, device=device)
    gates, index, *_ = ops.noisy_topk_gating(clean, None, None, 3)
    assert index.tolist() == [[0, 2, 3]] and gates.tolist() == [[0.5, 0.5, 0.0]]


@pytest.mark.parametrize("k", [1, 2, 64])
def test_gates_sum_to_one(device, k):
    """k gates each within a few roundings of the truth sum to 1 within a few units in the last
    place; an epsilon in the denominator would not."""
    clean = 20 * torch.randn(500, 64, device=device)
    gates = ops.noisy_topk_gating(clean, None, None, k).gates
    assert (gates.double().sum(-1) - 1).abs().max() <= 4 * torch.finfo(torch.float32).eps


def test_single_gate_has_no_gradient(device):
    """k = 1: the gate is 1 whatever the logits, so nothing reaches them, to the last bit."""
    clean, raw, noise = make(9, 5, device)
    clean.requires_grad_()
    raw.requires_grad_()
    gates = ops.noisy_topk_gating(clean, raw, noise, 1).gates
    assert torch.all(gates == 1)
    (gates * torch.randn_like(gates)).sum().backward()
    assert torch.count_nonzero(clean.grad) == 0 and torch.count_nonzero(raw.grad) == 0


def test_noise_is_a_constant(device):
    clean, raw, noise = (x.requires_grad_() for x in make(4, 5, device))
    out = ops.noisy_topk_gating(clean, raw, noise, 2)
    (out.gates.pow(2).sum() + out.threshold.sum()).backward()
    assert noise.grad is None and clean.grad is not None and raw.grad is not None


MANY = [65_535, 65_536, 200_000]


@pytest.mark.emulated(False)  # takes too long
@pytest.mark.parametrize("T", MANY)
def test_many_tokens(device, T):
    """Routing, load and importance, forward and backward, as in plain torch: no limit in a kernel.

    Sums of 200,000 terms of either order differ by about 1e-12 of them.
    """
    E, k = 4, 2
    clean, raw, noise = make(T, E, device)
    clean.requires_grad_(), raw.requires_grad_()
    actual = ops.noisy_topk_gating(clean, raw, noise, k, NU)
    load = ops.load(clean, actual.noise_stddev, actual.threshold, actual.expert_index)
    importance = ops.importance(actual.gates, actual.expert_index, E)

    stddev = torch.nn.functional.softplus(raw) + NU
    H = clean + noise * stddev
    top, index = H.topk(k + 1)
    gates, chosen = top[:, :k].softmax(1), index[:, :k]
    member = torch.zeros_like(H, dtype=torch.bool).scatter(1, chosen, True)
    threshold = torch.where(member, top[:, k:], top[:, k - 1 : k])
    expected_load = torch.special.ndtr((clean - threshold) / stddev).sum(0)
    expected_importance = torch.zeros_like(H).scatter(1, chosen, gates).sum(0)

    assert torch.equal(actual.expert_index, chosen)
    assert_exact(actual.gates.detach(), gates.detach())
    torch.testing.assert_close(load, expected_load, rtol=1e-11, atol=0)
    torch.testing.assert_close(importance, expected_importance, rtol=1e-11, atol=0)
    cotangents = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64, device=device)
    for a, e in zip(
        torch.autograd.grad([load, importance], [clean, raw], [cotangents] * 2),
        torch.autograd.grad([expected_load, expected_importance], [clean, raw], [cotangents] * 2),
        strict=True,
    ):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-12)
