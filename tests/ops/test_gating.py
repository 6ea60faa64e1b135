"""ops.noisy_topk_gating: H, KeepTopK and G (Eq. 3-5), App. A's thresholds, and their gradients."""

import math

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
SHAPES = [  # T, E, k
    (1, 1, 1),
    (3, 2, 1),
    (3, 2, 2),
    (7, 8, 1),
    (7, 8, 2),
    (7, 8, 7),
    (7, 8, 8),
    (64, 5, 3),
    (0, 4, 2),
]


def make(T, E, device="cpu", dtype=torch.float64):
    clean, raw, noise = torch.randn(3, T, E, dtype=torch.float64).to(dtype).to(device)
    return clean, raw, noise


def by_reference(clean, raw, noise, k, nu=NU):
    """The op's five outputs from the equations, for float64 CPU tensors."""
    T, E = clean.shape
    if raw is None:
        H_X, stddev = clean, clean.new_empty(0, E)
    else:
        H_X = clean.new_empty(0, E)
        if T:
            H_X = torch.stack([ref.H(*row, nu) for row in zip(clean, raw, noise, strict=True)])
        stddev = ref.Softplus(raw) + nu
    index = torch.tensor([ref.top_k(h, k) for h in H_X], dtype=torch.int64).reshape(T, k)
    gates, threshold, threshold_index = [], [], []
    for h, chosen in zip(H_X, index, strict=True):
        order = ref.top_k(h, E)
        gates.append(ref.G(h, k)[chosen])
        out, member = order[k - 1], order[0]
        # what an outsider and what a member must exceed: kth_excluding of any of each kind
        above = ref.kth_excluding(h, k, order[-1]) if k < E else h[out]
        threshold.append(torch.stack([above, ref.kth_excluding(h, k, member)]))
        threshold_index.append([out, order[k] if k < E else -1])
    empty = clean.new_empty
    return (
        torch.stack(gates) if T else empty(0, k),
        index,
        torch.stack(threshold) if T else empty(0, 2),
        torch.tensor(threshold_index, dtype=torch.int64).reshape(T, 2),
        stddev,
    )


def plain(clean, raw, noise, k, nu=NU):
    """The differentiable outputs in plain torch, at the precision of the arguments."""
    stddev = torch.logaddexp(raw, torch.zeros_like(raw)) + nu
    top = (clean + noise * stddev).topk(k + 1).values
    return torch.softmax(top[:, :k], -1), top[:, k - 1 :], stddev


def assert_gating(actual, expected):
    assert actual.expert_index.dtype == actual.threshold_index.dtype == torch.int64
    assert_same_bits(actual.expert_index, expected[1])
    assert_same_bits(actual.threshold_index, expected[3])
    assert_exact(actual.gates, expected[0])
    assert_exact(actual.threshold, expected[2])
    assert_exact(actual.noise_stddev, expected[4])


@pytest.mark.parametrize("T, E, k", SHAPES)
def test_equals_reference(device, T, E, k):
    clean, raw, noise = make(T, E)
    actual = ops.noisy_topk_gating(clean.to(device), raw.to(device), noise.to(device), k)
    assert_gating(actual, by_reference(clean, raw, noise, k))
    assert all(x.device.type == device for x in actual)


@pytest.mark.parametrize("T, E, k", SHAPES)
def test_equals_reference_without_noise(device, T, E, k):
    clean, _, _ = make(T, E)
    actual = ops.noisy_topk_gating(clean.to(device), None, None, k)
    assert actual.noise_stddev.shape == (0, E)
    assert_gating(actual, by_reference(clean, None, None, k))


