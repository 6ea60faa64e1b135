"""ops.experts, FeedForwardExperts and ModuleExperts (Sec. 3.2)."""

import copy
import math
import pickle

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
    poison_freed_memory,
    recorded_ops,
)
from operators import ACTIVATIONS, GATED, make_experts, make_linear, normal, offsets_of
from torch.utils.flop_counter import FlopCounterMode

from moe_ext import FeedForwardExperts, ModuleExperts, ops

pytestmark = pytest.mark.emulated

COUNTS = [[1], [3, 0, 4], [0, 0, 5, 0], [7, 1, 2, 1, 0, 6], [0, 0], [2] * 9]


def plain_linear(rows, weight, bias, counts):
    parts = [r @ w for r, w in zip(rows.split(counts), weight, strict=True)]
    if bias is not None:
        parts = [p + b for p, b in zip(parts, bias, strict=True)]
    return torch.cat(parts)


def by_reference(rows, weights, biases, counts, activation):
    """Each row through the expert whose segment it lies in."""
    out, row = [], 0
    for e, count in enumerate(counts):
        W = [w[e] for w in weights]
        b = None if biases is None else [b[e] for b in biases]
        out += [ref.E_i(x, W, b, activation) for x in rows[row : row + count]]
        row += count
    return torch.stack(out) if out else rows.new_zeros(0, weights[-1].shape[-1])


# ops.experts with a single matrix: a linear layer for each expert


def grouped_linear(rows, weight, bias, offsets):
    return ops.experts(rows, [weight], None if bias is None else [bias], offsets=offsets)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("D, F", [(1, 1), (3, 5), (17, 33)])
@pytest.mark.parametrize("bias", [False, True])
def test_grouped_linear_equals_reference(device, counts, D, F, bias):
    tensors = make_linear(counts, D, F, bias=bias)
    leaves = [x.requires_grad_() for x in tensors]
    expected = by_reference(
        leaves[0], leaves[1:2], [leaves[2]] if bias else None, counts, "identity"
    )
    moved = [x.detach().to(device).requires_grad_() for x in tensors]
    args = moved if bias else [*moved, None]
    actual = grouped_linear(*args, offsets_of(counts, device))
    assert actual.shape == (sum(counts), F) and actual.is_contiguous()
    assert_exact(actual.detach(), expected.detach())
    cotangent = torch.randn_like(expected)
    actual_grads = torch.autograd.grad(actual, moved, cotangent.to(device))
    if not sum(counts):
        assert all(torch.count_nonzero(g) == 0 for g in actual_grads)
        return
    for a, e in zip(actual_grads, gradients([expected], leaves, [cotangent]), strict=True):
        assert_exact(a, e)


