"""An LSTM with a mixture of experts as its weight matrix (Sec. 3.1)."""

import pytest
import reference as ref
import torch
from assertions import assert_all_same_bits, assert_exact, assert_same_bits, gradients
from layers import gating_by_reference, record_noise, shake

from moe_ext import HierarchicalNoisyTopKGate, MoELSTM, MoELSTMCell, NoisyTopKGate, SoftmaxGate

B, S, D, U, E, K = 3, 5, 2, 3, 4, 2


def make_layer(device="cpu", dtype=torch.float64, k=K, **options):
    generator = torch.Generator(device).manual_seed(1)
    layer = MoELSTM(D, U, E, k, **options).to(device, dtype)
    for parameter in layer.parameters():
        with torch.no_grad():
            parameter.normal_(generator=generator)
    return layer


def make_inputs(device="cpu", dtype=torch.float64, batch=B, length=S):
    """Makes x and a state."""
    x = torch.randn(batch, length, D, dtype=dtype, device=device)
    h, c = torch.randn(2, batch, U, dtype=dtype, device=device)
    return x.requires_grad_(), (h.requires_grad_(), c.requires_grad_())


def lengths_mask(*lengths, length=S, device="cpu"):
    return (torch.arange(length) < torch.tensor(lengths)[:, None]).to(device)


def run(layer, x, state=None, seed=5, **options):
    """Returns the outputs, then all gradients, then the RNG state."""
    torch.manual_seed(seed)
    y, last, aux = layer(x, state, **options)
    tensors = [y, *last, *(a for a in aux if isinstance(a, torch.Tensor))]
    floats = [t.float() if t.dtype == torch.bfloat16 else t for t in tensors]
    loss = sum((t * 1.5).sin().sum() for t in floats if t.is_floating_point()) + aux.loss
    leaves = [t for t in (x, *(state or ()), *layer.parameters()) if t.requires_grad]
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return *tensors, *grads, torch.get_rng_state()


# Comparison with the reference


def reference_step(cell, x, h, c, noise):
    (W,) = cell.moe.experts.weights
    experts = [lambda row, i=i: ref.E_i(row, [W[i]]) for i in range(E)]
    gate = cell.moe.gate
    return ref.MoELSTM_step(x, h, c, gate.w_gate, gate.w_noise, noise, K, experts, cell.bias)


@pytest.mark.equation("Sec. 3.1")
@pytest.mark.parametrize("training, slots", [(True, None), (True, 2), (False, None)])
def test_sequence_is_the_references(training, slots):
    """Compares all steps, the sums over them before CV², and every gradient."""
    layer = make_layer(
        generator=torch.Generator().manual_seed(3),
        w_importance=0.3,
        w_load=0.2,
        memory_slots=slots,
    ).train(training)
    assert MoELSTMCell(D, U, E, K).bias.tolist() == [0] * U + [1] * U + [0] * 2 * U  # at the start
    x, (h, c) = make_inputs()
    y, last, aux = layer(x, (h, c))

    generator, noise = torch.Generator().manual_seed(3), None
    h_t, c_t, ys, gates, importance, load = h, c, [], [], 0, 0
    for t in range(S):
        if training:
            noise = torch.empty(B, E, dtype=torch.float64).normal_(generator=generator)
        h_t, c_t, G, *statistics = reference_step(layer.cell, x[:, t], h_t, c_t, noise)
        ys.append(h_t)
        gates.append(G)
        importance = importance + statistics[0]
        load = load + (statistics[1] if training else (G > 0).double().sum(0))
    expected = torch.stack(ys, 1)
    G = torch.stack(gates, 1).flatten(0, 1)  # in the order of flattened x
    loss = ref.L_importance(importance, 0.3) + ref.L_load(load, 0.2)

    assert_exact(y.detach(), expected.detach())
    assert_exact(last[0].detach(), h_t.detach())
    assert_exact(last[1].detach(), c_t.detach())
    assert_exact(torch.zeros_like(G).scatter(1, aux.expert_index, aux.gates), G)
    assert_exact(aux.importance, importance)
    assert_exact(aux.load, load)
    assert_exact(aux.loss, loss)
    assert aux.tokens_per_expert.tolist() == (G > 0).sum(0).tolist()
    leaves = [x, h, c, *layer.parameters()]
    actual = gradients([y.sin().sum() + last[1].square().sum() + aux.loss], leaves, [None])
    wanted = gradients([expected.sin().sum() + c_t.square().sum() + loss], leaves, [None])
    for a, e in zip(actual, wanted, strict=True):
        assert_exact(a, e)
    layer.cell.moe.gate.generator.manual_seed(3)
    assert_exact(layer.cell(x[:, 0], (h, c))[0][0].detach(), y[:, 0].detach())


