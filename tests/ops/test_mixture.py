"""ops.experts with routed tokens: gather, experts and gated sum (Eq. 1) as one operator."""

from dataclasses import replace

import pytest
import torch
from assertions import assert_all_same_bits, assert_same_bits, assert_same_products
from operators import TABLE, evaluate, sample, tensors_in, with_leaves
from samples.draw import RAGGED, normal
from samples.experts import ACTIVATIONS
from torch.utils.checkpoint import checkpoint

from moe_ext import FeedForwardExperts, MoE, ops

pytestmark = pytest.mark.emulated

E = 5
ROW = TABLE["experts"]
ROUTED = [dict(T=5, E=E, k=2), RAGGED[0]]


def mixture(device, dtype=torch.float64, widths=(4, 6, 3), **options):
    """Returns the arguments of the operator."""
    return sample("experts", device, dtype, widths=widths, **options)


def assert_same(actual, expected, same=assert_same_bits):
    """Compares outputs and gradients in the form that `evaluate` returns."""
    for value, wanted in zip(actual, expected, strict=True):
        for a, e in zip(value, wanted, strict=True):
            same(a, e)


@pytest.mark.equation("Eq. 1", "App. D")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("widths", [(4, 6, 3), (4, 6, 5, 3)])
def test_recomputed_hidden_layers_have_the_same_bits(device, activation, widths):
    for sizes in RAGGED:
        call = mixture(device, widths=widths, activation=activation, bias=True, **sizes)
        assert_same(evaluate(ROW, call | dict(recompute=True)), evaluate(ROW, call))


def test_equal_numbers_of_slots_need_no_offsets(device):
    call = mixture(device, **ROUTED[0])
    inverse, gates = call["inverse"], call["gates"]
    listed = dict(inverse=inverse.flatten(), gates=gates.flatten())
    bounds = torch.arange(0, inverse.numel() + 1, inverse.shape[1], device=inverse.device)
    outputs, grads = evaluate(ROW, call | listed | dict(token_offsets=bounds))
    grads[-1] = grads[-1].view_as(gates)
    assert_same((outputs, grads), evaluate(ROW, call))


@pytest.mark.parametrize("rows_each", [0, 3])
def test_equal_numbers_of_rows_need_no_offsets(device, rows_each):
    """As with strictly balanced gates: the result is the same, and the counts are not read."""
    routes = [[] for _ in range(4)]
    for e in range(E):
        for t in torch.randperm(4)[:rows_each].tolist():
            routes[t].append(e)
    call = mixture(device, routes=routes, E=E, activation="gelu", bias=True)
    without = evaluate(ROW, call | dict(offsets=None))
    assert_same(without, evaluate(ROW, call), assert_same_products)


@pytest.mark.parametrize("sizes", ROUTED, ids=["two each", "any number"])
def test_without_gates_the_rows_come_out(device, sizes):
    """The result is bitwise identical to the experts of gathered rows."""
    call = mixture(device, activation="silu", bias=True, gated=False, **sizes)

    def gathered(x, inverse, token_offsets, **rest):
        return ops.experts(ops.dispatch(x, inverse, token_offsets), **rest)

    rows, grads = evaluate(ROW, call)
    assert rows[0].shape == (call["inverse"].numel(), 3)
    assert_same((rows, grads), evaluate(ROW, call, gathered))


LEARNED = [
    ("x",),
    ("gates",),
    ("weights", "biases"),
    ("x", "gates"),
    ("x", "weights", "biases"),
    ("weights", "biases", "gates"),
    ("lora",),
    ("x", "gates", "lora"),
]


@pytest.mark.parametrize("learned", LEARNED, ids="-".join)
def test_frozen_inputs(device, learned):
    """Learned inputs get the same gradients, also when sums cover several blocks of rows."""
    recompute = "gates" in learned
    dtype = torch.bfloat16 if "x" in learned else torch.float32
    sizes = dict(skewed=700, E=E, widths=(4, 6, 5, 3), ranks=(3, None, 2))
    call = mixture(device, dtype, activation="gelu", bias=True, recompute=recompute, **sizes)
    _, grads = evaluate(ROW, call)
    owners = [name for name in ROW.differentiable for _ in tensors_in(call[name])]
    expected = [dx for name, dx in zip(owners, grads, strict=True) if name in learned]
    _, frozen_grads = evaluate(replace(ROW, differentiable=learned), call)
    assert_all_same_bits(frozen_grads, expected)


def saved_bytes(function, excluded):
    """Returns the bytes that autograd saves for backward, without the given tensors."""
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
    """Saves x, gates and indices, and the pre-activations of hidden layers unless recomputed."""
    T, K, D, F = 40, 2, 8, 64
    columns = F * (2 if activation == "swiglu" else 1)
    for recompute, hidden in ((False, T * K * columns * 4), (True, 0)):
        call = mixture(
            device, torch.float32, T=T, E=E, k=K, widths=(D, F, D), activation=activation
        )
        leaves, _ = with_leaves(call | dict(recompute=recompute), ROW.differentiable)
        kept = saved_bytes(lambda leaves=leaves: ops.experts(**leaves), leaves["weights"])
        assert kept == T * D * 4 + T * K * (4 + 8) + (E + 1) * 8 + hidden


def test_a_parameter_list_keeps_the_hidden_layers_too(device):
    """Weights in a ParameterList: autograd saves as much as with a list of the weights."""
    call = mixture(device, torch.float32, T=40, E=E, k=2, widths=(8, 64, 8), activation="relu")
    parameters = torch.nn.ParameterList(call["weights"])
    saved = {
        kind: saved_bytes(
            lambda kind=kind: ops.experts(**call | dict(weights=kind(parameters))), parameters
        )
        for kind in (list, torch.nn.ParameterList)
    }
    assert saved[list] == saved[torch.nn.ParameterList] > 40 * 2 * 64 * 4


@pytest.mark.equation("App. D")
@pytest.mark.parametrize("own", [False, True])
def test_layer_that_recomputes(device, own):
    """MoE(recompute=True) is bitwise identical and saves only x, for any kind of experts.

    The same holds under torch.utils.checkpoint, where the noise is the same in the recomputation.
    """
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
        assert_all_same_bits(one, results[0])
    assert kept[0] - kept[1] >= T * 2 * F * 4
    assert kept[2] < kept[1]