@pytest.mark.parametrize("E", [1, 2, 3, 255, 256, 257, 1000, 4096])
def test_any_number_of_experts(device, E):
    """About every other expert is empty."""
    counts = torch.bincount(torch.randint(0, E, (E // 2 + 1,)), minlength=E).tolist()
    rows, weight, bias = make_linear(counts, 3, 2, device)
    owner = torch.repeat_interleave(torch.arange(E), torch.tensor(counts)).to(device)
    expected = torch.einsum("rd,rdf->rf", rows, weight[owner]) + bias[owner]
    assert_exact(grouped_linear(rows, weight, bias, offsets_of(counts, device)), expected)


@pytest.mark.parametrize("rows", [65_535, 65_536, 200_000])
def test_many_rows(device, rows):
    counts = [rows // 2, 0, rows - rows // 2]
    x, weight, bias = make_linear(counts, 2, 3, device)
    actual = grouped_linear(x, weight, bias, offsets_of(counts, device))
    assert_exact(actual, plain_linear(x, weight, bias, counts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("counts", [[5, 0, 70], [130, 17, 1]])
@pytest.mark.parametrize("D, F", [(64, 32), (33, 65)])
def test_grouped_linear_lower_precision(device, dtype, counts, D, F):
    tensors = make_linear(counts, D, F, device, dtype)
    cotangent = normal(sum(counts), F, device=device, dtype=dtype)
    results, grads = [], []
    for function, cast in (
        (lambda *a: grouped_linear(*a, offsets_of(counts, device)), lambda x: x),
        (lambda *a: plain_linear(*a, counts), lambda x: x),
        (lambda *a: plain_linear(*a, counts), lambda x: x.double()),
    ):
        leaves = [cast(x.clone()).requires_grad_() for x in tensors]
        out = function(*leaves)
        results.append(out)
        grads.append(gradients([out], leaves, [cast(cotangent)]))
    assert_as_accurate(*results)
    for three in zip(*grads, strict=True):
        assert_as_accurate(*three)


def test_grouped_linear_gradcheck(device):
    counts = [2, 0, 3]
    leaves = [x.requires_grad_() for x in make_linear(counts, 3, 2, device)]
    offsets = offsets_of(counts, device)
    assert torch.autograd.gradcheck(lambda *a: grouped_linear(*a, offsets), leaves)
    assert torch.autograd.gradcheck(lambda r, w: grouped_linear(r, w, None, offsets), leaves[:2])


def test_only_what_needs_a_gradient_gets_one(device):
    tensors, offsets = make_linear([2, 0, 3], 3, 2, device), offsets_of([2, 0, 3], device)
    for one in range(3):
        leaves = [x.clone().requires_grad_(i == one) for i, x in enumerate(tensors)]
        grouped_linear(*leaves, offsets).sum().backward()
        assert [x.grad is not None for x in leaves] == [i == one for i in range(3)]


def test_grouped_linear_any_layout(device):
    """A matrix product may add in another order for a transposed operand."""
    counts = [4, 0, 3]
    tensors, offsets = make_linear(counts, 5, 6, device), offsets_of(counts, device)
    base = [x.clone().requires_grad_() for x in tensors]
    expected = grouped_linear(*base, offsets)
    moved = [x.mT.contiguous().mT.requires_grad_() for x in tensors]
    assert not any(x.is_contiguous() for x in moved)
    actual = grouped_linear(*moved, offsets)
    assert_exact(actual.detach(), expected.detach())
    for a, e in zip(
        torch.autograd.grad(actual.sum(), moved),  # an expanded gradient
        gradients([expected], base, [torch.ones_like(expected)]),
        strict=True,
    ):
        assert_exact(a, e)
    row = tensors[0][:1].expand(7, 5)
    assert_same_bits(
        grouped_linear(row, *tensors[1:], offsets),
        grouped_linear(row.clone(), *tensors[1:], offsets),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [3, 32])
def test_empty_expert_has_zero_gradient_in_dirty_memory(device, dtype, size):
    """An uninitialised gradient shows only when freed memory is not zero: here it is NaN."""
    counts = [3, 0, 4, 0]
    tensors, offsets = make_linear(counts, size, size, device, dtype), offsets_of(counts, device)
    for _ in range(3):
        poison_freed_memory(4 * size, size * size, 4 * size * size, 7 * size, device=device)
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = grouped_linear(*leaves, offsets)
        poison_freed_memory(4 * size, size * size, 4 * size * size, 7 * size, device=device)
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        assert out.isfinite().all() and all(g.isfinite().all() for g in grads)
        for g in grads[1:]:
            assert torch.count_nonzero(g[1]) == 0 and torch.count_nonzero(g[3]) == 0
            assert torch.count_nonzero(g[0]) > 0


def test_zero_rows(device):
    tensors, offsets = make_linear([0, 0, 0], 3, 2, device), offsets_of([0, 0, 0], device)
    for _ in range(2):
        poison_freed_memory(6, 18, device=device)
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = grouped_linear(*leaves, offsets)
        assert out.shape == (0, 2)
        out.sum().backward()
        for leaf in leaves:
            assert leaf.grad.shape == leaf.shape and torch.count_nonzero(leaf.grad) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("widths", [(8, 0, 8), (8, 0), (0, 8)])
def test_layers_of_width_zero(device, dtype, widths):
    counts = [3, 0]
    x, weights, _ = make_experts(counts, widths, "relu", device, dtype)
    leaves = [tensor.requires_grad_() for tensor in (x, *weights)]
    y = ops.experts(x, weights, offsets=offsets_of(counts, device))
    assert_exact(y, torch.zeros(3, widths[-1], dtype=dtype))
    for leaf, gradient in zip(leaves, torch.autograd.grad(y.sum(), leaves), strict=True):
        assert_exact(gradient, torch.zeros_like(leaf, device="cpu"))


def test_small_gates_do_not_vanish_in_half_precision(device):
    """A loss is scaled for the range of half; gate times activation, 1e-8 here, is not in it."""
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
    """As torch's: where it is shut nothing comes through, also no infinity; NaN is seen."""
    one = torch.ones(1, 1, device=device)
    weight = torch.full((1, 1), z, device=device, requires_grad=True)
    upstream = torch.tensor([[upstream]], device=device)
    y = ops.experts(one, [weight[None], one[None]], offsets=offsets_of([1], device))
    (actual,) = torch.autograd.grad(y, weight, upstream)
    (expected,) = torch.autograd.grad((one @ weight).relu(), weight, upstream)
    torch.testing.assert_close(actual, expected, equal_nan=True, rtol=0, atol=0)


def test_unused_expert_with_nan_weights_poisons_nothing(device):
    counts = [3, 0, 4]
    tensors, offsets = make_linear(counts, 4, 5, device), offsets_of(counts, device)
    results = []
    for spoil in (False, True):
        leaves = [x.clone() for x in tensors]
        if spoil:
            leaves[1][1], leaves[2][1] = math.nan, math.inf
        leaves = [x.requires_grad_() for x in leaves]
        out = grouped_linear(*leaves, offsets)
        results.append([out, *torch.autograd.grad(out.pow(2).sum(), leaves)])
    for clean, spoilt in zip(*results, strict=True):
        assert_same_bits(spoilt, clean)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_nan_row_stays_in_its_row(device, dtype):
    """The rows of an expert are independent, and so are the experts' weight gradients."""
    counts = [20, 0, 4]
    rows, weight, bias = make_linear(counts, 24, 40, device, dtype)
    offsets = offsets_of(counts, device)
    clean = grouped_linear(rows, weight, bias, offsets)
    rows[5] = math.nan
    weight.requires_grad_()
    spoilt = grouped_linear(rows, weight, bias, offsets)
    assert spoilt[5].isnan().all()
    rest = torch.arange(24, device=device) != 5
    assert_same_bits(spoilt[rest], clean[rest])
    (gradient,) = torch.autograd.grad(spoilt, weight, torch.ones_like(spoilt))
    assert gradient[0].isnan().all() and gradient[1:].isfinite().all()


@pytest.mark.parametrize("counts", [[3, 0, 4], [0, 0]])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_linear_opcheck(device, counts, bias, transposed):
    tensors, offsets = make_linear(counts, 3, 2, device, torch.float32), offsets_of(counts, device)
    if transposed:
        tensors = [x.mT.contiguous().mT for x in tensors]

    def function():
        leaves = [x.detach().requires_grad_() for x in tensors]
        args = leaves if bias else [*leaves[:2], None]
        grouped_linear(*args, offsets).sum().backward()

    opcheck_all(function, {"experts", "_experts_backward"})


def test_grouped_linear_second_derivative_is_refused(device):
    offsets = offsets_of([2, 0, 3], device)
    assert_second_derivative_refused(
        lambda *a: grouped_linear(*a, offsets),
        tuple(x.requires_grad_() for x in make_linear([2, 0, 3], 3, 2, device)),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_linear_deterministic(threads, dtype):
    counts = [200, 0, 1, 300, 37]
    tensors, offsets = make_linear(counts, 48, 80, dtype=dtype), offsets_of(counts)
    cotangent = normal(sum(counts), 80, dtype=dtype)

    def function():
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = grouped_linear(*leaves, offsets)
        return out, *torch.autograd.grad(out, leaves, cotangent)

    assert_deterministic(function, threads)


# ops.experts with hidden layers


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("counts", [[3, 0, 4], [0, 0]])
@pytest.mark.parametrize("bias", [False, True])
def test_experts_equal_reference(device, activation, counts, bias):
    rows, weights, biases = make_experts(counts, (4, 6, 3), activation)
    leaves = [x.requires_grad_() for x in (rows, *weights, *biases)]
    expected = by_reference(rows, weights, biases if bias else None, counts, activation)
    moved = [x.detach().to(device).requires_grad_() for x in leaves]
    n = len(weights)
    actual = ops.experts(
        moved[0],
        moved[1 : 1 + n],
        moved[1 + n :] if bias else None,
        activation,
        offsets=offsets_of(counts, device),
    )
    assert_exact(actual.detach(), expected.detach())
    if sum(counts):
        cotangent = torch.randn_like(expected)
        for a, e in zip(
            gradients([actual], moved, [cotangent.to(device)]),
            gradients([expected], leaves, [cotangent]),
            strict=True,
        ):
            assert_exact(a, e)


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
@pytest.mark.parametrize("widths", [(4, 3), (4, 6, 5, 3)])
def test_depth(device, activation, widths):
    """A single matrix, which is linear, and two hidden layers."""
    rows, weights, biases = make_experts([3, 0, 4], widths, activation, device)
    actual = ops.experts(rows, weights, biases, activation, offsets=offsets_of([3, 0, 4], device))
    expected = by_reference(
        rows.cpu(), [w.cpu() for w in weights], [b.cpu() for b in biases], [3, 0, 4], activation
    )
    assert_exact(actual, expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_lower_precision(device, activation, dtype):
    counts = [30, 0, 40]
    rows, weights, biases = make_experts(counts, (16, 24, 8), activation, device, dtype)

    def plain(rows, w1, w2, b1, b2):
        h = plain_linear(rows, w1, b1, counts)
        if activation in GATED:
            a, b = h.chunk(2, -1)
            h = getattr(torch.nn.functional, GATED[activation])(a) * b
        elif activation != "identity":
            h = getattr(torch.nn.functional, activation)(h)
        return plain_linear(h, w2, b2, counts)

    def tested(rows, w1, w2, b1, b2):
        return ops.experts(rows, [w1, w2], [b1, b2], activation, offsets=offsets_of(counts, device))

    results, grads = [], []
    cotangent = normal(70, 8, device=device, dtype=dtype)
    for function, cast in (
        (tested, lambda x: x),
        (plain, lambda x: x),
        (plain, lambda x: x.double()),
    ):
        leaves = [cast(x.clone()).requires_grad_() for x in (rows, *weights, *biases)]
        out = function(*leaves)
        results.append(out)
        grads.append(gradients([out], leaves, [cast(cotangent)]))
    assert_as_accurate(*results)
    for three in zip(*grads, strict=True):
        assert_as_accurate(*three)


# FeedForwardExperts


@pytest.mark.parametrize("hidden_sizes", [(), (6,), (6, 5)])
@pytest.mark.parametrize("activation", ["relu", "geglu"])
@pytest.mark.parametrize("bias", [False, True])
def test_feed_forward_experts_equal_reference(device, hidden_sizes, activation, bias):
    counts = [3, 0, 4]
    module = FeedForwardExperts(
        3, 4, hidden_sizes, activation=activation, bias=bias, d_output=2
    ).double()
    if bias:
        for b in module.biases:
            torch.nn.init.normal_(b)
    module.to(device)
    rows = normal(7, 4, device=device, dtype=torch.float64)
    actual = module(rows, offsets_of(counts, device))
    assert actual.shape == (7, 2)
    weights = [w.detach().cpu() for w in module.weights]
    assert len(weights) == len(hidden_sizes) + 1
    biases = [b.detach().cpu() for b in module.biases] if bias else None
    expected = by_reference(rows.cpu(), weights, biases, counts, activation)
    assert_exact(actual.detach(), expected)


def test_parameters_are_stacked_and_counted():
    """d·h + h·d weights per expert and no biases unless asked for."""
    module = FeedForwardExperts(5, 4, (6,))
    assert [tuple(w.shape) for w in module.weights] == [(5, 4, 6), (5, 6, 4)]
    assert sum(p.numel() for p in module.parameters()) == 5 * (4 * 6 + 6 * 4)
    gated = FeedForwardExperts(5, 4, (6,), activation="swiglu")
    assert [tuple(w.shape) for w in gated.weights] == [(5, 4, 12), (5, 6, 4)]
    with_bias = FeedForwardExperts(5, 4, (6,), bias=True)
    assert [tuple(b.shape) for b in with_bias.biases] == [(5, 6), (5, 4)]


def test_initial_scale():
    """Variance 1 / fan_in: the outputs of a deep linear stack neither vanish nor grow. 4 sigma of
    the sample variance of 2^16 weights is below 3% even for a normal distribution."""
    module = FeedForwardExperts(4, 256, (64,))
    for weight, fan_in in zip(module.weights, (256, 64), strict=True):
        assert float(weight.var() * fan_in) == pytest.approx(1, abs=0.03)
        assert float(weight.mean().abs()) < 0.0025  # 5 sigma
    first = module.weights[0]
    assert not torch.equal(first[0], first[1])  # experts start different


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
    # Where none comes, none goes on.
    other = normal(6, 3).requires_grad_()
    (_NoGradient.apply(ops.experts(other, weights)).sum() + other.sum()).backward()
    assert torch.equal(other.grad, torch.ones_like(other))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("learned", [(True, True), (True, False), (False, True)])
def test_operations_are_counted(learned, recompute):
    """As many as of torch's own products, and of the hidden layer's again."""
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
    """Differentiating one slice W[e] per expert would fill a full-sized gradient for each."""
    calls = []
    for E in (2, 64):
        module = FeedForwardExperts(E, 4, (6,))
        rows = torch.randn(64, 4, requires_grad=True)
        with recorded_ops(None) as recorded:
            module(rows, offsets_of([64 // E] * E)).sum().backward()
        calls.append(len(recorded))
    assert calls[0] == calls[1]


def test_copies_pickles_and_states(device):
    module = FeedForwardExperts(3, 4, (6,), bias=True).to(device)
    rows, offsets = normal(7, 4, device=device, dtype=torch.float32), offsets_of([3, 0, 4], device)
    keys = list(module.state_dict())
    expected = module(rows, offsets)
    expected.sum().backward()
    assert list(module.state_dict()) == keys
    fresh = FeedForwardExperts(3, 4, (6,), bias=True).to(device)
    fresh.load_state_dict(module.state_dict())
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), fresh):
        assert_same_bits(twin(rows, offsets), expected)


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
    for p in modules[1].parameters():  # no rows: a zero gradient, not a missing one
        assert p.grad is not None and torch.count_nonzero(p.grad) == 0


def test_modules_agree_with_stacked_weights(device):
    stacked = FeedForwardExperts(3, 4, (6,), bias=True).double().to(device)
    modules = []
    for e in range(3):
        first, second = torch.nn.Linear(4, 6), torch.nn.Linear(6, 4)
        for linear, i in ((first, 0), (second, 1)):
            linear.weight = torch.nn.Parameter(stacked.weights[i][e].detach().t().clone())
            linear.bias = torch.nn.Parameter(stacked.biases[i][e].detach().clone())
        modules.append(torch.nn.Sequential(first, torch.nn.ReLU(), second))
    rows, offsets = normal(9, 4, device=device), offsets_of([5, 0, 4], device)
    assert_exact(
        ModuleExperts(modules).to(device)(rows, offsets).detach(), stacked(rows, offsets).detach()
    )


def test_modules_without_any_rows(device):
    experts = ModuleExperts([torch.nn.Linear(4, 3) for _ in range(2)]).to(device)
    out = experts(torch.zeros(0, 4, device=device), offsets_of([0, 0], device))
    assert out.shape == (0, 3)
    out.sum().backward()
    assert all(torch.count_nonzero(p.grad) == 0 for p in experts.parameters())
