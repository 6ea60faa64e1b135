"""Factored Adam and Adagrad (App. D), the schedules (App. C.1, E) and the parameter groups."""

import copy
import math
import pickle
from fractions import Fraction

import numpy
import pytest
import reference as ref
import torch
from assertions import assert_as_accurate, assert_exact, assert_same_bits, raises
from operators import TABLE
from torch import nn

from moe_ext import (
    BalancedGate,
    FeedForwardExperts,
    HierarchicalBalancedGate,
    HierarchicalMoE,
    ModuleExperts,
    MoE,
)
from moe_ext.optim import (
    FactoredAdagrad,
    FactoredAdam,
    split_parameters,
    warmup_inverse_sqrt,
    warmup_schedule,
)

OPTIMIZERS = [FactoredAdam, FactoredAdagrad]
STEP = TABLE["factored_step_"]
step_ = torch.ops.moe_ext.factored_step_


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def parameter(*shape, dtype=torch.float64):
    return nn.Parameter(torch.randn(shape, dtype=dtype))


def gradients_of_steps(param, steps):
    """Makes the gradients of a sparse mixture: experts without rows, rows and columns of zeros."""
    for t in range(steps):
        grad = torch.randn_like(param) * 10.0 ** (t % 3 - 1)
        if param.dim() > 2:
            grad[t % len(grad)] = 0
        if param.dim() > 1:
            grad[..., t % grad.shape[-2], :] = 0
            grad[..., 0] *= t % 2
        yield grad


def run(optimizer, param, gradients):
    for grad in gradients:
        param.grad = grad
        optimizer.step()


def run_reference(rule, w, gradients, start):
    """Applies a rule (w, g, row, column, t) -> (w, row, column) to each matrix of w."""
    matrices = list(w.detach().clone().reshape(-1, *w.shape[-2:]))
    states = [(m.new_full((len(m),), start), m.new_full((m.shape[1],), start)) for m in matrices]
    for t, grad in enumerate(gradients, 1):
        for e, g in enumerate(grad.reshape(-1, *w.shape[-2:])):
            matrices[e], *state = rule(matrices[e], g, *states[e], t)
            states[e] = tuple(state)
    rows, columns = (torch.stack(part) for part in zip(*states, strict=True))
    return (
        torch.stack(matrices).reshape(w.shape),
        rows.reshape(w.shape[:-1]),
        columns.reshape(*w.shape[:-2], w.shape[-1]),
    )


RULES = {
    "adam": (
        lambda params: FactoredAdam(params, lr=0.1, beta2=0.9, eps=1e-6),
        lambda w, g, vr, vc, t: ref.FactoredAdam(w, g, vr, vc, t, 0.1, 0.9, 1e-6),
    ),
    "adam, mean of roots": (
        lambda params: FactoredAdam(params, lr=0.1, beta2=0.98, eps=1e-3, mean_of_roots=True),
        lambda w, g, vr, vc, t: ref.FactoredAdam(w, g, vr, vc, t, 0.1, 0.98, 1e-3, "diet"),
    ),
    "adagrad": (
        lambda params: FactoredAdagrad(params, lr=0.1, eps=1e-6),
        lambda w, g, vr, vc, t: ref.FactoredAdagrad(w, g, vr, vc, 0.1, 1e-6),
    ),
    "adagrad, initial value": (
        lambda params: FactoredAdagrad(params, lr=0.1, initial_accumulator_value=0.5),
        lambda w, g, vr, vc, t: ref.FactoredAdagrad(w, g, vr, vc, 0.1, 1e-10),
    ),
}


# The update rule


@pytest.mark.equation("App. D")
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("shape", [(4, 7, 5), (9, 3), (2, 2, 3, 4), (3, 1, 4), (3, 4, 1)])
def test_equals_the_reference_over_many_steps(name, shape):
    make, rule = RULES[name]
    param = parameter(*shape)
    gradients = list(gradients_of_steps(param, 12))
    optimizer = make([param])
    start = optimizer.defaults.get("initial_accumulator_value", 0.0)
    expected = run_reference(rule, param, gradients, start)
    run(optimizer, param, gradients)
    state = optimizer.state[param]
    assert state.keys() == {"step", "row", "column"}  # far less than Adam's second moments
    for actual, wanted in zip((param, state["row"], state["column"]), expected, strict=True):
        assert_exact(actual.detach(), wanted)


