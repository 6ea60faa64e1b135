"""The cross-entropy of a linear layer: what the table of operators does not show."""

import math

import pytest
import torch
from assertions import assert_all_same_bits, assert_same_bits
from torch.utils.flop_counter import FlopCounterMode

from moe_ext import ops

pytestmark = [pytest.mark.emulated, pytest.mark.equation("App. C.1")]


@pytest.mark.emulated(False)  # GEMMs on CUDA may depend on the batch
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("dtype", "V"), [(torch.float32, 1100), (torch.bfloat16, 1100), (torch.float32, 40_000)]
)
def test_a_token_does_not_depend_on_the_others(dtype, V, recompute):
    X, W = torch.randn(400, 24).to(dtype), torch.randn(V, 24).to(dtype).requires_grad_()
    target = torch.randint(V, (400,))

    def rows(chosen):
        x = X[chosen].requires_grad_()
        options = dict(reduction="sum", recompute=recompute)
        loss = ops.linear_cross_entropy(x, W, target[chosen], reduction="none")
        total = ops.linear_cross_entropy(x, W, target[chosen], **options)
        return loss.detach(), torch.autograd.grad(total, x)[0]

    whole = rows(slice(0, 400))
    for chosen in (slice(0, 1), slice(3, 12), slice(100, 299), slice(399, 400)):
        for part, all_rows in zip(rows(chosen), whole, strict=True):
            assert_same_bits(part, all_rows[chosen])


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"reduction": "none"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_ignored_token_is_not_read(device, value, options, dtype):
    """Its NaN reaches no gradient: all results are bitwise identical to those without NaN."""
    W, b = torch.randn(7, 5).to(device, dtype), torch.randn(7, device=device)
    clean, target = torch.randn(6, 5).to(device, dtype), torch.tensor([1, 2, -100, 3, -100, 0])
    results = []
    for x in (clean, clean.clone()):
        x[[2, 4]] = 0 if x is clean else value
        leaves = [tensor.clone().requires_grad_() for tensor in (x, W, b)]
        args = *leaves[:2], target.to(device)
        loss = ops.linear_cross_entropy(*args, linear_bias=leaves[2], **options)
        results.append([loss.detach(), *torch.autograd.grad(loss.sum(), leaves)])
        assert all(value.isfinite().all() for value in results[-1])
    for actual, expected in zip(*results, strict=True):
        assert_same_bits(actual, expected)


