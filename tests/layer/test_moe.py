"""MoE: gate, dispatch, experts and combine as one layer (Eq. 1, 6, 7, 11)."""

import pytest
import torch
from assertions import (
    assert_all_same_bits,
    assert_same_bits,
    gradients,
    poison_freed_memory,
    tensors_of,
)
from layers import D, E, layer_of, make_x, shake, total

from moe_ext import (
    HierarchicalMoE,
    MoE,
    NoisyTopKGate,
    SharedExpert,
    TopKGate,
    count_parameters,
    cv_squared,
    ops,
)

emulated = pytest.mark.emulated


def make_layer(k=2, device="cpu", dtype=torch.float64, num_experts=E, **options):
    """Makes a layer with random weights."""
    return shake(layer_of(NoisyTopKGate(D, num_experts, k), **options)).to(device, dtype)


def all_gradients(loss, x, layer):
    return gradients([loss], [x, *layer.parameters()], [None])


def test_defaults():
    """The default is one ReLU hidden layer of 4 · D without biases; both loss weights are 0.1."""
    layer = MoE(D, E, 2)
    assert layer.experts.activation == "relu" and (layer.w_importance, layer.w_load) == (0.1, 0.1)
    assert [tuple(p.shape) for p in layer.experts.parameters()] == [(E, D, 4 * D), (E, 4 * D, D)]


@emulated
@pytest.mark.equation("Sec. 3.1")
def test_any_shape_and_layout(device):
    """All positions form one batch. Accepts transposed and expanded inputs and gradients."""
    layer, x = make_layer(2, device).eval(), make_x(3, 4, device=device)
    results = []
    for make in (
        lambda x: x,
        lambda x: x.reshape(12, D),
        lambda x: x.reshape(3, 2, 2, D),
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    ):
        moved = make(x).clone(memory_format=torch.preserve_format).requires_grad_()
        y, aux = layer(moved)
        assert y.shape == moved.shape
        grad_x, *grads = all_gradients(y.sum() + aux.loss, moved, layer)
        results.append([y.reshape(-1, D), *tensors_of(aux), grad_x.reshape(-1, D), *grads])
    assert not moved.is_contiguous()
    for result in results[1:]:
        assert_all_same_bits(result, results[0])
    row = x[:1].expand(3, 4, D)
    assert_same_bits(layer(row)[0], layer(row.clone())[0])


@emulated
def test_empty_experts_have_zero_gradients_and_change_nothing(device):
    """Their weights are NaN, and so is the memory that the second step finds freed."""
    layer = make_layer(2, device, torch.float32, num_experts=8, bias=True)
    with torch.no_grad():
        layer.gate.w_gate.zero_()
        layer.gate.w_noise.zero_()
        layer.gate.w_gate[0, 4:] = -1e6
        for p in layer.experts.parameters():
            p[4:] = torch.nan
    x = make_x(9, device=device, dtype=torch.float32)
    x[:, 0] = 1.0
    sizes = sorted(
        {p.numel() for p in layer.parameters()} | {p[0].numel() for p in layer.parameters()}
    )
    for _ in range(3):
        layer.zero_grad(set_to_none=True)
        poison_freed_memory(*sizes, 9 * D, 18 * D, 18 * 7, device=device)
        leaf = x.clone().requires_grad_()
        y, aux = layer(leaf)
        assert not aux.tokens_per_expert[4:].any()
        poison_freed_memory(*sizes, 9 * D, 18 * D, 18 * 7, device=device)
        (y.sum() + aux.loss).backward()
        assert y.isfinite().all() and leaf.grad.isfinite().all()
        for p in layer.experts.parameters():
            assert p.grad.isfinite().all() and torch.count_nonzero(p.grad[4:]) == 0


@pytest.mark.parametrize("enabled", [True, False])
def test_backward_within_autocast(device, enabled):
    """Backward within autocast has the gradients of a backward pass outside, bitwise identical."""
    layer = make_layer(2, device, torch.float32)
    x = make_x(30, device=device, dtype=torch.float32).requires_grad_()
    results = []
    for within in (False, True):
        torch.manual_seed(0)
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            y, aux = layer(x)
        with torch.autocast(device, torch.bfloat16, enabled=within):
            grads = torch.autograd.grad(total(y, aux), [x, *layer.parameters()])
        results.append(grads)
    assert_all_same_bits(*results)


