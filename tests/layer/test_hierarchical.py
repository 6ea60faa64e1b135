"""HierarchicalNoisyTopKGate and HierarchicalMoE: Eq. 12, Importance_H and Load_H of App. B."""

import math

import pytest
import torch
from assertions import LargestTensor, poison_freed_memory, recorded_ops
from layers import A, B, D, layer_of, make_x, shake, total

from moe_ext import HierarchicalMoE, HierarchicalNoisyTopKGate, cv_squared


def make_gate(k=2, a=A, b=B, device="cpu", dtype=torch.float64, **options):
    return shake(HierarchicalNoisyTopKGate(D, a, b, k, **options)).to(device, dtype)


@pytest.mark.parametrize("detach_threshold", [False, True])
def test_detach_threshold_on_both_levels(device, detach_threshold):
    """With threshold gradients, a token's logit gradients on a level sum to 0.

    A common shift of the logits changes nothing. Column sums of the matrix gradients are also 0.
    """
    gate = make_gate(2, device=device, detach_threshold=detach_threshold)
    load = gate(make_x(9, device=device)).load
    cotangent = torch.randn(A * B, dtype=torch.float64, device=device)
    for matrix in torch.autograd.grad(load @ cotangent, (gate.w_gate, gate.w_gate_secondary)):
        balanced = bool(torch.all(matrix.sum(-1).abs() < 1e-12))
        assert balanced != detach_threshold


def one_group(gate, group=1):
    """Makes every token choose `group` first."""
    with torch.no_grad():
        gate.w_gate.zero_()
        gate.w_gate[:, group] = 100
        gate.w_noise.fill_(-100)
    return gate


@pytest.mark.parametrize("training", [True, False])
def test_empty_groups(device, training):
    """Groups without tokens have load and importance 0 and zero gradients.

    Their weights may hold any value, and so may the memory of the gradients.
    """
    gate = one_group(make_gate((1, 2), device=device)).train(training)
    with torch.no_grad():
        for matrix in (gate.w_gate_secondary, gate.w_noise_secondary):
            matrix[[0, 2]] = math.nan
    x = make_x(7, device=device).abs().requires_grad_()
    gating = gate(x)
    empty = torch.ones(A * B, dtype=torch.bool, device=device)
    empty[B : 2 * B] = False
    for values in (gating.importance, gating.load):
        assert torch.count_nonzero(values[empty]) == 0 and values[~empty].isfinite().all()
        assert values[~empty].sum() > 0
    poison_freed_memory(A * D * B, D * A, device=device)
    loss = gating.gates.pow(2).sum() + cv_squared(gating.load) + cv_squared(gating.importance)
    loss.backward()
    for matrix in (gate.w_gate_secondary, gate.w_noise_secondary):
        grad = torch.zeros_like(matrix) if matrix.grad is None else matrix.grad
        assert torch.count_nonzero(grad[[0, 2]]) == 0 and grad.isfinite().all()
    assert torch.count_nonzero(gate.w_gate_secondary.grad[1]) > 0
    assert x.grad.isfinite().all() and gate.w_gate.grad.isfinite().all()


def test_nothing_has_a_row_for_every_expert():
    """No tensor has T · a · b elements in forward or backward, only T · (a + k1 · b) at most."""
    T, a, b = 64, 16, 32
    layer = layer_of(make_gate(2, a, b), hidden_sizes=(6,)).float()
    x = make_x(T, dtype=torch.float32)
    with LargestTensor() as largest:
        y, aux = layer(x)
        total(y, aux).backward()
    weights = max(parameter.numel() for parameter in layer.parameters())
    assert T * b <= largest.size <= max(weights, T * 2 * b) < T * a * b


def test_one_pass_for_all_groups():
    """The number of operator calls does not depend on the number of groups."""

    def names(a):
        layer, x = layer_of(make_gate(2, a, B)).double(), make_x(9)
        with recorded_ops(None) as calls:
            y, aux = layer(x)
            total(y, aux).backward()
        return [name for name, *_ in calls]

    assert names(2) == names(40)


def test_options_are_those_of_the_flat_layer():
    layer = HierarchicalMoE(
        D, A, B, (2, 1), hidden_sizes=(8,), activation="swiglu", bias=True, w_load=0.2
    )
    assert layer.experts.weights[0].shape == (A * B, D, 16) and layer.w_load == 0.2
    assert layer.k == layer.gate.k == 2 and layer.num_experts == A * B
    assert "k=(2, 1)" in repr(layer) and "num_groups=3" in repr(layer)
    modules = [torch.nn.Identity() for _ in range(A * B)]
    x = make_x(7, dtype=torch.float32)
    y, _ = HierarchicalMoE(D, A, B, 2, experts=modules)(x)
    torch.testing.assert_close(y, x)  # the gates sum to 1
    gate = HierarchicalNoisyTopKGate(D, A, B, (2, 1))
    assert HierarchicalMoE(D, A, B, (2, 1), gate=gate).gate is gate
    layer = HierarchicalMoE(D, A, B, 2, noise_epsilon=0.5)
    assert layer.gate.noise_epsilon == 0.5
