"""Inputs of other kinds than the operators' own: int32 indices, and tensors with torch's negative
bit, whose memory holds -x (of z.conj().imag, for example)."""

import functools
import subprocess
import sys

import pytest
import torch
from assertions import assert_same_bits, gradients, opcheck_all, recorded_ops
from operators import TABLE
from torch._subclasses import FakeTensorMode

from moe_ext import ops

T, E, K, D, F = 6, 5, 2, 3, 4


def experts(x, gates, weight, bias, offsets, inverse, token_offsets=None):
    routing = dict(offsets=offsets, inverse=inverse, gates=gates, token_offsets=token_offsets)
    return ops.experts(x, [weight], [bias], **routing)


def operators():
    """A call of every operator without side effects: the function, its floating-point inputs, and
    its indices by name."""
    clean, raw, noise = torch.randn(3, T, E)
    gating = ops.noisy_topk_gating(clean, raw, noise, K)
    index, gates = gating.expert_index, gating.gates
    plan = ops.dispatch_plan(index, E)
    x, rows, weight, bias = (
        torch.randn(T, D),
        torch.randn(T * K, D),
        torch.randn(E, D, F),
        torch.randn(E, F),
    )
    bounds = torch.arange(0, T * K + 1, K)
    slots = dict(inverse=plan.inverse)
    listed = dict(inverse=plan.inverse.flatten(), token_offsets=bounds)
    offsets = dict(offsets=plan.offsets)
    gating_of = functools.partial(ops.noisy_topk_gating, k=K)
    by_expert = dict(num_experts=E)
    return {
        "noisy_topk_gating": (gating_of, (clean, raw, noise), {}),
        "load": (
            ops.load,
            (clean, gating.noise_stddev, gating.threshold),
            dict(expert_index=index, group_offsets=torch.tensor([0, 2, T])),
        ),
        "batchwise_topm": (functools.partial(ops.batchwise_topm, m=3), (clean,), {}),
        "selected_softmax": (
            ops.selected_softmax,
            (clean,),
            dict(expert_index=index.flatten(), token_offsets=bounds),
        ),
        "importance": (
            functools.partial(ops.importance, **by_expert),
            (gates,),
            dict(expert_index=index),
        ),
        "dispatch_plan": (
            functools.partial(ops.dispatch_plan, **by_expert),
            (),
            dict(expert_index=index),
        ),
        "dispatch": (ops.dispatch, (x,), slots),
        "dispatch, listed": (ops.dispatch, (x,), listed),
        "combine": (ops.combine, (rows, gates), slots),
        "combine, listed": (ops.combine, (rows, gates.flatten()), listed),
        "experts": (experts, (x, gates, weight, bias), slots | offsets),
        "experts, listed": (experts, (x, gates.flatten(), weight, bias), listed | offsets),
    }


NAMES = list(operators())
WITH_INDICES = [name for name, (_, _, indices) in operators().items() if indices]


def test_every_operator_is_here():
    """But for the one that works in place, which test_optim has."""
    assert {name.split(",")[0] for name in NAMES} == {*TABLE} - {"factored_step_"}


def negated(tensor):
    """The same numbers, kept with the opposite sign."""
    view = torch._neg_view(-tensor.detach())
    assert view.is_neg() and torch.equal(view, tensor)
    return view


