"""Identity and null experts (MoE++, arXiv 2410.07348; LongCat-Flash, arXiv 2509.01322)."""

import pytest
import reference as ref
import torch
from assertions import (
    assert_equal_runs,
    assert_exact,
    assert_same_bits,
    recorded_ops,
    run_layer,
)
from moe_lab.analysis import moe_ops
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_ext import (
    BalancedGate,
    ExpertChoiceGate,
    Experts,
    HierarchicalMoE,
    HierarchicalNoisyTopKGate,
    MoE,
    NoisyTopKGate,
    SharedExpert,
    SoftmaxGate,
    SwitchLoss,
    TopKGate,
    ZLoss,
    update_gates,
)

D, E, K = 6, 3, 2
ZERO = pytest.mark.equation("arXiv 2410.07348", "arXiv 2509.01322")
LOSSES = [SwitchLoss(0.3), SwitchLoss(0.1, per_sequence=True), ZLoss(0.2)]


def make_layer(device="cpu", dtype=torch.float64, *, gate=TopKGate, k=K, n=2, m=1, **options):
    """Makes a layer with random weights of the gate, n identity and m null experts."""
    sizes = (D, E + n + m) if gate is SoftmaxGate else (D, E + n + m, k)
    options = {"hidden_sizes": [7], "losses": LOSSES, "w_importance": 0.1} | options
    number = {"num_identity_experts": n, "num_null_experts": m}
    layer = MoE(D, E, k, gate=gate(*sizes), **number, **options)
    nn.init.normal_(layer.gate.w_gate)
    return layer.to(device, dtype)


@ZERO
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("n, m", [(2, 1), (1, 0), (0, 2)])
@pytest.mark.parametrize("k", [1, 2, E + 1])
def test_equals_reference(device, k, n, m, renormalize):
    """Compares the output, and all gradients also through the gates of identity experts."""
    gate = TopKGate(D, E + n + m, min(k, E + n + m), renormalize=renormalize)
    layer = make_layer(device, gate=lambda *_: gate, k=gate.k, n=n, m=m, losses=(), w_importance=0)
    x = torch.randn(9, D, dtype=torch.float64, device=device, requires_grad=True)
    y, aux = layer(x)
    leaves = [t.detach().cpu().requires_grad_() for t in (x, *layer.parameters())]
    X, W_g, w1, w2 = leaves
    expected = []
    for t, x_t in enumerate(X):
        scores = ref.G_sigma(x_t, W_g)
        chosen = aux.expert_index[t].tolist()
        assert sorted(chosen) == sorted(ref.top_k(scores, gate.k))
        total = sum(scores[i] for i in chosen) if renormalize else 1
        g = [scores[i] / total if i in chosen else 0 * scores[i] for i in range(E + n + m)]
        expected.append(ref.zero_computation(x_t, g, list(zip(w1, w2, strict=True)), n))
    expected = torch.stack(expected)
    assert_exact(y.detach(), expected.detach())
    weight = torch.randn(9, D, dtype=torch.float64)
    actual = torch.autograd.grad((y * weight.to(device)).sum(), [x, *layer.parameters()])
    for a, e in zip(actual, torch.autograd.grad((expected * weight).sum(), leaves), strict=True):
        assert_exact(a, e)


class Null(nn.Module):
    def forward(self, x):
        return torch.zeros_like(x)


