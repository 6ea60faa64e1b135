"""Assertions and recorders that all test files share."""

import contextlib
import itertools
import re

import emulated
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_ext import ops

MIB = 1 << 20


def assert_same_bits(actual, expected):
    """Asserts bitwise equality. NaN equals itself; -0 differs from 0."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    if actual.numel():
        a = actual.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        b = expected.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(a, b), f"bits differ, by up to {(actual - expected).abs().max()}"


def assert_all_same_bits(actual, expected):
    """Asserts bitwise equality of each pair of tensors; None equals None."""
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) == (e is None)
        if e is not None:
            assert_same_bits(a, e)


def assert_same_products(actual, expected):
    """Asserts bitwise equality for the CPU kernels, and nearly equal values for CUDA.

    GEMMs on CUDA may sum in another order.
    """
    if (actual.is_cuda or emulated.active) and actual.is_floating_point():
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    else:
        assert_same_bits(actual, expected)


def assert_own_memory(results, arguments):
    """Asserts that no result shares memory with another one or with an argument."""
    places = [x.untyped_storage().data_ptr() for x in results if x.numel()]
    used = {x.untyped_storage().data_ptr() for x in tree_leaves(arguments) if torch.is_tensor(x)}
    assert len({*places}) == len(places) and not used & {*places}, "results share memory"


def assert_exact(actual, expected, nan=False):
    """Asserts a tolerance of 1e-12 for float64.

    This is about 5000 rounding errors: far above those of such sums, far below any error in a
    formula.
    """
    torch.testing.assert_close(
        actual.cpu(), torch.as_tensor(expected).cpu(), rtol=1e-12, atol=1e-12, equal_nan=nan
    )


def assert_as_accurate(actual, plain, exact, units=2):
    """Asserts an error of at most twice that of plain torch at the precision of `plain`.

    Both errors are against the float64 result. Plain torch can be exact by chance if a result has
    few roundings. So some units in the last place of the largest value are allowed in addition. If
    `actual` has a narrower dtype than `plain`, each element may be rounded once to this dtype.
    """
    assert actual.shape == plain.shape == exact.shape
    if not exact.numel():
        return
    actual, plain, exact = actual.detach(), plain.detach(), exact.detach()
    error = (actual.double() - exact).abs()
    allowed = 2 * (plain.double() - exact).abs().max()
    allowed = allowed + units * torch.finfo(plain.dtype).eps * exact.abs().max()
    if actual.dtype != plain.dtype:
        assert torch.promote_types(actual.dtype, plain.dtype) == plain.dtype
        allowed = allowed + half_unit(exact, actual.dtype)
    excess = (error - allowed).max()
    assert excess <= 0, f"error {error.max():.3g}, by {excess:.3g} more than allowed"


def half_unit(exact, dtype):
    """Returns half the distance between the numbers of a dtype at each element."""
    limits = torch.finfo(dtype)
    _, exponent = torch.frexp(exact.abs().clamp_min(limits.tiny))  # |exact| < 2^exponent
    return torch.ldexp(torch.full_like(exact, limits.eps / 4), exponent)


def tensors_of(aux):
    """Returns the tensors of a `MoEAux`, without those that the gate does not set."""
    return [leaf for leaf in tree_leaves(aux) if isinstance(leaf, torch.Tensor)]


def dense(routing, num_experts, values=None):
    """Returns the values of the slots as a matrix [T, E], 0 for experts that are not chosen.

    routing: a `Routing` or a `MoEAux`. values: one for each slot; None: the gates.
    """
    values = routing.gates if values is None else values
    token = ops.token_index(routing.expert_index, routing.token_offsets)
    offsets = routing.token_offsets
    num_tokens = len(routing.gates) if offsets is None else len(offsets) - 1
    matrix = values.new_zeros(num_tokens, num_experts)
    return matrix.index_put((token, routing.expert_index.flatten()), values.flatten())


def run_layer(layer, x, mask=None, expert_index=None):
    """Returns y, aux and all gradients, with the same noise in every call."""
    torch.manual_seed(1)
    leaf = x.detach().clone().requires_grad_()
    y, aux = layer(leaf, mask, expert_index=expert_index)
    layer.zero_grad()
    (y.square().sum() + aux.loss).backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in layer.parameters()]
    return y.detach(), aux, [leaf.grad, *grads]


def assert_equal_runs(run_1, run_2, compare=assert_same_bits):
    """Compares y, aux and all gradients."""
    compare(run_1[0], run_2[0])
    for a, b in zip(tensors_of(run_1[1]), tensors_of(run_2[1]), strict=True):
        compare(a.detach(), b.detach())
    for a, b in zip(run_1[2], run_2[2], strict=True):
        compare(a, b)


def gradients(outputs, inputs, cotangents, **options):
    """Returns the gradients of sum(output · cotangent); zeros where there is no gradient."""
    pairs = [(y, dy) for y, dy in zip(outputs, cotangents, strict=True) if y.requires_grad]
    grads = [None] * len(inputs)
    if pairs:
        outputs, cotangents = zip(*pairs, strict=True)
        grads = torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True, **options)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True)]


def peak_mib(function):
    """Returns the peak of the memory that torch allocates in a call of `function`."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        function()
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events)) / MIB


def raises(exception, operator, argument="", got=None):
    """Expects the error "<op>: <argument> must <rule>, got <value>" for any rule.

    An empty argument matches any argument. The value is checked only if `got` is given.
    """
    name = rf"\b{argument}" if argument[:1].isalpha() else argument
    value = "" if got is None else rf"{re.escape(str(got))}"
    return pytest.raises(exception, match=rf"^{operator}: (.*{name}.*) must .*, got .*{value}")


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest floating-point tensor that an operator returns."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(results):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                self.size = max(self.size, leaf.numel())
        return results


class _Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def recorded_ops(namespace="moe_ext"):
    """Records the calls below autograd, also of backward, as (name, op, args, kwargs) tuples."""
    calls = []
    with _Recorder() as recorder:
        yield calls
    for func, args, kwargs in recorder.calls:
        space, name = func.name().split("::")
        if namespace in (None, space):
            calls.append((name.split(".")[0], func, args, kwargs))


def assert_deterministic(function, threads):
    """Asserts that the tensors of `function` are bitwise equal for 1 and 2 threads in all runs."""
    threads(1)
    first = function()
    for number in (1, 2):
        threads(number)
        for _ in range(10):
            assert_all_same_bits(function(), first)


def assert_second_derivative_refused(function, inputs):
    """Asserts that a second derivative raises an error instead of missing a term."""
    with pytest.raises(RuntimeError, match="(?i)not implemented|second|twice"):
        first = torch.autograd.grad(function(*inputs).pow(2).sum(), inputs, create_graph=True)
        torch.autograd.grad(sum(g.pow(2).sum() for g in first), inputs)


def poison_freed_memory(*sizes, device="cpu", count=64):
    """Leaves NaN in the allocator's free blocks, where an uninitialized buffer would pick it up.

    All bytes are 0xFF, which is NaN in every floating-point dtype.
    """
    blocks = []
    for size in sizes:
        for width in (2, 4, 8):
            blocks += [
                torch.full((size * width,), 255, dtype=torch.uint8, device=device)
                for _ in range(count)
            ]
    del blocks
