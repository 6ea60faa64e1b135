"""ReLUGate: gates, the loss, and its weight λ, which adapts (arXiv 2412.14711)."""

import pytest
import torch
from assertions import assert_same_bits
from layers import LOSSES, D, E, assert_equals_reference, layer_of, make_x

from moe_ext import ReLUGate, update_gates

LAMBDA = 0.3
RELU = pytest.mark.equation("arXiv 2412.14711")


def make_gate(k=2, **options):
    """Makes a gate with weights so large that the loss matters."""
    gate = ReLUGate(D, E, k, **dict(l1_weight=LAMBDA) | options)
    torch.nn.init.normal_(gate.w_gate)
    return gate


@RELU
def test_update_by_hand():
    """Of 10 tokens with k = 2, 20 scores have to be positive."""
    gate = ReLUGate(D, E, 2, l1_weight=8.0, l1_growth=2.0)
    for counts, expected in (
        ([10, 10, 1, 0, 0, 0, 10], 16),
        ([10, 10, 0, 0, 0, 0, 10], 16),
        ([10, 9, 0, 0, 0, 0, 10], 8),
        ([0, 0, 0, 0, 0, 0, 10], 4),
        ([0, 0, 0, 0, 0, 0, 0], 4),
    ):
        gate.tokens_since_update.copy_(torch.tensor(counts))
        update_gates(torch.nn.Sequential(gate))
        assert gate.l1_weight.item() == expected
        assert gate.tokens_since_update.tolist() == [0] * (E + 1)


@pytest.mark.parametrize("bound", ["tiny", "max"])
def test_lambda_returns_from_its_bounds(bound):
    """λ stays at the bound while all scores are zero or positive, and then leaves it."""
    limit = getattr(torch.finfo(torch.float32), bound)
    gate = ReLUGate(D, E, 2, l1_weight=limit)
    outwards = 0 if bound == "tiny" else 9
    for positive, factor in ((outwards, 1), (outwards, 1), (9 - outwards, 1.2)):
        gate.tokens_since_update.fill_(9)
        gate.tokens_since_update[:E] = positive
        update_gates(gate)
        expected = limit * factor if bound == "tiny" else limit / factor
        assert gate.l1_weight.item() == pytest.approx(expected)


def test_scores_of_zero_are_no_slots(device):
    gate = make_gate().to(device)
    x = torch.randn(4, D, device=device)
    x[1] = 0
    routing = gate(x)
    assert routing.token_offsets.diff()[1] == 0 and (routing.gates > 0).all()
    routing = gate(torch.zeros(3, D, device=device))
    assert routing.gates.shape == (0,) and routing.token_offsets.tolist() == [0] * 4
    assert routing.metrics["sparsity"] == routing.metrics["share_without_expert"] == 1
    assert routing.loss == 0
    routing.loss.backward()
    assert gate.w_gate.grad.count_nonzero() == 0


def test_a_token_without_an_expert_gets_zero(device):
    """Its probabilities for the losses are 0 too."""
    layer = layer_of(make_gate(), losses=LOSSES).double().to(device)
    torch.nn.init.ones_(layer.gate.w_gate)
    x = make_x(6, device=device).abs()
    x[::2] *= -1
    y, aux = assert_equals_reference(layer, x)
    assert aux.token_offsets.diff().tolist() == [0, E] * 3
    assert y[::2].count_nonzero() == 0 and y[1::2].abs().amin(1).min() > 0
    assert aux.metrics()["share_without_expert"] == aux.metrics()["sparsity"] == 0.5


def test_it_is_causal():
    """Earlier tokens do not depend on later tokens, also in training."""
    layer, x = layer_of(make_gate()).double(), make_x(9)
    assert_same_bits(layer(x[:5])[0], layer(x)[0][:5])


@RELU
def test_an_update_before_backward_changes_nothing():
    """The loss of a forward pass has the λ of that time."""
    grads = []
    for early in (False, True):
        torch.manual_seed(0)
        gate = make_gate(l1_growth=3.0)
        routing = gate(torch.randn(9, D))
        if early:
            update_gates(gate)
            assert gate.l1_weight != routing.metrics["l1_weight"] == torch.tensor(LAMBDA)
        routing.loss.backward()
        grads.append(gate.w_gate.grad)
    assert_same_bits(*grads)
    assert grads[0].count_nonzero()
