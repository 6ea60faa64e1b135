"""BalancedGate, HierarchicalBalancedGate and TopKGate: strictly balanced gating (App. F)."""

import math

import pytest
import reference as ref
import torch
from assertions import assert_same_bits, assert_same_products
from layers import (
    BALANCED,
    TABLE,
    D,
    E,
    layer_of,
    make_gate,
    make_layer,
    make_x,
    move_thresholds,
    thresholds_of,
    total,
)
from torch.utils._python_dispatch import TorchDispatchMode

from moe_ext import BalancedGate, batchwise_masks
from moe_ext.gates import rows_per_expert

each_kind = pytest.mark.parametrize("kind", BALANCED)


@pytest.mark.parametrize(
    "k, T, n, m",
    [
        (2, 16, 8, 4),
        (2, 15, 8, 4),  # 3.75
        (1, 12, 8, 2),  # a half is rounded up
        (1, 11, 8, 1),  # 1.375
        (1, 3, 8, 1),  # at least 1
        (1, 1, 1000, 1),
        (8, 5, 8, 5),
        (3, 0, 8, 0),
    ],
)
def test_rows_per_expert(k, T, n, m):
    assert rows_per_expert(k, T, n) == ref.rows_per_expert(k, T, n) == m
    gating = BalancedGate(D, n, k)(make_x(T, dtype=torch.float32))
    assert torch.bincount(gating.expert_index, minlength=n).tolist() == [m] * n
    assert gating.load.tolist() == [m] * n and gating.equal_load


@each_kind
def test_symmetric_start(device, kind):
    """All scores tie: every expert gets m different tokens, the same ones in two runs."""
    gate, x = TABLE[kind].gate().to(device), make_x(120, device=device, dtype=torch.float32)
    assert all(torch.count_nonzero(p) == 0 for p in gate.parameters())
    first, second = gate(x), gate(x)
    assert_same_bits(first.expert_index, second.expert_index)
    token = torch.repeat_interleave(first.token_offsets.diff())
    num = gate.num_experts
    tokens = [frozenset(token[first.expert_index == e].tolist()) for e in range(num)]
    assert {len(t) for t in tokens} == {40 if kind == "balanced" else 20}
    assert len(set(tokens)) == num
    (first.gates.square().sum() + first.loss).backward()
    assert all(p.grad.isfinite().all() for p in gate.parameters())