@ZERO
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "gate, k",
    [(TopKGate, K), (NoisyTopKGate, K), (SoftmaxGate, E + 3), (BalancedGate, K)]
    + [(ExpertChoiceGate, K)],
)
def test_equals_modules(device, gate, k, masked, training):
    """A layer whose list of experts has the identity and the null modules gives the same numbers.

    Importance, load, losses, metrics and counts of all experts are bitwise identical.
    """
    modules = [nn.Linear(D, D) for _ in range(E)]
    options = {"hidden_sizes": None, "experts": modules}
    layer = make_layer(device, gate=gate, k=k, **options).train(training)
    every = [*modules, nn.Identity(), nn.Identity(), Null()]
    other = MoE(D, E + 3, k, gate=layer.gate, experts=every, losses=LOSSES, w_importance=0.1)
    other = other.to(device, torch.float64).train(training)
    x = torch.randn(3, 8, D, dtype=torch.float64, device=device)
    if gate is BalancedGate:
        layer.train()(x)  # sets the thresholds
        layer.train(training)
    mask = torch.rand(3, 8, device=device) < 0.7 if masked else None
    found, expected = run_layer(layer, x, mask), run_layer(other, x, mask)
    assert_equal_runs(found, expected, assert_exact)
    aux = found[1]
    for name in ("loss", "importance", "load", "gates", "expert_index", "tokens_per_expert"):
        assert_same_bits(getattr(aux, name), getattr(expected[1], name))
    assert len(aux.tokens_per_expert) == len(aux.importance) == len(aux.load) == E + 3
    assert aux.metrics() == expected[1].metrics()


@ZERO
def test_no_row_is_computed():
    """The experts get only the rows of their own tokens, also on the fused path."""
    layer = make_layer()
    x = torch.randn(9, D, dtype=torch.float64)
    with recorded_ops() as calls:
        _, aux = layer(x)
    gate, experts = [args for name, _, args, _ in calls if name == "experts"]
    assert len(gate[5][0]) == 1 and len(experts[5][0]) == E
    assert experts[2].numel() == aux.tokens_per_expert[:E].sum() < 9 * K
    dispatched = make_layer(hidden_sizes=None, experts=[nn.Linear(D, D) for _ in range(E)])
    seen = []
    for module in dispatched.experts.experts:
        module.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    _, aux = dispatched(x)
    assert seen == aux.tokens_per_expert[:E].tolist()


def test_all_tokens_may_choose_them():
    """Without a row, the experts' gradients are exactly 0, and y is x or 0."""
    layer = make_layer(k=1, n=1, m=1, losses=(), w_importance=0)
    x = torch.randn(4, D, dtype=torch.float64)
    index = torch.tensor([[E], [E + 1], [E], [E + 1]])
    y, aux, gradients = run_layer(layer, x, expert_index=index)
    assert_same_bits(y[::2], x[::2])
    assert y[1::2].count_nonzero() == 0
    assert aux.tokens_per_expert.tolist() == [0] * E + [2, 2]
    for gradient in gradients[2:]:
        assert gradient.count_nonzero() == 0
    assert layer(x[:0])[0].shape == (0, D)


@pytest.mark.parametrize("gate", [TopKGate, NoisyTopKGate])
def test_replay(gate):
    layer = make_layer(gate=gate)
    x = torch.randn(3, 5, D, dtype=torch.float64)
    first = run_layer(layer, x)
    second = run_layer(layer, x, expert_index=first[1].expert_index)
    compare = assert_exact if gate is NoisyTopKGate else assert_same_bits
    assert_equal_runs(second, first, compare)
    index = torch.rand(3, 5, E + 3).argsort(-1)[..., :K]
    _, aux, _ = run_layer(layer, x, expert_index=index)
    wanted = index.flatten().bincount(minlength=E + 3)
    assert torch.equal(aux.tokens_per_expert, wanted)


def test_a_mask_leaves_padding_out(device):
    layer = make_layer(device)
    x = torch.randn(3, 8, D, dtype=torch.float64, device=device)
    mask = torch.rand(3, 8, device=device) < 0.6
    y, aux = layer(x, mask)
    plain, plain_aux = layer(x[mask])
    assert_same_bits(y[mask], plain)
    assert y[~mask].count_nonzero() == 0
    assert torch.equal(aux.tokens_per_expert, plain_aux.tokens_per_expert)


def test_recomputation_is_bitwise_identical(device):
    plain, other = make_layer(device), make_layer(device, recompute=True)
    other.load_state_dict(plain.state_dict())
    x = torch.randn(9, D, dtype=torch.float64, device=device)
    expected = run_layer(plain, x)
    assert_equal_runs(run_layer(other, x), expected)

    def recomputed(x, mask, expert_index):
        return checkpoint(plain, x, mask, expert_index=expert_index, use_reentrant=False)

    recomputed.zero_grad, recomputed.parameters = plain.zero_grad, plain.parameters
    assert_equal_runs(run_layer(recomputed, x), expected)


