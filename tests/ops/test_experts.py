"""ops.experts, FeedForwardExperts and ModuleExperts (Sec. 3.2)."""

import math
import subprocess
import sys

import pytest
import torch
from assertions import assert_exact, assert_same_bits, assert_same_products, recorded_ops
from operators import DTYPES
from samples.draw import normal, offsets_of
from samples.experts import ACTIVATION_ARGS, CLAMPED, make_experts, make_linear, plain_activation
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


@pytest.mark.parametrize(
    "dtype, fan_in, width",
    [(dtype, *sizes) for dtype, sizes in zip(DTYPES, [(24, 333), (16, 512)] * 2, strict=True)],
)
def test_interleaved_columns_equal_halves(device, dtype, fan_in, width):
    """The same weights in another order of columns: the activations of many tiles are the same."""
    counts = [70, 0, 3]
    x, first, _ = make_linear(counts, fan_in, 2 * width, device, dtype)
    last = normal(3, width, 5, device=device, dtype=dtype)
    offsets, upstream = offsets_of(counts, device), normal(73, 5, device=device, dtype=dtype)

    def interleave(columns):
        return torch.stack(columns.chunk(2, -1), -1).flatten(-2)

    results = {}
    for activation in CLAMPED:
        interleaved = activation.startswith("interleaved")
        weight = interleave(first) if interleaved else first
        leaves = [x.clone(), weight.clone(), last.clone()]
        args = ACTIVATION_ARGS[activation]
        y = ops.experts(
            leaves[0].requires_grad_(), [leaf.requires_grad_() for leaf in leaves[1:]], None,
            activation, offsets=offsets, activation_args=args,
        )  # fmt: skip
        results[activation] = [y, *torch.autograd.grad(y, leaves, upstream)]
    expected, actual = (results[activation] for activation in CLAMPED)
    for i in (0, 3):  # y and the gradient of the last layer
        assert_same_bits(actual[i], expected[i])
    assert_same_products(actual[2], interleave(expected[2]))
    # Its sum over the columns has another order.
    eps = torch.finfo(dtype).eps
    scale = float(expected[1].abs().max())
    torch.testing.assert_close(actual[1], expected[1], rtol=0, atol=16 * eps * scale)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_few_rows_of_long_weights(dtype, transposed):
    """Rows are bitwise identical in a small and in a large batch, over several K-blocks."""
    x, weights, _, offsets = layout_sample("cpu", dtype, (1088, 64), 20)
    _, views = stored_as(weights, [transposed])
    every = ops.experts(x, views, offsets=offsets)
    few = ops.experts(x[:3], views, offsets=offsets_of([3, 0, 0]))
    assert_same_bits(few.detach(), every[:3].detach())


def test_transposed_weights_are_not_copied(device):
    """Neither the weights nor their gradients pass through a copy; p.grad is contiguous."""
    x, weights, _, offsets = layout_sample(device, torch.float32, (64, 96, 32), 9)
    leaves, views = stored_as(weights, [True, True])
    with recorded_ops(None) as calls:
        ops.experts(x, views, None, "swiglu", offsets=offsets).sum().backward()
    assert not {name for name, *_ in calls} & {"clone", "copy_", "contiguous", "_to_copy"}
    for leaf in leaves:
        assert leaf.grad.is_contiguous()


