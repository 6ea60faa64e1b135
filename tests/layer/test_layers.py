"""Properties that all gates and layers share; a table row is one gate or layer.

The properties are padding, empty batches, copies, dtypes, checkpointing, compilation and
determinism. The other files of this folder test what is specific to a gate or a layer.
"""

import copy
import math
import pickle

import pytest
import torch
from assertions import (
    assert_deterministic,
    assert_same_bits,
    assert_same_products,
    gradients,
    tensors_of,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from moe_ext import (
    BalancedGate,
    HierarchicalBalancedGate,
    HierarchicalMoE,
    HierarchicalNoisyTopKGate,
    MoE,
    NoisyTopKGate,
    ReLUGate,
    cv_squared,
)

pytestmark = pytest.mark.emulated

D, E, A, B = 5, 6, 3, 4
GATES = {
    "noisy": lambda **options: NoisyTopKGate(D, E, 2, **options),
    "hierarchical": lambda **options: HierarchicalNoisyTopKGate(D, A, B, 2, **options),
    "balanced": lambda **options: BalancedGate(D, E, 2, **options),
    "balanced groups": lambda **options: HierarchicalBalancedGate(D, A, B, (1, 2), **options),
    "relu": lambda **options: ReLUGate(D, E, 2, l1_weight=0.1, **options),
}
NOISY = ["noisy", "hierarchical"]
BALANCED = ["balanced", "balanced groups"]


def shake(gate):
    """Randomizes the weights. The first batch sets the thresholds."""
    for name, parameter in gate.named_parameters():
        if "threshold" not in name:
            torch.nn.init.normal_(parameter)
    return gate


def thresholds_of(gate):
    return [parameter for name, parameter in gate.named_parameters() if "threshold" in name]


def make_gate(kind, device="cpu", dtype=torch.float64, started=True, **options):
    """Makes a gate. A started gate has thresholds where the two masks disagree."""
    gate = shake(GATES[kind](**options)).to(device, dtype)
    if started and kind in BALANCED:
        gate(make_x(20, device=device, dtype=dtype))
        with torch.no_grad():
            for threshold in thresholds_of(gate):
                threshold.add_(0.02 * torch.randn(threshold.shape).to(threshold))
    return gate


def layer_of(gate, **options):
    options = {"hidden_sizes": (7,), **options}
    if isinstance(gate, (HierarchicalNoisyTopKGate, HierarchicalBalancedGate)):
        sizes = gate.num_groups, gate.experts_per_group, gate.k_of_levels
        return HierarchicalMoE(D, *sizes, gate=gate, **options)
    return MoE(D, gate.num_experts, gate.k, gate=gate, **options)


def make_layer(kind, device="cpu", dtype=torch.float64, started=True, **options):
    gate = make_gate(kind, device, dtype, started)
    return layer_of(gate, **options).to(device, dtype)


def make_x(*shape, device="cpu", dtype=torch.float64):
    return torch.randn(*shape, D, dtype=torch.float64).to(device, dtype)


def total(y, aux):
    """Computes a loss whose gradient differs between tokens."""
    weight = torch.linspace(-1, 1, y.numel()).to(y.device)
    return (y * weight.reshape(y.shape)).sum() + aux.loss


def results(layer, x, mask=None, function=None):
    """Returns the output, the report and all gradients of `total` for one seed."""
    torch.manual_seed(1)
    leaf = x.detach().clone().requires_grad_()
    y, aux = (layer if function is None else function)(leaf, mask)
    grads = gradients([total(y, aux)], [leaf, *layer.parameters()], [None])
    return [y, *tensors_of(aux), *grads]


def assert_all_same_bits(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert_same_bits(a, e)


# Masks and empty batches


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("padding", [0.0, math.nan])
@pytest.mark.parametrize("bias", [False, True])
def test_padding_changes_nothing(device, kind, training, padding, bias):
    """Results are bitwise identical to those without the padding rows, whatever these contain."""
    layer = make_layer(kind, device, bias=bias).train(training)
    for p in layer.experts.parameters():  # with biases, a padding row would not be 0
        torch.nn.init.normal_(p)
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]], device=device).bool()
    x = make_x(3, 4, device=device)
    x[~mask] = padding
    cotangent = torch.randn_like(x)
    cotangent[~mask] = 1  # the loss may use padding rows, the layer must not
    found = []
    for padded in (True, False):
        torch.manual_seed(5)
        leaf = (x if padded else x[mask]).clone().requires_grad_()
        y, aux = layer(leaf, mask) if padded else layer(leaf)
        loss = (y * (cotangent if padded else cotangent[mask])).sum() + aux.loss
        grad_x, *grads = gradients([loss], [leaf, *layer.parameters()], [None])
        if padded:
            assert torch.count_nonzero(y[~mask]) == 0
            assert torch.count_nonzero(grad_x[~mask]) == 0
            y, grad_x = y[mask], grad_x[mask]
        found.append([y, *tensors_of(aux), grad_x, *grads])
    assert_all_same_bits(*found)
    assert int(aux.tokens_per_expert.sum()) == aux.expert_index.numel()
    assert kind not in NOISY or aux.gates.shape == (8, layer.k)


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("shape", [(0,), (2, 0)])
@pytest.mark.parametrize("training", [True, False])
def test_empty_batch(device, kind, shape, training):
    """Used parameters get zero gradients, thresholds are not set, and the next call works."""
    layer = make_layer(kind, device, started=False, bias=True).train(training)
    x = make_x(*shape, device=device).requires_grad_()
    y, aux = layer(x)
    assert y.shape == x.shape and float(aux.loss) == 0
    assert aux.importance.tolist() == aux.load.tolist() == [0] * layer.num_experts
    assert aux.gates.shape == aux.expert_index.shape
    assert aux.gates.shape == ((0, layer.k) if kind in NOISY else (0,))
    assert all(value == 0 for name, value in aux.metrics().items() if name != "l1_weight")
    (y.sum() + aux.loss + aux.load.sum()).backward()
    assert x.grad.shape == x.shape
    for name, p in layer.named_parameters():
        if training or not name.startswith(("gate.w_noise", "gate.threshold")):
            assert p.grad is not None and torch.count_nonzero(p.grad) == 0, name
    assert kind in NOISY or aux.token_offsets.tolist() == [0]
    assert kind not in BALANCED or not layer.gate.initialized
    y, aux = layer(make_x(4, device=device))
    assert y.isfinite().all() and aux.loss.isfinite()
    assert kind not in BALANCED or layer.gate.initialized == training