def test_a_shared_expert_has_the_dtype_of_the_experts():
    shared = SharedExpert(D, [4], dtype=torch.bfloat16, gated=True)
    layer = MoE(D, E, 2, expert_dtype=torch.bfloat16, shared_expert=shared)
    y, aux = layer(torch.randn(9, D))
    assert y.dtype == torch.float32
    (y.sum() + aux.loss).backward()
    assert shared.w_gate.grad.dtype == torch.float32 and shared.w_gate.grad.abs().sum() > 0


def test_experts_in_a_type_of_their_own(device):
    """The gate sees x unchanged, the experts see x in their dtype; y has the dtype of x.

    After a cast of the layer, the experts see x in the new dtype.
    """
    layer = MoE(D, E, 2, hidden_sizes=(7,), expert_dtype=torch.bfloat16).to(device)
    torch.nn.init.normal_(layer.gate.w_gate)
    half = {name for name, p in layer.named_parameters() if p.dtype == torch.bfloat16}
    assert half == {"experts.weight_0", "experts.weight_1"}
    x = make_x(30, device=device, dtype=torch.float32).requires_grad_()
    y, aux = layer(x)
    (y.square().sum() + aux.loss).backward()
    assert x.grad.dtype == torch.float32
    plan = ops.dispatch_plan(aux.expert_index, E)
    routing = {"inverse": plan.inverse, "gates": aux.gates}
    assert_same_bits(y, layer.experts(x.bfloat16(), plan.offsets, **routing).float())
    for dtype in (torch.float64, torch.float32, torch.float16):
        y, aux = layer.to(dtype)(make_x(5, device=device, dtype=dtype))
        assert y.dtype == dtype and y.isfinite().all()


@pytest.mark.parametrize("shape", [(D,), (5, D), (2, 3, D)])
def test_the_output_may_be_changed_in_place(device, shape):
    """The output is no view; wrappers such as FSDP2 would warn about one."""
    y, aux = make_layer(2, device)(make_x(*shape[:-1], device=device))
    assert not y._is_view()
    before = y.detach().clone()
    y += 1
    (y.square().sum() + aux.loss).backward()
    assert_same_bits(y.detach(), before + 1)


@pytest.mark.equation("Table 6")
def test_statistics(device):
    layer = make_layer(2, device)
    with torch.no_grad():
        _, aux = layer(make_x(40, device=device))
    metrics = aux.metrics()
    assert all(type(value) is float for value in metrics.values())
    assert metrics == {
        "cv_importance": pytest.approx(float(cv_squared(aux.importance)) ** 0.5),
        "cv_load": pytest.approx(float(cv_squared(aux.load)) ** 0.5),
        "max_over_mean_load": pytest.approx(float(aux.load.max() / aux.load.mean())),
        "cv_tokens": pytest.approx(float(cv_squared(aux.tokens_per_expert.double())) ** 0.5),
    }
    counts = torch.bincount(aux.expert_index.flatten(), minlength=E)
    assert_same_bits(aux.tokens_per_expert, counts)
    aux.gate_metrics["mine"] = torch.ones(())
    assert aux.metrics()["mine"] == 1
    assert layer(make_x(40, device=device))[1].gate_metrics == {}


def test_total_and_active_parameters():
    per_expert, gate_size = 2 * D * 7, 2 * D * 5
    layer = MoE(D, 5, 2, hidden_sizes=[7])
    assert count_parameters(layer) == (5 * per_expert + gate_size, 2 * per_expert + gate_size)
    assert f"parameters={5 * per_expert + gate_size}, active_parameters=" in repr(layer)

    one = SharedExpert(D, [3])  # of both layers, so it counts once
    model = torch.nn.Sequential(*(MoE(D, 5, 2, hidden_sizes=[7], shared_expert=one) for _ in "ab"))
    model.append(torch.nn.Linear(D, 1))
    dense = 2 * D * 3 + D + 1 + 2 * gate_size
    assert count_parameters(model) == (10 * per_expert + dense, 4 * per_expert + dense)

    with torch.device("meta"):  # the secondary gates of 2 of 3 groups, 2 of 12 experts
        two_levels = HierarchicalMoE(D, 3, 4, (2, 1), hidden_sizes=[7])
    primary, secondary = 2 * D * 3, 2 * D * 4
    total = 12 * per_expert + primary + 3 * secondary
    assert count_parameters(two_levels) == (total, 2 * per_expert + primary + 2 * secondary)

    empty = MoE(D, 5, 2, gate=TopKGate(D, 8, 2), num_null_experts=3, hidden_sizes=[7])
    active = round(2 * 5 / 8 * per_expert) + D * 8
    assert count_parameters(empty) == (5 * per_expert + D * 8, active)
    assert count_parameters(torch.nn.Linear(2, 3)) == (9, 9)
