"""The options of TopKGate, and its selection bias: every token counts once (arXiv:2408.15664)."""

import copy
import io
from functools import partial

import pytest
import reference as ref
import torch
from assertions import assert_exact, assert_same_bits
from torch.utils.checkpoint import checkpoint

from moe_ext import MoE, TopKGate, update_selection_bias

D, E, K, RATE = 6, 8, 2, 0.25
pytestmark = pytest.mark.equation("2408.15664")


def make_gate(**options):
    return TopKGate(D, E, K, **dict(score="sigmoid", bias_update_rate=RATE) | options)


def make_layer(**options):
    return MoE(D, E, K, gate=make_gate(**options), hidden_sizes=(7,), w_importance=0.1, w_load=0)


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
    update_selection_bias(torch.nn.Sequential(gate))
    assert gate.selection_bias.tolist() == [RATE, RATE, 0, 0, 0, 0, -RATE, -RATE]
    assert gate.tokens_since_update.tolist() == [0] * E
    update_selection_bias(gate)  # no token since
    assert gate.selection_bias.tolist() == [RATE, RATE, 0, 0, 0, 0, -RATE, -RATE]


def test_the_bias_balances():
    """The tokens prefer the same experts; after 1000 small updates, every expert has its share."""
    gate = make_gate(bias_update_rate=1e-3)
    x = torch.randn(64, D) + 3
    before = gate(x).load
    for _ in range(1000):
        gate(x)
        update_selection_bias(gate)
    after = gate(x).load
    assert before.max() > 3 * before.mean() and after.max() < 1.5 * after.mean()


def test_only_training_counts():
    gate = make_gate()
    x = torch.randn(5, D)
    expected = counts_of(gate(x).expert_index)
    gate.eval()(x)
    assert gate.tokens_since_update.tolist() == expected.tolist()


RECOMPUTED = {
    "no": lambda function, x: function(x),
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recompute", RECOMPUTED)
def test_a_token_counts_once(recompute, compiled):
    """Also if checkpoints are nested, and if the layer is a graph that runs in both passes."""
    layer = make_layer()
    torch._dynamo.reset()
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    once = RECOMPUTED[recompute]

    def function(x):
        y, aux = run(x)
        return y.sum() + aux.loss

    expected = torch.zeros(E, dtype=torch.int64)
    for number in range(3):  # micro-batches
        x = torch.randn(5 + number, D, requires_grad=True)
        loss = once(lambda x: once(function, x), x)
        assert loss.requires_grad
        loss.backward()
        expected += counts_of(layer.eval()(x)[1].expert_index)
        layer.train()
    assert layer.gate.tokens_since_update.tolist() == expected.tolist()


def test_a_checkpoint_inside_a_compiled_function_counts_once():
    layer = make_layer()
    torch._dynamo.reset()

    @partial(torch.compile, fullgraph=True, backend="aot_eager")
    def step(x):
        y, aux = checkpoint(layer, x, use_reentrant=False)
        return y.sum() + aux.loss

    x = torch.randn(5, D, requires_grad=True)
    step(x).backward()
    expected = counts_of(layer.eval()(x)[1].expert_index)
    assert layer.gate.tokens_since_update.tolist() == expected.tolist()


def test_the_optimizer_updates_the_bias():
    layer = make_layer()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    optimizer.register_step_post_hook(lambda *_: update_selection_bias(layer))
    y, aux = layer(torch.randn(9, D))
    y.sum().backward()
    optimizer.step()
    below = 9 * K - E * counts_of(aux.expert_index)
    assert_exact(layer.gate.selection_bias, RATE * below.sign())


def test_the_bias_is_saved_and_loaded():
    gate = make_gate()
    gate(torch.randn(9, D))
    update_selection_bias(gate)
    file = io.BytesIO()
    torch.save(gate.state_dict(), file)
    file.seek(0)
    assert gate.state_dict().keys() == {"w_gate", "selection_bias"}
    other = make_gate()
    other.load_state_dict(torch.load(file))
    assert_same_bits(other.selection_bias, gate.selection_bias)
    assert other.selection_bias.count_nonzero()
    assert TopKGate(D, E, K).state_dict().keys() == {"w_gate"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_bias_stays_precise(dtype):
    """A step of 1e-3 from 1 would be lost in bfloat16."""
    gate = make_gate(bias_update_rate=1e-3)
    gate.selection_bias.fill_(1)
    gate.to(dtype)
    assert gate.w_gate.dtype == dtype
    assert gate.selection_bias.dtype == torch.promote_types(dtype, torch.float32)
    x = torch.randn(9, D).to(dtype)
    assert counts_of(gate(x).expert_index).tolist() == gate.tokens_since_update.tolist()
    update_selection_bias(gate)
    assert (gate.selection_bias != 1).any()


def test_from_the_meta_device():
    with torch.device("meta"):
        gate = make_gate()
    gate = gate.to_empty(device="cpu")
    assert gate.tokens_since_update.tolist() == [0] * E
    gate.reset_parameters()
    assert gate.selection_bias.tolist() == [0] * E and gate.w_gate.count_nonzero()


def test_copies_count_apart():
    gate = make_gate()
    other = copy.deepcopy(gate)
    other(torch.randn(5, D))
    assert gate.tokens_since_update.sum() == 0 and other.tokens_since_update.sum() == 5 * K


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: make_gate(bias_update_rate=-1), r"TopKGate: bias_update_rate must .*got -1"),
        (lambda: make_gate(num_groups=3), "topk_routing: num_groups must divide .*got 3"),
        (lambda: make_gate(score="relu"), "topk_routing: score must be one of .*got 'relu'"),
        (
            lambda: update_selection_bias(TopKGate(D, E, K)),
            "update_selection_bias: model must contain a TopKGate .*got 'TopKGate'",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_repr_shows_the_options():
    assert repr(TopKGate(D, E, K)) == "TopKGate(d_model=6, num_experts=8, k=2)"
    shown = repr(make_gate(num_groups=2, logit_bias=True))
    assert "score='sigmoid', num_groups=2, bias_update_rate=0.25, logit_bias=True" in shown