# Other tokens


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_token_does_not_depend_on_other_tokens(kind, dtype):
    """In evaluation, the order and the number of other tokens do not change a token's bits."""
    layer = make_layer(kind, dtype=dtype).eval()
    x = make_x(40, dtype=dtype)
    y, aux = layer(x)
    order = torch.randperm(40)
    moved, moved_aux = layer(x[order])
    assert_same_bits(moved, y[order])
    assert_same_bits(moved_aux.tokens_per_expert, aux.tokens_per_expert)
    for size in (1, 2, 13):
        assert_same_bits(layer(x[:size])[0], y[:size])


@pytest.mark.equation("Eq. 6", "Eq. 10")
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("scale", [0.1, 100])
def test_bounds_of_importance_and_load(device, kind, training, scale):
    """The importances sum to the sum of the gates; Load_i is between 0 and T."""
    layer = make_layer(kind, device).train(training)
    aux = layer(scale * make_x(40, device=device))[1]
    torch.testing.assert_close(aux.importance.sum(), aux.gates.sum())
    assert aux.importance.min() >= 0 and aux.load.min() >= 0
    assert aux.load.max() <= 40 * (1 + 1e-12) and aux.tokens_per_expert.max() <= 40


@pytest.mark.guarantee("No dropped tokens")
@pytest.mark.parametrize("kind", NOISY)
@pytest.mark.parametrize("training", [True, False])
def test_all_tokens_reach_the_same_experts(device, kind, training):
    """If all tokens choose the same k experts, those experts compute all of the tokens."""
    layer = make_layer(kind, device).train(training)
    with torch.no_grad():
        for name, weight in layer.gate.named_parameters():
            if "noise" in name:
                weight.zero_()
    x = 1e6 * make_x(1, device=device).expand(1000, D)  # large, so that noise changes nothing
    y, aux = layer(x)
    assert aux.tokens_per_expert.tolist().count(1000) == layer.k
    assert int(aux.tokens_per_expert.sum()) == 1000 * layer.k
    assert_same_bits(y, layer(x[:1])[0].expand_as(y))
    assert y.abs().min() > 0