@pytest.mark.parametrize("nu", [0.0, 0.3])
def test_noise_epsilon(device, nu):
    clean, raw, noise = make(5, 6)
    raw[0] = -800.0  # Softplus underflows: the floor is all that is left
    actual = ops.noisy_topk_gating(*(x.to(device) for x in (clean, raw, noise)), 2, nu)
    assert_gating(actual, by_reference(clean, raw, noise, 2, nu))
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("E, k", [(8, 1), (8, 2), (64, 17)])
def test_lower_precision(device, dtype, E, k):
    """Half-precision logits are exact in float32, so float32's accuracy is asked of the outputs;
    gradients come back rounded to the input's type."""
    inputs = make(200, E, device, dtype)
    exact_inputs = [x.double() for x in inputs]
    plain_inputs = [x.float() for x in inputs]
    cotangents = [torch.randn(200, n, device=device) for n in (k, 2, E)]
    results, grads = [], []
    for fn, args in ((None, inputs), (plain, plain_inputs), (plain, exact_inputs)):
        leaves = [x.clone().requires_grad_() for x in args[:2]]
        if fn is None:
            out = ops.noisy_topk_gating(*leaves, args[2], k)
            assert_same_bits(
                out.expert_index,
                plain_top_k(exact_inputs, k),
            )
            outputs = out.gates, out.threshold, out.noise_stddev
            assert all(o.dtype == torch.float32 for o in outputs)
        else:
            outputs = fn(*leaves, args[2], k)
        results.append(outputs)
        grads.append(gradients(outputs, leaves, [c.to(outputs[0].dtype) for c in cotangents]))
    for actual, at_float32, exact in zip(*results, strict=True):
        assert_as_accurate(actual, at_float32, exact)
    for actual, at_float32, exact in zip(*grads, strict=True):
        assert actual.dtype == dtype
        assert_as_accurate(actual, at_float32.to(dtype), exact)


def plain_top_k(exact_inputs, k):
    clean, raw, noise = exact_inputs
    return (clean + noise * (torch.logaddexp(raw, torch.zeros_like(raw)) + NU)).topk(k).indices


def test_float64_stays_float64(device):
    outputs = ops.noisy_topk_gating(*make(3, 4, device), 2)
    assert all(outputs[i].dtype == torch.float64 for i in (0, 2, 4))


@pytest.mark.parametrize("T, E, k", [(5, 6, 1), (5, 6, 2), (5, 6, 5), (3, 2, 1)])
def test_gradcheck(device, T, E, k):
    clean, raw, noise = make(T, E, device)

    def function(clean, raw):
        out = ops.noisy_topk_gating(clean, raw, noise, k)
        return out.gates, out.threshold, out.noise_stddev

    clean.requires_grad_()
    raw.requires_grad_()
    assert torch.autograd.gradcheck(function, (clean, raw))
    assert torch.autograd.gradcheck(
        lambda c: ops.noisy_topk_gating(c, None, None, k)[0:3:2], (clean,)
    )


@pytest.mark.parametrize("T, E, k", SHAPES)
def test_gradients_equal_reference(device, T, E, k):
    clean, raw, noise = make(T, E)
    cotangents = [torch.randn(T, n, dtype=torch.float64) for n in (k, 2, E)]
    expected_leaves = [x.clone().requires_grad_() for x in (clean, raw)]
    expected = by_reference(*expected_leaves, noise, k)
    leaves = [x.to(device).requires_grad_() for x in (clean, raw)]
    actual = ops.noisy_topk_gating(*leaves, noise.to(device), k)
    if T:
        expected = gradients([expected[i] for i in (0, 2, 4)], expected_leaves, cotangents)
    else:
        expected = [torch.zeros(0, E, dtype=torch.float64)] * 2
    actual = gradients(
        [actual.gates, actual.threshold, actual.noise_stddev],
        leaves,
        [c.to(device) for c in cotangents],
    )
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == (T, E)
        assert_exact(a, e)


@pytest.mark.parametrize("output", ["gates", "threshold", "noise_stddev"])
def test_gradient_of_each_output_alone(device, output):
    """The other outputs' gradients are then undefined, not zeros."""
    clean, raw, noise = make(5, 6)
    leaves = [x.to(device).requires_grad_() for x in (clean, raw)]
    actual = getattr(ops.noisy_topk_gating(*leaves, noise.to(device), 3), output)
    expected_leaves = [x.clone().requires_grad_() for x in (clean, raw)]
    position = {"gates": 0, "threshold": 2, "noise_stddev": 4}[output]
    expected = by_reference(*expected_leaves, noise, 3)[position]
    cotangent = torch.randn(actual.shape, dtype=torch.float64)
    for a, e in zip(
        gradients([actual], leaves, [cotangent.to(device)]),
        gradients([expected], expected_leaves, [cotangent]),
        strict=True,
    ):
        assert_exact(a, e)


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