def test_classes_with_a_bias_of_minus_infinity(device):
    """They have no probability, even if they fill the first tile."""
    X = torch.randn(3, 4, device=device, requires_grad=True)
    W, b = torch.randn(600, 4, device=device), torch.zeros(600, device=device)
    b[:550] = -math.inf
    target = torch.tensor([550, 580, 599], device=device)
    actual = ops.linear_cross_entropy(X, W, target, linear_bias=b)
    expected = ops.linear_cross_entropy(X, W[550:], target - 550)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y, X)[0] for y in (actual, expected)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_float32_bias_of_half_precision_weights(device, dtype, reduction):
    """Half precision would round this bias. GEMMs round the softmax, and so the gradient."""
    X, W = (torch.randint(-2, 3, shape, device=device) for shape in ((9, 4), (700, 4)))
    b = (torch.arange(700, device=device) / 700 + 8).requires_grad_()
    target = torch.arange(9, device=device)

    def evaluate(dtype):
        options = dict(linear_bias=b.to(dtype) if dtype == torch.float64 else b)
        loss = ops.linear_cross_entropy(
            X.to(dtype), W.to(dtype), target, reduction=reduction, **options
        )
        return loss, *torch.autograd.grad(3 * loss.sum(), b)

    (loss, gradient), (expected, expected_gradient) = evaluate(dtype), evaluate(torch.float64)
    assert loss.dtype == gradient.dtype == torch.float32
    torch.testing.assert_close(loss, expected.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("recompute", [False, True])
def test_without_targets_the_mean_is_nan_and_the_gradient_zero(device, recompute):
    X, W = (torch.randn(3, 4, device=device, requires_grad=True) for _ in range(2))
    target = torch.full((3,), -100, device=device)
    loss = ops.linear_cross_entropy(X, W, target, recompute=recompute)
    assert loss.isnan()
    for gradient in torch.autograd.grad(loss, (X, W)):
        assert_same_bits(gradient.abs(), torch.zeros_like(gradient))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_of_half_precision_do_not_overflow(device, reduction):
    """The gradient of the mean fits float16; the gradient of the sum does not."""
    T, V = 1500, 200
    X = torch.full((T, 1), 50.0, device=device).half()
    W = torch.zeros(V, 1, device=device).half().requires_grad_()
    target = torch.zeros(T, dtype=torch.int64, device=device)
    loss = ops.linear_cross_entropy(X, W, target, reduction=reduction)
    (loss / (T if reduction == "sum" else 1)).backward()
    assert W.grad.dtype == torch.float16
    assert W.grad[0].item() == pytest.approx(-50, rel=1e-2)
    assert W.grad[1:].sum().item() == pytest.approx(50, rel=1e-2)


@pytest.mark.parametrize("options", [dict(reduction="none"), dict(recompute=True)])
def test_a_backward_pass_within_autocast(device, options):
    """Autocast applies to the forward pass; the backward pass has its dtypes."""
    X, W = (torch.randn(5, 4, device=device, requires_grad=True) for _ in range(2))
    loss = ops.linear_cross_entropy(X, W, torch.arange(5, device=device), **options).sum()
    expected = torch.autograd.grad(loss, (X, W), retain_graph=True)
    with torch.autocast(device, torch.bfloat16):
        grads = torch.autograd.grad(loss, (X, W))
    assert_all_same_bits(grads, expected)


def test_targets_that_are_no_class(device, request):
    """The CPU raises an error. CUDA does not read the targets on the host: their loss is NaN."""
    X, W = torch.randn(4, 3, device=device), torch.randn(9, 3, device=device)
    target = torch.tensor([0, -1, 9, -100], device=device)
    if request.node.callspec.params["device"] == "cpu":
        with pytest.raises(IndexError, match="target must be at least 0 and below 9"):
            ops.linear_cross_entropy(X, W, target, reduction="none")
    else:
        loss = ops.linear_cross_entropy(X, W, target, reduction="none")
        assert loss.isnan().tolist() == [False, True, True, False]


@pytest.mark.parametrize("softcap", [1e-46, 1e39])
def test_a_softcap_beyond_float32(device, softcap):
    X, W = torch.randn(4, 3, device=device), torch.randn(9, 3, device=device)
    target = torch.zeros(4, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="softcap must be above 0, and finite in the dtype"):
        ops.linear_cross_entropy(X, W, target, softcap=softcap)
    assert ops.linear_cross_entropy(X.double(), W.double(), target, softcap=softcap).isfinite()


@pytest.mark.emulated(False)  # reading the number would wait for a GPU
def test_a_gradient_of_one_returns_the_kept_gradients():
    """With retain_graph it returns copies: their changes in place do not reach the next pass."""
    X, W = (torch.randn(6, 4, requires_grad=True) for _ in range(2))
    options = "mean", -100, 0.0, 0.0, None, [True, True, False]
    loss, _, *kept = torch.ops.moe_ext.linear_cross_entropy(X, W, torch.arange(6), None, *options)
    first = torch.autograd.grad(loss, (X, W), retain_graph=True)
    expected = [gradient.clone() for gradient in first]
    for gradient in first:
        gradient.data.zero_()
    for gradient, same, equal in zip(
        torch.autograd.grad(loss, (X, W)), kept[:2], expected, strict=True
    ):
        assert gradient.data_ptr() == same.data_ptr()
        assert_same_bits(gradient, equal)


@pytest.mark.emulated(False)
def test_gradients_of_several_backward_passes_add_up():
    X, W = (torch.randn(6, 4, requires_grad=True) for _ in range(2))
    loss = ops.linear_cross_entropy(X, W, torch.arange(6))
    loss.backward(retain_graph=True)
    once = X.grad.clone(), W.grad.clone()
    (2 * loss).backward(retain_graph=True)
    loss.backward()
    for leaf, first in zip((X, W), once, strict=True):
        torch.testing.assert_close(leaf.grad, 4 * first)


@pytest.mark.parametrize(("recompute", "products"), [(False, 3), (True, 4)])
def test_operations_are_counted(recompute, products):
    X, W = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        loss = ops.linear_cross_entropy(X, W, torch.arange(5), recompute=recompute)
        (3 * loss).backward()
    assert counter.get_total_flops() == products * 2 * 5 * 4 * 7