# Random numbers


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("kind", GATES)
def test_evaluation_draws_nothing_and_repeats(device, kind, own_generator):
    own_generator = own_generator and kind in NOISY
    generator = torch.Generator(device).manual_seed(3) if own_generator else None
    options = {"generator": generator} if own_generator else {}
    layer = layer_of(make_gate(kind, device, **options)).to(device, torch.float64).eval()
    x = make_x(9, device=device)
    state = torch.get_rng_state()
    own_state = generator.get_state() if own_generator else None
    cuda_state = torch.cuda.get_rng_state() if device == "cuda" else None
    first, second = tensors_of(layer(x)), tensors_of(layer(x))
    assert_all_same_bits(second, first)
    assert all(tensor.isfinite().all() for tensor in first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not own_generator or torch.equal(generator.get_state(), own_state)
    assert device == "cpu" or torch.equal(torch.cuda.get_rng_state(), cuda_state)


@pytest.mark.parametrize("kind", NOISY)
def test_own_generator(device, kind):
    """The same seed repeats the noise. The default generator is not used."""
    x, generator = make_x(9, device=device), torch.Generator(device)
    gate = make_gate(kind, device, generator=generator)
    before = torch.get_rng_state()
    found = [tensors_of(gate(x)) for seed in (1, 1, 2) if generator.manual_seed(seed)]
    assert torch.equal(torch.get_rng_state(), before)
    assert_all_same_bits(found[1], found[0])
    assert not torch.equal(found[0][0], found[2][0])


@pytest.mark.parametrize("kind", NOISY)
def test_zero_gate_is_balanced_in_training(device, kind):
    """Each expert is selected by k/n of the tokens, within 4 sigma on 6 or 12 counts.

    A balanced gate exceeds this for 1 of 1300 seeds; the seed is fixed.
    """
    gate = GATES[kind]().to(device)
    assert all(torch.count_nonzero(p) == 0 for p in gate.parameters())
    T, n = 4000, gate.num_experts
    p = gate.k / n
    routing = gate(make_x(T, device=device, dtype=torch.float32))
    counts = torch.bincount(routing.expert_index.flatten(), minlength=n)
    assert torch.all((counts - T * p).abs() <= 4 * math.sqrt(T * p * (1 - p)))
    # The smooth load deviates less from its mean than the counts.
    assert cv_squared(routing.load) < cv_squared(counts.double())


# Hierarchies with a single choice


@pytest.mark.parametrize(
    "flat_gate, gate_of_levels",
    [(NoisyTopKGate, HierarchicalNoisyTopKGate), (BalancedGate, HierarchicalBalancedGate)],
)
@pytest.mark.parametrize("level", ["a = 1", "b = 1"])
@pytest.mark.parametrize("n, k", [(6, 1), (6, 2), (6, 6), (1, 1)])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_choice_on_a_level_is_the_flat_gate(
    device, flat_gate, gate_of_levels, level, n, k, training, dtype
):
    """On the CPU, all results are bitwise identical for the same seed."""
    flat = layer_of(flat_gate(D, n, k)).to(device, dtype)
    names = [name for name, _ in flat.gate.named_parameters()]
    if level == "a = 1":
        layer, suffix = layer_of(shake(gate_of_levels(D, 1, n, (1, k)))), "_secondary"
    else:
        layer, suffix = layer_of(shake(gate_of_levels(D, n, 1, (k, 1)))), ""
    layer.to(device, dtype)
    weights = [getattr(layer.gate, name + suffix) for name in names]
    with torch.no_grad():
        for to, weight in zip(flat.gate.parameters(), weights, strict=True):
            to.copy_(weight.reshape(to.shape))
    flat.experts.load_state_dict(layer.experts.state_dict())
    x = make_x(40, device=device, dtype=dtype)
    shift = 0.02 * torch.randn(n, dtype=dtype, device=device)
    found = []
    for module, of_gate in ((layer, weights), (flat, list(flat.gate.parameters()))):
        module(x)  # sets the thresholds
        with torch.no_grad():
            for name, parameter in zip(names, of_gate, strict=True):
                if name == "threshold":
                    parameter.add_(shift.view_as(parameter))
        module.train(training)
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        y, aux = module(leaf)
        inputs = leaf, *of_gate, *module.experts.parameters()
        grads = gradients([total(y, aux)], inputs, [None])
        reported = aux.loss, aux.importance, aux.load, aux.gates, aux.expert_index
        offsets = [] if aux.token_offsets is None else [aux.token_offsets]
        found.append([y, *reported, *offsets, *grads])
    for a, e in zip(*found, strict=True):
        assert_same_products(a.reshape(e.shape), e)


# Derivatives and dtypes


@pytest.mark.emulated(False)  # the operators have their own gradcheck
@pytest.mark.parametrize("kind", GATES)
def test_gradcheck(device, kind):
    """Compares gradients of x and all parameters with finite differences that change no routing.

    Includes L_batchwise with detach_scores=False; otherwise it has no gradient for the scores.
    """
    options = {"detach_scores": False} if kind in BALANCED else {}
    gate, x = make_gate(kind, device, **options), make_x(5, device=device)
    names = [name for name, _ in gate.named_parameters()]

    def function(x, *parameters):
        torch.manual_seed(1)
        parameters = dict(zip(names, parameters, strict=True))
        routing = torch.func.functional_call(gate, parameters, (x,))
        loss = routing.load if routing.loss is None else routing.loss
        return routing.gates, routing.importance, loss

    leaves = [t.detach().clone().requires_grad_() for t in (x, *gate.parameters())]
    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.guarantee("It works with PyTorch's tools")
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("training", [True, False])
def test_autocast_leaves_the_gate_in_float32(device, kind, training):
    gate = make_gate(kind, device, torch.float32).train(training)
    x, found = make_x(50, device=device, dtype=torch.float32), []
    for enabled in (False, True):
        torch.manual_seed(0)
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            routing = gate(x)
        loss = routing.gates.square().sum() + routing.importance.square().sum()
        if routing.loss is not None:
            loss = loss + routing.loss
        grads = gradients([loss], list(gate.parameters()), [None])
        assert all(grad.dtype == torch.float32 for grad in grads)
        found.append([*tensors_of(routing), *grads])
    assert_all_same_bits(found[1], found[0])


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gates_are_computed_in_float32(device, kind, training, dtype):
    """From half-precision inputs, the logits are float32, as from widened inputs and weights.

    y and the gradients have the dtype of x.
    """
    layer = make_layer(kind, device, dtype).train(training)
    x = make_x(50, device=device, dtype=dtype).requires_grad_()
    wide = copy.deepcopy(layer.gate).float()
    torch.manual_seed(0)
    routing = layer.gate(x)
    torch.manual_seed(0)
    expected = wide(x.float())
    assert_all_same_bits(routing[:4], expected[:4])
    assert routing.gates.dtype == routing.importance.dtype == routing.load.dtype == torch.float32
    y, aux = layer(x)
    total(y, aux).backward()
    assert y.dtype == x.grad.dtype == dtype and aux.load.dtype == aux.loss.dtype == torch.float32
    for name, p in layer.named_parameters():
        if training or not name.startswith(("gate.w_noise", "gate.threshold")):
            assert p.grad.dtype == dtype and p.grad.isfinite().all(), name
    assert torch.count_nonzero(layer.gate.w_gate.grad) > 0


# Recomputation and copies


@pytest.mark.guarantee("It works with PyTorch's tools")
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(device, kind, reentrant):
    """Recomputation replays the noise and does not initialize thresholds again.

    Routing, gradients and parameters are bitwise identical, and the loss is added once.
    """
    start, x = make_layer(kind, device, started=False), make_x(30, device=device)
    routes, found = [], []
    start.experts.register_forward_pre_hook(
        lambda module, *given: routes.append([t.detach().clone() for t in tensors_of(given)]),
        with_kwargs=True,
    )
    for recompute in (False, True):
        layer = copy.deepcopy(start)
        torch.manual_seed(4)
        leaf = x.clone().requires_grad_()

        def forward(x, layer=layer):
            y, aux = layer(x)
            return y, total(y, aux), *tensors_of(aux)

        if recompute:
            y, loss, *report = checkpoint(forward, leaf, use_reentrant=reentrant)
        else:
            y, loss, *report = forward(leaf)
        loss.backward()
        parameters = list(layer.parameters())
        found.append([y, *report, leaf.grad, *parameters, *(p.grad for p in parameters)])
    assert_all_same_bits(found[1], found[0])
    assert len(routes) == 3
    for route in routes:
        assert_all_same_bits(route, routes[0])


@pytest.mark.parametrize("kind", GATES)
def test_recomputed_experts_have_the_same_gradients(device, kind):
    x, found = make_x(9, device=device), []
    for recompute in (False, True):
        torch.manual_seed(0)
        found.append(results(make_layer(kind, device, recompute=recompute), x))
    assert_all_same_bits(found[1], found[0])


@pytest.mark.parametrize("kind", GATES)
def test_copies_pickles_and_states(device, kind):
    """Copies, pickles and states include the thresholds and their flags. A call adds no state."""
    layer, x = make_layer(kind, device, bias=True), make_x(9, device=device)
    keys = list(layer.state_dict())
    y, aux = layer(x)
    total(y, aux).backward()
    assert list(layer.state_dict()) == keys
    expected = tensors_of(layer.eval()(x))
    fresh = make_layer(kind, device, started=False, bias=True)
    fresh.load_state_dict(layer.state_dict())
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), fresh):
        twin.train()(make_x(7, device=device))
        assert_all_same_bits(twin.parameters(), layer.parameters())
        assert_all_same_bits(tensors_of(twin.eval()(x)), expected)


