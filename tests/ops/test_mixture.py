"""ops.experts with the tokens' routing: gather, experts and gated sum (Eq. 1) as one operator."""

import pytest
import reference as ref
import torch
from assertions import (
    assert_as_accurate,
    assert_deterministic,
    assert_exact,
    assert_same_bits,
    assert_same_products,
    assert_second_derivative_refused,
    gradients,
    opcheck_all,
    poison_freed_memory,
)
from operators import ACTIVATIONS, make_experts, normal
from torch.utils.checkpoint import checkpoint

from moe_ext import FeedForwardExperts, MoE, ops

pytestmark = pytest.mark.emulated

# The experts of each token, in the order of its slots.
ROUTES = {
    "two each": [[0, 2], [4, 0], [2, 1], [1, 0], [0, 4]],
    "any number": [[2], [], [0, 4, 1], [0], [4, 2], []],
    "nobody": [[], [], []],
    "no token": [],
}
E = 5


class Routing:
    """Routes as `ops.experts` takes them; [T, K] where every token has as many slots."""

    def __init__(self, routes, num_experts=E, device="cpu", ragged=True):
        self.routes = routes
        index = torch.tensor([e for route in routes for e in route], dtype=torch.int64)
        offsets = torch.tensor([0, *map(len, routes)]).cumsum(0)
        self.token_offsets = offsets.to(device) if ragged else None
        self.index = (index if ragged else index.view(len(routes), -1)).to(device)
        self.plan = ops.dispatch_plan(self.index, num_experts)
        self.gates = torch.rand(self.index.shape, dtype=torch.float64).to(device)

    def arguments(self):
        return dict(
            offsets=self.plan.offsets, inverse=self.plan.inverse, token_offsets=self.token_offsets
        )


def mixture(x, gates, weights, biases, activation, routing, **options):
    arguments = routing.arguments() | options
    return ops.experts(x, weights, biases, activation, gates=gates, **arguments)


def composed(x, gates, weights, biases, activation, routing):
    """The same by three operators."""
    rows = ops.dispatch(x, routing.plan.inverse, routing.token_offsets)
    out = ops.experts(rows, weights, biases, activation, offsets=routing.plan.offsets)
    return ops.combine(out, gates, routing.plan.inverse, routing.token_offsets)


def by_reference(x, gates, weights, biases, activation, routing):
    y, slot = [], 0
    gates = gates.reshape(-1)
    for x_t, route in zip(x, routing.routes, strict=True):
        total = x.new_zeros(weights[-1].shape[-1])
        for e in route:
            W, b = [w[e] for w in weights], biases and [b[e] for b in biases]
            total = total + gates[slot] * ref.E_i(x_t, W, b, activation)
            slot += 1
        y.append(total)
    return torch.stack(y) if y else x.new_zeros(0, weights[-1].shape[-1])


def make(routing, widths, activation, bias=False, dtype=torch.float64, device="cpu"):
    """x, gates, weights, biases"""
    _, weights, biases = make_experts([0] * E, widths, activation, device, dtype)
    x = normal(len(routing.routes), widths[0], device=device, dtype=dtype)
    gates = routing.gates.clone().to(torch.promote_types(dtype, torch.float32))
    return x, gates, weights, biases if bias else None


def leaves_of(x, gates, weights, biases):
    return [t.detach().clone().requires_grad_() for t in (x, gates, *weights, *(biases or []))]


def regroup(leaves, num_layers):
    x, gates, *rest = leaves
    return x, gates, rest[:num_layers], rest[num_layers:] or None


