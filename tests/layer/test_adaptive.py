"""Gates that adapt after each optimizer step: every token counts once (arXiv 2408.15664)."""

import copy
import io
from functools import partial

import pytest
import torch
from assertions import assert_exact, assert_same_bits
from layers import RECOMPUTED
from torch.utils.checkpoint import checkpoint

from moe_ext import MoE, ReLUGate, TopKGate, update_gates

D, E, K = 6, 8, 2
pytestmark = pytest.mark.equation("arXiv 2408.15664", "arXiv 2412.14711")

GATES = {
    "selection_bias": lambda: TopKGate(D, E, K, score="sigmoid", bias_update_rate=1e-3),
    "l1_weight": lambda: ReLUGate(D, E, K, l1_growth=1.001),
}
all_gates = pytest.mark.parametrize("state", GATES)  # the name of the buffer that adapts


def make_layer(state):
    return MoE(D, E, K, gate=GATES[state](), hidden_sizes=(7,), w_importance=0.1, w_load=0)


def counts_of(state, routing, num_tokens):
    """Returns what the gate has to count for the routing of num_tokens tokens."""
    counts = torch.bincount(routing.expert_index.flatten(), minlength=E)
    return torch.cat([counts, torch.tensor([num_tokens])]) if state == "l1_weight" else counts


@pytest.mark.parametrize(
    "state, recompute, compiled",
    [
        *((state, recompute, False) for state in GATES for recompute in RECOMPUTED),
        ("selection_bias", "not reentrant", True),
    ],
)
def test_a_token_counts_once(state, recompute, compiled):
    """Also if checkpoints are nested, and if the layer is a graph that runs in both passes."""
    layer = make_layer(state)
    torch._dynamo.reset()
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    once = RECOMPUTED[recompute]

    def function(x):
        y, aux = run(x)
        return y.sum() + aux.loss

    expected = 0
    for number in range(3):  # micro-batches
        x = torch.randn(5 + number, D, requires_grad=True)
        loss = once(lambda x: once(function, x), x)
        assert loss.requires_grad
        loss.backward()
        expected += counts_of(state, layer.eval()(x)[1], 5 + number)
        layer.train()
    assert layer.gate.tokens_since_update.tolist() == expected.tolist()


def test_a_checkpoint_inside_a_compiled_function_counts_once():
    state = "l1_weight"
    layer = make_layer(state)
    torch._dynamo.reset()

    @partial(torch.compile, fullgraph=True, backend="aot_eager")
    def step(x):
        y, aux = checkpoint(layer, x, use_reentrant=False)
        return y.sum() + aux.loss

    x = torch.randn(5, D, requires_grad=True)
    step(x).backward()
    expected = counts_of(state, layer.eval()(x)[1], 5)
    assert layer.gate.tokens_since_update.tolist() == expected.tolist()


def test_the_optimizer_updates_all_gates():
    """A gate without a state to adapt is left out."""
    layers = torch.nn.ModuleList(make_layer(state) for state in GATES)
    layers.append(MoE(D, E, K, gate=TopKGate(D, E, K), w_load=0))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.0)
    optimizer.register_step_post_hook(lambda *_: update_gates(layers))
    x = torch.randn(9, D)
    (_, biased), (_, relu) = layers[0](x), layers[1](x)
    optimizer.step()
    below = 9 * K - E * counts_of("selection_bias", biased, 9)
    assert_same_bits(layers[0].gate.selection_bias, 1e-3 * below.sign().float())
    excess = torch.tensor(len(relu.expert_index) - 9 * K)
    torch.testing.assert_close(layers[1].gate.l1_weight, 1e-8 * 1.001 ** excess.sign())
    assert excess != 0
    for layer in layers[:2]:
        assert layer.gate.tokens_since_update.count_nonzero() == 0