@pytest.mark.parametrize("shape", [(), (7,), (5, 4), (2, 5, 4)])
def test_unfactored_is_torchs(shape):
    """Vectors, scalars and groups with factored=False store the full second moment."""
    for make, full in (
        (
            lambda params: FactoredAdam(params, lr=0.1, beta2=0.9, factored=len(shape) < 2),
            lambda params: torch.optim.Adam(params, lr=0.1, betas=(0.0, 0.9), eps=1e-8),
        ),
        (
            lambda params: FactoredAdagrad(
                params, lr=0.1, initial_accumulator_value=0.3, factored=len(shape) < 2
            ),
            lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.3),
        ),
    ):
        factored, adam = parameter(*shape), parameter(*shape)
        adam.data.copy_(factored.data)
        gradients = [torch.randn(shape).double() for _ in range(8)]
        optimizer = make([factored])
        run(optimizer, factored, gradients)
        run(full([adam]), adam, gradients)
        assert_exact(factored.detach(), adam.detach())
        assert set(optimizer.state[factored]) == {"step", "second_moment"}


def test_tiny_gradients_keep_their_direction():
    """The product of row and column would underflow: 1e-30 · 1e-30."""
    param = nn.Parameter(torch.zeros(4, 5))
    run(FactoredAdam([param], lr=1.0, eps=1e-30), param, [torch.full((4, 5), 1e-15)])
    torch.testing.assert_close(param.detach(), torch.full((4, 5), -1.0))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_are_not_hidden(value):
    param = parameter(2, 3, 4)
    grad = torch.ones_like(param)
    grad[0, 1, 2] = value
    run(FactoredAdam([param]), param, [grad])
    assert not param[0, 1, 2].isfinite() and param[1].isfinite().all()
    assert value == math.inf or param[0].isnan().all()


STEPS = {
    "adam": lambda params: FactoredAdam(params, lr=0.1),
    "mean of roots": lambda params: FactoredAdam(params, lr=0.1, mean_of_roots=True),
    "adagrad": lambda params: FactoredAdagrad(params, lr=0.1),
}


@pytest.mark.parametrize("lr", [0.1, 10.0])
def test_unfactored_gradients_whose_squares_overflow(lr):
    param = nn.Parameter(torch.ones(3, 4))
    grads = [torch.full((3, 4), value) for value in (0.1, 3e38)]
    run(FactoredAdam([param], lr=lr, factored=False), param, grads)
    torch.testing.assert_close(param.detach(), torch.full((3, 4), 1 - lr))


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("whole", [True, False])
def test_gradients_whose_squares_overflow(name, dtype, whole):
    """A weight with such a gradient keeps its value, as with Adam. The other weights learn on."""
    largest = torch.finfo(dtype).max  # its square is finite for float16
    for spike in (largest, largest**0.5, 0.9 * largest**0.5):
        param = nn.Parameter(torch.ones(5, 70, 3, dtype=dtype))
        optimizer = STEPS[name]([param])
        grads = [torch.full_like(param, 0.1) for _ in range(4)]
        grads[1][(...,) if whole else (2, 3, 1)] = spike
        run(optimizer, param, grads[:1])
        before = param.detach().clone()
        run(optimizer, param, grads[1:])
        assert param.isfinite().all() and (param[0] < before[0]).all()
        if whole:  # a step is at most about lr
            assert (param - 1).abs().max() < 2
    state = optimizer.state[param]
    assert state["row"].isfinite().all() and state["column"].isfinite().all()


@pytest.mark.parametrize("name", STEPS)
def test_sums_of_squares_that_overflow(name):
    """Each g² is finite, but their sum is not. A step stays bounded."""
    param = nn.Parameter(torch.ones(50, 30))
    run(STEPS[name]([param]), param, [torch.full((50, 30), 1e19)] * 20)
    assert (param - 1).abs().max() <= 2


# Precision


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precision(dtype):
    """Moments are float32; a half-precision weight is rounded once per step."""
    param = parameter(3, 150, 90, dtype=dtype)
    exact = nn.Parameter(param.detach().double())
    plain = param.detach().clone()
    gradients = [torch.randn_like(param) for _ in range(3)]
    optimizer, twin = (FactoredAdam([p], lr=0.1, beta2=0.9) for p in (param, exact))
    row, column = (torch.zeros(shape) for shape in ((3, 150), (3, 90)))
    for t, grad in enumerate(gradients, 1):
        run(optimizer, param, [grad])
        exact.data.copy_(plain)  # set to the state of the plain rule, to compare a single step
        before = param.detach().clone()
        run(twin, exact, [grad.double()])
        g = grad.float()
        row = 0.9 * row + 0.1 * g.square().mean(-1)
        column = 0.9 * column + 0.1 * g.square().mean(-2)
        V = row[..., None] * column[:, None] / row.mean(-1)[:, None, None] / (1 - 0.9**t)
        plain = (plain.float() - 0.1 * g / (V.sqrt() + 1e-8)).to(dtype)
        param.data.copy_(plain)
        assert_as_accurate(before, plain, exact.detach())
    state = optimizer.state[param]
    assert state["row"].dtype == state["column"].dtype == torch.float32
    assert_as_accurate(state["row"], row, twin.state[exact]["row"])
    assert_as_accurate(state["column"], column, twin.state[exact]["column"])


