"""CV², L_importance and L_load (Eq. 7, 11)."""

import re

import pytest
import reference as ref
import torch
from assertions import assert_as_accurate, assert_exact, assert_same_bits

from moe_ext import cv_squared, importance_loss, load_loss


def vec(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.float64, device=device)


@pytest.mark.equation("Eq. 7", "Eq. 11")
@pytest.mark.parametrize(
    "v, expected",
    [([1, 3], 0.25), ([4, 0, 0, 0], 3), ([5], 0), ([0, 0, 0], 0), ([0], 0), ([3] * 8, 0)],
)
def test_population_variance(device, v, expected):
    """n = 1 and all zeros give 0 instead of 0 / 0. Equal values also have gradient 0."""
    v = vec(*v, device=device).requires_grad_()
    actual = cv_squared(v)
    assert actual.shape == ()
    assert float(actual.detach()) == pytest.approx(expected, abs=1e-14)
    (gradient,) = torch.autograd.grad(actual, v)
    assert gradient.isfinite().all()
    if expected == 0:
        assert gradient.abs().max() < 1e-15
    if len(v) == 1:
        assert gradient.tolist() == [0]


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_values_of_other_shapes_are_refused(shape):
    message = rf"cv_squared: values must have shape \[E\], E > 0, got {re.escape(str(shape))}"
    with pytest.raises(ValueError, match=message):
        cv_squared(torch.rand(shape))


@pytest.mark.equation("Eq. 7", "Eq. 11")
@pytest.mark.parametrize("n", [2, 3, 256, 4096])
def test_equals_reference(device, n):
    v = torch.rand(n, dtype=torch.float64) + 0.1
    leaf = v.clone().requires_grad_()
    expected = ref.CV_squared(leaf)
    (expected_gradient,) = torch.autograd.grad(expected, leaf)
    moved = v.to(device).requires_grad_()
    actual = cv_squared(moved)
    assert_exact(actual.detach(), expected.detach())
    assert_exact(torch.autograd.grad(actual, moved)[0], expected_gradient)


@pytest.mark.equation("Eq. 7", "Eq. 11")
def test_derivative_formula(device):
    """Checks dCV²/dy_i = (2n / S²)(y_i - Q/S) with S = sum y, Q = sum y²; y · dCV²/dy = 0."""
    y = (torch.rand(7, dtype=torch.float64, device=device) + 0.1).requires_grad_()
    (gradient,) = torch.autograd.grad(cv_squared(y), y)
    S, Q = y.sum(), y.pow(2).sum()
    assert_exact(gradient, (2 * 7 / S**2 * (y - Q / S)).detach())
    assert abs(float(gradient @ y)) < 1e-14


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e6, 1e30])
@pytest.mark.parametrize("dtype, rtol", [(torch.float32, 1e-6), (torch.float64, 1e-9)])
def test_scale_free(device, scale, dtype, rtol):
    """Values of any scale give the same result, because no epsilon is used."""
    y = torch.rand(6, dtype=dtype, device=device) + 0.1
    torch.testing.assert_close(cv_squared(y * scale), cv_squared(y), rtol=rtol, atol=0)


def test_maximum_is_one_expert_taking_all(device):
    y = torch.zeros(100, dtype=torch.float64, device=device)
    y[17] = 12.5
    assert float(cv_squared(y)) == pytest.approx(99, rel=1e-12)


@pytest.mark.parametrize("offset", [0.1, 1000.0])
def test_float32(device, offset):
    """Includes nearly balanced loads, where the difference of two moments would cancel."""
    y = torch.rand(64, device=device) + offset

    def plain(y):
        return y.var(correction=0) / y.mean() ** 2

    leaves = [y.clone().requires_grad_(), y.clone().requires_grad_(), y.double().requires_grad_()]
    out = [f(x) for f, x in zip((cv_squared, plain, plain), leaves, strict=True)]
    assert_as_accurate(*out)
    assert_as_accurate(*(torch.autograd.grad(o, x)[0] for o, x in zip(out, leaves, strict=True)))


def test_coefficients_are_applied_once(device):
    v = vec(1, 3, device=device)
    assert float(importance_loss(v, 0.1)) == pytest.approx(0.025, rel=1e-12)
    assert float(load_loss(v, 0.4)) == pytest.approx(0.1, rel=1e-12)
    assert float(importance_loss(v, 0.0)) == 0
    assert_exact(importance_loss(v, 0.1), ref.L_importance(v.cpu(), 0.1))
    assert_exact(load_loss(v, 0.3), ref.L_load(v.cpu(), 0.3))


def test_losses_are_of_the_whole_batch(device):
    """CV² is computed from the summed loads; the mean of the parts' CV² differs."""
    a, b = vec(4, 0, device=device), vec(0, 4, device=device)
    assert float(cv_squared(a + b)) == 0
    assert float((cv_squared(a) + cv_squared(b)) / 2) == 1


def test_any_layout(device):
    y = torch.rand(4, 3, dtype=torch.float64, device=device)
    assert_same_bits(cv_squared(y[:, 1]), cv_squared(y[:, 1].contiguous()))
