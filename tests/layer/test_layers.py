"""Properties that all gates and layers share, each tested for every row of layers.py.

The properties are the equations, padding, empty batches, NaN, replay, dtypes, recomputation,
copies, determinism, compilation and export. The other files of this folder test what is specific
to a gate or an option.
"""

import copy
import math
import pickle
from functools import partial

import pytest
import torch
from assertions import (
    assert_all_same_bits,
    assert_deterministic,
    assert_equal_runs,
    assert_exact,
    assert_same_bits,
    gradients,
    run_layer,
    tensors_of,
)
from layers import (
    BALANCED,
    LOSSES,
    NOISY,
    PER_SEQUENCE,
    TABLE,
    A,
    B,
    D,
    E,
    K,
    assert_equals_reference,
    layer_of,
    make_gate,
    make_layer,
    make_x,
    move_thresholds,
    results,
    shake,
    total,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from moe_ext import (
    BalancedGate,
    Capacity,
    ExpertChoiceGate,
    HierarchicalBalancedGate,
    HierarchicalNoisyTopKGate,
    NoisyTopKGate,
    ReLUGate,
    SharedExpert,
    SoftmaxGate,
    TopKGate,
)

PROPERTIES = {}


def having(prop):
    """Returns the layers that have a property."""
    PROPERTIES[prop] = [name for name, row in TABLE.items() if prop not in row.lacks]
    return PROPERTIES[prop]


def layers_with(prop):
    """Parametrizes a test by the layers that have a property."""
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, marks=pytest.mark.equation(*TABLE[name].equations))
            if prop == "equations"
            else name
            for name in having(prop)
        ],
    )


def all_losses(name):
    """Returns the options of a layer with all losses, if its gate has logits."""
    return {"losses": TABLE[name].options().get("losses", [*LOSSES, PER_SEQUENCE])}


in_both_modes = pytest.mark.parametrize("training", [True, False])
emulated = pytest.mark.emulated


# Equations


@emulated
@pytest.mark.guarantee("The paper's equations")
@layers_with("equations")
@in_both_modes
def test_equals_reference(device, name, training):
    """Compares outputs, routing, statistics, losses and every gradient."""
    layer = make_layer(name, device).train(training)
    _, aux = assert_equals_reference(layer, make_x(11, device=device))
    assert aux.load.is_floating_point()
    assert aux.load.requires_grad == (training and name in (*NOISY, "modules"))


def case(gate, *sizes, T=9, options_of_gate=None, **options):
    """Makes a case of the next test: a gate, a number of tokens and the options of the layer."""
    given = options_of_gate or {}
    shown = [
        gate.__name__,
        *sizes,
        *(f"{key}={value}" for key, value in (given | options).items()),
    ]
    return pytest.param(
        partial(gate, D, *sizes, **given), T, options, id=f"T={T}-{'-'.join(map(str, shown))}"
    )