@each_kind
def test_thresholds_start_at_the_first_batch(device, kind):
    """Thresholds start just below the m-th scores of the first batch, where both masks agree.

    Evaluation then has the result of training. Later batches do not initialize them again.
    """
    gate, x = make_gate(kind, device, started=False), make_x(30, device=device)
    first = gate(x)
    assert first.metrics["mask_disagreement"] == 0 and first.loss == 0
    before = [threshold.detach().clone() for threshold in thresholds_of(gate)]
    if kind == "balanced":
        m = rows_per_expert(2, 30, E)
        scores = torch.softmax(x @ gate.w_gate, 1).detach()
        mth = scores.sort(0, descending=True).values[m - 1]
        torch.testing.assert_close(before[0], mth, rtol=1e-12, atol=0)
    gate(make_x(30, device=device))
    for threshold, start in zip(thresholds_of(gate), before, strict=True):
        assert_same_bits(threshold.detach(), start)
    gate.eval()
    again = gate(x)
    assert_same_products(again.gates, first.gates)
    assert_same_bits(again.expert_index, first.expert_index)
    assert_same_bits(again.token_offsets, first.token_offsets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each_kind
def test_equal_scores_pass_the_thresholds_they_start(device, kind, dtype):
    """A rounded threshold is below the scores too. At the start W_g = 0, so all are equal."""
    layer = make_layer(kind, device, dtype, started=False)
    x = make_x(64, device=device, dtype=dtype)
    for name, param in layer.gate.named_parameters():
        if name.startswith("w_gate"):
            torch.nn.init.zeros_(param)
    layer(x)
    _, aux = layer.eval()(x)
    assert aux.metrics()["share_without_expert"] == 0


@each_kind
def test_thresholds_do_not_start_at_a_batch_of_nan(device, kind):
    gate, x = make_gate(kind, device, started=False), make_x(30, device=device)
    gate(torch.full_like(x, math.nan))
    thresholds = thresholds_of(gate)
    assert not any(torch.count_nonzero(threshold) for threshold in thresholds)
    assert gate(x).metrics["mask_disagreement"] == 0
    assert all(threshold.isfinite().all() for threshold in thresholds)


@each_kind
def test_all_buffers_may_change_their_type(kind):
    """Module.type makes numbers of the flags that say whether the thresholds are initialized."""
    gate, x = make_gate(kind, "cpu", started=False).type(torch.float64), make_x(30)
    assert gate(x).metrics["mask_disagreement"] == 0
    thresholds = thresholds_of(gate)
    before = [threshold.clone() for threshold in thresholds]
    gate(x[:20])
    assert all(map(torch.equal, thresholds, before))


@pytest.mark.equation("App. F")
@each_kind
def test_batchwise_masks(device, kind):
    """Within the context, evaluation has the result of training."""
    layer, x = make_layer(kind, device, started=False), make_x(20, device=device)
    y, aux = layer(x)
    move_thresholds(layer.gate)
    layer.eval()
    by_threshold, _ = layer(x)
    with batchwise_masks(layer):
        y_batch, aux_batch = layer(x)
    assert_same_bits(y_batch, y)
    assert_same_bits(aux_batch.tokens_per_expert, aux.tokens_per_expert)
    assert not torch.equal(by_threshold, y)
    assert_same_bits(layer(x)[0], by_threshold)
    with pytest.raises(KeyError), batchwise_masks(layer):
        raise KeyError
    assert not layer.gate.batchwise


def test_metrics(device):
    """Checks mask_disagreement and share_without_expert against their definitions."""
    gate, x = make_gate("balanced", device, started=False), make_x(30, device=device)
    gate(x)
    move_thresholds(gate, 0.1)
    gating = gate(x)
    scores = torch.softmax(x @ gate.w_gate, 1).detach().cpu()
    batch = ref.M_batchwise(scores, rows_per_expert(2, 30, E))
    threshold = ref.M_threshold(scores, gate.threshold.detach().cpu())
    expected = (batch - threshold).abs().sum() / (batch + threshold).sum()
    assert expected > 0.05
    assert float(gating.metrics["mask_disagreement"]) == pytest.approx(float(expected))
    gate.eval()
    gating = gate(x)
    assert gating.loss is None and "mask_disagreement" not in gating.metrics
    without = float((threshold.sum(1) == 0).double().mean())
    assert float(gating.metrics["share_without_expert"]) == pytest.approx(without)
    with batchwise_masks(gate):
        assert float(gate(x).metrics["mask_disagreement"]) == pytest.approx(float(expected))
    layer = layer_of(gate).double().to(device).train()
    assert layer(x)[1].metrics()["mask_disagreement"] == pytest.approx(float(expected))


@pytest.mark.parametrize("detach_scores", [True, False])
@each_kind
def test_detach_scores(device, kind, detach_scores):
    """The loss trains the thresholds; it trains the scores only if detach_scores is False."""
    gate = make_gate(kind, device, started=False, detach_scores=detach_scores)
    x = make_x(30, device=device).requires_grad_()
    gate(x)
    move_thresholds(gate)
    gate(x).loss.backward()
    for name, parameter in gate.named_parameters():
        if "threshold" in name:
            assert torch.count_nonzero(parameter.grad) > 0
        else:
            assert (parameter.grad is None) == detach_scores
    assert (x.grad is None) == detach_scores


# Module behavior


class _NoReads(TorchDispatchMode):
    """Raises an error for ops that synchronize with a GPU: reads of values, dynamic shapes."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        assert not name.startswith(("aten::_local_scalar_dense", "aten::nonzero", "aten::item"))
        return func(*args, **(kwargs or {}))


@each_kind
def test_training_reads_no_values(kind):
    layer, x = make_layer(kind), make_x(20)
    with _NoReads():
        for _ in range(2):
            y, aux = layer(x)
            total(y, aux).backward()
    with pytest.raises(AssertionError), _NoReads():
        layer.eval()(x)