@pytest.mark.parametrize("slots", [None, 2])
def test_hierarchical_load_is_of_all_steps(slots):
    """Load_H (App. B) treats all rows [x_t, h_{t-1}] as one batch, also in its gradients."""
    gate = shake(HierarchicalNoisyTopKGate(D + U, 3, 2, (2, 1)))
    layer = MoELSTM(D, U, 6, 2, gate=gate, memory_slots=slots).double()
    x, (h, c) = make_inputs()
    drawn = record_noise(gate)
    y, _, aux = layer(x, (h, c))
    states = torch.cat([h[:, None], y[:, :-1]], 1)
    X = torch.cat([x, states], 2).transpose(0, 1).flatten(0, 1)
    gating = gating_by_reference(gate, X, (torch.cat(drawn[0::2]), torch.cat(drawn[1::2])))
    importance = ref.Importance(gating.G_X)
    assert_exact(aux.importance, importance)
    assert_exact(aux.load, gating.load)
    loss = ref.L_importance(importance, 0.1) + ref.L_load(gating.load, 0.1)
    assert_exact(aux.loss, loss)
    leaves = [x, h, *gate.parameters()]
    actual, expected = (torch.autograd.grad(v, leaves, retain_graph=True) for v in (aux.loss, loss))
    for a, e in zip(actual, expected, strict=True):
        assert_exact(a, e)


# Few stored states


LEVELS = dict(num_groups=2, experts_per_group=2, k=(1, 2))
GATES = {
    "default": lambda generator: None,
    "noisy": lambda generator: NoisyTopKGate(D + U, E, K, generator=generator),
    "hierarchical": lambda g: HierarchicalNoisyTopKGate(D + U, **LEVELS, generator=g),
    "softmax": lambda generator: SoftmaxGate(D + U, E),
}


@pytest.mark.parametrize(
    "kind, masked, dtype, autocast",
    [
        *((kind, False, torch.float64, False) for kind in GATES),
        ("default", True, torch.float64, False),
        ("default", False, torch.float32, True),
        ("default", False, torch.bfloat16, False),
        ("default", False, torch.bfloat16, True),
    ],
)
def test_slots_do_not_change_a_bit(device, kind, masked, dtype, autocast):
    """With noise, dropout, padding and an initial state, everything is bitwise identical.

    The backward pass replays the generator of a gate. y and the state have the dtype of x.
    """
    generator = torch.Generator(device)
    gate = GATES[kind](generator)
    layer = make_layer(device, dtype, K if gate is None else gate.k, gate=gate, dropout=0.3)
    args, results = make_inputs(device, dtype), []
    options = {"mask": lengths_mask(5, 2, 4, device=device)} if masked else {}
    for slots in (None, 1, 2, S - 1, S, S + 1):
        layer.memory_slots = slots
        generator.manual_seed(4)
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            results.append((*run(layer, *args, **options), generator.get_state()))
    for again in results[1:]:
        assert_all_same_bits(again, results[0])
    y, h, c = results[0][:3]
    assert y.dtype == h.dtype == c.dtype == dtype


@pytest.mark.parametrize("part", ["cell", "cell.moe.gate"])
def test_slots_need_the_same_mode_on_the_way_back(part):
    layer = make_layer(memory_slots=2, dropout=0.5)
    y, _, _ = layer(make_inputs()[0])
    layer.get_submodule(part).eval()
    with pytest.raises(RuntimeError, match="training mode must not change between forward"):
        y.sum().backward()


# Padding


@pytest.mark.parametrize("training", [True, False])
def test_padding_is_not_seen(device, training):
    """Padding may hold any value, also NaN, and have any length."""
    layer = make_layer(device, dropout=0.3).train(training)
    lengths = (4, 2, 3)
    x, state = make_inputs(device, length=4)
    mask = lengths_mask(*lengths, length=4, device=device)
    outcome = []
    for fill in (0.0, float("nan")):
        padded = x.detach().masked_fill(~mask[..., None], fill).requires_grad_()
        outcome.append(run(layer, padded, state, mask=mask))
    assert_all_same_bits(*outcome)
    y, h, c, _, importance, _, gates, _, counts, grad_x = outcome[0][:10]
    assert (y[~mask] == 0).all() and (grad_x[~mask] == 0).all()
    assert gates.shape == (sum(lengths), K) and counts.sum() == K * sum(lengths)
    assert float(importance.sum()) == pytest.approx(sum(lengths))
    for b, n in enumerate(lengths):
        assert_same_bits(h[b], y[b, n - 1])
    # Two more steps contain only padding.
    longer = torch.nn.functional.pad(x.detach(), (0, 0, 0, 2), value=float("nan"))
    wide = torch.nn.functional.pad(mask, (0, 2))
    again = run(layer, longer.requires_grad_(), state, mask=wide)
    assert_same_bits(again[0][:, :4], y)
    assert_all_same_bits(again[1:9], outcome[0][1:9])