def test_only_what_needs_a_gradient_gets_one(device):
    clean, raw, noise = make(4, 5, device)
    for needs in ((True, False), (False, True)):
        leaves = [x.clone().requires_grad_(r) for x, r in zip((clean, raw), needs, strict=True)]
        out = ops.noisy_topk_gating(*leaves, noise, 2)
        (out.gates.pow(2).sum() + out.threshold.sum()).backward()
        assert [x.grad is not None for x in leaves] == list(needs)


def test_indices_are_not_differentiable(device):
    out = ops.noisy_topk_gating(make(4, 5, device)[0].requires_grad_(), None, None, 2)
    assert out.gates.requires_grad and out.threshold.requires_grad
    assert not out.expert_index.requires_grad and not out.threshold_index.requires_grad


def test_k_equal_to_n_has_finite_gradients(device):
    clean, raw, noise = (x.requires_grad_(i < 2) for i, x in enumerate(make(4, 5, device)))
    out = ops.noisy_topk_gating(clean, raw, noise, 5)
    (out.gates.pow(2).sum() + out.threshold[:, 0].sum()).backward()
    assert clean.grad.isfinite().all() and raw.grad.isfinite().all()


def test_any_layout(device):
    """Transposed, strided and expanded inputs, and an expanded gradient."""
    clean, raw, noise = make(6, 8, device)
    base = [x.clone().requires_grad_() for x in (clean, raw)]
    expected = ops.noisy_topk_gating(*base, noise, 3)
    expected_grads = gradients(
        [expected.gates, expected.threshold],
        base,
        [torch.ones_like(expected.gates)] + [torch.ones_like(expected.threshold)],
    )
    strided = torch.stack([noise, noise], -1)[..., 0]
    leaves = [x.t().contiguous().t().requires_grad_() for x in (clean, raw)]
    assert not leaves[0].is_contiguous() and not strided.is_contiguous()
    actual = ops.noisy_topk_gating(*leaves, strided, 3)
    for a, e in zip(actual, expected, strict=True):
        assert a.is_contiguous()
        assert_same_bits(a, e)
    for a, e in zip(
        torch.autograd.grad(actual.gates.sum() + actual.threshold.sum(), leaves),
        expected_grads,
        strict=True,
    ):
        assert_same_bits(a, e)
    row = clean[:1].expand(6, 8)
    for a, e in zip(
        ops.noisy_topk_gating(row, row, row, 3),
        ops.noisy_topk_gating(row.clone(), row.clone(), row.clone(), 3),
        strict=True,
    ):
        assert_same_bits(a, e)


def test_does_not_change_its_inputs(device):
    inputs = make(6, 8, device)
    copies = [x.clone() for x in inputs]
    ops.noisy_topk_gating(*inputs, 3)
    for x, copy in zip(inputs, copies, strict=True):
        assert_same_bits(x, copy)


@pytest.mark.parametrize("T, E, k", [(5, 6, 2), (5, 6, 6), (0, 4, 2)])
@pytest.mark.parametrize("noisy", [True, False])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_opcheck(device, T, E, k, noisy, layout):
    clean, raw, noise = make(T, E, device, torch.float32)
    if layout == "transposed":
        clean = clean.t().contiguous().t()

    def function():
        leaves = clean.clone().requires_grad_(), raw.clone().requires_grad_()
        if noisy:
            out = ops.noisy_topk_gating(*leaves, noise, k)
        else:
            out = ops.noisy_topk_gating(leaves[0], None, None, k)
        (out.gates.sum() + out.threshold[:, 0].sum() + out.noise_stddev.sum()).backward()

    opcheck_all(function, {"noisy_topk_gating", "_noisy_topk_gating_backward"})


def test_second_derivative_is_refused(device):
    clean, raw, noise = make(4, 5, device)
    assert_second_derivative_refused(
        lambda c, r: ops.noisy_topk_gating(c, r, noise, 2).gates,
        (clean.requires_grad_(), raw.requires_grad_()),
    )


def test_deterministic(threads):
    clean, raw, noise = make(1000, 64, dtype=torch.float32)
    cotangent = torch.randn(1000, 4)

    def function():
        leaves = clean.clone().requires_grad_(), raw.clone().requires_grad_()
        out = ops.noisy_topk_gating(*leaves, noise, 4)
        loss = (out.gates * cotangent).sum() + out.threshold.sum() + out.noise_stddev.sum()
        return *out, *torch.autograd.grad(loss, leaves)

    assert_deterministic(function, threads)


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