@pytest.mark.equation("Eq. 1", "App. D")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("widths", [(4, 3), (4, 6, 3), (4, 6, 5, 3)])
def test_equals_reference(device, route, activation, bias, widths):
    """Output and every gradient, kept hidden layers and recomputed ones; these to the same bits."""
    routing = Routing(ROUTES[route], device=device)
    inputs = make(routing, widths, activation, bias, device=device)
    num_layers = len(widths) - 1
    reference = leaves_of(*inputs)
    expected = by_reference(*regroup(reference, num_layers), activation, routing)
    cotangent = normal(*expected.shape, device=device)
    expected_grads = gradients([expected], reference, [cotangent]) if expected.requires_grad else []
    kept = None
    for recompute in (False, True):
        leaves = leaves_of(*inputs)
        y = mixture(*regroup(leaves, num_layers), activation, routing, recompute=recompute)
        assert_exact(y.detach(), expected.detach())
        grads = torch.autograd.grad(y, leaves, cotangent)
        for actual, wanted in zip(grads, expected_grads, strict=False):
            assert_exact(actual, wanted)
        if not expected_grads:
            assert all(torch.count_nonzero(grad) == 0 for grad in grads)
        for actual, wanted in zip([y, *grads], kept or [y, *grads], strict=True):
            assert_same_bits(actual, wanted)
        kept = [y, *grads]


def test_equal_numbers_of_slots_need_no_offsets(device):
    ragged, even = (Routing(ROUTES["two each"], device=device, ragged=r) for r in (True, False))
    inputs = make(ragged, (4, 6, 3), "relu", device=device)
    results = []
    for routing in (ragged, even):
        leaves = leaves_of(*inputs)
        gates = leaves[1].view(routing.index.shape)
        y = mixture(leaves[0], gates, leaves[2:], None, "relu", routing)
        results.append([y, *torch.autograd.grad(y, leaves, torch.cos(y).detach())])
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("rows_each", [0, 3])
def test_equal_numbers_of_rows_need_no_offsets(device, rows_each):
    """As strictly balanced gates have them: the same result, and the counts are not read."""
    routes = [[] for _ in range(4)]
    for e in range(E):
        for t in torch.randperm(4)[:rows_each].tolist():
            routes[t].append(e)
    routing = Routing(routes, device=device)
    inputs = make(routing, (4, 6, 3), "gelu", True, device=device)
    results = []
    for offsets in (routing.plan.offsets, None):
        leaves = leaves_of(*inputs)
        y = mixture(*regroup(leaves, 2), "gelu", routing, offsets=offsets)
        results.append([y, *torch.autograd.grad(y, leaves, torch.cos(y).detach())])
    for a, b in zip(*results, strict=True):
        assert_same_products(a, b)


@pytest.mark.parametrize("route", ["two each", "any number"])
def test_without_gates_the_rows_come_out(device, route):
    routing = Routing(ROUTES[route], device=device)
    inputs = make(routing, (4, 6, 3), "silu", True, device=device)
    results = []
    for function in (
        lambda x, w, b: mixture(x, None, w, b, "silu", routing),
        lambda x, w, b: ops.experts(
            ops.dispatch(x, routing.plan.inverse, routing.token_offsets),
            w,
            b,
            "silu",
            offsets=routing.plan.offsets,
        ),
    ):
        leaves = leaves_of(*inputs)
        x, _, weights, biases = regroup(leaves, 2)
        rows = function(x, weights, biases)
        assert rows.shape == (routing.index.numel(), 3)
        results.append([rows, *gradients([rows], leaves, [torch.cos(rows).detach()])])
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