def test_peak_memory_with_transposed_weights():
    """A pass over 192 MiB of weights takes less than 64 MiB besides the gradients of the weights.

    A copy of the weights would take 192 MiB more.
    """
    program = """
import resource, torch
from moe_ext import ops
E, H, I = 16, 512, 2048
leaves = [torch.full((E, 2 * I, H), 1e-3), torch.full((E, H, I), 1e-3)]
def run(x, views, offsets):
    y = ops.experts(x, views, None, "swiglu", offsets=offsets)
    if y.requires_grad: y.sum().backward()
small = [torch.ones(2, 8, 4).mT, torch.ones(2, 4, 4)]
run(torch.ones(2, 4, requires_grad=True), small, torch.tensor([0, 1, 2]))
for training in (False, True):
    for p in leaves: p.requires_grad_(training)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(torch.ones(64, H), [p.mT for p in leaves], torch.arange(0, 65, 4))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(grown - sum(p.nbytes for p in leaves) / 2**20 * training)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    forward, training = map(float, done.stdout.split())
    assert forward < 64 and training < 64


def test_transposed_weights_compile(device):
    x, weights, biases, offsets = layout_sample(device, torch.float32, (64, 96, 32), 9)
    leaves, _ = stored_as(weights, [True, True])

    def loss(first, second):
        views = [first.mT, second.mT]
        return ops.experts(x, views, biases, "swiglu", offsets=offsets).square().sum()

    expected = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    actual = torch.autograd.grad(compiled(*leaves), leaves)
    for one, other in zip(actual, expected, strict=True):
        assert one.stride() == other.stride()
        assert_same_bits(one, other)


def test_frozen_parameters_get_an_empty_gradient(device):
    x, weights, biases, offsets = layout_sample(device, torch.float32, (8, 6, 4), 40)
    learned = weights[1].requires_grad_()
    with recorded_ops() as calls:
        ops.experts(x, weights, biases, "swiglu", offsets=offsets).sum().backward()
    ((op, args),) = [(op, args) for name, op, args, _ in calls if name == "_experts_backward"]
    _, _, *found = op(*args)
    assert_same_bits(found[1], learned.grad)
    assert [gradient.shape == (0,) for gradient in found] == [True, False, True, True]


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


def test_activation_args_are_shown():
    options = dict(activation="clamped_swiglu", activation_args=(7, 1.702, 1))
    assert "clamped_swiglu[7.0, 1.702, 1.0]" in repr(FeedForwardExperts(2, 4, (6,), **options))


def test_parameters_are_stacked_and_counted():
    """d·h + h·d weights for each expert, and no biases by default."""
    module = FeedForwardExperts(5, 4, (6,))
    assert [tuple(w.shape) for w in module.weights] == [(5, 4, 6), (5, 6, 4)]
    assert sum(p.numel() for p in module.parameters()) == 5 * (4 * 6 + 6 * 4)
    gated = FeedForwardExperts(5, 4, (6,), activation="swiglu")
    assert [tuple(w.shape) for w in gated.weights] == [(5, 4, 12), (5, 6, 4)]
    assert gated.biases is None
    with_bias = FeedForwardExperts(5, 4, (6,), bias=True)
    assert [tuple(b.shape) for b in with_bias.biases] == [(5, 6), (5, 4)]
    names = [name for name, _ in with_bias.named_parameters(recurse=False)]
    assert names == ["weight_0", "weight_1", "bias_0", "bias_1"]
    assert with_bias.weights == (with_bias.weight_0, with_bias.weight_1)
    assert with_bias.biases == (with_bias.bias_0, with_bias.bias_1)


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


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def test_backward_makes_no_gradient_of_the_hidden_layers():
    x, weights = normal(6, 3).requires_grad_(), [normal(2, 3, 4), normal(2, 4, 5)]
    y = ops.experts(x, weights)
    with recorded_ops(None) as calls:
        y.sum().backward()
    assert "_experts_backward" in {name for name, *_ in calls}
    assert not {name for name, *_ in calls} & {"zeros", "new_zeros", "zeros_like"}
    # Without an incoming gradient, there is no outgoing gradient.
    other = normal(6, 3).requires_grad_()
    (_NoGradient.apply(ops.experts(other, weights)).sum() + other.sum()).backward()
    assert torch.equal(other.grad, torch.ones_like(other))


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


def test_operations_of_a_mixture_are_counted_by_its_slots():
    x, weights, inverse = normal(7, 4), [normal(3, 4, 2)], torch.arange(14).view(7, 2)
    gates = torch.rand(7, 2, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        ops.experts(x, weights, offsets=torch.tensor([0, 3, 3, 14]), inverse=inverse, gates=gates)
    assert counter.get_total_flops() == 2 * 14 * 4 * 2


def test_backward_work_does_not_grow_with_the_number_of_experts():
    """The gradient of a slice W[e] would have the full size for each expert."""
    calls = []
    for E in (2, 64):
        module = FeedForwardExperts(E, 4, (6,))
        rows = torch.randn(64, 4, requires_grad=True)
        with recorded_ops(None) as recorded:
            module(rows, offsets_of([64 // E] * E)).sum().backward()
        calls.append(len(recorded))
    assert calls[0] == calls[1]


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


def test_modules_without_any_rows(device):
    experts = ModuleExperts([torch.nn.Linear(4, 3) for _ in range(2)]).to(device)
    out = experts(torch.zeros(0, 4, device=device), offsets_of([0, 0], device))
    assert out.shape == (0, 3)
    out.sum().backward()
    assert all(torch.count_nonzero(p.grad) == 0 for p in experts.parameters())
