"""ops.load: P(x, i) and Load(X) of App. A, with the gradient through the thresholds."""

import math

import pytest
import reference as ref
import torch
from assertions import assert_exact, assert_same_bits, gradients
from operators import sample
from samples.draw import EDGES, shapes

from moe_ext import ops

pytestmark = [pytest.mark.emulated, pytest.mark.equation("Eq. 8", "Eq. 9", "Eq. 10")]

NU = 1e-2


def make(T, E, device="cpu"):
    """Returns clean, raw and noise."""
    return torch.randn(3, T, E, dtype=torch.float64).to(device)


def drawn(T, E, k, device, dtype=torch.float64):
    """Returns clean, stddev, threshold and expert_index."""
    return list(sample("load", device, dtype, T=T, E=E, k=k).values())[:4]


def load_of(clean, raw, noise, k, detach_threshold=False):
    """Computes Load as a layer does: the gating op, then the load op."""
    gating = ops.noisy_topk_gating(clean, raw, noise, k)
    return ops.load(
        clean, gating.noise_stddev, gating.threshold, gating.expert_index, detach_threshold
    )


def reference_load(clean, raw, noise, k, detach_threshold=False):
    S = ref.Softplus(raw) + NU
    H_X = torch.stack([ref.H(*row, NU) for row in zip(clean, raw, noise, strict=True)])
    return ref.Load(clean, S, H_X.detach() if detach_threshold else H_X, k)


SIZES = [sizes for sizes in EDGES if sizes["T"]] + shapes((1, 8, 2), (2, 64, 4), (1, 256, 4))


@pytest.mark.guarantee("The paper's equations")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("detach_threshold", [False, True])
def test_gating_and_load_equal_reference(device, sizes, detach_threshold):
    """Values, and gradients through the thresholds of the gating."""
    T, E, k = sizes.values()
    clean, raw, noise = make(T, E)
    cotangent = torch.randn(E, dtype=torch.float64)
    expected_leaves = [x.clone().requires_grad_() for x in (clean, raw)]
    expected = reference_load(*expected_leaves, noise, k, detach_threshold)
    leaves = [x.to(device).requires_grad_() for x in (clean, raw)]
    actual = load_of(*leaves, noise.to(device), k, detach_threshold)
    assert_exact(actual.detach(), expected.detach())
    grads = gradients([actual], leaves, [cotangent.to(device)])
    for a, e in zip(grads, gradients([expected], expected_leaves, [cotangent]), strict=True):
        assert_exact(a, e)


def test_vanishing_noise(device):
    """A standard deviation of 1e-300 makes P a step: 0 or 1, with no gradient and no NaN."""
    clean, _, threshold, index = drawn(5, 6, 2, device)
    stddev = torch.full_like(clean, 1e-300)
    leaves = [x.requires_grad_() for x in (clean, stddev, threshold)]
    actual = ops.load(*leaves, index)
    assert set(actual.tolist()) <= {0.0, 1.0, 2.0, 3.0, 4.0, 5.0}
    for gradient in torch.autograd.grad(actual.sum(), leaves):
        assert torch.count_nonzero(gradient) == 0


def test_gradient_below_the_least_noise(device):
    """Below 1e-6, P uses a standard deviation of 1e-6, so its derivative by the deviation is 0."""
    _, _, threshold, index = drawn(4, 6, 2, device)
    clean = threshold[:, :1] + 1e-6 * make(4, 6, device)[0]
    stddev = torch.full_like(clean, 4e-7)
    leaves = [x.requires_grad_() for x in (clean, stddev, threshold)]
    actual = ops.load(*leaves, index)
    at_least = ops.load(clean, torch.full_like(stddev, 1e-6), threshold, index)
    weight = torch.randn_like(actual)
    grad_clean, grad_stddev, grad_threshold = torch.autograd.grad(actual, leaves, weight)
    assert torch.count_nonzero(grad_stddev) == 0 and torch.count_nonzero(grad_clean) > 6
    expected = torch.autograd.grad(at_least, (clean, threshold), weight)
    assert_same_bits(grad_clean, expected[0])
    assert_same_bits(grad_threshold, expected[1])


def test_lower_tail_keeps_its_digits(device):
    """0.5 (1 + erf) has no correct digit below z = -6.

    An error of a few roundings in z changes P by z² times that error, which is the tolerance.
    """
    z = -torch.linspace(0, 12, 49)
    clean, one = z[None].to(device), torch.ones(1, 49, device=device)
    zero = torch.zeros(1, 2, device=device)
    index = torch.zeros(1, 1, dtype=torch.int64, device=device)
    actual = ops.load(clean, one, zero, index).cpu().double()
    exact = torch.erfc(-z.double() / math.sqrt(2)) / 2
    tolerance = (8 + 2 * z.double() ** 2) * torch.finfo(torch.float32).eps
    assert torch.all((actual / exact - 1).abs() <= tolerance)


def test_nan_stays_in_its_expert(device):
    clean, stddev, threshold, index = drawn(6, 5, 2, device)
    expected = ops.load(clean, stddev, threshold, index)
    clean = clean.clone()
    clean[2, 3] = math.nan
    actual = ops.load(clean, stddev, threshold, index)
    assert actual[3].isnan()
    rest = torch.arange(5, device=device) != 3
    assert_same_bits(actual[rest], expected[rest])