def test_sums_of_long_rows_and_columns_are_accurate():
    """One rounding per term would leave an error of 1e-4.

    Blockwise sums leave a few units in the last place.
    """
    for shape in ((1 << 17, 3), (3, 1 << 17)):
        grad = torch.rand(shape) + 0.5
        row, column = torch.zeros(shape[0]), torch.zeros(shape[1])
        step_(torch.zeros(shape), grad, row, column, number(0), number(1), 1, 1, 1e-8)
        exact = grad.double().square()
        torch.testing.assert_close(row.double(), exact.mean(1), rtol=3e-6, atol=0)
        torch.testing.assert_close(column.double(), exact.mean(0), rtol=3e-6, atol=0)


# The operator


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_autograd_notices_a_step(mode):
    """Weights that require a gradient are changed within no_grad alone."""
    call = STEP.make(torch.float32, **STEP.typical[0])
    weight = call["param"].requires_grad_()
    before, loss = weight.detach().clone(), weight.square().sum()
    with pytest.raises(RuntimeError, match="must be used under torch.no_grad"):
        step_(**call)
    assert_same_bits(weight.detach(), before)
    with mode():
        step_(**call)
    assert (weight != before).any()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def sharing(name, second):
    """Lets one argument be a view of the other's memory."""
    return lambda call: {name: call[second].view(-1)[: call[name].numel()].view_as(call[name])}