def results(function, inputs, indices, cotangent=torch.cos):
    """The outputs, and the gradients with respect to what is differentiable."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = function(*leaves, **indices)
    outputs = [out] if isinstance(out, torch.Tensor) else list(out)
    wanted = [each for each in outputs if each.requires_grad]
    found = []
    if wanted:
        found = gradients(wanted, leaves, [cotangent(each.detach()) for each in wanted])
    return [*outputs, *found]


def narrow(indices):
    return {name: index.int() for name, index in indices.items()}


@pytest.mark.emulated
@pytest.mark.parametrize("name", WITH_INDICES)
def test_int32_indices(device, name):
    """As int64 ones, one or all of them; indices that come out are int64."""
    function, inputs, indices = operators()[name]
    inputs = [tensor.to(device) for tensor in inputs]
    indices = {key: index.to(device) for key, index in indices.items()}
    expected = results(function, inputs, indices)
    for narrowed in (*({key: index.int()} for key, index in indices.items()), narrow(indices)):
        actual = results(function, inputs, indices | narrowed)
        for a, e in zip(actual, expected, strict=True):
            assert_same_bits(a, e)


@pytest.mark.parametrize("name", WITH_INDICES)
def test_int32_indices_compile(name):
    """With the checks of torch.library, as one graph and without data."""
    function, inputs, indices = operators()[name]
    expected = results(function, inputs, indices)
    with recorded_ops() as calls:
        results(function, inputs, narrow(indices))
    names = {call for call, *_ in calls}
    opcheck_all(lambda: results(function, inputs, narrow(indices)), names)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for a, e in zip(results(compiled, inputs, narrow(indices)), expected, strict=True):
        assert_same_bits(a, e)
    narrowed = narrow(indices)
    with FakeTensorMode() as mode:
        fake_inputs = [mode.from_tensor(tensor) for tensor in inputs]
        fake_indices = {key: mode.from_tensor(index) for key, index in narrowed.items()}
        for a, e in zip(results(function, fake_inputs, fake_indices), expected, strict=True):
            assert a.shape == e.shape and a.dtype == e.dtype and a.device == e.device


@pytest.mark.parametrize("name", NAMES)
def test_negated_inputs(name):
    function, inputs, indices = operators()[name]

    def cotangent(output):
        return negated(torch.cos(output))

    expected = results(function, inputs, indices)
    actual = results(function, [negated(tensor) for tensor in inputs], indices, cotangent)
    for a, e in zip(actual, expected, strict=True):
        assert_same_bits(a.resolve_neg(), e.resolve_neg())


# In a process of its own: memory that is corrupted shows late, or as a crash.
STEPS = """
import itertools
import torch
import moe_ext

NAMES = ["param", "grad", "row", "column", "lr", "correction"]
CHANGED = ["param", "row", "column"]


def tensors(dtype):
    torch.manual_seed(0)
    values = [torch.randn(2, 4, 3), torch.randn(2, 4, 3), torch.rand(2, 4), torch.rand(2, 3)]
    values = [value.to(dtype if i < 2 else torch.promote_types(dtype, torch.float32))
              for i, value in enumerate(values)]
    return dict(zip(NAMES, values + [torch.tensor(v, dtype=torch.float64) for v in (0.1, 2.0)]))


def step(call):
    torch.ops.moe_ext.factored_step_(*call.values(), 0.9, 0.2, 1e-3)


for dtype in (torch.float64, torch.float32, torch.bfloat16):
    expected = tensors(dtype)
    step(expected)
    for size in range(len(NAMES) + 1):
        for negated in itertools.combinations(NAMES, size):
            call = tensors(dtype)
            for name in negated:
                call[name] = torch._neg_view(-call[name])
            versions = {name: call[name]._version for name in CHANGED}
            step(call)
            for name in NAMES:
                assert torch.equal(call[name], expected[name]), (negated, name)
                assert call[name].is_neg() == (name in negated)
            for name in CHANGED:
                assert call[name]._version == versions[name] + 1, (negated, name)

# The imaginary part of a conjugate, and tensors whose columns are the rows of memory.
z = torch.complex(torch.zeros(2, 4, 3), -tensors(torch.float32)["param"])
call = tensors(torch.float32) | {"param": z.conj().imag}
step(call)
expected = tensors(torch.float32)
step(expected)
assert torch.equal(-z.imag, expected["param"]) and torch.equal(call["row"], expected["row"])

# A place in memory for each element, whatever the bit.
call = tensors(torch.float32)
call["row"] = torch._neg_view(torch.ones(()).expand(2, 4))
before = call["param"].clone()
try:
    step(call)
except ValueError as error:
    assert str(error).startswith("factored_step_: row must "), error
else:
    raise AssertionError("taken")
assert torch.equal(call["param"], before)

with torch.inference_mode():
    call = tensors(torch.float32)
    call["column"] = torch._neg_view(-call["column"])
    step(call)
    assert torch.equal(call["column"], expected["column"])

for bit in (torch.conj, lambda tensor: torch._efficientzerotensor(tensor.shape)):
    call = tensors(torch.float32)
    call["param"] = bit(call["param"].to(torch.complex64))
    try:
        step(call)
    except (TypeError, RuntimeError):
        pass
    else:
        raise AssertionError("taken")
print("done")
"""


def test_factored_step_of_negated_tensors():
    run = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and run.stdout == "done\n", run.stderr[-2000:]
