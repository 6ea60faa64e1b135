"""ops.experts, FeedForwardExperts and ModuleExperts (Sec. 3.2)."""

import math

import pytest
import torch
from assertions import assert_exact, assert_same_bits, assert_same_products, recorded_ops
from launch import run_code
from operators import DTYPES
from samples.draw import normal, offsets_of
from samples.experts import ACTIVATION_ARGS, CLAMPED, make_experts, plain_activation
from torch.utils.flop_counter import FlopCounterMode

from moe_ext import FeedForwardExperts, ModuleExperts, ops

pytestmark = [pytest.mark.emulated, pytest.mark.equation("Sec. 3.2")]


def test_small_gates_do_not_vanish_in_half_precision(device):
    """A loss scale keeps the loss in range; gate times activation, here 1e-8, underflows."""
    x = torch.full((1, 8), 1e-3, dtype=torch.half, device=device)
    weight = torch.zeros(1, 8, 8, dtype=torch.half, device=device, requires_grad=True)
    y = ops.experts(
        x,
        [weight],
        offsets=offsets_of([1], device),
        inverse=torch.zeros(1, 1, dtype=torch.int64, device=device),
        gates=torch.full((1, 1), 1e-5, device=device),
    )
    (gradient,) = torch.autograd.grad(y, weight, torch.full_like(y, 1e3))
    torch.testing.assert_close(gradient, torch.full_like(gradient, 1e-5), rtol=0.01, atol=0)