REFUSED = [
    (ValueError, "row", dict(row=torch.zeros(5).expand(3, 5))),
    (ValueError, "row", dict(row=torch.zeros(7).as_strided((3, 5), (1, 1)))),
    (ValueError, "param", lambda call: {"param": call["grad"]}),
    (ValueError, "row", sharing("row", "param")),
    (ValueError, "column", sharing("column", "grad")),
    (ValueError, "column", sharing("column", "row")),
    (ValueError, "row", lambda call: {"lr": call["row"].view(-1)[:2].view(torch.float64)[0]}),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refused_arguments_leave_the_weights_alone(number):
    """Includes a row moment whose elements share memory."""
    exception, argument, changes, *_ = REFUSED[number]
    call = STEP.make(torch.float32, **STEP.typical[0])
    call |= changes(call) if callable(changes) else changes
    before = call["param"].clone()
    with raises(exception, "factored_step_", argument):
        step_(**call)
    assert_same_bits(call["param"], before)


# As a torch optimizer


def problem(dtype=torch.float32):
    """Makes parameters of several dtypes and shapes and a closure with a loss."""
    params = [parameter(3, 6, 4, dtype=dtype), parameter(5, dtype=dtype)]
    target = [torch.randn_like(param) for param in params]

    def loss():
        total = sum((p - t).square().sum() for p, t in zip(params, target, strict=True))
        for param in params:
            param.grad = None
        total.backward()
        return total

    return params, loss


@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_closures_and_missing_gradients(optimizer_class):
    params, closure = problem()
    unused = parameter(4, 4)
    optimizer = optimizer_class([*params, unused], lr=0.3)
    losses = [optimizer.step(closure).item() for _ in range(60)]
    assert losses[-1] < 0.1 * losses[0]
    assert unused not in optimizer.state or not optimizer.state[unused]
    assert optimizer.step() is None


@pytest.mark.parametrize(
    "optimizer_class, dtype, way",
    [
        (FactoredAdam, torch.float64, "state_dict"),
        (FactoredAdagrad, torch.float32, "saved"),
        (FactoredAdam, torch.bfloat16, "saved"),
        (FactoredAdam, torch.float32, "deepcopy"),
        (FactoredAdagrad, torch.bfloat16, "pickle"),
    ],
)
def test_state_goes_on_to_the_same_bits(optimizer_class, dtype, way, tmp_path):
    params, _ = problem(dtype)
    optimizer = optimizer_class(params, lr=0.1, factored=True)
    gradients = [[torch.randn_like(param) for param in params] for _ in range(6)]

    def steps(optimizer, params, gradients):
        for grads in gradients:
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad.clone()
            optimizer.step()

    steps(optimizer, params, gradients[:3])
    if way == "deepcopy":
        twins, twin = copy.deepcopy((params, optimizer))
    elif way == "pickle":
        twins, twin = pickle.loads(pickle.dumps((params, optimizer)))
    else:
        twins = copy.deepcopy(params)
        twin = optimizer_class(twins, lr=3.0, factored=True)
        state = copy.deepcopy(optimizer.state_dict())  # torch loads without copying
        if way == "saved":
            torch.save(state, tmp_path / "state.pt")
            state = torch.load(tmp_path / "state.pt", weights_only=True)
        twin.load_state_dict(state)
        assert twin.param_groups[0]["lr"] == 0.1
    for number_of_optimizer, params_of_it in ((optimizer, params), (twin, twins)):
        steps(number_of_optimizer, params_of_it, gradients[3:])
    for param, copied in zip(params, twins, strict=True):
        assert_same_bits(param.detach(), copied.detach())
        for key, value in optimizer.state[param].items():
            assert_same_bits(twin.state[copied][key], value)
            assert twin.state[copied][key].data_ptr() != value.data_ptr()


@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_capturable_keeps_the_step_with_the_parameter(optimizer_class):
    """Gives the same numbers without reading the step count, and compiles to one graph."""
    params = [[parameter(3, 6, 4), parameter(5)] for _ in range(3)]
    for twins in params[1:]:
        for a, b in zip(params[0], twins, strict=True):
            b.data.copy_(a.data)
    plain = optimizer_class(params[0], lr=0.1)
    captured, compiled = (
        optimizer_class(twins, lr=number(0.1), capturable=True) for twins in params[1:]
    )
    step = torch.compile(compiled.step, fullgraph=True, backend="aot_eager")
    for _ in range(4):
        for replicas in zip(*params, strict=True):
            grad = torch.randn_like(replicas[0])
            for param in replicas:
                param.grad = grad.clone()
        plain.step(), captured.step(), step()
    for a, b, c in zip(*params, strict=True):
        assert_exact(b.detach(), a.detach())
        assert_same_bits(c.detach(), b.detach())
        assert captured.state[b]["step"].device == b.device
    # Values cannot be read on the meta device.
    param = nn.Parameter(torch.empty(2, 3, 4, device="meta"))
    param.grad = torch.empty_like(param)
    lr = torch.empty((), device="meta")
    optimizer = optimizer_class([param], lr=lr, capturable=True)
    optimizer.step()
    assert optimizer.state[param]["step"].is_meta


@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
@pytest.mark.parametrize(
    "options, message",
    [
        ({"lr": -1.0}, "lr must be at least 0, got -1.0"),
        ({"lr": math.nan}, "lr must be a finite number, got nan"),
        ({"lr": torch.tensor([0.1, 0.2])}, r"lr must have one element, got \(2,\)"),
        ({"lr": torch.tensor(-0.5)}, "lr must be at least 0, got tensor"),
        ({"eps": 0.0}, "eps must be a number above 0, got 0.0"),
        ({"beta2": 1.0}, r"beta2 must be in \[0, 1\), got 1.0"),
        ({"beta2": -0.1}, r"beta2 must be in \[0, 1\), got -0.1"),
        ({"initial_accumulator_value": -1.0}, "initial_accumulator_value must be at least 0"),
    ],
)
def test_options_out_of_range(optimizer_class, options, message):
    (option,) = options
    optimizer = optimizer_class([parameter(2, 2)])
    if option not in optimizer.defaults:
        with pytest.raises(TypeError, match="unexpected keyword"):
            optimizer_class([parameter(2, 2)], **options)
        return
    message = rf"^{optimizer_class.__name__}: {message}"
    with pytest.raises(ValueError, match=message):
        optimizer_class([parameter(2, 2)], **options)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [parameter(2, 2)], **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_options_of_torchs_optimizers_are_not_passed_over(optimizer_class):
    optimizer = optimizer_class([parameter(2, 2)])
    message = rf"^{optimizer_class.__name__}: weight_decay must be left out, .*, got 0.1$"
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [parameter(2, 2)], "weight_decay": 0.1})
    optimizer.add_param_group({"params": [parameter(2, 2)], "weight_decay": 0.0})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_complex_parameters_and_sparse_gradients_are_refused(optimizer_class):
    name = optimizer_class.__name__
    with pytest.raises(TypeError, match=f"^{name}: params must be .*, got torch.complex64"):
        optimizer_class([nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))])
    params = [parameter(2, 2), parameter(2, 2)]
    before = [param.detach().clone() for param in params]
    optimizer = optimizer_class(params)
    params[0].grad = torch.ones(2, 2).double()
    params[1].grad = torch.ones(2, 2).double().to_sparse()
    with pytest.raises(TypeError, match=f"^{name}: gradients must be dense, got torch.sparse_coo"):
        optimizer.step()
    for param, old in zip(params, before, strict=True):
        assert_same_bits(param.detach(), old)