def cases():
    for k, T in ((1, 9), (E - 1, 1), (E, 9)):
        yield case(NoisyTopKGate, E, k, T=T, losses=LOSSES)
    yield case(NoisyTopKGate, 1, 1)
    for gate in (NoisyTopKGate, BalancedGate):
        yield case(gate, E, K, hidden_sizes=(7, 4), activation="swiglu", bias=True)
    for shared in ({}, {"gated": True}, {"activation": "swiglu", "bias": True}):
        yield case(TopKGate, E, K, shared_expert=SharedExpert(D, [4, 3], **shared))
    yield case(NoisyTopKGate, E, K, options_of_gate={"detach_threshold": True})
    yield case(NoisyTopKGate, E, K, options_of_gate={"noise_epsilon": 0.5})
    yield case(SoftmaxGate, E, T=1, losses=LOSSES)
    for options in (
        dict(),
        dict(renormalize=False, logit_bias=True, bias_update_rate=0.1),
        dict(score="sqrt_softplus", num_groups=2, group_score_k=1, scale=2.5),
    ):
        for k in (1, 2, 3):
            yield case(TopKGate, E, k, options_of_gate=options, losses=LOSSES)
    for k in (1, (1, 3), (A, 2), (2, B), (A, B)):
        yield case(HierarchicalNoisyTopKGate, A, B, k)
    for gate in (HierarchicalNoisyTopKGate, HierarchicalBalancedGate):  # as the flat gates
        yield case(gate, 1, E, (1, K))
        yield case(gate, E, 1, (K, 1))
    for n, k in ((6, 1), (6, 5), (6, 6), (1, 1), (7, 3), (40, 1)):
        yield case(BalancedGate, n, k, T=16)
    for T in (1, 2, 7):
        yield case(BalancedGate, E, K, T=T, losses=LOSSES)
        yield case(HierarchicalBalancedGate, A, B, (2, 1), T=T)
    for a, b, k in ((3, 4, 1), (2, 3, (2, 3)), (4, 1, (2, 1))):
        yield case(HierarchicalBalancedGate, a, b, k, T=16)
    for k, T in ((1, 9), (E, 12), (2, 1)):
        yield case(ExpertChoiceGate, E, k, T=T, losses=LOSSES)
        yield case(ReLUGate, E, k, T=T, losses=LOSSES)
    for drop, factor, T, gate, sizes in (
        ("position", 0.1, 10, TopKGate, (E, 1)),
        ("score", 0.7, 40, TopKGate, (E, 1)),  # all gates are 1: the first tokens are kept
        ("score", 1.1, 35, TopKGate, (E, 2)),
        ("position", 1.5, 35, TopKGate, (E, 3)),
        ("position", 0.3, 1, TopKGate, (E, 2)),
        ("score", 0.3, 20, TopKGate, (E, 3)),
        ("position", 1.0, 20, NoisyTopKGate, (E, 2)),
        ("score", 1.0, 9, BalancedGate, (E, 2)),
        ("position", 2.0, 9, BalancedGate, (E, 2)),
        ("score", 2.0, 9, SoftmaxGate, (E,)),
        ("position", 0.7, 9, SoftmaxGate, (E,)),
        ("score", 0.7, 20, ReLUGate, (E, 2)),
    ):
        yield case(gate, *sizes, T=T, capacity=Capacity(factor, drop))
    yield case(TopKGate, E + 1, 1, num_identity_experts=1)
    yield case(TopKGate, E + 2, E + 1, num_null_experts=2)
    for gate in (NoisyTopKGate, BalancedGate, ExpertChoiceGate):
        yield case(gate, E + 3, K, num_identity_experts=2, num_null_experts=1)
    yield case(SoftmaxGate, E + 3, num_identity_experts=2, num_null_experts=1)


@pytest.mark.parametrize("gate, T, options", list(cases()))
def test_other_sizes_and_options_equal_reference(device, gate, T, options):
    layer = shake(layer_of(gate(), **options)).double().to(device)
    layer(make_x(20, device=device))  # sets the thresholds
    move_thresholds(layer.gate)
    assert_equals_reference(layer, make_x(T, device=device))


@layers_with("replay")
@in_both_modes
def test_replay_of_any_experts_equals_reference(device, name, training):
    """The gates are those of the given experts, whatever the gate would select."""
    layer = make_layer(name, device).train(training)
    given = torch.rand(9, layer.gate.num_experts).argsort(1)[:, : layer.k].tolist()
    assert_equals_reference(layer, make_x(9, device=device), given)


# Masks, empty batches and NaN


@emulated
@pytest.mark.equation("Sec. 3.1")
@layers_with("padding")
@in_both_modes
def test_padding_changes_nothing(device, name, training):
    """Results are bitwise identical to those without the padding rows, which contain NaN."""
    biases = {} if name == "modules" else {"bias": True}  # a padding row would not be 0
    layer = make_layer(name, device, **biases).train(training)
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]], device=device).bool()
    x = make_x(3, 4, device=device)
    assert_all_same_bits(results(layer, x, torch.ones_like(mask)), results(layer, x))
    x[~mask] = math.nan
    cotangent = torch.randn_like(x)
    cotangent[~mask] = 1  # the loss may use padding rows, the layer must not
    padded_results = []
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
        padded_results.append([y, *tensors_of(aux), grad_x, *grads])
    assert_all_same_bits(*padded_results)
    torch.manual_seed(5)
    rows = [row[kept] for row, kept in zip(x, mask, strict=True)]
    y, aux = layer(torch.nested.nested_tensor(rows, layout=torch.jagged))
    nested = [y.values(), *tensors_of(aux)]
    assert_all_same_bits(nested, padded_results[1][: len(nested)])
    counts = aux.expert_index.flatten().bincount(minlength=layer.gate.num_experts)
    assert_same_bits(counts, aux.tokens_per_expert)


