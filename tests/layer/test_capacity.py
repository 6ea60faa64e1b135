"""The capacity of the experts, with dropping by position or by score (arXiv 2101.03961)."""

import math

import pytest
import torch
from assertions import (
    assert_exact,
    recorded_ops,
)
from layers import LOSSES, PER_SEQUENCE, D, E, K, layer_of, make_x, shake

from moe_ext import Capacity, MoE, TopKGate, ops

CAPACITY = pytest.mark.equation("arXiv 2101.03961")
DROPS = ["position", "score"]


def make_layer(drop=None, device="cpu", dtype=torch.float64, *, gate=TopKGate, k=K, **options):
    """Makes a layer with random weights of the gate; drop None: without capacity."""
    if drop is not None:
        options = {"capacity": Capacity(0.7, drop)} | options
    options = {"losses": [*LOSSES, PER_SEQUENCE]} | options
    return layer_of(shake(gate(D, E, k)), **options).to(device, dtype)


@CAPACITY
@pytest.mark.parametrize(
    ("factor", "T", "k", "num_experts", "C"),
    [(0.9, 50, 1, 3, 15), (0.9, 100, 2, 3, 60), (1.1, 100, 1, 10, 11), (1.25, 64, 2, 8, 20)],
)
def test_the_capacity_is_that_of_the_decimal_number(factor, T, k, num_experts, C):
    """In float64, 0.9 · 50 / 3 is above 15."""
    gate = TopKGate(D, num_experts, k)
    layer = MoE(D, num_experts, k, gate=gate, capacity=factor)
    same = torch.arange(k).expand(T, k)
    _, aux = layer(torch.randn(T, D), expert_index=same)
    assert aux.kept.sum(0).tolist() == [C] * k


def test_the_selection_bias_counts_dropped_tokens():
    layer = make_layer("score", gate=lambda *sizes: TopKGate(*sizes, bias_update_rate=0.1))
    _, aux = layer(make_x(9))
    assert not aux.kept.all()
    assert torch.equal(layer.gate.tokens_since_update, aux.tokens_per_expert)


@pytest.mark.parametrize("drop", DROPS)
def test_no_dropped_row_is_computed(drop):
    layer = make_layer(drop)
    with recorded_ops() as calls:
        _, aux = layer(make_x(20))
    *_, experts = [args for name, _, args, _ in calls if name == "experts"]
    assert experts[2].numel() == aux.kept.sum() < 20 * K
    assert experts[1].diff().max() == math.ceil(20 * K / E * 0.7)


@pytest.mark.parametrize("drop", DROPS)
def test_zero_computation_experts_have_no_limit(drop):
    """C is a multiple of the mean over all experts of the gate."""
    gate = TopKGate(D, E + 2, K, renormalize=False)
    options = {"num_identity_experts": 1, "num_null_experts": 1}
    layer = layer_of(gate, capacity=Capacity(0.5, drop), **options).double()
    with torch.no_grad():
        gate.w_gate.zero_()
        gate.w_gate[0] = torch.arange(E + 2)
    x = torch.ones(14, D, dtype=torch.float64)  # all choose the last two experts
    aux = layer(x)[1]
    assert aux.kept.all()
    _, aux = layer(x, expert_index=torch.tensor([[0, E]] * 14))
    assert torch.equal(aux.kept.sum(0), torch.tensor([2, 14]))  # in the order of expert_index
    assert aux.gate_metrics["share_dropped"] == 12 / 28


class ChoiceMajorGate(TopKGate):
    """Drops as GShard does (arXiv 2006.16668): all first choices come before all second ones."""

    def forward(self, x, ranks=None):
        routing = super().forward(x, ranks)
        index = routing.expert_index.T.flatten()
        plan = ops.dispatch_plan(index, self.num_experts)
        place = plan.inverse - plan.offsets[index]
        return routing._replace(kept=place.view(self.k, -1).T < 4)


@pytest.mark.equation("arXiv 2101.03961")
def test_a_gate_may_drop_by_itself():
    layer = make_layer(gate=ChoiceMajorGate)
    x = make_x(20)
    y, aux = layer(x)
    taken, kept = [0] * E, torch.zeros(20, K, dtype=torch.bool)
    for j in range(K):
        for t in range(20):
            kept[t, j] = taken[aux.expert_index[t, j]] < 4
            taken[aux.expert_index[t, j]] += 1
    assert torch.equal(aux.kept, kept) and not kept.all()
    zero = aux.gates * aux.kept
    plan = ops.dispatch_plan(aux.expert_index, E)
    weights = layer.experts.weights
    expected = ops.experts(x, weights, offsets=plan.offsets, inverse=plan.inverse, gates=zero)
    assert_exact(y.detach(), expected.detach())
    message = r"^MoE: capacity must be None for a gate that sets Routing.kept, got Capacity\(f"
    with pytest.raises(ValueError, match=message):
        make_layer("score", gate=ChoiceMajorGate, capacity=Capacity(1.0, "score"))(x)


def test_a_capacity_for_evaluation():
    """The attribute may change between steps."""
    layer = make_layer("position")
    x = make_x(20)
    shares = []
    for layer.capacity in (0.5, Capacity(1.0), 2.0):
        shares.append(layer(x)[1].metrics()["share_dropped"])
    assert shares[0] > shares[1] > shares[2]
    assert "capacity=2.0" in repr(layer)


def test_another_k_of_the_gate():
    """The capacity follows it."""
    layer = make_layer("position", capacity=0.5)
    layer.gate.k = K - 1
    _, aux = layer(make_x(60))
    assert layer.k == K - 1
    most = aux.expert_index[aux.kept].bincount().max()
    assert most == math.ceil(0.5 * (K - 1) * 60 / E)


def test_the_former_spelling():
    """capacity_factor and drop of version 0.1, as arguments and attributes."""
    is_deprecated = pytest.warns(DeprecationWarning, match=r"are now capacity=Capacity\(factor")
    with is_deprecated:
        layer = MoE(D, E, K, capacity_factor=0.7, drop="score")
    assert layer.capacity == Capacity(0.7, "score")
    with is_deprecated:
        layer = MoE(D, E, K, capacity_factor=0.7)
    assert layer.capacity == Capacity(0.7, "position")
    with is_deprecated:
        assert (layer.capacity_factor, layer.drop) == (0.7, "position")
    with is_deprecated:
        layer.drop = "score"
    assert layer.capacity == Capacity(0.7, "score")
    with is_deprecated:
        layer.capacity_factor = 2
    assert layer.capacity == Capacity(2.0, "score")
    with is_deprecated:
        layer.capacity_factor = None
    assert layer.capacity is None
    with is_deprecated:
        assert (layer.capacity_factor, layer.drop) == (None, "position")
    with is_deprecated, pytest.raises(ValueError, match="^MoE: drop must be left out without cap"):
        layer.drop = "score"