def long_routing(num_rows, device="cpu"):
    """Two experts with more rows than a block has, one with few, two with none."""
    routes = [[0, 3] if t % 2 else [3] for t in range(num_rows)]
    routes[5] = [3, 1]
    return Routing(routes, device=device)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_experts_with_many_rows(device, dtype, bias):
    """The gradients of their weights are sums over several blocks of them."""
    routing = long_routing(2600, device)
    inputs = make(routing, (8, 12, 4), "relu", bias, dtype, device)

    def plain(x, gates, weights, biases):
        owner = torch.repeat_interleave(
            torch.arange(E, device=device), routing.plan.tokens_per_expert
        )
        rows = ops.dispatch(x, routing.plan.inverse, routing.token_offsets)
        for layer, weight in enumerate(weights):
            rows = torch.relu(rows) if layer else rows
            parts = []
            for e in range(E):
                part = rows[owner == e] @ weight[e]
                parts.append(part if biases is None else part + biases[layer][e])
            rows = torch.cat(parts)
        slots = rows[routing.plan.inverse].to(gates.dtype) * gates[:, None]
        token = torch.repeat_interleave(
            torch.arange(len(x), device=device), routing.token_offsets.diff()
        )
        y = slots.new_zeros(len(x), slots.shape[1]).index_add(0, token, slots)
        return y.to(x.dtype)

    results, grads = [], []
    cotangent = normal(2600, 4, device=device, dtype=dtype)
    for function, cast in (
        (lambda *a: mixture(*a, "relu", routing), lambda t: t),
        (plain, lambda t: t),
        (plain, lambda t: t.double()),
    ):
        leaves = [cast(t).detach().requires_grad_() for t in leaves_of(*inputs)]
        y = function(*regroup(leaves, 2))
        results.append(y)
        grads.append(torch.autograd.grad(y, leaves, cast(cotangent)))
    for actual, at_this_precision, exact in [results, *zip(*grads, strict=True)]:
        if dtype == torch.float64:
            assert_exact(actual.detach(), exact.detach())
        else:
            assert_as_accurate(actual, at_this_precision, exact)


LEARNED = ["x", "gates", "parameters", "x gates", "x parameters", "gates parameters"]


def leaves_with(learned, inputs):
    """The leaves, of which those not learned are frozen."""
    leaves = leaves_of(*inputs)
    kinds = ["x", "gates", *["parameters"] * (len(leaves) - 2)]
    for leaf, kind in zip(leaves, kinds, strict=True):
        leaf.requires_grad_(kind in learned.split())
    return leaves


@pytest.mark.parametrize("learned", LEARNED)
@pytest.mark.parametrize("widths", [(4, 3), (4, 6, 5, 3)])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_inputs(device, learned, widths, recompute, dtype):
    """What is learned gets the same gradients, and what is frozen none."""
    routing = long_routing(1500, device)
    inputs = make(routing, widths, "gelu", True, dtype, device)
    cotangent = normal(1500, widths[-1], device=device, dtype=dtype)
    found = {}
    for each in ("x gates parameters", learned):
        leaves = leaves_with(each, inputs)
        num_layers = len(widths) - 1
        y = mixture(*regroup(leaves, num_layers), "gelu", routing, recompute=recompute)
        y.backward(cotangent)
        found[each] = [leaf.grad for leaf in leaves]
        assert [g is not None for g in found[each]] == [leaf.requires_grad for leaf in leaves]
    for grad, of_all in zip(found[learned], found["x gates parameters"], strict=True):
        if grad is not None:
            assert_same_bits(grad, of_all)