@pytest.mark.parametrize("num_tokens", [1, 5, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gates_are_not_rounded_to_the_dtype_of_the_weights(device, dtype, num_tokens):
    """Two experts of opposite outputs leave the difference of their gates, which both round to 1.

    All sums and products are exact. In other samples the rounding of y hides that of the gates.
    """
    width, eps = 16, torch.finfo(dtype).eps
    x = torch.randint(-1, 2, (num_tokens, width), device=device).to(dtype)
    first = torch.randint(-1, 2, (width, width), device=device).to(dtype)
    second = torch.eye(width, device=device)[torch.randperm(width)].to(dtype)
    weights = [torch.stack([first, first]), torch.stack([second, -second])]
    plan = ops.dispatch_plan(torch.tensor([[0, 1]], device=device).expand(num_tokens, 2), 2)
    gates = torch.tensor([[1 + eps / 4, 1 - eps / 8]], device=device).expand(num_tokens, 2)

    def output(gates):
        return ops.experts(x, weights, offsets=plan.offsets, inverse=plan.inverse, gates=gates)

    expected = 3 / 8 * eps * ((x.double() @ first.double()).relu() @ second.double())
    assert expected.count_nonzero()
    assert_exact(output(gates).double(), expected)
    assert not output(gates.to(dtype).float()).count_nonzero()
    x, weights = x.float(), [weight.float() for weight in weights]
    with torch.autocast(x.device.type, dtype):
        y = output(gates)
    assert y.dtype == dtype
    assert_exact(y.double(), expected)


@pytest.mark.parametrize("upstream", [1.0, math.inf])
@pytest.mark.parametrize("z", [-1.0, 0.0, 1.0, math.nan])
def test_relu_selects_its_gradient(device, z, upstream):
    """As in torch: 0 for z <= 0 even if upstream is infinite; a NaN z passes the gradient on."""
    one = torch.ones(1, 1, device=device)
    weight = torch.full((1, 1), z, device=device, requires_grad=True)
    upstream = torch.tensor([[upstream]], device=device)
    y = ops.experts(one, [weight[None], one[None]], offsets=offsets_of([1], device))
    (actual,) = torch.autograd.grad(y, weight, upstream)
    (expected,) = torch.autograd.grad((one @ weight).relu(), weight, upstream)
    torch.testing.assert_close(actual, expected, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("args", [(7.0, 1.702, 1.0), (7.0, 1.0, 0.0)], ids=["gpt-oss", "DeepSeek"])
@pytest.mark.parametrize("activation", CLAMPED)
def test_gradient_is_zero_at_a_limit(device, activation, args):
    """Beyond a limit the gradient is 0. At a limit it is that of a value just beyond."""
    values = torch.tensor([-9, -7, -6.5, -1, 0, 1, 7, 8, math.nan], dtype=torch.float64)
    pairs = torch.cartesian_prod(values, values).to(device).requires_grad_()  # an expert for each
    one = torch.ones(len(pairs), 1, dtype=torch.float64, device=device)
    y = ops.experts(one, [pairs[:, None], one[:, :, None]], None, activation, activation_args=args)
    beyond = torch.where(pairs.detach().abs() == 7, pairs.detach() * (1 + 1e-15), pairs.detach())
    beyond.requires_grad_()
    expected = plain_activation(beyond, activation, args).sum(-1, keepdim=True)
    assert_exact(y.detach(), expected.detach(), nan=True)
    actual_grad, expected_grad = (
        torch.autograd.grad(out, leaf, torch.ones_like(out))[0]
        for out, leaf in ((y, pairs), (expected, beyond))
    )
    assert_exact(actual_grad, expected_grad, nan=True)


def stored_as(tensors, transposed):
    """Makes leaves and weights: views p.mT of leaves p where `transposed`, else the leaves."""
    leaves = [
        (tensor.mT if swap else tensor).detach().clone(memory_format=torch.contiguous_format)
        for tensor, swap in zip(tensors, transposed, strict=True)
    ]
    for leaf in leaves:
        leaf.requires_grad_()
    return leaves, [p.mT if swap else p for p, swap in zip(leaves, transposed, strict=True)]


def layout_sample(device, dtype, widths, num_rows, activation="swiglu"):
    counts = [num_rows, 0, num_rows + 1]
    x, weights, biases = make_experts(counts, widths, activation, device, dtype)
    return x, weights, biases, offsets_of(counts, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "widths, num_rows, bias",
    [((64, 96, 32), 9, True), ((20, 9, 7), 1, False), ((20, 9, 7), 40, True)],
)
def test_transposed_weights_give_the_same_bits(device, dtype, widths, num_rows, bias):
    """Each sum has the terms in the same order, whatever the layout; layers may differ."""
    x, weights, biases, offsets = layout_sample(device, dtype, widths, num_rows)
    results = []
    for transposed in ((False, False), (True, True), (True, False), (False, True)):
        leaves, views = stored_as(weights, transposed)
        rows = x.clone().requires_grad_()
        y = ops.experts(rows, views, biases if bias else None, "swiglu", offsets=offsets)
        grads = torch.autograd.grad(y, [rows, *views], torch.ones_like(y))
        results.append([y.detach(), *grads])
        for gradient, view in zip(grads[1:], views, strict=True):
            assert gradient.stride() == view.stride()
    for result in results[1:]:
        for actual, expected in zip(result, results[0], strict=True):
            assert_same_bits(actual.contiguous(), expected)


def test_peak_memory_with_transposed_weights():
    """A pass over 96 MiB of weights takes less than 32 MiB besides the gradients of the weights.

    A copy of the weights would take 96 MiB more.
    """
    program = """
import resource, torch
from moe_ext import ops
E, H, I = 8, 512, 2048
leaves = [torch.full((E, 2 * I, H), 1e-3), torch.full((E, H, I), 1e-3)]
def run(x, views, offsets):
    y = ops.experts(x, views, None, "swiglu", offsets=offsets)
    if y.requires_grad: y.sum().backward()
small = [torch.ones(2, 8, 4).mT, torch.ones(2, 4, 4)]
run(torch.ones(2, 4, requires_grad=True), small, torch.tensor([0, 1, 2]))
for training in (False, True):
    for p in leaves: p.requires_grad_(training)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(torch.ones(32, H), [p.mT for p in leaves], torch.arange(0, 33, 4))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(grown - sum(p.nbytes for p in leaves) / 2**20 * training)
"""
    done = run_code(program)
    assert done.status == 0, done.stderr
    forward, training = map(float, done.stdout.split())
    assert forward < 32 and training < 32


@pytest.mark.parametrize("activation", ["swiglu", CLAMPED[1]])
def test_frozen_parameters_get_an_empty_gradient(device, activation):
    """The gradient of the last layer is that of a pass in which all layers are learned."""
    x, weights, biases, offsets = layout_sample(device, torch.float32, (8, 6, 4), 40)
    options = dict(offsets=offsets, activation_args=ACTIVATION_ARGS.get(activation))
    leaves = [weight.clone().requires_grad_() for weight in weights]
    ops.experts(x, leaves, biases, activation, **options).sum().backward()
    learned = weights[1].requires_grad_()
    with recorded_ops() as calls:
        ops.experts(x, weights, biases, activation, **options).sum().backward()
    ((op, args),) = [(op, args) for name, op, args, _ in calls if name == "_experts_backward"]
    _, _, *grads = op(*args)
    assert_same_bits(grads[1], learned.grad)
    assert_same_products(learned.grad, leaves[1].grad)
    assert [gradient.shape == (0,) for gradient in grads] == [True, False, True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_large_numbers(device, dtype):
    """All activations are linear or constant far from 0; a square must not overflow."""
    x = torch.tensor([[2e13], [-2e13], [1e18], [-1e18]], dtype=dtype, device=device)
    one = torch.ones(1, 1, 1, dtype=dtype, device=device)
    offsets = torch.tensor([0, 4], device=device)
    for activation in ("gelu", "gelu_tanh", "silu"):
        z = x.clone().requires_grad_()
        ops.experts(z, [one, one], None, activation, offsets=offsets).sum().backward()
        assert z.grad.flatten().tolist() == [1, 0, 1, 0], activation


# FeedForwardExperts


@pytest.mark.parametrize("hidden_sizes", [(), (6,), (6, 5)])
@pytest.mark.parametrize("activation, bias", [("relu", False), ("geglu", True), (CLAMPED[1], True)])
def test_feed_forward_experts_call_the_operator(device, hidden_sizes, activation, bias):
    args = ACTIVATION_ARGS.get(activation)
    options = dict(activation=activation, activation_args=args, bias=bias, d_output=2)
    module = FeedForwardExperts(3, 4, hidden_sizes, **options).to(device)
    for b in module.biases if bias else []:
        torch.nn.init.normal_(b)
    rows, offsets = normal(7, 4, device=device, dtype=torch.float32), offsets_of([3, 0, 4], device)
    assert len(module.weights) == len(hidden_sizes) + 1
    weights, biases = [*module.weights], [*module.biases] if bias else None
    expected = ops.experts(
        rows, weights, biases, activation, offsets=offsets, activation_args=args
    ).detach()
    assert_same_bits(module(rows, offsets).detach(), expected)
    one, rest = module.split([1, 2])
    parts = [one(rows[:3], offsets_of([3], device)), rest(rows[3:], offsets_of([0, 4], device))]
    assert_same_products(torch.cat(parts).detach(), expected)


def test_initial_scale():
    """The variance is 1 / fan_in, so the outputs of a deep linear stack neither vanish nor grow.

    4 sigma of the sample variance of 2^16 weights is below 3% even for a normal distribution.
    """
    module = FeedForwardExperts(4, 256, (64,))
    for weight, fan_in in zip(module.weights, (256, 64), strict=True):
        assert float(weight.var() * fan_in) == pytest.approx(1, abs=0.03)
        assert float(weight.mean().abs()) < 0.0025  # 5 sigma
    first = module.weights[0]
    assert not torch.equal(first[0], first[1])  # experts start with different weights


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("learned", [(True, True), (True, False), (False, True)])
def test_operations_are_counted(learned, recompute):
    """Counts as many operations as torch's GEMMs, plus the recomputed hidden layer."""
    inputs = [normal(3 * 5, 4), normal(3, 4, 6), normal(3, 6, 2)]
    for tensor, needed in zip(inputs, (learned[0], learned[1], learned[1]), strict=True):
        tensor.requires_grad_(needed)
    x, *weights = inputs

    def batched():
        hidden = torch.bmm(x.view(3, 5, 4), weights[0]).relu()
        torch.bmm(hidden, weights[1]).sum().backward()

    counted = []
    for function in (
        lambda: ops.experts(x, weights, recompute=recompute).sum().backward(),
        batched,
    ):
        with FlopCounterMode(display=False) as counter:
            function()
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1] + recompute * 2 * 15 * 4 * 6


# ModuleExperts


def test_heterogeneous_modules(device):
    modules = [
        torch.nn.Linear(4, 3),
        torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3)),
        torch.nn.Linear(4, 3, bias=False),
    ]
    experts = ModuleExperts(modules).double().to(device)
    rows = normal(7, 4, device=device).requires_grad_()
    actual = experts(rows, offsets_of([3, 0, 4], device))
    expected = torch.cat([modules[0](rows[:3]), modules[2](rows[3:])])
    assert_exact(actual.detach(), expected.detach())
    actual_grad, expected_grad = (
        torch.autograd.grad(out.pow(2).sum(), rows)[0] for out in (actual, expected)
    )
    assert_exact(actual_grad, expected_grad)
    experts(rows, offsets_of([3, 0, 4], device)).sum().backward()
    for p in modules[1].parameters():  # no rows: the gradient is zero, not missing
        assert p.grad is not None and torch.count_nonzero(p.grad) == 0