@emulated
@layers_with("no tokens")
@in_both_modes
def test_no_tokens(device, name, training):
    """Used parameters get zero gradients, thresholds are not set, and the next call works."""
    layer = make_layer(name, device, started=False, **all_losses(name)).train(training)
    x = make_x(2, 3, device=device).requires_grad_()
    for inputs in ((x[:0, 0],), (x[:, :0],), (x, torch.zeros(2, 3, device=device).bool())):
        y, aux = layer(*inputs)
        assert y.shape == inputs[0].shape and torch.count_nonzero(y) == 0 and aux.loss == 0
        assert aux.importance.tolist() == aux.load.tolist() == [0] * layer.gate.num_experts
        slot_shape = (0, layer.k) if "k slots" not in TABLE[name].lacks else (0,)
        assert aux.gates.shape == aux.expert_index.shape == slot_shape
        assert not any(value for key, value in aux.metrics().items() if key != "l1_weight")
        layer.zero_grad()
        (grad_x,) = torch.autograd.grad(y.sum() + aux.loss, x, retain_graph=True)
        assert torch.count_nonzero(grad_x) == 0
        (y.sum() + aux.loss + aux.load.sum()).backward()
        for key, p in layer.named_parameters():
            if training or not key.startswith(("gate.w_noise", "gate.threshold")):
                assert p.grad is not None and torch.count_nonzero(p.grad) == 0, key
    assert name not in BALANCED or not layer.gate.initialized
    y, aux = layer(make_x(4, device=device))
    assert y.isfinite().all() and aux.loss.isfinite()
    assert name not in BALANCED or layer.gate.initialized == training


@emulated
@pytest.mark.parametrize(
    "name, training",
    [(name, training) for name in having("nan") for training in (True, False)],
)
def test_nan_reaches_the_output(device, name, training):
    """Also if no expert computes the token: its output would be 0."""
    layer, x = make_layer(name, device).train(training), make_x(20, device=device)
    clean, _ = layer.eval()(x)
    layer.train(training)
    t = 19
    x[t, 1] = math.nan
    y, aux = layer(x)
    rest = torch.arange(20, device=device) != t
    assert y[t].isnan().all() and y[rest].isfinite().all()
    assert aux.loss.isnan() or not layer.losses
    if not training and "independent" not in TABLE[name].lacks:
        assert_exact(y[rest].detach(), clean[rest].detach())


# Other tokens


@layers_with("independent")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_token_does_not_depend_on_other_tokens(name, dtype):
    """In evaluation, the order and the number of other tokens do not change a token's bits."""
    layer = make_layer(name, dtype=dtype).eval()
    x = make_x(40, dtype=dtype)
    y, aux = layer(x)
    order = torch.randperm(40)
    moved, moved_aux = layer(x[order])
    assert_same_bits(moved, y[order])
    assert_same_bits(moved_aux.tokens_per_expert, aux.tokens_per_expert)
    for size in range(1, 40):  # any remainder of a vectorized loop
        assert_same_bits(layer(x[:size])[0], y[:size])


@emulated
@pytest.mark.guarantee("No dropped tokens")
@pytest.mark.parametrize("name", NOISY)
@in_both_modes
def test_all_tokens_reach_the_same_experts(device, name, training):
    """If all tokens choose the same k experts, those experts compute all of the tokens."""
    layer = make_layer(name, device).train(training)
    with torch.no_grad():
        for key, weight in layer.gate.named_parameters():
            if "noise" in key:
                weight.zero_()
    x = 1e6 * make_x(1, device=device).expand(1000, D)  # large, so that noise changes nothing
    y, aux = layer(x)
    assert aux.tokens_per_expert.tolist().count(1000) == layer.k
    assert int(aux.tokens_per_expert.sum()) == 1000 * layer.k
    assert_same_bits(y, layer(x[:1])[0].expand_as(y))
    assert y.abs().min() > 0


# Random numbers


