"""The capacity of the experts, with dropping by position or by score (arXiv 2101.03961)."""

import math

import pytest
import reference as ref
import torch
from assertions import (
    assert_equal_runs,
    assert_exact,
    assert_same_bits,
    dense,
    recorded_ops,
    run_layer,
    tensors_of,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_ext import (
    BalancedGate,
    ExpertChoiceGate,
    HierarchicalMoE,
    MoE,
    NoisyTopKGate,
    SoftmaxGate,
    SwitchLoss,
    TopKGate,
    ZLoss,
    ops,
)

D, E, K = 6, 5, 2
CAPACITY = pytest.mark.equation("arXiv 2101.03961")
DROPS = ["position", "score"]
LOSSES = [SwitchLoss(0.3), SwitchLoss(0.1, per_sequence=True), ZLoss(0.2)]


def make_layer(drop=None, device="cpu", dtype=torch.float64, *, gate=TopKGate, k=K, **options):
    """Makes a layer with random weights of the gate; drop None: without capacity."""
    gate = gate(D, E) if gate is SoftmaxGate else gate(D, E, k)
    if drop is not None:
        options = {"capacity_factor": 0.7, "drop": drop} | options
    options = {"hidden_sizes": [7], "losses": LOSSES, "w_importance": 0.1} | options
    layer = MoE(D, E, gate.k, gate=gate, **options)
    for name, weight in gate.named_parameters():
        if name.startswith("w_"):
            nn.init.normal_(weight)
    return layer.to(device, dtype)


def unnormalized(*sizes):
    return TopKGate(*sizes, renormalize=False)


@CAPACITY
@pytest.mark.parametrize("T", [1, 9, 20])
@pytest.mark.parametrize("capacity_factor", [0.3, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("drop", DROPS)
@pytest.mark.parametrize(
    "gate, k", [(TopKGate, 2), (unnormalized, 3), (SoftmaxGate, E), (BalancedGate, 2)]
)
def test_equals_reference(device, gate, k, drop, capacity_factor, T):
    """Compares the kept slots, the output and all gradients."""
    layer = make_layer(drop, device, gate=gate, k=k, capacity_factor=capacity_factor, losses=())
    x = torch.randn(T, D, dtype=torch.float64, device=device)
    y, aux, gradients = run_layer(layer, x)
    chosen = dense(aux, E, torch.ones_like(aux.gates)).bool().cpu()
    G_X = dense(aux, E).cpu()
    experts_of = [row.nonzero().flatten().tolist() for row in chosen]
    kept = ref.kept_by_capacity(G_X, experts_of, k, capacity_factor, drop)
    assert dense(aux, E, aux.kept).cpu().tolist() == kept
    dropped = chosen.sum() - torch.tensor(kept).sum()
    assert aux.gate_metrics["share_dropped"].item() == pytest.approx(dropped / chosen.sum())

    named = {name: p.detach().cpu().requires_grad_() for name, p in layer.named_parameters()}
    X = x.detach().cpu().requires_grad_()
    scores = torch.softmax(X @ named["gate.w_gate"], 1)
    if gate in (TopKGate, BalancedGate):
        scores = scores * chosen / (scores * chosen).sum(1, keepdim=True).clamp_min(1e-300)
    expected = torch.zeros(T, D, dtype=torch.float64)
    for t in range(T):
        for i in range(E):
            if kept[t][i]:
                W = named["experts.weight_0"][i], named["experts.weight_1"][i]
                expected[t] = expected[t] + scores[t, i] * ref.E_i(X[t], W)
    assert_exact(y, expected.detach())
    importance = ref.Importance(scores * chosen)
    loss = expected.square().sum() + ref.L_importance(importance, 0.1)
    if gate is BalancedGate:  # its thresholds have a loss of their own, and no other gradient
        loss = loss + 0 * named["gate.threshold"].sum()
        gradients[list(named).index("gate.threshold") + 1].zero_()
    wanted = torch.autograd.grad(loss, [X, *named.values()])
    for a, e in zip(gradients, wanted, strict=True):
        assert_exact(a, e)


@CAPACITY
@pytest.mark.parametrize("drop", DROPS)
@pytest.mark.parametrize("capacity_factor", [0.1, 0.5, 0.9, 1.0, 1.1, 1.5])
@pytest.mark.parametrize("T, k", [(10, 1), (35, 2), (64, 3)])
def test_equals_the_formula_of_megatron(T, k, capacity_factor, drop):
    """Their router takes the top C rows of each column of probabilities, or of the routing map.

    A stable sort defines which rows win a tie of the map.
    """
    layer = make_layer(drop, gate=unnormalized, k=k, capacity_factor=capacity_factor)
    aux = layer(torch.randn(T, D, dtype=torch.float64))[1]
    probs, routing_map = (
        dense(aux, E, aux.gates.detach()),
        dense(aux, E, torch.ones_like(aux.gates)),
    )
    C = math.ceil((T * k / E) * capacity_factor)
    key = probs if drop == "score" else routing_map
    best = key.sort(dim=0, descending=True, stable=True).indices[:C]
    expected = routing_map.bool() & torch.zeros(T, E, dtype=torch.bool).scatter(0, best, True)
    assert torch.equal(dense(aux, E, aux.kept), expected)


@CAPACITY
@pytest.mark.parametrize("drop", DROPS)
@pytest.mark.parametrize("gate", [TopKGate, NoisyTopKGate, BalancedGate])
def test_losses_count_dropped_tokens(device, gate, drop):
    """Losses, importance, load and counts are bitwise those of the layer without capacity."""
    layer = make_layer(drop, device, gate=gate, w_load=0.1)
    x = torch.randn(3, 8, D, dtype=torch.float64, device=device)
    _, aux, _ = run_layer(layer, x)
    layer.capacity_factor = None
    _, plain, _ = run_layer(layer, x)
    assert not aux.kept.all() and plain.kept is None
    assert aux.metrics().keys() - plain.metrics().keys() == {"share_dropped"}
    metrics = {key: value for key, value in aux.gate_metrics.items() if key != "share_dropped"}
    aux = aux._replace(kept=None, gate_metrics=metrics)
    for a, b in zip(tensors_of(aux), tensors_of(plain), strict=True):
        assert_same_bits(a, b)


def test_the_selection_bias_counts_dropped_tokens():
    layer = make_layer("score", gate=lambda *sizes: TopKGate(*sizes, bias_update_rate=0.1))
    _, aux = layer(torch.randn(9, D, dtype=torch.float64))
    assert not aux.kept.all()
    assert torch.equal(layer.gate.tokens_since_update, aux.tokens_per_expert)


@pytest.mark.parametrize("drop", DROPS)
def test_no_dropped_row_is_computed(drop):
    layer = make_layer(drop)
    with recorded_ops() as calls:
        _, aux = layer(torch.randn(20, D, dtype=torch.float64))
    *_, experts = [args for name, _, args, _ in calls if name == "experts"]
    assert experts[2].numel() == aux.kept.sum() < 20 * K
    assert experts[1].diff().max() == math.ceil(20 * K / E * 0.7)


@pytest.mark.parametrize("drop", DROPS)
def test_a_large_capacity_drops_nothing(device, drop):
    layer = make_layer(drop, device, capacity_factor=math.inf)
    x = torch.randn(9, D, dtype=torch.float64, device=device)
    y, aux, gradients = run_layer(layer, x)
    assert aux.kept.all() and aux.metrics()["share_dropped"] == 0
    layer.capacity_factor = None
    plain = run_layer(layer, x)
    assert_exact(y, plain[0])
    for a, b in zip(gradients, plain[2], strict=True):
        assert_exact(a, b)


@CAPACITY
def test_the_first_of_equal_gates_is_kept(device):
    """With k = 1 and renormalized gates, all gates are 1."""
    by_score, by_position = (make_layer(drop, device, k=1) for drop in ("score", "position"))
    by_position.load_state_dict(by_score.state_dict())
    x = torch.randn(40, D, dtype=torch.float64, device=device)
    assert_equal_runs(run_layer(by_score, x), run_layer(by_position, x))
    assert not by_score(x)[1].kept.all()


def test_nan_reaches_the_output(device):
    """Tokens with NaN are not dropped by score, so that they do not silently get the output 0."""
    layer = make_layer("score", device)
    x = torch.randn(20, D, dtype=torch.float64, device=device)
    x[-1] = math.nan
    y, aux = layer(x)
    assert aux.kept[-1].all() and y[-1].isnan().all()


@pytest.mark.parametrize("drop", DROPS)
def test_padding_has_no_share_of_the_capacity(device, drop):
    layer = make_layer(drop, device, losses=())
    x = torch.randn(4, 6, D, dtype=torch.float64, device=device)
    mask = torch.rand(4, 6, device=device) < 0.5
    y, aux = layer(x, mask)
    plain, plain_aux = layer(x[mask])
    assert_same_bits(y[mask], plain)
    for a, b in zip(tensors_of(aux), tensors_of(plain_aux), strict=True):
        assert_same_bits(a, b)
    nested = torch.nested.nested_tensor([x[0], x[1, :3]], layout=torch.jagged)
    flat = torch.cat([x[0], x[1, :3]])
    assert_same_bits(layer(nested)[0].values(), layer(flat)[0])


@pytest.mark.parametrize("drop", DROPS)
def test_replay(drop):
    """aux.expert_index has the dropped experts too, so that replay drops them again."""
    layer = make_layer(drop)
    x = torch.randn(3, 5, D, dtype=torch.float64)
    first = run_layer(layer, x)
    assert first[1].expert_index.shape == (15, K)
    assert_equal_runs(run_layer(layer, x, expert_index=first[1].expert_index), first)


@pytest.mark.parametrize("drop", DROPS)
def test_recomputation_is_bitwise_identical(device, drop):
    plain, other = make_layer(drop, device), make_layer(drop, device, recompute=True)
    other.load_state_dict(plain.state_dict())
    x = torch.randn(9, D, dtype=torch.float64, device=device)
    expected = run_layer(plain, x)
    assert_equal_runs(run_layer(other, x), expected)

    def recomputed(x, mask, expert_index):
        return checkpoint(plain, x, mask, expert_index=expert_index, use_reentrant=False)

    recomputed.zero_grad, recomputed.parameters = plain.zero_grad, plain.parameters
    assert_equal_runs(run_layer(recomputed, x), expected)


@pytest.mark.parametrize("drop", DROPS)
def test_half_precision(device, drop):
    """The routing of float32 and of autocast is the same; experts in bfloat16 get the same rows."""
    layer = make_layer(drop, device, torch.float32, expert_dtype=torch.float32)
    x = torch.randn(20, D, device=device)
    kept = layer(x)[1].kept
    with torch.autocast(device, torch.bfloat16):
        y, aux = layer(x)
        (y.square().sum() + aux.loss).backward()
    assert torch.equal(aux.kept, kept) and y.dtype == torch.float32
    layer.experts.bfloat16()
    y, aux = layer(x)
    assert torch.equal(aux.kept, kept) and y.dtype == torch.float32


@pytest.mark.parametrize("masked", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize(
    "gate, drop",
    [
        (TopKGate, "position"),
        (ExpertChoiceGate, "score"),
        pytest.param(TopKGate, "score", marks=pytest.mark.long),
        pytest.param(ExpertChoiceGate, "position", marks=pytest.mark.long),
    ],
)
def test_compiles(gate, drop, masked):
    torch._dynamo.reset()
    layer = make_layer(drop, gate=gate)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    compiled.zero_grad = layer.zero_grad
    for shape in ((3, 7), (4, 5)):
        x = torch.randn(*shape, D, dtype=torch.float64)
        mask = torch.rand(shape) < 0.6 if masked else None
        assert_equal_runs(run_layer(compiled, x, mask), run_layer(layer, x, mask), assert_exact)


@pytest.mark.parametrize("drop", DROPS)
def test_export_leaves_the_batch_free(drop):
    layer, x = make_layer(drop).eval(), torch.randn(9, D, dtype=torch.float64)
    free = ({0: torch.export.Dim("batch", min=2)},)
    program = torch.export.export(layer, (x,), dynamic_shapes=free)
    other = torch.randn(14, D, dtype=torch.float64)
    y, aux = program.module()(other)
    assert_exact(y.detach(), layer(other)[0].detach())
    assert torch.equal(aux.kept, layer(other)[1].kept)


@pytest.mark.parametrize("drop", DROPS)
def test_no_tokens(drop):
    layer = make_layer(drop)
    y, aux, _ = run_layer(layer, torch.randn(0, D, dtype=torch.float64))
    assert y.shape == (0, D) and aux.metrics()["share_dropped"] == 0


@pytest.mark.parametrize("drop", DROPS)
def test_zero_computation_experts_have_no_limit(drop):
    """C is a multiple of the mean over all experts of the gate."""
    gate = unnormalized(D, E + 2, K)
    layer = MoE(
        D,
        E,
        K,
        gate=gate,
        num_identity_experts=1,
        num_null_experts=1,
        capacity_factor=0.5,
        drop=drop,
    ).double()
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
    x = torch.randn(20, D, dtype=torch.float64)
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
    message = "^MoE: capacity_factor must be None for a gate that sets Routing.kept, got 1.0$"
    with pytest.raises(ValueError, match=message):
        make_layer("score", gate=ChoiceMajorGate, capacity_factor=1.0)(x)


def test_a_capacity_for_evaluation():
    """The attribute may change between steps."""
    layer = make_layer("position")
    x = torch.randn(20, D, dtype=torch.float64)
    shares = []
    for layer.capacity_factor in (0.5, 1.0, 2.0):
        shares.append(layer(x)[1].metrics()["share_dropped"])
    assert shares[0] > shares[1] > shares[2]
    assert "capacity_factor=2.0, drop='position'" in repr(layer)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"capacity_factor": 0.0}, "capacity_factor must be a number above 0, got 0.0"),
        ({"capacity_factor": math.nan}, "capacity_factor must be a number above 0, got nan"),
        ({"capacity_factor": 1, "drop": "probs"}, "drop must be one of position, score, got 'pro"),
        ({"drop": "score"}, "drop must be left out without capacity_factor, got 'score'"),
    ],
)
def test_invalid_options(options, message):
    with pytest.raises(ValueError, match=f"^MoE: {message}"):
        MoE(D, E, K, **options)


def test_hierarchical_gates_are_refused():
    message = "^MoE: capacity_factor must be left out with a hierarchical gate, got 1.5$"
    with pytest.raises(ValueError, match=message):
        HierarchicalMoE(D, 2, 3, 1, capacity_factor=1.5)