# Schedules


@pytest.mark.equation("App. C.1", "App. E")
def test_schedules_are_the_papers():
    """App. C.1: p·min(t/1000, sqrt(1000/t)); App. E: p·min(t/2000, 1, sqrt(10000/t))."""
    for t in (1, 999, 1000, 1001, 2000, 2001, 9999, 10_000, 10_001, 40_000):
        assert warmup_inverse_sqrt(t, 1000) == min(t / 1000, math.sqrt(1000 / t))
        translation = min(t / 2000, 1, math.sqrt(10_000 / t))
        assert warmup_inverse_sqrt(t, 2000, 8000) == translation
    assert [warmup_inverse_sqrt(t, 2, 6) for t in (1, 2, 5, 8, 32)] == [0.5, 1, 1, 1, 0.5]
    with pytest.raises(ValueError, match="warmup_inverse_sqrt: step must be at least 1, got 0"):
        warmup_inverse_sqrt(0, 4)
    with pytest.raises(ValueError, match="hold_steps must be at least 0, got -1"):
        warmup_inverse_sqrt(1, 4, -1)


@pytest.mark.parametrize(
    "options, factor",
    [
        ({}, lambda t: warmup_inverse_sqrt(t, 1000)),
        ({"warmup_steps": 4}, lambda t: warmup_inverse_sqrt(t, 4)),
        ({"warmup_steps": 2, "hold_steps": 5}, lambda t: warmup_inverse_sqrt(t, 2, 5)),
    ],
)
def test_the_schedule_moves_every_group(options, factor):
    groups = [{"params": [parameter(1)], "lr": lr} for lr in (2.0, 0.5)]
    optimizer = torch.optim.Adam(groups)
    schedule = warmup_schedule(optimizer, **options)
    for t in range(1, 17):
        assert [group["lr"] for group in optimizer.param_groups] == [2 * factor(t), factor(t) / 2]
        optimizer.step()
        schedule.step()


# Parameter groups


def test_parameters_are_split_by_what_they_are():
    layer = MoE(4, 3, 2, hidden_sizes=[5], bias=True)
    strict = MoE(4, 3, 2, gate=BalancedGate(4, 3, 2), w_load=0)
    strict_on_two = MoE(4, 6, 1, gate=HierarchicalBalancedGate(4, 2, 3, 1), w_load=0)
    two_levels = HierarchicalMoE(4, 2, 3, 1, hidden_sizes=[5])
    modules = MoE(4, 2, 1, experts=ModuleExperts([nn.Linear(4, 4), nn.Linear(4, 4)]))
    elsewhere = nn.Threshold(0.1, 20)
    elsewhere.threshold_weight = nn.Parameter(torch.zeros(2))
    model = nn.ModuleList([layer, strict, layer, two_levels, modules, strict_on_two, elsewhere])
    split = split_parameters(model)

    def same(actual, expected):
        assert [id(param) for param in actual] == [id(param) for param in expected]

    same(
        split.experts,
        [w for m in (layer, strict, two_levels, strict_on_two) for w in m.experts.weights],
    )
    two = strict_on_two.gate
    same(split.thresholds, [strict.gate.threshold, two.threshold, two.threshold_secondary])
    expert_ids = {id(param) for param in (*split.experts, *split.thresholds)}
    same(split.rest, [param for param in model.parameters() if id(param) not in expert_ids])
    assert {id(bias) for bias in layer.experts.biases} <= {id(param) for param in split.rest}
    same(split_parameters(FeedForwardExperts(1, 4)).rest, [])


@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_an_option_that_a_group_gets_later(optimizer_class):
    param = parameter(2, 2)
    optimizer = optimizer_class([param], lr=numpy.float32(0.5), eps=Fraction(1, 1000))
    assert [type(optimizer.param_groups[0][name]) for name in ("lr", "eps")] == [float, float]
    param.grad, before = torch.ones_like(param), param.detach().clone()
    optimizer.param_groups[0]["eps"] = 1e-50
    with pytest.raises(ValueError, match="eps must be 0 or a number of float32 .*, got 1e-50$"):
        optimizer.step()
    assert torch.equal(param, before) and not optimizer.state
    optimizer.param_groups[0]["eps"] = numpy.float64(1e-8)
    optimizer.step()
    assert not torch.equal(param, before)