@layers_with("evaluation")
def test_evaluation_draws_nothing_and_repeats(device, name):
    generators = [None, torch.Generator(device).manual_seed(3)] if name in NOISY else [None]
    for generator in generators:
        options = {"generator": generator} if generator else {}
        gate = make_gate(name, device, **options)
        layer = make_layer(name, device).eval()
        layer.gate = gate.eval()
        x, state = make_x(9, device=device), torch.get_rng_state()
        own_state = generator.get_state() if generator else None
        cuda_state = torch.cuda.get_rng_state() if device == "cuda" else None
        first, second = tensors_of(layer(x)), tensors_of(layer(x))
        assert_all_same_bits(second, first)
        assert all(tensor.isfinite().all() for tensor in first)
        assert torch.equal(torch.get_rng_state(), state)
        assert not generator or torch.equal(generator.get_state(), own_state)
        assert device == "cpu" or torch.equal(torch.cuda.get_rng_state(), cuda_state)


@pytest.mark.parametrize("name", NOISY)
def test_own_generator(device, name):
    """The same seed repeats the noise. The default generator is not used."""
    x, generator = make_x(9, device=device), torch.Generator(device)
    gate = make_gate(name, device, generator=generator)
    before = torch.get_rng_state()
    values = [tensors_of(gate(x)) for seed in (1, 1, 2) if generator.manual_seed(seed)]
    assert torch.equal(torch.get_rng_state(), before)
    assert_all_same_bits(values[1], values[0])
    assert not torch.equal(values[0][0], values[2][0])


# Derivatives and dtypes


@emulated
@pytest.mark.guarantee("It works with PyTorch's tools")
@layers_with("autocast")
@in_both_modes
def test_autocast_leaves_the_gate_in_float32(device, name, training):
    """Routing, losses and their gradients are bitwise identical; y has the dtype of x."""
    layer = make_layer(name, device, torch.float32).train(training)
    x, gates, outputs = make_x(50, device=device, dtype=torch.float32), [], []
    for enabled in (False, True):
        torch.manual_seed(0)
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            y, aux = layer(x)
        loss = aux.gates.square().sum() + aux.importance.square().sum() + aux.loss
        gate_grads = gradients([loss], list(layer.gate.parameters()), [None], retain_graph=True)
        assert all(grad.dtype == torch.float32 for grad in gate_grads)
        gates.append([*tensors_of(aux), *gate_grads])
        layer_grads = gradients([y.square().sum()], list(layer.parameters()), [None])
        assert all(g.dtype == torch.float32 and g.isfinite().all() for g in layer_grads)
        assert y.dtype == torch.float32
        outputs.append(y.detach())
    assert_all_same_bits(gates[1], gates[0])
    error = (outputs[1] - outputs[0]).abs().max()  # some rounding errors of 8-bit mantissas
    assert 0 < error <= 16 * torch.finfo(torch.bfloat16).eps * outputs[0].abs().max()
    x = x.bfloat16().requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        y, aux = layer(x)
    total(y, aux).backward()
    assert y.dtype == x.grad.dtype == torch.bfloat16 and aux.gates.dtype == torch.float32


@emulated
@layers_with("half precision")
@pytest.mark.parametrize("training, dtype", [(True, torch.bfloat16), (False, torch.float16)])
def test_gates_are_computed_in_float32(device, name, training, dtype):
    """From half-precision inputs, the logits are float32, as from widened inputs and weights.

    y and the gradients have the dtype of x.
    """
    layer = make_layer(name, device, dtype).train(training)
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
    assert all(value.dtype == torch.float32 for value in aux.losses.values())
    for key, p in layer.named_parameters():
        if training or not key.startswith(("gate.w_noise", "gate.threshold")):
            assert p.grad.dtype == dtype and p.grad.isfinite().all(), key
    assert torch.count_nonzero(layer.gate.w_gate.grad) > 0


# Replay, recomputation and copies


@layers_with("replay")
@in_both_modes
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_replay_of_itself_is_bitwise_identical(device, name, training, dtype):
    layer = make_layer(name, device, dtype).train(training)
    x = make_x(3, 8, device=device, dtype=dtype)
    mask = torch.rand(3, 8, device=device) < 0.7 if training else None
    first = run_layer(layer, x, mask)
    again = run_layer(layer, x, mask, first[1].expert_index)
    if training and first[1].load.requires_grad:  # gradients of gates and load add up later
        limit = 4 * torch.finfo(dtype).eps
        for a, b in zip(again[2], first[2], strict=True):
            torch.testing.assert_close(a, b, rtol=limit, atol=limit * float(b.abs().max()))
        again, first = (*again[:2], ()), (*first[:2], ())
    assert_equal_runs(again, first)


