"""CV², L_importance and L_load (Eq. 7, 11); the losses of later routers."""

import pytest
import reference as ref
import torch
from assertions import assert_exact
from layers import (
    PER_SEQUENCE,
    TABLE,
    D,
    E,
    K,
    gating_by_reference,
    layer_of,
    make_layer,
    make_x,
    shake,
)

from moe_ext import (
    Gate,
    HierarchicalMoE,
    ImportanceLoss,
    LoadLoss,
    MoE,
    RouterLoss,
    Routing,
    SwitchLoss,
    TopKGate,
    ZLoss,
    cv_squared,
)

SWITCH = pytest.mark.equation("arXiv 2101.03961")
Z = pytest.mark.equation("arXiv 2202.08906")
SEQUENCE = pytest.mark.equation("arXiv 2412.19437")


def vec(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.float64, device=device)


@pytest.mark.equation("Eq. 7", "Eq. 11")
@pytest.mark.parametrize(
    "v, expected",
    [([1, 3], 0.25), ([4, 0, 0, 0], 3), ([5], 0), ([0, 0, 0], 0), ([0], 0), ([3] * 8, 0)],
)
def test_population_variance(device, v, expected):
    """n = 1 and all zeros give 0 instead of 0 / 0. Equal values also have gradient 0."""
    v = vec(*v, device=device).requires_grad_()
    actual = cv_squared(v)
    assert actual.shape == ()
    assert float(actual.detach()) == pytest.approx(expected, abs=1e-14)
    (gradient,) = torch.autograd.grad(actual, v)
    assert gradient.isfinite().all()
    if expected == 0:
        assert gradient.abs().max() < 1e-15
    if len(v) == 1:
        assert gradient.tolist() == [0]


@pytest.mark.equation("Eq. 7", "Eq. 11")
@pytest.mark.parametrize("make", [MoE, lambda d, e, k, **own: HierarchicalMoE(d, 2, 3, k, **own)])
def test_the_losses_of_the_paper_in_both_spellings(make):
    """losses=[...] and the short form have equal losses and gradients; the first reports both."""
    x, results = make_x(20), []
    for options in (
        {"w_importance": 0.3, "w_load": 0.7},
        {"losses": [ImportanceLoss(0.3), LoadLoss(0.7)]},
        {"losses": [LoadLoss(0.7)], "w_importance": 0.3},
    ):
        torch.manual_seed(0)
        layer = make(D, E, K, **options).double()
        torch.manual_seed(1)
        aux = layer(x)[1]
        aux.loss.backward()
        results.append((aux.loss.detach(), *(p.grad for p in layer.gate.parameters())))
        statistics = {"importance_loss": aux.importance, "load_loss": aux.load}
        for name, value in aux.losses.items():
            assert_exact(value, cv_squared(statistics[name]).detach())
        assert set(aux.losses) == {loss.name for loss in options.get("losses", ())}
    for result in results[1:]:
        for actual, expected in zip(result, results[0], strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)
    assert results[0][1].count_nonzero()


# Losses of later routers. test_layers.py compares those of the batch with the reference.


def layer_with(*losses, device="cpu", **options):
    gate = shake(TopKGate(D, E, K))
    options = {"w_importance": None, "w_load": None} | options
    return layer_of(gate, losses=losses, **options).double().to(device)


@SEQUENCE
@pytest.mark.parametrize("name", [name for name in TABLE if "losses" not in TABLE[name].options()])
@pytest.mark.parametrize("how", ["mask", "nested", "one sequence"])
def test_loss_of_each_sequence_equals_reference(device, name, how):
    """A sequence without real tokens does not count."""
    layer = make_layer(name, device, losses=[PER_SEQUENCE])
    lengths = {"mask": [4, 0, 3], "one sequence": [7], "nested": [4, 2, 3]}[how]
    x = make_x(len(lengths), max(lengths), device=device)
    mask = torch.arange(max(lengths), device=device) < torch.tensor(lengths, device=device)[:, None]
    rows = [row[real] for row, real in zip(x, mask, strict=True)]
    if how == "one sequence":
        _, aux = layer(x[0])
    elif how == "nested":
        _, aux = layer(torch.nested.nested_tensor(rows, layout=torch.jagged))
    else:
        _, aux = layer(x.unflatten(0, (3, 1)), mask.unflatten(0, (3, 1)))
    offsets, index = aux.token_offsets, aux.expert_index
    chosen = iter(index.tolist())
    if offsets is not None:
        chosen = iter([part.tolist() for part in index.tensor_split(offsets[1:-1].cpu())])
    losses = []
    for row in rows:
        if len(row):
            gating = gating_by_reference(layer.gate.eval(), row)
            P_X = gating.P_X or [ref.Softmax(logits) for logits in gating.logits]
            losses.append(ref.L_switch(P_X, [next(chosen) for _ in row]).detach())
    assert_exact(aux.losses["switch_loss_per_sequence"], sum(losses) / len(losses))