@all_gates
def test_the_state_is_saved_and_loaded(state):
    gate = GATES[state]()
    start = getattr(gate, state).clone()
    gate(torch.randn(9, D))
    update_gates(gate)
    file = io.BytesIO()
    torch.save(gate.state_dict(), file)
    file.seek(0)
    assert gate.state_dict().keys() == {"w_gate", state}
    second = GATES[state]()
    second.load_state_dict(torch.load(file))
    assert_same_bits(getattr(second, state), getattr(gate, state))
    half = {name: value.bfloat16() for name, value in gate.state_dict().items()}
    second.load_state_dict(half, assign=True)
    assert second.w_gate.dtype == torch.bfloat16
    assert_same_bits(getattr(second, state), half[state].float())
    second.load_state_dict(gate.state_dict(), assign=True)
    assert (getattr(second, state) != start).any()
    assert TopKGate(D, E, K).state_dict().keys() == {"w_gate"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@all_gates
def test_the_state_stays_precise(state, dtype):
    """A change of 1 by 1e-3 would be lost in bfloat16."""
    gate = GATES[state]()
    value = getattr(gate, state).fill_(1)
    gate.to(dtype)
    assert gate.w_gate.dtype == dtype
    assert getattr(gate, state).dtype == torch.promote_types(dtype, torch.float32)
    x = torch.randn(9, D).to(dtype)
    assert counts_of(state, gate(x), 9).tolist() == gate.tokens_since_update.tolist()
    update_gates(gate)
    assert (getattr(gate, state) != torch.ones_like(value)).any()
    assert_exact((getattr(gate, state) - 1).abs().max() < 1.1e-3, True)


@all_gates
def test_from_the_meta_device(state):
    """The counts follow to_empty, and load_state_dict(assign=True)."""
    with torch.device("meta"):
        gate, loaded = GATES[state](), GATES[state]()
    loaded.load_state_dict(GATES[state]().state_dict(), assign=True)
    x = torch.randn(9, D)
    assert counts_of(state, loaded(x), 9).tolist() == loaded.tokens_since_update.tolist()
    gate = gate.to_empty(device="cpu")
    assert gate.tokens_since_update.count_nonzero() == 0
    gate.reset_parameters()
    assert_same_bits(getattr(gate, state), getattr(GATES[state](), state))
    assert gate.w_gate.count_nonzero()


@all_gates
def test_compiled_step_equals_eager(state):
    """One graph serves any number of tokens, also after as many tokens as counts."""
    torch._dynamo.reset()
    layer = make_layer(state)
    compiled_layer = copy.deepcopy(layer)

    def step(layer, x):
        layer(x)
        update_gates(layer)

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    for num_tokens in (len(layer.gate.tokens_since_update), 9, 12):
        x = torch.randn(num_tokens, D)
        with torch.no_grad():
            step(layer, x)
            compiled(compiled_layer, x)
        assert_same_bits(layer.gate.get_buffer(state), compiled_layer.gate.get_buffer(state))
        assert compiled_layer.gate.tokens_since_update.count_nonzero() == 0
    assert len(graphs) == 1


# The selection bias


def test_update_by_hand():
    """Experts below the mean of 2 tokens rise, those above it fall, and those at it stay."""
    gate, rate = TopKGate(D, E, K, score="sigmoid", bias_update_rate=0.25), 0.25
    gate.tokens_since_update.copy_(torch.tensor([0, 1, 2, 2, 2, 2, 3, 4]))
    for _ in range(2):  # the second update has no token
        update_gates(torch.nn.Sequential(gate))
        assert gate.selection_bias.tolist() == [rate, rate, 0, 0, 0, 0, -rate, -rate]
        assert gate.tokens_since_update.tolist() == [0] * E


def test_the_bias_balances():
    """The tokens prefer the same experts; after 1000 small updates, every expert has its share."""
    gate, x = GATES["selection_bias"](), torch.randn(64, D) + 3
    before = gate(x).load
    for _ in range(1000):
        gate(x)
        update_gates(gate)
    after = gate(x).load
    assert before.max() > 3 * before.mean() and after.max() < 1.5 * after.mean()