@pytest.mark.parametrize("learned", LEARNED)
def test_frozen_inputs_opcheck(device, learned):
    routing = Routing(ROUTES["any number"], device=device)
    inputs = make(routing, (4, 6, 3), "reglu", True, torch.float32, device)

    def function():
        leaves = leaves_with(learned, inputs)
        mixture(*regroup(leaves, 2), "reglu", routing).sum().backward()

    opcheck_all(function, {"experts", "_experts_backward"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic(threads, dtype):
    routing = long_routing(2600)
    inputs = make(routing, (24, 40, 16), "relu", True, dtype)
    cotangent = normal(2600, 16, dtype=dtype)

    def function():
        leaves = leaves_of(*inputs)
        y = mixture(*regroup(leaves, 2), "relu", routing)
        return y, *torch.autograd.grad(y, leaves, cotangent)

    assert_deterministic(function, threads, runs=5)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activation", ["tanh", "swiglu"])
def test_gradcheck(device, recompute, activation):
    routing = Routing(ROUTES["any number"], device=device)
    leaves = leaves_of(*make(routing, (3, 4, 2), activation, True, device=device))
    assert torch.autograd.gradcheck(
        lambda *a: mixture(*regroup(a, 2), activation, routing, recompute=recompute), leaves
    )


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_opcheck(device, route, recompute, gated):
    routing = Routing(ROUTES[route], device=device)
    inputs = make(routing, (4, 6, 3), "reglu", True, torch.float32, device)

    def function():
        x, gates, weights, biases = regroup(leaves_of(*inputs), 2)
        gates = gates if gated else None
        mixture(x, gates, weights, biases, "reglu", routing, recompute=recompute).sum().backward()

    opcheck_all(function, {"experts", "_experts_backward"})


def test_second_derivative_is_refused(device):
    routing = Routing(ROUTES["any number"], device=device)
    leaves = leaves_of(*make(routing, (3, 4, 2), "tanh", device=device))
    assert_second_derivative_refused(
        lambda *a: mixture(*regroup(a, 2), "tanh", routing), tuple(leaves)
    )


def test_nothing_is_left_uninitialised(device):
    """Unused experts and tokens without experts: exact zeros, in memory that held NaN."""
    routing = Routing([[0], [], [0, 2]], device=device)
    inputs = make(routing, (16, 32, 16), "relu", True, torch.float32, device)
    for recompute in (False, True):
        sizes = [16, 32, 3 * 16, 3 * 32, E * 16, E * 32, E * 16 * 32]
        poison_freed_memory(*sizes, device=device)
        leaves = leaves_of(*inputs)
        y = mixture(*regroup(leaves, 2), "relu", routing, recompute=recompute)
        poison_freed_memory(*sizes, device=device)
        grads = torch.autograd.grad(y, leaves, torch.ones_like(y))
        assert y.isfinite().all() and all(grad.isfinite().all() for grad in grads)
        assert torch.count_nonzero(y[1]) == 0 and torch.count_nonzero(grads[0][1]) == 0
        for grad in grads[2:]:
            assert torch.count_nonzero(grad[[1, 3, 4]]) == 0
            assert torch.count_nonzero(grad[0]) > 0


def saved_bytes(function, excluded):
    """What autograd keeps for the backward pass, beside the given tensors."""
    kept = {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        function().sum().backward()
    for tensor in excluded:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(kept.values())


@pytest.mark.equation("App. D")
@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_what_is_kept_for_the_backward_pass(device, activation):
    """x, gates and indices; and the hidden layers before their activation unless recomputed."""
    T, K, D, F = 40, 2, 8, 64
    index = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
    routing = Routing(index.tolist(), device=device, ragged=False)
    inputs = make(routing, (D, F, D), activation, dtype=torch.float32, device=device)
    columns = F * (2 if activation == "swiglu" else 1)
    for recompute, hidden in ((False, T * K * columns * 4), (True, 0)):
        leaves = leaves_of(*inputs)
        kept = saved_bytes(
            lambda leaves=leaves, recompute=recompute: mixture(
                *regroup(leaves, 2), activation, routing, recompute=recompute
            ),
            leaves[2:],
        )
        assert kept == T * D * 4 + T * K * (4 + 8) + (E + 1) * 8 + hidden


@pytest.mark.equation("App. D")
@pytest.mark.parametrize("own", [False, True])
def test_layer_that_recomputes(device, own):
    """MoE(recompute=True), with feed-forward experts and others: the same bits, x alone kept; and
    under torch.utils.checkpoint, with the noise drawn once."""
    T, D, F = 60, 8, 64
    x = normal(T, D, device=device, dtype=torch.float32)
    results, kept = [], []
    for recompute, outer in ((False, False), (True, False), (True, True)):
        torch.manual_seed(0)
        modules = [
            torch.nn.Sequential(
                torch.nn.Linear(D, F), torch.nn.Dropout(0.3), torch.nn.ReLU(), torch.nn.Linear(F, D)
            )
            for _ in range(E)
        ]
        experts = modules if own else FeedForwardExperts(E, D, (F,))
        layer = MoE(D, E, 2, experts=experts, recompute=recompute).to(device)
        torch.nn.init.normal_(layer.gate.w_gate)
        leaf = x.clone().requires_grad_()

        def run(layer=layer, leaf=leaf, outer=outer):
            torch.manual_seed(1)
            y, aux = checkpoint(layer, leaf, use_reentrant=False) if outer else layer(leaf)
            results.append([y, aux.loss, aux.tokens_per_expert])
            return y.square() + aux.loss

        kept.append(saved_bytes(run, list(layer.parameters())))
        results[-1] += [leaf.grad, *(p.grad for p in layer.parameters())]
    for one in results[1:]:
        for a, b in zip(one, results[0], strict=True):
            assert_same_bits(a, b)
    assert kept[0] - kept[1] >= T * 2 * F * 4
    assert kept[2] < kept[1]


def test_dispatch_and_combine_with_any_number_of_slots(device):
    """Against the reference; a token without experts gives 0 and takes a gradient of 0."""
    routing = Routing(ROUTES["any number"], device=device)
    T, R = len(routing.routes), routing.index.numel()
    slots = [(t, e) for t, route in enumerate(routing.routes) for e in route]
    by_expert = [(t, s) for e in range(E) for s, (t, chosen) in enumerate(slots) if chosen == e]
    x = normal(T, 3, device=device).requires_grad_()
    rows = ops.dispatch(x, routing.plan.inverse, routing.token_offsets)
    assert_same_bits(rows, x[[t for t, _ in by_expert]])
    cotangent = normal(R, 3, device=device)
    (grad,) = torch.autograd.grad(rows, x, cotangent)
    expected = torch.zeros_like(x)
    for row, (t, _) in enumerate(by_expert):
        expected[t] += cotangent[row]
    assert_exact(grad, expected)

    output = normal(R, 3, device=device).requires_grad_()
    gates = routing.gates.clone().requires_grad_()
    y = ops.combine(output, gates, routing.plan.inverse, routing.token_offsets)
    expected_y = torch.zeros(T, 3, dtype=torch.float64, device=device)
    for row, (t, s) in enumerate(by_expert):
        expected_y[t] = expected_y[t] + gates[s] * output[row]
    assert_exact(y.detach(), expected_y.detach())
    cotangent = normal(T, 3, device=device)
    for a, e in zip(
        gradients([y], [output, gates], [cotangent]),
        gradients([expected_y], [output, gates], [cotangent]),
        strict=True,
    ):
        assert_exact(a, e)

    def function():
        x, output, gates = (normal(*t.shape).to(device).requires_grad_() for t in (x_, o_, g_))
        ops.dispatch(x, routing.plan.inverse, routing.token_offsets).sum().backward()
        ops.combine(output, gates, routing.plan.inverse, routing.token_offsets).sum().backward()

    x_, o_, g_ = x, output, gates
    opcheck_all(function, {"dispatch", "_dispatch_backward", "combine", "_combine_backward"})


@pytest.mark.parametrize(
    "bad", [[0, 1, 1, 4, 5, 7, 8], [0, 1, 1, 4, 3, 7, 7], [1, 1, 1, 4, 5, 7, 7]]
)
def test_token_offsets_run_from_0_to_the_number_of_slots(bad):
    routing = Routing(ROUTES["any number"])
    x, gates, weights, _ = make(routing, (4, 6, 3), "relu")
    bad = torch.tensor(bad)
    for call in (
        lambda: ops.dispatch(x, routing.plan.inverse, bad),
        lambda: ops.combine(normal(7, 3), gates, routing.plan.inverse, bad),
        lambda: mixture(x, gates, weights, None, "relu", routing, token_offsets=bad),
    ):
        with pytest.raises(
            ValueError, match=r"^\w+: token_offsets must ascend from 0 to .* 7, got"
        ):
            call()