def test_a_sentence_in_a_batch_is_as_it_is_alone():
    layer = make_layer().eval()
    lengths = (5, 1, 3)
    x, (h, c) = make_inputs()
    y, last, aux = layer(x, (h, c), mask=lengths_mask(*lengths))
    gates = aux.gates.split(lengths)
    for b, n in enumerate(lengths):
        alone, alone_last, alone_aux = layer(x[b : b + 1, :n], (h[b : b + 1], c[b : b + 1]))
        assert_exact(y[b, :n].detach(), alone[0].detach())
        assert_exact(gates[b].detach(), alone_aux.gates.detach())
        for a, e in zip(last, alone_last, strict=True):
            assert_exact(a[b].detach(), e[0].detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_sequence_has_the_same_bits_in_any_batch(dtype):
    """The number of units fills no vector of torch's functions."""
    layer = MoELSTM(5, 7, 4, 2).to(dtype).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(41, 3, 5).to(dtype)
    y = layer(x)[0].detach()
    for size in (1, 2, 3, 5, 8, 13, 21, 34):
        assert_same_bits(layer(x[:size])[0].detach(), y[:size])


def test_time_first():
    layer = make_layer(dropout=0.3)
    x, state = make_inputs()
    mask = lengths_mask(5, 2, 4)
    torch.manual_seed(5)
    y, last, aux = layer(x, state, mask=mask)
    layer.batch_first = False
    torch.manual_seed(5)
    y_t, last_t, aux_t = layer(x.transpose(0, 1), state, mask=mask.T)
    assert_same_bits(y_t.transpose(0, 1), y)
    assert_same_bits(last_t[1], last[1])
    assert_same_bits(aux_t.loss, aux.loss)
    order = torch.arange(B * S).view(B, S).T[mask.T].argsort()
    assert_same_bits(aux_t.gates[order], aux.gates)


# Edge cases and custom gates


def test_no_tokens():
    """Gradients are zero; a step without a token keeps the state."""
    x, state = make_inputs(length=1)
    mask = torch.zeros(B, 1, dtype=torch.bool)
    y, last, aux = make_layer(memory_slots=1)(x, state, mask=mask)
    assert (y == 0).all() and aux.loss == 0
    assert_all_same_bits(last, state)
    for slots in (None, 2):
        layer = make_layer(memory_slots=slots)
        y, (h, _), aux = layer(make_inputs(batch=0)[0])
        assert y.shape == (0, S, U) and h.shape == (0, U) and aux.gates.shape == (0, K)
        (y.sum() + aux.loss).backward()
        assert all((p.grad == 0).all() for p in layer.parameters())


@pytest.mark.parametrize("dtype, masked", [(torch.bfloat16, True), (torch.float64, False)])
def test_a_state_of_another_dtype_is_converted(dtype, masked):
    layer = make_layer()
    x, state = make_inputs()
    mask = torch.rand(B, S) < 0.6 if masked else None
    cast_state = tuple(s.to(dtype) for s in state)
    torch.manual_seed(0)
    y, last, _ = layer(x, cast_state, mask=mask)
    torch.manual_seed(0)
    expected_y, expected, _ = layer(x, tuple(s.to(x.dtype) for s in cast_state), mask=mask)
    assert_all_same_bits((y, *last), (expected_y, *expected))


@pytest.mark.parametrize("slots", [None, 2])
def test_the_gates_own_loss_is_summed_over_the_steps(slots):
    class Gate(SoftmaxGate):
        def forward(self, x, ranks=None):
            return super().forward(x, ranks)._replace(loss=x.square().sum())

    layer = MoELSTM(
        D, U, E, E, gate=Gate(D + U, E), w_importance=0, w_load=0, memory_slots=slots
    ).double()
    x, (h, c) = make_inputs()
    y, _, aux = layer(x, (h, c))
    states = torch.cat([h[:, None], y[:, :-1]], 1)
    expected = x.square().sum() + states.square().sum()
    assert_exact(aux.loss.detach(), expected.detach())
    leaves = [x, h, *layer.cell.moe.experts.weights]
    actual = torch.autograd.grad(aux.loss, leaves, retain_graph=True)
    for a, e in zip(actual, torch.autograd.grad(expected, leaves), strict=True):
        assert_exact(a, e)


def test_gates_with_a_memory_are_refused_with_slots():
    class Gate(SoftmaxGate):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x, ranks=None):
            self.calls += 1
            return super().forward(x, ranks)

    layer = MoELSTM(D, U, E, E, gate=Gate(D + U, E)).double()
    x, _ = make_inputs()
    layer(x)
    assert layer.cell.moe.gate.calls == S
    layer.memory_slots = 2
    with pytest.raises(RuntimeError, match="must not modify a parameter or buffer"):
        layer(x)


@pytest.mark.parametrize("training, slots", [(True, None), (False, 2)])
def test_compiled_equals_eager(training, slots):
    """memory_slots breaks the graph; without it, there is one graph."""
    torch._dynamo.reset()
    layer = make_layer(dtype=torch.float32, memory_slots=slots).train(training)
    args = make_inputs(dtype=torch.float32, length=3)
    compiled = torch.compile(layer, fullgraph=slots is None, backend="aot_eager")
    for a, e in zip(run(compiled, *args), run(layer, *args), strict=True):
        torch.testing.assert_close(a, e)
    torch._dynamo.reset()
