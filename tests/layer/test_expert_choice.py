"""ExpertChoiceGate (arXiv 2202.09368)."""

import pytest
import reference as ref
import torch
from assertions import assert_exact, assert_same_bits, dense

from moe_ext import ExpertChoiceGate, MoE

D, E = 5, 6
CHOICE = pytest.mark.equation("arXiv 2202.09368")


def make_layer(k=2, device="cpu", **options):
    """Makes a layer with random weights of the gate."""
    gate = ExpertChoiceGate(D, E, k)
    torch.nn.init.normal_(gate.w_gate)
    options = {"hidden_sizes": [7], "w_load": 0} | options
    return MoE(D, E, k, gate=gate, **options).double().to(device)


@CHOICE
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("k", [1, 2, E])
@pytest.mark.parametrize("T", [1, 9, 12])
def test_equals_reference(device, T, k, training):
    """Compares gates, output and gradients; T · k / E need not be a whole number."""
    layer = make_layer(k, device).train(training)
    x = torch.randn(T, D, dtype=torch.float64, device=device, requires_grad=True)
    y, aux = layer(x)
    leaves = [t.detach().cpu().requires_grad_() for t in (x, *layer.parameters())]
    X, W_g, w1, w2 = leaves
    G_X = ref.expert_choice_gates(X, W_g, k)
    expected = torch.zeros(T, D, dtype=torch.float64)
    for t in range(T):
        for i in range(E):
            if G_X[t, i] != 0:
                expected[t] = expected[t] + G_X[t, i] * ref.E_i(X[t], [w1[i], w2[i]])
    assert_exact(dense(aux, E).detach(), G_X.detach())
    assert_exact(aux.importance.detach(), ref.Importance(G_X).detach())
    m = ref.rows_per_expert(k, T, E)
    assert aux.tokens_per_expert.tolist() == aux.load.tolist() == [m] * E
    without = (G_X == 0).all(1).double().mean()
    assert aux.metrics()["share_without_expert"] == pytest.approx(float(without), rel=1e-12)
    assert_exact(y.detach(), expected.detach())
    weight = torch.randn(T, D, dtype=torch.float64)
    loss = (y * weight.to(device)).sum() + aux.loss
    wanted = (expected * weight).sum() + ref.L_importance(ref.Importance(G_X), 0.1)
    actual = torch.autograd.grad(loss, [x, *layer.parameters()])
    for a, e in zip(actual, torch.autograd.grad(wanted, leaves), strict=True):
        assert_exact(a, e)


@CHOICE
def test_it_is_not_causal():
    """A later token takes an expert away from an earlier one, also in evaluation mode."""
    layer = make_layer(1, hidden_sizes=[]).eval()
    with torch.no_grad():
        layer.gate.w_gate.zero_()
        layer.gate.w_gate[0] = torch.arange(E)
    x = torch.zeros(E, D, dtype=torch.float64)  # each expert takes one token
    x[0, 0] = 1
    first = layer(x)[0][0]
    x[-1, 0] = 2
    assert not torch.equal(layer(x)[0][0], first)


def test_equal_scores_are_spread(device):
    """With W_g = 0, each expert gets m tokens, not the same ones."""
    gate = ExpertChoiceGate(D, E, 2).to(device)
    torch.nn.init.ones_(gate.w_gate)
    gate.reset_parameters()
    routing = gate(torch.randn(60, D, device=device))
    assert routing.load.tolist() == [20] * E
    assert len(routing.expert_index) == 120 and routing.token_offsets.diff().max() < E
    assert routing.equal_load
    assert_same_bits(routing.gates, torch.full_like(routing.gates, 1 / E))


def test_no_tokens(device):
    layer = make_layer(2, device)
    x = torch.randn(0, D, dtype=torch.float64, device=device, requires_grad=True)
    y, aux = layer(x)
    assert y.shape == (0, D) and aux.metrics()["share_without_expert"] == 0
    (y.sum() + aux.loss).backward()


def test_padding_takes_no_expert(device):
    layer = make_layer(2, device)
    x = torch.randn(4, 6, D, dtype=torch.float64, device=device)
    mask = torch.rand(4, 6, device=device) < 0.5
    y, aux = layer(x, mask)
    assert_same_bits(y[mask], layer(x[mask])[0])
    assert len(aux.token_offsets) == mask.sum() + 1


@pytest.mark.parametrize("masked", [False, True])
def test_compiles(masked):
    torch._dynamo.reset()
    layer = make_layer(2)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((3, 7), (4, 5)):
        x = torch.randn(*shape, D, dtype=torch.float64)
        mask = torch.rand(shape) < 0.6 if masked else None
        (y, aux), (expected, _) = compiled(x, mask), layer(x, mask)
        assert_exact(y.detach(), expected.detach())
        (y.sum() + aux.loss).backward()


def test_errors():
    message = f"^ExpertChoiceGate: k must .* num_experts = {E}, got {E + 1}$"
    with pytest.raises(ValueError, match=message):
        ExpertChoiceGate(D, E, E + 1)


@pytest.mark.parametrize("training", [True, False])
def test_nan_is_seen(device, training):
    """Every expert selects a row with NaN. With none, its output would be 0 and the loss finite."""
    layer = make_layer(device=device).train(training)
    x = torch.randn(12, D, dtype=torch.float64, device=device)
    x[3, 1] = torch.nan
    y, aux = layer(x)
    assert y[3].isnan().all() and aux.loss.isnan()
    assert y.isnan().any(1).sum() == 1
