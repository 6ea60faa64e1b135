"""The logits of several matrices of a gate: one operator and one node of the autograd graph."""

import pytest
import torch
from assertions import assert_all_same_bits, assert_same_bits, recorded_ops

from moe_ext import ops
from moe_ext.gates._logits import logits

T, D, E, G = 5, 6, 4, 3


def plain(x, *weights, **rows):
    """Computes each product with a call of its own."""
    wide = torch.promote_types(x.dtype, torch.float32)
    for weight in weights:
        wide = torch.promote_types(wide, weight.dtype)
    x = x.to(wide)
    matrices = [weight if weight.dim() == 3 else weight.unsqueeze(0) for weight in weights]
    return [ops.experts(x, [matrix.to(wide)], **rows) for matrix in matrices]


def make(shape, dtype=torch.float32, number=2):
    x = torch.randn(T, D).to(dtype).requires_grad_()
    return x, [torch.randn(*shape).requires_grad_() for _ in range(number)]


def rows_of_groups():
    plan = ops.dispatch_plan(torch.randint(G, (T, 2)), G)
    return {"offsets": plan.offsets, "inverse": plan.inverse}


def all_gradients(function, x, weights, *, used, **rows):
    """Returns the gradients of x and weights; the loss has another term of x."""
    products = function(x, *weights, **rows)
    loss = sum((products[i] * (i + 0.3)).sin().sum() for i in used) + (x * x / 3).sum()
    return torch.autograd.grad(loss, [x, *weights], allow_unused=True)


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grouped", [False, True])
def test_logits_equal_separate_calls(number, dtype, grouped):
    x, weights = make((G, D, E) if grouped else (D, E), dtype, number)
    rows = rows_of_groups() if grouped else {}
    assert_all_same_bits(logits(x, *weights, **rows), plain(x, *weights, **rows))
    for used in ([*range(number)], [number - 1], [0]):
        actual = all_gradients(logits, x, weights, used=used, **rows)
        assert_all_same_bits(actual, all_gradients(plain, x, weights, used=used, **rows))
        with torch.no_grad():
            assert_all_same_bits(logits(x, *weights, **rows), plain(x, *weights, **rows))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context):
    x, weights = make((D, E))
    with context():
        products = logits(x, *weights)
    assert not any(product.requires_grad for product in products)
    assert_all_same_bits(products, [product.detach() for product in plain(x, *weights)])


def test_the_dtypes_of_weights_are_promoted():
    x, (first, second) = make((D, E), torch.float16)
    for weights in ([first.double(), second], [first.bfloat16(), second.bfloat16()]):
        actual = logits(x, *weights)
        assert_all_same_bits(actual, plain(x, *weights))
    assert actual[0].dtype == torch.float32


def test_a_transposed_weight_has_a_gradient_in_its_layout():
    x, weight = torch.randn(T, D), torch.randn(E, D, requires_grad=True)
    (product,) = logits(x, weight.mT)
    product.sum().backward()
    assert weight.grad.is_contiguous()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(E, D))


def test_only_needed_gradients_are_computed():
    x, (first, second) = make((D, E))
    products = logits(x, first.detach(), second)
    with recorded_ops() as calls:
        torch.autograd.grad(products[0].sum() + products[1].sum(), second)
    backward = [args for name, _, args, _ in calls if name == "_experts_backward"]
    (args,) = backward
    needs_x, needs_parameters = args[10:12]
    assert not needs_x and needs_parameters == [True]


def test_a_second_derivative_is_refused():
    x, weights = make((D, E))
    loss = sum(product.square().sum() for product in logits(x, *weights))
    for leaf in (x, *weights):
        (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="_experts_backward"):
            torch.autograd.grad(gradient.sum(), leaf)


def test_the_graph_has_one_node_for_all_weights():
    x, weights = make((D, E))
    first, second = logits(x, *weights)
    assert first.grad_fn is second.grad_fn
    edges = [node for node, _ in first.grad_fn.next_functions]
    assert [node.variable for node in edges] == [x, x, *weights]


def test_a_wrong_weight_names_the_operator():
    x, _ = make((D, E))
    with pytest.raises(ValueError, match=r"experts: weights\[0\] must have"):
        logits(x, torch.randn(D + 1, E))
    assert logits(x) == []
    assert_same_bits(logits(x[:0], torch.ones(D, E))[0], torch.ones(0, E))
