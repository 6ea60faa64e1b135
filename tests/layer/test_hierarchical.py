"""HierarchicalNoisyTopKGate and HierarchicalMoE: Eq. 12, Importance_H and Load_H of App. B."""

import copy
import math
import pickle

import pytest
import reference as ref
import torch
from assertions import (
    assert_deterministic,
    assert_exact,
    assert_same_bits,
    assert_same_products,
    gradients,
    poison_freed_memory,
    recorded_ops,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from moe_ext import (
    HierarchicalMoE,
    HierarchicalNoisyTopKGate,
    MoE,
    NoisyTopKGate,
    SoftmaxGate,
    cv_squared,
)

D, A, B = 5, 3, 4
SHAPES = [(A, B, 1, 1), (A, B, 2, 2), (A, B, 1, 3), (A, B, A, 2), (A, B, 2, B), (A, B, A, B)]


def shake(gate):
    """Away from the all-zero start."""
    for parameter in gate.parameters():
        torch.nn.init.normal_(parameter)
    return gate


def make_gate(k=2, a=A, b=B, device="cpu", dtype=torch.float64, **options):
    return shake(HierarchicalNoisyTopKGate(D, a, b, k, **options)).to(device, dtype)


def make_layer(k=2, a=A, b=B, device="cpu", dtype=torch.float64, **options):
    layer = HierarchicalMoE(D, a, b, k, **{"hidden_sizes": (6,), **options})
    shake(layer.gate)
    return layer.to(device, dtype)


def make_x(*shape, device="cpu", dtype=torch.float64):
    return torch.randn(*shape, D, dtype=torch.float64).to(device, dtype)


def drawn_noise(gate, x):
    """What the gate draws next: for every token and group, then for every slot and expert."""
    k1, _ = gate.k_of_levels
    state = torch.get_rng_state() if x.device.type == "cpu" else torch.cuda.get_rng_state()
    primary = torch.randn(len(x), gate.num_groups, dtype=x.dtype, device=x.device)
    secondary = torch.randn(len(x), k1, gate.experts_per_group, dtype=x.dtype, device=x.device)
    (torch.set_rng_state if x.device.type == "cpu" else torch.cuda.set_rng_state)(state)
    return primary.cpu(), secondary.cpu()


def dense(gates, expert_index, num_experts):
    return gates.new_zeros(len(gates), num_experts).scatter(1, expert_index, gates)


def total(y, aux):
    """A loss whose gradient differs from token to token."""
    weight = torch.linspace(-1, 1, y.numel()).to(y.device)
    return (y * weight.reshape(y.shape)).sum() + aux.loss


def by_reference(layer, x, noise):
    """y, the dense gates, Importance_H, Load_H, the loss and the gradients of `total`."""
    gate = layer.gate
    named = {"x": x, **dict(layer.named_parameters())}
    leaves = {name: t.detach().cpu().clone().requires_grad_() for name, t in named.items()}
    w1, w2 = leaves["experts.weight_0"], leaves["experts.weight_1"]

    def expert(e):
        return lambda x: ref.E_i(x, [w1[e], w2[e]])

    b = gate.experts_per_group
    experts = [[expert(i * b + j) for j in range(b)] for i in range(gate.num_groups)]
    primary, secondary = noise if gate.training else (None, None)
    y, G_X, importance, load = ref.HierarchicalMoE(
        leaves["x"],
        leaves["gate.w_gate"],
        leaves["gate.w_noise"],
        leaves["gate.w_gate_secondary"],
        leaves["gate.w_noise_secondary"],
        primary,
        secondary,
        *gate.k_of_levels,
        experts,
    )
    if load is None:  # the limit of vanishing noise
        load = (G_X.detach() > 0).double().sum(0)
    importance, load = importance.reshape(-1), load.reshape(-1)
    losses = ref.L_importance(importance, 0.1) + ref.L_load(load, 0.1)
    loss = (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum() + losses
    grads = gradients([loss], list(leaves.values()), [torch.ones_like(loss)])
    return y, G_X, importance, load, losses, dict(zip(leaves, grads, strict=True))


@pytest.mark.equation("App. B", "Eq. 12")
@pytest.mark.parametrize("a, b, k1, k2", SHAPES)
@pytest.mark.parametrize("training", [True, False])
def test_equals_reference(device, a, b, k1, k2, training):
    """Outputs, gates, statistics, losses and every gradient; a group may be empty."""
    layer = make_layer((k1, k2), a, b, device).train(training)
    x = make_x(6, device=device).requires_grad_()
    expected = by_reference(layer, x, drawn_noise(layer.gate, x))
    y, aux = layer(x)
    y_H, G_X, importance, load, losses, grads = [t.detach() for t in expected[:5]] + [expected[5]]
    assert_exact(y.detach(), y_H)
    assert_exact(dense(aux.gates, aux.expert_index, a * b).detach(), G_X)
    assert_exact(aux.importance.detach(), importance)
    assert_exact(aux.load.detach(), load)
    assert_exact(aux.loss.detach(), losses)
    total(y, aux).backward()
    assert_exact(x.grad, grads["x"])
    for name, parameter in layer.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert_exact(grad, grads[name])


@pytest.mark.equation("App. B")
def test_load_trains_the_primary_gate(device):
    """The gradient of Load_H to the primary gate is that of the paper's product, and not zero; the
    naive Load_i(X^(i))_j has none: which tokens are in X^(i) is not differentiable."""
    gate, x = make_gate(2, device=device), make_x(12, device=device)
    cotangent = torch.randn(A * B, dtype=torch.float64)
    primary_noise, secondary_noise = drawn_noise(gate, x)
    load = gate(x).load
    actual = torch.autograd.grad(load @ cotangent.to(device), (gate.w_gate, gate.w_noise))

    leaves = [p.detach().cpu().requires_grad_() for p in gate.parameters()]
    _, _, load_primary, load_secondary, sizes = ref.hierarchical_gates(
        x.cpu(), *leaves, primary_noise, secondary_noise, 2, 2
    )
    load_H = ref.Load_H(load_primary, load_secondary, sizes).reshape(-1)
    expected = torch.autograd.grad(load_H @ cotangent, leaves[:2], retain_graph=True)
    for a, e in zip(actual, expected, strict=True):
        assert_exact(a, e)
        assert a.norm() > 1e-3

    naive = torch.stack(load_secondary).reshape(-1) @ cotangent
    primary = torch.autograd.grad(naive, leaves[:2], allow_unused=True, retain_graph=True)
    assert primary == (None, None)
    assert torch.autograd.grad(naive, leaves[2])[0].norm() > 1e-3


@pytest.mark.parametrize("detach_threshold", [False, True])
def test_detach_threshold_on_both_levels(device, detach_threshold):
    """With the thresholds' gradient, what reaches the logits of a level sums to 0 over a token's
    choices (a common shift changes nothing), and so does a column sum of the matrices'."""
    gate = make_gate(2, device=device, detach_threshold=detach_threshold)
    load = gate(make_x(9, device=device)).load
    cotangent = torch.randn(A * B, dtype=torch.float64, device=device)
    for matrix in torch.autograd.grad(load @ cotangent, (gate.w_gate, gate.w_gate_secondary)):
        balanced = bool(torch.all(matrix.sum(-1).abs() < 1e-12))
        assert balanced != detach_threshold


def test_gradcheck(device):
    """Finite differences of gates, Importance_H and Load_H in x and all four matrices."""
    gate, x = make_gate(2, device=device), make_x(5, device=device)
    names = [name for name, _ in gate.named_parameters()]

    def function(x, *parameters):
        torch.manual_seed(1)
        parameters = dict(zip(names, parameters, strict=True))
        gating = torch.func.functional_call(gate, parameters, (x,))
        return dense(gating.gates, gating.expert_index, A * B), gating.importance, gating.load

    leaves = [t.detach().clone().requires_grad_() for t in (x, *gate.parameters())]
    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("level", ["a = 1", "b = 1"])
@pytest.mark.parametrize("n, k", [(6, 1), (6, 2), (6, 6), (1, 1)])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_choice_on_a_level_is_the_flat_gate(device, level, n, k, training, dtype):
    """Bit for bit on the CPU, from the same seed: gates, statistics, losses, outputs, gradients."""
    if level == "a = 1":
        layer = make_layer((1, k), 1, n, device, dtype)
        weights = layer.gate.w_gate_secondary, layer.gate.w_noise_secondary
    else:
        layer = make_layer((k, 1), n, 1, device, dtype)
        weights = layer.gate.w_gate, layer.gate.w_noise
    flat = MoE(D, n, k, hidden_sizes=(6,)).to(device, dtype)
    with torch.no_grad():
        flat.gate.w_gate.copy_(weights[0].reshape(D, n))
        flat.gate.w_noise.copy_(weights[1].reshape(D, n))
    flat.experts.load_state_dict(layer.experts.state_dict())
    x, results = make_x(40, device=device, dtype=dtype), []
    for module, w_gate, w_noise in (
        (layer, *weights),
        (flat, flat.gate.w_gate, flat.gate.w_noise),
    ):
        module.train(training)
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        y, aux = module(leaf)
        inputs = leaf, w_gate, w_noise, *module.experts.parameters()
        grads = gradients([total(y, aux)], inputs, [None])
        grads[1:3] = (grad.reshape(D, n) for grad in grads[1:3])
        statistics = aux.loss, aux.importance, aux.load, aux.gates, aux.expert_index
        results.append([y, *statistics, *grads])
    for hierarchical, expected in zip(*results, strict=True):
        assert_same_products(hierarchical, expected)


@pytest.mark.parametrize("a, b, k1, k2", SHAPES)
def test_gates_of_a_token(device, a, b, k1, k2):
    """k1 · k2 distinct experts, k2 in each of k1 groups, whose gates sum to 1 and are grouped."""
    gating = make_gate((k1, k2), a, b, device, torch.float32)(make_x(50, device=device).float())
    assert gating.gates.shape == gating.expert_index.shape == (50, k1 * k2)
    for row in gating.expert_index.view(50, k1, k2).tolist():
        assert len({e for group in row for e in group}) == k1 * k2
        groups = [{e // b for e in group} for group in row]
        assert all(len(group) == 1 for group in groups) and len(set.union(*groups)) == k1
    assert gating.expert_index.min() >= 0 and gating.expert_index.max() < a * b
    eps = torch.finfo(torch.float32).eps
    assert torch.all((gating.gates.sum(1) - 1).abs() <= 4 * eps)
    primary = gating.gates.view(50, k1, k2).sum(2)
    assert torch.all(primary[:, :-1] >= primary[:, 1:] - 4 * eps)


def test_zero_gate_is_balanced_in_training(device):
    """Each expert is chosen by k1 k2 / (a b) of the tokens: 4 sigma on 12 counts, which a balanced
    gate exceeds in 1 of 1300 seeds; the seed is fixed."""
    gate = HierarchicalNoisyTopKGate(D, A, B, 2).to(device)
    assert all(torch.count_nonzero(p) == 0 for p in gate.parameters())
    T, p = 4000, 4 / (A * B)
    gating = gate(make_x(T, device=device).float())
    counts = torch.bincount(gating.expert_index.flatten(), minlength=A * B)
    assert torch.all((counts - T * p).abs() <= 4 * math.sqrt(T * p * (1 - p)))
    # The smooth load is closer to its mean than the counts are.
    assert cv_squared(gating.load) < cv_squared(counts.double())


def one_group(gate, group=1):
    """Makes every token choose `group`, and first of all."""
    with torch.no_grad():
        gate.w_gate.zero_()
        gate.w_gate[:, group] = 100
        gate.w_noise.fill_(-100)
    return gate


@pytest.mark.parametrize("training", [True, False])
def test_empty_groups(device, training):
    """They have load and importance 0, their secondary gates zero gradients; nothing is NaN."""
    gate = one_group(make_gate((1, 2), device=device)).train(training)
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


@pytest.mark.parametrize("training", [True, False])
def test_secondary_gates_see_their_groups_rows_only(device, training):
    """Those of groups that nobody chose may hold anything; so may the tokens of other groups."""
    gate = one_group(make_gate((1, 2), device=device)).train(training)
    x = make_x(7, device=device).abs()
    torch.manual_seed(0)
    expected = gate(x)
    with torch.no_grad():
        for matrix in (gate.w_gate_secondary, gate.w_noise_secondary):
            matrix[[0, 2]] = math.nan
    torch.manual_seed(0)
    x.requires_grad_()
    actual = gate(x)
    for a, e in zip(actual[:4], expected[:4], strict=True):
        assert_same_bits(a, e)
    (actual.gates.pow(2).sum() + actual.load.pow(2).sum()).backward()
    for grad in (x.grad, gate.w_gate.grad, gate.w_gate_secondary.grad):
        assert grad.isfinite().all()


@pytest.mark.parametrize("training", [True, False])
def test_empty_batch(device, training):
    """Every parameter has a gradient, of zeros."""
    layer = make_layer(2, device=device).train(training)
    y, aux = layer(make_x(0, device=device))
    assert y.shape == (0, D) and aux.gates.shape == aux.expert_index.shape == (0, 4)
    assert aux.importance.tolist() == aux.load.tolist() == [0] * (A * B)
    (y.sum() + aux.loss + aux.load.sum()).backward()
    for name, parameter in layer.named_parameters():
        if training or "noise" not in name:
            assert torch.count_nonzero(parameter.grad) == 0, name


def test_masked_tokens_do_not_exist(device):
    """As if they had been left out: outputs, statistics, losses and gradients, to the bit."""
    layer, x = make_layer(2, device=device), make_x(9, device=device)
    mask = torch.arange(9, device=device) % 3 != 1
    results = []
    for tokens, options in (
        (x[mask], {}),
        (x.masked_fill(~mask[:, None], math.nan), {"mask": mask}),
    ):
        torch.manual_seed(0)
        layer.zero_grad()
        y, aux = layer(tokens, **options)
        kept = y[mask] if options else y
        (total(kept, aux)).backward()
        results.append([kept, *aux[:6], *(p.grad for p in layer.parameters())])
    assert torch.count_nonzero(y[~mask]) == 0
    for masked, expected in zip(*results, strict=True):
        assert_same_bits(masked, expected)


def test_evaluation_counts_and_repeats(device):
    """By the clean logits, without draws; Load_H is then the number of tokens of each expert."""
    gate, x = make_gate(2, device=device).eval(), make_x(30, device=device)
    before = torch.get_rng_state()
    first, second = gate(x), gate(x)
    assert torch.equal(torch.get_rng_state(), before)
    for a, b in zip(first[:4], second[:4], strict=True):
        assert_same_bits(a, b)
    assert not first.load.requires_grad and first.importance.requires_grad
    counts = torch.bincount(first.expert_index.flatten(), minlength=A * B)
    assert first.load.tolist() == counts.tolist()
    zero = HierarchicalNoisyTopKGate(D, A, B, 2).to(device).eval()
    assert zero(x.float()).expert_index.tolist() == [[0, 1, B, B + 1]] * 30  # the lowest


def test_noise_of_a_token_is_its_own(device):
    """What a token draws does not depend on the groups that others choose."""
    gate, x = make_gate(2, device=device), make_x(8, device=device)
    results = []
    for sign in (1, -1):
        torch.manual_seed(0)
        results.append(gate(torch.cat([x[:3], sign * x[3:]])))
    assert not torch.equal(results[0].expert_index, results[1].expert_index)
    assert_same_bits(results[0].expert_index[:3], results[1].expert_index[:3])
    torch.testing.assert_close(results[0].gates[:3], results[1].gates[:3])


def test_own_generator(device):
    x, generator = make_x(9, device=device), torch.Generator(device)
    gate = make_gate(2, device=device, generator=generator)
    before = torch.get_rng_state()
    results = [gate(x).gates for seed in (1, 1, 2) if generator.manual_seed(seed)]
    assert torch.equal(torch.get_rng_state(), before)
    assert_same_bits(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize("training", [True, False])
def test_autocast_leaves_the_gate_in_float32(device, training):
    gate = make_gate(2, device=device, dtype=torch.float32).train(training)
    x = make_x(50, device=device, dtype=torch.float32)
    results = []
    for enabled in (False, True):
        torch.manual_seed(0)
        gate.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            gating = gate(x)
        (gating.gates.pow(2).sum() + gating.importance.pow(2).sum()).backward()
        grads = [p.grad for name, p in gate.named_parameters() if training or "noise" not in name]
        results.append([*gating[:4], *grads])
    for plain, cast in zip(*results, strict=True):
        assert_same_bits(cast, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(device, dtype):
    """The logits on are float32, those of the widened inputs; y and gradients are of x's type."""
    layer, x = make_layer(2, device=device, dtype=dtype).eval(), make_x(20, device=device).to(dtype)
    gating = layer.gate(x)
    wide = copy.deepcopy(layer.gate).float()(x.float())
    for a, e in zip(gating[:4], wide[:4], strict=True):
        assert_same_bits(a, e)
    layer.train()
    y, aux = layer(x.requires_grad_())
    total(y, aux).backward()
    assert y.dtype == x.grad.dtype == dtype and aux.load.dtype == torch.float32
    assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in layer.parameters())


def test_checkpoint_replays_the_noise(device):
    layer, x = make_layer(2, device=device), make_x(9, device=device)
    results = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        torch.manual_seed(0)
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        y, aux = run(leaf)
        total(y, aux).backward()
        results.append([y, *aux[:6], leaf.grad, *(p.grad.clone() for p in layer.parameters())])
    for a, e in zip(*results, strict=True):
        assert_same_bits(a, e)


def test_deterministic(threads):
    gate = make_gate(2, 8, 64, dtype=torch.float32)
    x = make_x(600, dtype=torch.float32)

    def function():
        torch.manual_seed(0)
        gating = gate(x)
        loss = gating.gates.pow(2).sum() + cv_squared(gating.load) + cv_squared(gating.importance)
        return *gating[:4], *torch.autograd.grad(loss, list(gate.parameters()))

    assert_deterministic(function, threads, runs=5)


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that any operator returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_nothing_has_a_row_for_every_expert():
    """T · (a + k1 · b) logits at most, in the forward and the backward pass: never T · a · b."""
    T, a, b = 64, 16, 32
    layer = make_layer(2, a, b, dtype=torch.float32)
    x = make_x(T, dtype=torch.float32)
    with LargestTensor() as largest:
        y, aux = layer(x)
        total(y, aux).backward()
    weights = max(parameter.numel() for parameter in layer.parameters())
    assert T * b <= largest.elements <= max(weights, T * 2 * b) < T * a * b


def test_one_pass_for_all_groups():
    """The same few operators whatever the number of groups."""

    def names(a):
        layer, x = make_layer(2, a, B), make_x(9)
        with recorded_ops(None) as calls:
            y, aux = layer(x)
            total(y, aux).backward()
        return [name for name, *_ in calls]

    assert names(2) == names(40)


@pytest.mark.parametrize("training", [True, False])
def test_compiles_to_one_graph(training):
    """Whole, for any number of tokens and any routing, with the noise of eager mode."""
    torch._dynamo.reset()
    layer = make_layer(2, dtype=torch.float32).train(training)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    compiled(make_x(9, dtype=torch.float32).requires_grad_())
    compiled_once, loads = counter.frame_count, set()
    for T in (7, 12, 33):
        for sign in (1, -1):
            x, results = sign * make_x(T, dtype=torch.float32).abs(), []
            for function in (layer, compiled):
                torch.manual_seed(1)
                layer.zero_grad()
                leaf = x.clone().requires_grad_()
                y, aux = function(leaf)
                total(y, aux).backward()
                grads = [p.grad for p in layer.parameters() if p.grad is not None]
                results.append([y, *aux[:5], leaf.grad, *grads])
            for a, e in zip(*results, strict=True):
                torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)
            loads.add(tuple(aux.tokens_per_expert.tolist()))
    assert len(loads) == 6 and counter.frame_count == compiled_once > 0
    torch._dynamo.reset()


def test_copies_pickles_and_states(device):
    layer, x = make_layer(2, device=device).eval(), make_x(9, device=device)
    layer(x)[1].loss.backward()
    fresh = HierarchicalMoE(D, A, B, 2, hidden_sizes=(6,)).double().to(device).eval()
    fresh.load_state_dict(layer.state_dict())
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), fresh):
        assert_same_bits(twin(x)[0], layer(x)[0])
    assert "k=(2, 2)" in repr(layer) and "num_groups=3" in repr(layer)


def test_recomputed_experts_have_the_same_gradients(device):
    x, results = make_x(9, device=device), []
    for recompute in (False, True):
        torch.manual_seed(0)
        layer = make_layer(2, device=device, recompute=recompute)
        y, aux = layer(x)
        total(y, aux).backward()
        results.append([y, *aux[:6], *(parameter.grad for parameter in layer.parameters())])
    for kept, recomputed in zip(*results, strict=True):
        assert_same_bits(recomputed, kept)


def test_options_are_those_of_the_flat_layer():
    layer = HierarchicalMoE(
        D, A, B, (2, 1), hidden_sizes=(8,), activation="swiglu", bias=True, w_load=0.2
    )
    assert layer.experts.weights[0].shape == (A * B, D, 16) and layer.w_load == 0.2
    assert layer.k == layer.gate.k == 2 and layer.num_experts == A * B
    modules = [torch.nn.Identity() for _ in range(A * B)]
    x = make_x(7, dtype=torch.float32)
    y, _ = HierarchicalMoE(D, A, B, 2, experts=modules)(x)
    torch.testing.assert_close(y, x)  # the gates sum to 1
    gate = HierarchicalNoisyTopKGate(D, A, B, (2, 1))
    assert HierarchicalMoE(D, A, B, (2, 1), gate=gate).gate is gate
    layer = HierarchicalMoE(D, A, B, 2, noise_epsilon=0.5)
    assert layer.gate.noise_epsilon == 0.5


@pytest.mark.parametrize("make", [HierarchicalNoisyTopKGate, HierarchicalMoE])
@pytest.mark.parametrize(
    "arguments, pattern",
    [
        ((D, A, B, 0), r"k must be between 1 and num_groups = 3 at the first level, got 0"),
        ((D, A, B, A + 1), r"k must be between 1 and num_groups = 3 .*, got 4"),
        ((D, A, B, (2, B + 1)), r"k must .* experts_per_group = 4 at the second level, got \(2, 5"),
        ((D, A, B, (2, 0)), r"k must be between 1 and experts_per_group = 4 .*, got \(2, 0\)"),
        ((D, A, B, (2, 2, 2)), r"k must be a whole number or a pair of them, got \(2, 2, 2\)"),
        ((D, A, B, 1.5), r"k must be a whole number or a pair of them, got 1.5"),
        ((D, 0, B, 1), r"num_groups must be at least 1, got 0"),
        ((D, A, 0, 1), r"experts_per_group must be at least 1, got 0"),
        ((0, A, B, 1), r"d_model must be at least 1, got 0"),
    ],
)
def test_errors(make, arguments, pattern):
    with pytest.raises(ValueError, match=f"^{make.__name__}: {pattern}"):
        make(*arguments)


def test_more_errors():
    with pytest.raises(ValueError, match="noise_epsilon must be at least 0, got -1"):
        HierarchicalNoisyTopKGate(D, A, B, 2, noise_epsilon=-1)
    with pytest.raises(ValueError, match=r"MoE: gate.num_experts must be 12, got 5"):
        HierarchicalMoE(D, A, B, 2, gate=NoisyTopKGate(D, 5, 4))
    with pytest.raises(ValueError, match="must be left out when gate is given"):
        HierarchicalMoE(D, A, B, (A, B), gate=SoftmaxGate(D, A * B), noise_epsilon=0.5)
