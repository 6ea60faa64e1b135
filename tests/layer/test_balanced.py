"""BalancedGate, HierarchicalBalancedGate and TopKGate: strictly balanced gating (App. F)."""

import math

import pytest
import reference as ref
import torch
from assertions import (
    assert_exact,
    assert_same_bits,
    assert_same_products,
    dense,
    gradients,
)
from operators import tie_break
from torch.utils._python_dispatch import TorchDispatchMode

from moe_ext import (
    BalancedGate,
    HierarchicalBalancedGate,
    HierarchicalMoE,
    MoE,
    SoftmaxGate,
    TopKGate,
    batchwise_loss,
    batchwise_masks,
)
from moe_ext.gates import rows_per_expert

D, E, A, B = 5, 6, 3, 4
GATES = {
    "flat": lambda **options: BalancedGate(D, E, 2, **options),
    "hierarchical": lambda **options: HierarchicalBalancedGate(D, A, B, (1, 2), **options),
}


def shake(gate):
    """Randomizes the weights. The first batch sets the thresholds."""
    for name, parameter in gate.named_parameters():
        if "w_gate" in name:
            torch.nn.init.normal_(parameter)
    return gate


def make_gate(kind="flat", device="cpu", dtype=torch.float64, **options):
    return shake(GATES[kind](**options)).to(device, dtype)


def layer_of(gate, **options):
    options = {"hidden_sizes": (7,), **options}
    if isinstance(gate, HierarchicalBalancedGate):
        sizes = gate.num_groups, gate.experts_per_group, gate.k_of_levels
        return HierarchicalMoE(D, *sizes, gate=gate, **options)
    return MoE(D, gate.num_experts, gate.k, gate=gate, **options)


def make_layer(kind="flat", device="cpu", dtype=torch.float64, **options):
    return layer_of(make_gate(kind, dtype=dtype), **options).to(device, dtype)


def make_x(*shape, device="cpu", dtype=torch.float64):
    return torch.randn(*shape, D, dtype=torch.float64).to(device, dtype)


def move_thresholds(gate, by=0.02):
    """Moves the thresholds to where the two masks disagree."""
    with torch.no_grad():
        for name, parameter in gate.named_parameters():
            if "threshold" in name:
                shift = torch.randn(parameter.shape, dtype=parameter.dtype)  # on any device
                parameter.add_(by * shift.to(parameter.device))


def total(y, aux):
    """Computes a loss whose gradient differs between tokens."""
    weight = torch.linspace(-1, 1, y.numel()).to(y.device)
    return (y * weight.reshape(y.shape)).sum() + aux.loss


def priority(num_rows, num_experts, first_column=0):
    """Returns the tie-break priorities of the op for the reference, where the smaller one wins."""
    return torch.tensor(
        [[-tie_break(first_column + e, row) for e in range(num_experts)] for row in range(num_rows)]
    )


