"""The options of TopKGate, and its selection bias (arXiv 2408.15664)."""

import pytest
import reference as ref
import torch
from assertions import assert_exact, assert_same_bits

from moe_ext import TopKGate, update_gates

D, E, K, RATE = 6, 8, 2, 0.25
pytestmark = pytest.mark.equation("2408.15664")


def make_gate(**options):
    return TopKGate(D, E, K, **dict(score="sigmoid", bias_update_rate=RATE) | options)


def counts_of(expert_index):
    return torch.bincount(expert_index.flatten(), minlength=E)


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(score="softmax", renormalize=False, logit_bias=True),
        dict(num_groups=4, groups_per_token=2, scale=2.5, logit_bias=True),
        dict(score="sqrt_softplus", num_groups=2, group_score_k=1),
    ],
)
def test_equals_reference(device, options):
    gate = make_gate(**options).double().to(device)
    for value in (gate.w_gate, gate.b_gate, gate.selection_bias):
        if value is not None:
            torch.nn.init.normal_(value.data)
    x = torch.randn(9, D, dtype=torch.float64, device=device)
    routing = gate(x)
    logits = (x @ gate.w_gate).detach().cpu()
    if gate.b_gate is not None:
        logits = logits + gate.b_gate.detach().cpu()
    groups = gate.num_groups, gate.groups_per_token, gate.group_score_k
    b = gate.selection_bias.cpu()
    index = torch.tensor([ref.route(row, K, b, gate.score, *groups) for row in logits])
    assert_same_bits(routing.expert_index, index)
    rule = gate.score, gate.renormalize, gate.scale
    gates = [ref.gates_of(row, i, *rule) for row, i in zip(logits, index, strict=True)]
    assert_exact(routing.gates.detach(), torch.stack(gates))
    assert routing.load.tolist() == counts_of(index).tolist()
    (routing.gates * torch.randn_like(routing.gates)).sum().backward()
    assert all(p.grad.count_nonzero() for p in gate.parameters())


def test_update_by_hand():
    """Experts below the mean of 2 tokens rise, those above it fall, and those at it stay."""
    gate = make_gate()
    gate.tokens_since_update.copy_(torch.tensor([0, 1, 2, 2, 2, 2, 3, 4]))
    update_gates(torch.nn.Sequential(gate))
    assert gate.selection_bias.tolist() == [RATE, RATE, 0, 0, 0, 0, -RATE, -RATE]
    assert gate.tokens_since_update.tolist() == [0] * E
    update_gates(gate)  # no token since
    assert gate.selection_bias.tolist() == [RATE, RATE, 0, 0, 0, 0, -RATE, -RATE]


def test_the_bias_balances():
    """The tokens prefer the same experts; after 1000 small updates, every expert has its share."""
    gate = make_gate(bias_update_rate=1e-3)
    x = torch.randn(64, D) + 3
    before = gate(x).load
    for _ in range(1000):
        gate(x)
        update_gates(gate)
    after = gate(x).load
    assert before.max() > 3 * before.mean() and after.max() < 1.5 * after.mean()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: make_gate(bias_update_rate=-1), r"TopKGate: bias_update_rate must .*got -1"),
        (lambda: make_gate(num_groups=3), "topk_routing: num_groups must divide .*got 3"),
        (lambda: make_gate(score="relu"), "topk_routing: score must be one of .*got 'relu'"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_repr_shows_the_options():
    assert repr(TopKGate(D, E, K)) == "TopKGate(d_model=6, num_experts=8, k=2)"
    shown = repr(make_gate(num_groups=2, logit_bias=True))
    assert "score='sigmoid', num_groups=2, bias_update_rate=0.25, logit_bias=True" in shown


def test_the_gradient_of_a_score_that_underflows_is_0():
    gate = TopKGate(2, 2, 1, score="sqrt_softplus")
    gate.w_gate.data.copy_(torch.tensor([[1.0, -120.0], [0.0, 0.0]]))
    gate(torch.tensor([[1.0, 0.0]])).scores.sum().backward()
    assert gate.w_gate.grad.isfinite().all() and gate.w_gate.grad[0, 1] == 0