# Compilation and threads


@pytest.mark.guarantee("It works with PyTorch's tools")
@pytest.mark.emulated(False)  # the compiler does not support the device
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize(
    "kind, training",
    # In evaluation, a balanced gate's number of slots depends on values.
    [*((kind, True) for kind in GATES), *((kind, False) for kind in NOISY)],
)
def test_compiles_to_one_graph(device, kind, training, masked):
    """Compiles to one graph for any number of tokens and any routing, with the noise of eager mode.

    This includes the batch that sets the thresholds.
    """
    torch._dynamo.reset()
    layer = make_layer(kind, device, torch.float32, started=False).train(training)
    twin = copy.deepcopy(layer)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(twin, fullgraph=True, dynamic=True, backend=counter)
    loads, compiled_frames = set(), []
    # Balanced gates treat a single token per expert as a special case.
    for T in (9, 7, 12, 7, 33) if kind in NOISY else (20, 33, 64):
        for sign in (1, -1, 0):
            x = sign * make_x(T, device=device, dtype=torch.float32).abs()
            mask = (torch.rand(T) > 0.3).to(device) if masked else None
            expected = [*results(layer, x, mask), *layer.parameters()]
            actual = [*results(twin, x, mask, compiled), *twin.parameters()]
            for a, e in zip(actual, expected, strict=True):
                assert a.dtype == e.dtype and a.shape == e.shape
                if a.is_floating_point() and a.numel():
                    assert (a - e).abs().max() <= 1e-5 * (1 + e.abs().max())
                else:
                    assert_same_bits(a, e)
            compiled_frames.append(counter.frame_count)
            loads.add(tuple(layer(x, mask)[1].tokens_per_expert.tolist()))
    assert len(loads) > 4 or kind not in NOISY
    assert min(compiled_frames) == max(compiled_frames) > 0
    torch._dynamo.reset()


LARGE = {
    "noisy": lambda: NoisyTopKGate(D, 16, 2),
    "hierarchical": lambda: HierarchicalNoisyTopKGate(D, 8, 64, 2),
    "balanced": GATES["balanced"],
    "balanced groups": GATES["balanced groups"],
    "relu": GATES["relu"],
}


@pytest.mark.guarantee("Determinism")
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic(threads, kind, dtype):
    layer, x = layer_of(shake(LARGE[kind]()), bias=True).to(dtype), make_x(3000, dtype=dtype)
    layer(x)
    with torch.no_grad():
        for threshold in thresholds_of(layer.gate):
            threshold.add_(0.02 * torch.randn(threshold.shape))
    assert_deterministic(lambda: results(layer, x), threads)