@pytest.mark.parametrize("name", [name for name in TABLE if "replay" in TABLE[name].lacks])
def test_gates_that_cannot_replay(name):
    layer = make_layer(name)
    gate = type(layer.gate).__name__
    message = f"^MoE: expert_index must be None for {gate}, whose forward does not take it, got "
    with pytest.raises(ValueError, match=message):
        layer(make_x(3), expert_index=torch.zeros(3, layer.k, dtype=torch.int64))


@pytest.mark.guarantee("It works with PyTorch's tools")
@layers_with("checkpointing")
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(device, name, reentrant):
    """Recomputation replays the noise and does not initialize thresholds again.

    Routing, gradients and parameters are bitwise identical, and the loss is added once.
    """
    start, x = make_layer(name, device, started=False), make_x(30, device=device)
    routes, results = [], []
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
        results.append([y, *report, leaf.grad, *parameters, *(p.grad for p in parameters)])
    assert_all_same_bits(results[1], results[0])
    assert len(routes) == 3
    for route in routes:
        assert_all_same_bits(route, routes[0])


@layers_with("recomputation")
def test_recomputed_experts_have_the_same_gradients(device, name):
    x, recorded = make_x(9, device=device), []
    for recompute in (False, True):
        torch.manual_seed(0)
        recorded.append(results(make_layer(name, device, recompute=recompute), x))
    assert_all_same_bits(recorded[1], recorded[0])


@layers_with("copies")
def test_copies_pickles_and_states(device, name):
    """Copies, pickles and states include the thresholds and their flags. A call adds no state."""
    options = all_losses(name)
    layer, x = make_layer(name, device, **options), make_x(9, device=device)
    keys = list(layer.state_dict())
    before = [set(module.__dict__) for module in layer.modules()]
    y, aux = layer(x)
    total(y, aux).backward()
    assert list(layer.state_dict()) == keys
    for module, names in zip(layer.modules(), before, strict=True):
        assert set(module.__dict__) == names
    expected = tensors_of(layer.eval()(x))
    fresh = make_layer(name, device, started=False, **options)
    fresh.load_state_dict(layer.state_dict())
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), fresh):
        twin.train()(make_x(7, device=device))
        assert_all_same_bits(twin.parameters(), layer.parameters())
        assert_all_same_bits(tensors_of(twin.eval()(x)), expected)


@layers_with("reset")
def test_reset_parameters(name):
    """What starts with constants has these again, such as zeros; the rest is drawn again."""
    first, second = (
        layer_of(TABLE[name].gate(), **TABLE[name].options()).state_dict() for _ in range(2)
    )
    layer = make_layer(name, dtype=torch.float32)
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for key, value in layer.state_dict().items():
        if torch.equal(first[key], second[key]):
            assert_same_bits(value, first[key])
        else:
            assert not torch.equal(value, before[key]), key


# Compilation, export and threads


def assert_close(actual, expected):
    """Allows a few float32 rounding errors of the largest value: the compiler may reorder sums."""
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype and a.shape == e.shape
        if a.is_floating_point() and a.numel():
            assert (a - e).abs().max() <= 1e-5 * (1 + e.abs().max())
        else:
            assert_same_bits(a, e)


OTHER_OPTIONS = ["top-k", "capacity by position"]  # a class and a path of other rows
# Next to others that compile the same gates, or a part of the same functions.
LONG_TO_COMPILE = ["balanced", "balanced groups", "capacity by score", "softmax", "noisy"]