@ZERO
def test_the_identity_has_the_precision_of_x():
    """With experts in bfloat16, the identity part is that of the float32 tokens."""
    layer = make_layer(dtype=torch.float32, k=1, expert_dtype=torch.bfloat16, losses=())
    layer.experts.bfloat16()
    x = torch.randn(40, D)
    index = torch.full((40, 1), E)
    y, _ = layer(x, expert_index=index)
    assert_same_bits(y, x)
    layer = make_layer(dtype=torch.float32, gate=lambda *a: TopKGate(*a, renormalize=False))
    with torch.autocast("cpu", torch.bfloat16):
        y, aux = layer(x)
        (y.square().sum() + aux.loss).backward()
    plain, _ = layer(x)
    only = (aux.expert_index >= E).all(1)
    assert only.any() and not only.all()
    assert_same_bits(y[only], plain[only])
    assert layer.gate.w_gate.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_the_sum_once(dtype):
    layer = make_layer(dtype=dtype, gate=lambda *a: TopKGate(*a, renormalize=False), losses=())
    x = torch.randn(40, D, dtype=dtype)
    y, aux = layer(x)
    only = ((aux.expert_index >= E) & (aux.expert_index < E + 2)).all(1)
    assert only.any() and y.dtype == dtype
    expected = aux.gates[only].sum(1, keepdim=True) * x[only].float()
    torch.testing.assert_close(y[only], expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("masked", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("gate", [TopKGate, BalancedGate])
def test_compiles(masked, gate):
    torch._dynamo.reset()
    layer = make_layer(gate=gate)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    compiled.zero_grad = layer.zero_grad
    for shape in ((3, 7), (4, 5)):
        x = torch.randn(*shape, D, dtype=torch.float64)
        mask = torch.rand(shape) < 0.6 if masked else None
        assert_equal_runs(run_layer(compiled, x, mask), run_layer(layer, x, mask), assert_exact)


def test_export_leaves_the_batch_free():
    layer, x = make_layer().eval(), torch.randn(9, D, dtype=torch.float64)
    free = ({0: torch.export.Dim("batch", min=2)},)
    program = torch.export.export(layer, (x,), dynamic_shapes=free)
    other = torch.randn(14, D, dtype=torch.float64)
    assert_exact(program.module()(other)[0].detach(), layer(other)[0].detach())


def test_gradcheck():
    layer = make_layer(gate=lambda *a: TopKGate(*a, renormalize=False))
    x = torch.randn(5, D, dtype=torch.float64, requires_grad=True)
    names, values = zip(*layer.named_parameters(), strict=True)

    def function(x, *parameters):
        weights = dict(zip(names, parameters, strict=True))
        y, aux = torch.func.functional_call(layer, weights, (x,))
        return y, aux.loss

    assert torch.autograd.gradcheck(function, (x, *values))


def test_other_parts_of_the_layer():
    """The shared expert is added, the selection bias covers all experts, and costs are a mean."""
    shared = SharedExpert(D, [4]).double()
    layer = make_layer(gate=lambda *a: TopKGate(*a, bias_update_rate=0.1))
    x = torch.randn(9, D, dtype=torch.float64)
    y, aux = layer(x)
    counts = aux.tokens_per_expert
    assert torch.equal(layer.gate.tokens_since_update, counts)
    update_gates(layer)
    below_mean = torch.sign(counts.sum() - (E + 3) * counts)
    assert_exact(layer.gate.selection_bias, 0.1 * below_mean.double())
    layer.gate.selection_bias.zero_()
    layer.shared_expert = shared
    assert_exact(layer(x)[0].detach(), (y + shared(x)).detach())
    layer.shared_expert = None
    of_experts = sum(p.numel() for p in layer.experts.parameters())
    assert moe_ops(layer).experts == of_experts * K // (E + 3)
    assert "num_identity_experts=2, num_null_experts=1" in repr(layer)
    assert "identity" not in repr(MoE(D, E, K))


@pytest.mark.equation("arXiv 2509.01322")
def test_equals_longcat_flash():
    """Copies the weights of a mixture of transformers, router and selection bias included."""
    modeling = pytest.importorskip("transformers.models.longcat_flash.modeling_longcat_flash")
    config = modeling.LongcatFlashConfig(
        hidden_size=D,
        expert_ffn_hidden_size=7,
        n_routed_experts=E,
        zero_expert_num=2,
        moe_topk=K,
        routed_scaling_factor=2.5,
    )
    theirs = modeling.LongcatFlashMoE(config).double()
    for value in theirs.parameters():
        nn.init.normal_(value)
    nn.init.normal_(theirs.router.e_score_correction_bias, std=0.1)
    gate = TopKGate(D, E + 2, K, renormalize=False, scale=2.5, bias_update_rate=0)
    options = {"activation": "swiglu", "losses": ()}
    layer = make_layer(gate=lambda *_: gate, n=2, m=0, **options)
    with torch.no_grad():
        gate.w_gate.copy_(theirs.router.classifier.weight.T)
        gate.selection_bias.copy_(theirs.router.e_score_correction_bias)
        # They allocate unused weights for the identity experts too.
        layer.experts.weight_0.copy_(theirs.experts.gate_up_proj[:E].mT)
        layer.experts.weight_1.copy_(theirs.experts.down_proj.mT)
        x = torch.randn(2, 20, D, dtype=torch.float64)
        (y, aux), expected = layer(x), theirs(x)
        assert aux.tokens_per_expert.min() > 0
        # Their router computes the scores in float32.
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


class Wide(Experts):
    """Does not declare its output width."""

    def __init__(self):
        super().__init__(E, None)

    def forward(self, x, offsets):
        return x.repeat(1, 2)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: make_layer(n=-1), "^MoE: num_identity_experts must be at least 0, got -1$"),
        (
            lambda: MoE(D, E, K, num_null_experts=1.0),
            "^MoE: num_null_experts must be a whole number, got 1.0$",
        ),
        (
            lambda: MoE(D, E, K, gate=TopKGate(D, E, K), num_null_experts=1),
            "^MoE: gate.num_experts must be 4, got 3$",
        ),
        (lambda: MoE(D, E, 5, num_null_experts=1), "^MoE: k must be .* got 5$"),
        (
            lambda: HierarchicalMoE(D, 2, 2, 1, num_identity_experts=1),
            "^MoE: num_identity_experts must be left out with a hierarchical gate, got 1$",
        ),
        (
            lambda: MoE(D, 3, 1, gate=HierarchicalNoisyTopKGate(D, 2, 2, 1), num_null_experts=1),
            "^MoE: num_null_experts must be left out with a hierarchical gate, got 1$",
        ),
        (
            lambda: MoE(
                D, E, K, experts=[nn.Linear(D, 4) for _ in range(E)], num_identity_experts=1
            )(torch.randn(5, D)),
            r"^MoE: experts must return \[T, d_model = 6\] with .*, got \[5, 4\]$",
        ),
        (
            lambda: MoE(D, E, K, experts=Wide(), num_identity_experts=1)(torch.randn(5, D)),
            r"^MoE: experts must return \[T, d_model = 6\] with .*, got \[5, 12\]$",
        ),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_dropped_slot_adds_nothing():
    class Dropping(TopKGate):
        def forward(self, x, ranks=None):
            routing = super().forward(x, ranks)
            return routing._replace(kept=torch.zeros_like(routing.expert_index, dtype=torch.bool))

    layer = make_layer(gate=Dropping)
    y, aux = layer(torch.randn(5, D, dtype=torch.float64))
    assert not aux.kept.any() and not y.any()


def test_the_width_of_the_experts_is_checked_when_the_layer_is_made():
    class Narrow(Wide):
        def __init__(self):
            Experts.__init__(self, E, D, 4)

    message = "^MoE: experts.d_output must be d_model = 6 with identity experts, got 4$"
    with pytest.raises(ValueError, match=message):
        MoE(D, E, K, experts=Narrow(), num_identity_experts=1)
    assert MoE(D, E, K, experts=Narrow(), num_null_experts=1).experts.d_output == 4