@SWITCH
@pytest.mark.parametrize("masked", [False, True])
def test_transformers_loss_is_k_times_ours(masked):
    """It is the mean over layers before the product, so it equals ours for one layer only."""
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    layer = layer_with(SwitchLoss(1.0))
    x = make_x(3, 8)
    mask = torch.rand(3, 8) < 0.6 if masked else None
    _, aux = layer(x, mask)
    logits = (x @ layer.gate.w_gate.detach()).flatten(0, 1)
    expected = modeling.load_balancing_loss_func((logits,), E, K, mask)
    # Their sums are in float32.
    assert float(aux.losses["switch_loss"]) == pytest.approx(float(expected) / K, rel=1e-6)


def test_accumulated_losses():
    """Micro-batches of equal size give the z-loss and the loss of each sequence of the batch."""
    layer = layer_with(PER_SEQUENCE, ZLoss(0.2))
    x = make_x(6, 4)
    whole = layer(x)[1].loss
    parts = sum(layer(part)[1].loss for part in x.chunk(3)) / 3
    assert_exact(parts.detach(), whole.detach())
    expected, actual = (torch.autograd.grad(v, layer.gate.w_gate)[0] for v in (whole, parts))
    assert_exact(actual, expected)
    batch_layer = layer_with(SwitchLoss(0.3))
    part_loss = sum(batch_layer(part)[1].loss for part in x.chunk(3)) / 3
    assert abs(part_loss - batch_layer(x)[1].loss) > 1e-4


def test_losses_add_to_those_of_the_paper():
    x = make_x(9)
    layer = layer_with(SwitchLoss(0.3), ZLoss(0.0), w_importance=0.2)
    assert (layer.w_importance, layer.w_load) == (0.2, 0)
    _, aux = layer(x)
    expected = 0.2 * cv_squared(aux.importance) + 0.3 * aux.losses["switch_loss"]
    assert_exact(aux.loss.detach(), expected.detach())
    assert aux.losses["z_loss"] > 0  # a metric only
    assert aux.metrics()["z_loss"] == float(aux.losses["z_loss"])
    layer.losses[0].weight = 1.0  # a schedule
    expected = 0.2 * cv_squared(aux.importance) + aux.losses["switch_loss"]
    assert_exact(layer(x)[1].loss.detach(), expected.detach())
    assert not any(value.requires_grad for value in aux.losses.values())
    assert repr(layer.losses[0]) in repr(layer)
    assert MoE(D, E, K)(x.float())[1].losses == {}


@Z
def test_z_loss_of_large_logits():
    """exp(1000) is infinite; its logarithm is not computed."""
    logits = torch.tensor([[1000.0, 0.0], [-1000.0, -1001.0]], dtype=torch.float64)
    routing = Routing(None, None, None, None, logits=logits)
    total, count = ZLoss(1.0).sums(routing, None, None)
    second = -1000 + torch.log1p(torch.tensor(-1.0, dtype=torch.float64).exp())
    assert_exact(total, 1e6 + second.square())
    assert count == 2


class RouterEntropy(RouterLoss):
    name = "router_entropy"

    def sums(self, routing, tokens_per_expert, sequence_offsets):
        p = routing.probabilities()
        return -torch.special.xlogy(p, p).sum(), p.new_tensor(len(p))

    def value(self, entropy, num_tokens):
        return entropy / num_tokens


class SigmoidGate(Gate):
    """Scores each expert with a sigmoid."""

    def __init__(self):
        super().__init__(D, E, K)
        self.w_gate = torch.nn.Parameter(torch.randn(D, E))

    def forward(self, x, ranks=None):
        logits = self.logits(x, self.w_gate)
        top, index = logits.sigmoid().topk(self.k)
        gates = top / top.sum(-1, keepdim=True)
        return self.make_routing(gates, index, ranks=ranks, logits=logits, scores=logits.sigmoid())


@pytest.mark.parametrize("gate", [TopKGate(D, E, K), SigmoidGate()])
def test_a_custom_loss(gate):
    """The probabilities are the scores of a custom gate, divided by their sum."""
    layer, x = (
        layer_of(gate, losses=[RouterEntropy(0.5)], w_importance=0, w_load=0).double(),
        make_x(9),
    )
    _, aux = layer(x)
    logits = x @ gate.w_gate.detach()
    given = {"logits": logits} if isinstance(gate, TopKGate) else {"probs": logits.sigmoid()}
    expected = torch.distributions.Categorical(**given).entropy().mean()
    assert_exact(aux.losses["router_entropy"], expected)
    assert_exact(aux.loss.detach(), 0.5 * expected)