@pytest.mark.guarantee("It works with PyTorch's tools")
@pytest.mark.parametrize(
    "name, training, masked",
    # In evaluation, the number of slots depends on values for some gates.
    [
        pytest.param(name, True, True, marks=[pytest.mark.long] * (name in LONG_TO_COMPILE))
        for name in having("compilation")
        if name not in OTHER_OPTIONS
    ]
    + [("noisy", True, False), ("balanced", True, False), ("noisy", False, False)],
)
def test_compiles_to_one_graph(device, name, training, masked):
    """Compiles to one graph for any number of tokens and any routing, with the noise of eager mode.

    This includes the batch that sets the thresholds.
    """
    torch._dynamo.reset()
    options = {"started": False, "losses": ()}  # the next test compiles the losses
    layer = make_layer(name, device, torch.float32, **options).train(training)
    twin = copy.deepcopy(layer)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(twin, fullgraph=True, dynamic=True, backend=counter)
    loads, compiled_frames = set(), []
    # Balanced gates treat a single token per expert as a special case.
    for T, signs in ((20, (1, 0)), (33, (-1,)), (18, (0, 1))):
        for sign in signs:
            x = sign * make_x(T, device=device, dtype=torch.float32).abs()
            mask = (torch.rand(T) > 0.3).to(device) if masked else None
            expected = [*results(layer, x, mask), *layer.parameters()]
            actual = [*results(twin, x, mask, compiled), *twin.parameters()]
            assert_close(actual, expected)
            compiled_frames.append(counter.frame_count)
            loads.add(tuple(layer(x, mask)[1].tokens_per_expert.tolist()))
    assert len(loads) > 2 or name not in NOISY
    assert min(compiled_frames) == max(compiled_frames) > 0


@pytest.mark.parametrize(
    "name, given",
    [
        ("top-k", lambda index, mask: index[mask]),  # of the real tokens alone
        pytest.param("balanced", lambda index, mask: None, marks=pytest.mark.long),
    ],
)
def test_sequences_and_replay_compile(name, given):
    """Also with the loss of each sequence. Experts that do not exist are refused."""
    torch._dynamo.reset()
    layer = make_layer(name, losses=[*LOSSES, PER_SEQUENCE])
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    compiled.zero_grad = layer.zero_grad
    for shape in ((3, 7), (4, 5)):
        x, mask = make_x(*shape), torch.rand(shape) < 0.6
        mask[0, 0] = True
        index = torch.rand(*shape, E).argsort(-1)[..., :K]
        runs = [run_layer(function, x, mask, given(index, mask)) for function in (compiled, layer)]
        assert_equal_runs(*runs, assert_exact)
    errors = ValueError, IndexError, RuntimeError
    for expert in (index[0, 0, 0], E, -1) if name != "balanced" else ():
        wrong = index.clone()
        wrong[0, 0, -1] = expert
        with pytest.raises(errors, match="different experts|below|out of bounds"):
            compiled(x, mask, expert_index=given(wrong, mask))


@pytest.mark.parametrize(
    "name",
    ["top-k", "softmax", "hierarchical", "balanced", "balanced groups", "expert choice", "relu"]
    + ["capacity by position", "capacity by score", "zero computation", "shared expert"],
)
def test_export_leaves_the_batch_free(name):
    """The packages of test_compile.py have "noisy" and "router"."""
    layer, x = make_layer(name, dtype=torch.float32).eval(), make_x(9, dtype=torch.float32)
    free = ({0: torch.export.Dim("batch", min=2)},)
    program = torch.export.export(layer, (x,), dynamic_shapes=free)
    for batch in (2, 14):
        x_new = make_x(batch, dtype=torch.float32)
        (y, aux), (expected, expected_aux) = program.module()(x_new), layer(x_new)
        torch.testing.assert_close(y, expected)
        assert torch.equal(aux.expert_index, expected_aux.expert_index)


LARGE = {
    "noisy": lambda: NoisyTopKGate(D, 16, 2),
    "hierarchical": lambda: HierarchicalNoisyTopKGate(D, 8, 64, 2),
    "balanced": TABLE["balanced"].gate,
    "balanced groups": TABLE["balanced groups"].gate,
    "relu": TABLE["relu"].gate,
}


@pytest.mark.guarantee("Determinism")
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic(threads, name, dtype):
    layer, x = layer_of(shake(LARGE[name]()), bias=True).to(dtype), make_x(3000, dtype=dtype)
    layer(x)
    move_thresholds(layer.gate)
    assert_deterministic(lambda: results(layer, x), threads)


def test_every_lack_is_of_a_property():
    print(*(f"{prop}: {', '.join(names)}" for prop, names in PROPERTIES.items()), sep="\n")
    assert {prop for row in TABLE.values() for prop in row.lacks} - {"k slots"} <= {*PROPERTIES}
