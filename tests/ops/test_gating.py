"""ops.noisy_topk_gating: H, KeepTopK and G (Eq. 3-5), App. A's thresholds, and their gradients."""

import math

import pytest
import reference as ref
import torch
from assertions import assert_exact, assert_same_bits
from samples.gating import reference_gating

from moe_ext import ops

pytestmark = [pytest.mark.emulated, pytest.mark.equation("Eq. 3", "Eq. 4", "Eq. 5")]


def make(T, E, device="cpu", dtype=torch.float64):
    clean, raw, noise = torch.randn(3, T, E, dtype=torch.float64).to(dtype).to(device)
    return clean, raw, noise


@pytest.mark.parametrize("nu", [0.0, 0.3])
def test_noise_epsilon(device, nu):
    clean, raw, noise = make(5, 6)
    raw[0] = -800.0  # Softplus underflows: only the floor is left
    actual = ops.noisy_topk_gating(*(x.to(device) for x in (clean, raw, noise)), 2, nu)
    for a, e in zip(actual, reference_gating(clean, raw, noise, 2, nu), strict=True):
        assert_exact(a, e)
    assert torch.all(actual.noise_stddev[0] == nu)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("E, k", [(4, 1), (8, 3), (8, 7), (257, 17), (1000, 64), (6, 6)])
def test_ties_go_to_the_lower_index(device, E, k, dtype):
    """Selects exactly k distinct experts, wherever the tie lies relative to the k-th place."""
    clean = torch.randint(0, 3, (50, E)).to(dtype)
    clean[0] = 0
    actual = ops.noisy_topk_gating(clean.to(device), None, None, k)
    assert_same_bits(actual.expert_index, torch.tensor([ref.top_k(c, k) for c in clean.tolist()]))
    assert actual.expert_index[0].tolist() == list(range(k))
    order = clean.float().sort(descending=True, stable=True).indices
    assert_same_bits(actual.threshold_index[:, 0], order[:, k - 1])
    if k < E:
        assert_same_bits(actual.threshold_index[:, 1], order[:, k])


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_nan_ranks_last(device, k):
    """NaN ranks below -inf, and NaNs rank by index. The indices stay distinct and in range."""
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


@pytest.mark.parametrize(
    "clean, index, gates",
    [
        pytest.param([-0.0, 0.0, -1e3, 0.0, -0.0], [0, 1, 3, 4], [0.25] * 4, id="zero signs tie"),
        pytest.param([-math.inf, 1.0, -math.inf], [1, 0], [1.0, 0.0], id="-inf gets gate 0"),
        pytest.param([0.0, -1e3, -2e3], [0, 1], [1.0, 0.0], id="underflowed gate is routed"),
    ],
)
def test_gates_by_hand(device, clean, index, gates):
    actual = ops.noisy_topk_gating(torch.tensor([clean], device=device), None, None, len(index))
    assert actual.expert_index.tolist() == [index] and actual.gates.tolist() == [gates]