def by_reference(layer, x):
    """Returns y, dense gates, importance, loss and the gradients of `total`.

    Thresholds stay as they are.
    """
    gate, T = layer.gate, len(x)
    named = {"x": x, **dict(layer.named_parameters())}
    leaves = {name: t.detach().cpu().clone().requires_grad_() for name, t in named.items()}
    w1, w2 = leaves["experts.weight_0"], leaves["experts.weight_1"]
    experts = [lambda x, e=e: ref.E_i(x, [w1[e], w2[e]]) for e in range(gate.num_experts)]
    if isinstance(gate, BalancedGate):
        y, G_X, importance, L = ref.BalancedMoE(
            leaves["x"],
            leaves["gate.w_gate"],
            gate.k,
            experts,
            D,
            leaves["gate.threshold"],
            priority(T, gate.num_experts),
            gate.training,
        )
    else:
        a, b = gate.num_groups, gate.experts_per_group
        m1 = ref.rows_per_expert(gate.k_of_levels[0], T, a)
        y, G_X, importance, L = ref.HierarchicalBalancedMoE(
            leaves["x"],
            leaves["gate.w_gate"],
            leaves["gate.w_gate_secondary"],
            *gate.k_of_levels,
            [experts[i * b : (i + 1) * b] for i in range(a)],
            D,
            leaves["gate.threshold"],
            leaves["gate.threshold_secondary"],
            priority(T, a),
            [priority(m1, b, i * b) for i in range(a)],
            gate.training,
        )
    importance = importance.reshape(-1)
    losses = ref.L_importance(importance, 0.1)
    if L is not None:
        losses = losses + L / T
    loss = (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum() + losses
    grads = gradients([loss], list(leaves.values()), [torch.ones_like(loss)])
    return y, G_X, importance, losses, dict(zip(leaves, grads, strict=True))


def assert_equals_reference(layer, x):
    expected = by_reference(layer, x)
    y, aux = layer(x)
    y_ref, G_X, importance, losses = (t.detach() for t in expected[:4])
    assert_exact(y.detach(), y_ref)
    assert_exact(dense(aux, layer.num_experts).detach(), G_X)
    assert_exact(aux.importance.detach(), importance)
    # Load is constant over the experts in training. In evaluation it has no gradient.
    load = (G_X > 0).double().sum(0)
    assert_exact(aux.load, load)
    assert_exact(aux.tokens_per_expert.double(), load)
    assert_exact(aux.loss.detach(), losses + ref.L_load(load, 0.1))
    layer.zero_grad()
    x = x.detach().requires_grad_()
    total(*layer(x)).backward()
    assert_exact(x.grad, expected[4]["x"])
    for name, parameter in layer.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert_exact(grad, expected[4][name])
    return aux


@pytest.mark.equation("App. B", "App. F")
@pytest.mark.parametrize("T", [1, 2, 7, 16])
@pytest.mark.parametrize("kind", GATES)
def test_training_equals_reference(device, kind, T):
    """Compares outputs, gates, losses and every gradient, including those of the thresholds."""
    layer, x = make_layer(kind, device), make_x(T, device=device)
    layer(x)  # sets the thresholds
    move_thresholds(layer.gate)
    assert_equals_reference(layer, x)


@pytest.mark.equation("App. B", "App. F")
@pytest.mark.parametrize("kind", GATES)
def test_evaluation_equals_reference(device, kind):
    layer, x = make_layer(kind, device), make_x(16, device=device)
    layer(x)
    move_thresholds(layer.gate, 0.1)
    aux = assert_equals_reference(layer.eval(), x)
    assert not aux.load.requires_grad and aux.load.is_floating_point()
    assert len({int(n) for n in aux.load}) > 1


@pytest.mark.parametrize("E, k", [(6, 1), (6, 5), (6, 6), (1, 1), (7, 3), (40, 1)])
def test_shapes(device, E, k):
    """k = n gives the softmax gate.

    With 40 experts and 16 tokens, each expert gets 1 (0.4 rounded up).
    """
    layer = layer_of(shake(BalancedGate(D, E, k))).to(device, torch.float64)
    x = make_x(16, device=device)
    layer(x)
    move_thresholds(layer.gate)
    aux = assert_equals_reference(layer, x)
    assert aux.tokens_per_expert.tolist() == [max(1, math.floor(k * 16 / E + 0.5))] * E


@pytest.mark.parametrize("a, b, k", [(3, 4, 1), (3, 4, (2, 1)), (2, 3, (2, 3)), (4, 1, (2, 1))])
def test_hierarchical_shapes(device, a, b, k):
    layer = layer_of(shake(HierarchicalBalancedGate(D, a, b, k))).to(device, torch.float64)
    x = make_x(14, device=device)
    layer(x)
    move_thresholds(layer.gate)
    assert_equals_reference(layer, x)


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


def test_tokens_without_expert(device):
    """Tokens without experts have output 0 and gradient 0."""
    layer = layer_of(shake(BalancedGate(D, E, 1))).double().to(device)
    x = make_x(40, device=device).requires_grad_()
    y, aux = layer(x)
    none = aux.token_offsets.diff() == 0
    assert 0 < none.sum() < 40
    assert torch.count_nonzero(y[none]) == 0 and torch.all(y[~none].abs().sum(1) > 0)
    assert aux.metrics()["share_without_expert"] == pytest.approx(float(none.sum()) / 40)
    total(y, aux).backward()
    assert torch.count_nonzero(x.grad[none]) == 0 and torch.all(x.grad[~none].abs().sum(1) > 0)


@pytest.mark.parametrize("kind", GATES)
def test_gates_sum_to_1(device, kind):
    """Gates sum to 1 over a token's experts.

    With groups, each chosen group must have an expert for it.
    """
    gating = make_gate(kind, device)(make_x(60, device=device))
    sums = dense(gating, 12 if kind == "hierarchical" else E).sum(1).detach()
    some = gating.token_offsets.diff() > 0
    assert torch.all(sums <= 1 + 1e-12) and torch.count_nonzero(sums[~some]) == 0
    if kind == "flat":
        assert torch.all((sums[some] - 1).abs() <= 1e-12)


@pytest.mark.parametrize("kind", GATES)
def test_symmetric_start(device, kind):
    """All scores tie: every expert gets m different tokens, the same ones in two runs."""
    gate, x = GATES[kind]().to(device), make_x(120, device=device, dtype=torch.float32)
    assert all(torch.count_nonzero(p) == 0 for p in gate.parameters())
    first, second = gate(x), gate(x)
    assert_same_bits(first.expert_index, second.expert_index)
    token = torch.repeat_interleave(first.token_offsets.diff())
    num = gate.num_experts
    tokens = [frozenset(token[first.expert_index == e].tolist()) for e in range(num)]
    assert {len(t) for t in tokens} == {40 if kind == "flat" else 20}
    assert len(set(tokens)) == num
    (first.gates.square().sum() + first.loss).backward()
    assert all(p.grad.isfinite().all() for p in gate.parameters())


@pytest.mark.parametrize("kind", GATES)
def test_thresholds_start_at_the_first_batch(device, kind):
    """Thresholds start just below the m-th scores of the first batch, where both masks agree.

    Evaluation then has the result of training. Later batches do not initialize them again.
    """
    gate, x = make_gate(kind, device), make_x(30, device=device)
    first = gate(x)
    assert first.metrics["mask_disagreement"] == 0 and first.loss == 0
    thresholds = [p.detach().clone() for n, p in gate.named_parameters() if "threshold" in n]
    if kind == "flat":
        m = rows_per_expert(2, 30, E)
        scores = torch.softmax(x @ gate.w_gate, 1).detach()
        mth = scores.sort(0, descending=True).values[m - 1]
        torch.testing.assert_close(thresholds[0], mth, rtol=1e-12, atol=0)
    gate(make_x(30, device=device))
    for before, (name, now) in zip(
        thresholds, [i for i in gate.named_parameters() if "threshold" in i[0]], strict=True
    ):
        assert_same_bits(now.detach(), before), name
    gate.eval()
    again = gate(x)
    assert_same_products(again.gates, first.gates)
    assert_same_bits(again.expert_index, first.expert_index)
    assert_same_bits(again.token_offsets, first.token_offsets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_batch_meets_the_thresholds_it_starts(device, dtype):
    """The loss of the first batch uses the new thresholds, not those from before it.

    In half precision the thresholds are rounded, so the masks only nearly agree.
    """
    gate, x = make_gate("flat", device).to(dtype), make_x(400, device=device).to(dtype)
    disagreement = gate(x).metrics["mask_disagreement"]
    assert disagreement <= (0 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", GATES)
def test_equal_scores_pass_the_thresholds_they_start(device, kind, dtype):
    """A rounded threshold is below the scores too. At the start W_g = 0, so all are equal."""
    layer, x = make_layer(kind, device, dtype), make_x(64, device=device).to(dtype)
    for name, param in layer.gate.named_parameters():
        if name.startswith("w_gate"):
            torch.nn.init.zeros_(param)
    layer(x)
    _, aux = layer.eval()(x)
    assert aux.metrics()["share_without_expert"] == 0


@pytest.mark.parametrize("kind", GATES)
def test_thresholds_do_not_start_at_a_batch_of_nan(device, kind):
    gate, x = make_gate(kind, device), make_x(30, device=device)
    gate(torch.full_like(x, math.nan))
    thresholds = [p for n, p in gate.named_parameters() if "threshold" in n]
    assert not any(torch.count_nonzero(threshold) for threshold in thresholds)
    assert gate(x).metrics["mask_disagreement"] == 0
    assert all(threshold.isfinite().all() for threshold in thresholds)


@pytest.mark.parametrize("kind", GATES)
def test_all_buffers_may_change_their_type(kind):
    """Module.type makes numbers of the flags that say whether the thresholds are initialized."""
    gate, x = make_gate(kind, "cpu").type(torch.float64), make_x(30)
    assert gate(x).metrics["mask_disagreement"] == 0
    thresholds = [p for n, p in gate.named_parameters() if "threshold" in n]
    before = [threshold.clone() for threshold in thresholds]
    gate(x[:20])
    assert all(map(torch.equal, thresholds, before))


@pytest.mark.parametrize("kind", GATES)
def test_nan_is_seen_in_evaluation(device, kind):
    """A row with NaN scores selects all experts. With none, its output would be 0."""
    layer, x = make_layer(kind, device), make_x(20, device=device)
    layer(x)
    layer.eval()
    clean, _ = layer(x)
    x[3, 1] = math.nan
    y, _ = layer(x)
    assert y[3].isnan().all()
    rest = torch.arange(20, device=device) != 3
    assert_exact(y[rest].detach(), clean[rest].detach())


def test_evaluation_before_training(device):
    """Thresholds of 0 select every expert for every token. Evaluation does not initialize them."""
    gate, x = make_gate(device=device).eval(), make_x(9, device=device)
    softmax = SoftmaxGate(D, E).double().to(device)
    with torch.no_grad():
        softmax.w_gate.copy_(gate.w_gate)
    assert_exact(dense(gate(x), E).detach(), softmax(x).gates.detach())
    with batchwise_masks(gate):
        gate(x)
    assert not gate.initialized and torch.count_nonzero(gate.threshold) == 0


@pytest.mark.parametrize("kind", GATES)
def test_evaluation_of_a_token_is_its_own(device, kind):
    """A token's experts do not depend on the batch, its position, or masked-out tokens."""
    layer, x = make_layer(kind, device), make_x(20, device=device)
    layer(x)
    move_thresholds(layer.gate)
    layer.eval()
    y, aux = layer(x)
    gates = dense(aux, layer.num_experts)
    for index in (torch.tensor([3]), torch.randperm(20), torch.tensor([19, 0])):
        y_part, part = layer(x[index.to(device)])
        assert_exact(y_part.detach(), y[index.to(device)].detach())
        assert_exact(dense(part, layer.num_experts).detach(), gates[index.to(device)].detach())


@pytest.mark.equation("App. F")
@pytest.mark.parametrize("kind", GATES)
def test_batchwise_masks(device, kind):
    """Within the context, evaluation has the result of training."""
    layer, x = make_layer(kind, device), make_x(20, device=device)
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
    gate, x = make_gate(device=device), make_x(30, device=device)
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


# L_batchwise


@pytest.mark.equation("App. F")
def test_batchwise_loss_equals_reference(device):
    X, T = torch.rand(12, 5, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    mask = ref.M_batchwise(X, 4)
    leaves, expected_leaves = [
        [t.to(place).clone().requires_grad_() for t in (X, T)] for place in (device, "cpu")
    ]
    loss = batchwise_loss(*leaves, mask.bool().to(device))
    expected = ref.L_batchwise(*expected_leaves, 4)
    assert_exact(loss.detach(), expected.detach())
    grads = torch.autograd.grad(loss, leaves)
    for a, e in zip(grads, torch.autograd.grad(expected, expected_leaves), strict=True):
        assert_exact(a, e)
    passing = (X > T).sum(0)
    assert grads[1].tolist() == (4 - passing).tolist()
    assert_exact(grads[0], ref.M_threshold(X, T) - mask)


def test_batchwise_loss_refuses_other_shapes():
    X, T, mask = torch.rand(12, 5), torch.rand(5), torch.ones(12, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"loss: threshold must have shape \(5,\), got \(1, 5\)"):
        batchwise_loss(X, T[None], mask)
    with pytest.raises(ValueError, match=r"loss: mask must have shape \(12, 5\), got \(5,\)"):
        batchwise_loss(X, T, mask[0])


def test_batchwise_loss_is_0_where_the_masks_agree():
    """The loss is 0 for thresholds from the (m+1)-th to just below the m-th score, and convex."""
    X = torch.rand(12, 1, dtype=torch.float64)
    mask = ref.M_batchwise(X, 4).bool()
    ordered = X[:, 0].sort(descending=True).values
    low, high = float(ordered[4]), float(ordered[3])
    for T in (low, (low + high) / 2, math.nextafter(high, 0)):
        assert batchwise_loss(X, torch.tensor([T], dtype=torch.float64), mask) == 0
    grid = torch.linspace(-0.5, 1.5, 201, dtype=torch.float64)
    losses = torch.stack([batchwise_loss(X, T[None], mask) for T in grid])
    assert torch.all(losses >= 0) and losses[0] > 1 and losses[-1] > 1
    assert torch.all(losses.diff().diff() >= -1e-12)


@pytest.mark.parametrize("detach_scores", [True, False])
@pytest.mark.parametrize("kind", GATES)
def test_detach_scores(device, kind, detach_scores):
    """The loss trains the thresholds; it trains the scores only if detach_scores is False."""
    gate = make_gate(kind, device, detach_scores=detach_scores)
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
    if detach_scores or kind != "flat":
        return
    X = torch.softmax(x.detach().cpu() @ gate.w_gate.detach().cpu(), 1).requires_grad_()
    L = ref.L_batchwise(X, gate.threshold.detach().cpu(), rows_per_expert(2, 30, E)) / 30
    (grad_X,) = torch.autograd.grad(L, X)
    logits = (x @ gate.w_gate).detach().requires_grad_()
    torch.softmax(logits, 1).backward(grad_X.to(device))
    assert_exact(gate.w_gate.grad, (x.t() @ logits.grad).detach())


def test_thresholds_follow_by_sgd(device):
    """On a fixed batch, L_batchwise / T makes the masks agree.

    Its gradient is the excess share of tokens.
    """
    gate, x = make_gate(device=device), make_x(200, device=device)
    gate(x)
    with torch.no_grad():
        gate.threshold.add_(0.1)
    assert gate(x).metrics["mask_disagreement"] > 0.1
    optimizer = torch.optim.SGD([gate.threshold], lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        gate(x).loss.backward()
        optimizer.step()
    assert gate(x).metrics["mask_disagreement"] < 0.01


# Module behavior


class _NoReads(TorchDispatchMode):
    """Raises an error for ops that synchronize with a GPU: reads of values, dynamic shapes."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        assert not name.startswith(("aten::_local_scalar_dense", "aten::nonzero", "aten::item"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", GATES)
def test_training_reads_no_values(kind):
    layer, x = make_layer(kind), make_x(20)
    with _NoReads():
        for _ in range(2):
            y, aux = layer(x)
            total(y, aux).backward()
    with pytest.raises(AssertionError), _NoReads():
        layer.eval()(x)


# TopKGate


@pytest.mark.equation("App. F")
@pytest.mark.parametrize("k", [1, 2, E])
@pytest.mark.parametrize("training", [True, False])
def test_topk_gate_equals_reference(device, k, training):
    """The gates are G_σ masked by its top k, in training and evaluation; compares gradients too."""
    gate, x = TopKGate(D, E, k).to(device, torch.float64).train(training), make_x(9, device=device)
    torch.nn.init.normal_(gate.w_gate)
    gating = gate(x)
    gates = gating.gates.new_zeros(9, E).scatter(1, gating.expert_index, gating.gates)
    X, W = x.cpu(), gate.w_gate.detach().cpu().requires_grad_()
    g_sigma = torch.stack([ref.G_sigma(row, W) for row in X])
    M = ref.M_topk(g_sigma.detach(), k)
    expected = torch.stack([ref.G_strict(g, m) for g, m in zip(g_sigma, M, strict=True)])
    assert_exact(gates.detach(), expected.detach())
    assert_exact(gating.importance.detach(), ref.Importance(expected).detach())
    assert gating.load.tolist() == M.sum(0).tolist() and not gating.load.requires_grad
    cotangent = torch.randn(9, E, dtype=torch.float64)
    (actual,) = gradients([gates], [gate.w_gate], [cotangent.to(device)])
    (wanted,) = gradients([expected], [W], [cotangent])
    assert_exact(actual, wanted)


def test_topk_gate_starts_apart():
    """Small random weights give nearly equal gates, and no expert is in every token's top 2."""
    gating = TopKGate(64, 8, 2)(torch.randn(1000, 64))
    assert torch.all((gating.gates - 0.5).abs() < 0.15)
    assert torch.all((gating.load > 100) & (gating.load < 500))
