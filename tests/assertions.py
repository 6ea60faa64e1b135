"""The assertions, and what they observe, that all test files share."""

import contextlib
import re

import emulated
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def assert_same_bits(actual, expected):
    """Equal to the last bit: NaN equals itself, -0 differs from 0."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    if actual.numel():
        a = actual.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        b = expected.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(a, b), f"bits differ, by up to {(actual - expected).abs().max()}"


def assert_same_products(actual, expected):
    """The same bits by the CPU's kernels; by CUDA's, where products of equal factors need not be
    added in one order, nearly the same numbers."""
    if (actual.is_cuda or emulated.active) and actual.is_floating_point():
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    else:
        assert_same_bits(actual, expected)


def assert_exact(actual, expected, nan=False):
    """Float64: 1e-12 is about 5000 roundings, far above what sums of this size leave behind, and
    far below any error in a formula."""
    torch.testing.assert_close(
        actual.cpu(), torch.as_tensor(expected).cpu(), rtol=1e-12, atol=1e-12, equal_nan=nan
    )


def assert_as_accurate(actual, plain, exact):
    """No further from the float64 result than twice plain torch at the same precision.

    Plain torch can be right by luck where a result has few roundings, so two units in the last
    place of the largest value are allowed on top: rounding an exact result costs half of one.
    """
    assert actual.dtype == plain.dtype and actual.shape == plain.shape == exact.shape
    if not exact.numel():
        return
    actual, plain, exact = actual.detach(), plain.detach(), exact.detach()
    error = (actual.double() - exact).abs().max()
    allowed = 2 * (plain.double() - exact).abs().max()
    allowed = allowed + 2 * torch.finfo(plain.dtype).eps * exact.abs().max()
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


def tensors_of(aux):
    """The tensors of a layer's report, without what this gate leaves out."""
    return [leaf for leaf in tree_leaves(aux) if isinstance(leaf, torch.Tensor)]


def gradients(outputs, inputs, cotangents, **options):
    """Gradients of sum(output · cotangent); zeros where nothing flows."""
    pairs = [(y, dy) for y, dy in zip(outputs, cotangents, strict=True) if y.requires_grad]
    found = [None] * len(inputs)
    if pairs:
        outputs, cotangents = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True, **options)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


def raises(exception, operator, argument="", got=None):
    """Within it the operator must refuse the argument, as "<op>: <argument> must <rule>, got
    <value>": whatever the rule's words are, it is named, and the value where `got` is given. An
    argument of "" may be any."""
    name = rf"\b{argument}" if argument[:1].isalpha() else argument
    value = "" if got is None else rf"{re.escape(str(got))}"
    return pytest.raises(exception, match=rf"^{operator}: (.*{name}.*) must .*, got .*{value}")


class _Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def recorded_ops(namespace="moe_ext"):
    """The calls below autograd, backward ones included: a list of (name, op, args, kwargs)."""
    calls = []
    with _Recorder() as recorder:
        yield calls
    for func, args, kwargs in recorder.calls:
        space, name = func.name().split("::")
        if namespace in (None, space):
            calls.append((name.split(".")[0], func, args, kwargs))


def opcheck_all(function, expected_names):
    """opcheck every op that `function` (a forward and a backward) calls; these must be the expected
    ones. Forward ops are checked with gradients required."""
    with recorded_ops() as calls:
        function()
    assert {name for name, *_ in calls} == set(expected_names)
    for name, op, args, kwargs in calls:
        differentiable = not name.startswith("_")

        def leaf(x, differentiable=differentiable):
            if isinstance(x, torch.Tensor):
                x = x.detach()
                return x.requires_grad_() if differentiable and x.is_floating_point() else x
            return [leaf(item) for item in x] if isinstance(x, (list, tuple)) else x

        torch.library.opcheck(
            op, tuple(leaf(x) for x in args), {k: leaf(v) for k, v in kwargs.items()}
        )


def assert_deterministic(function, threads, runs=20):
    """`function` returns tensors; the same bits at 1 and 2 threads and in every run."""
    threads(1)
    first = function()
    for number in (1, 2):
        threads(number)
        for _ in range(runs):
            for actual, expected in zip(function(), first, strict=True):
                assert_same_bits(actual, expected)


def assert_second_derivative_refused(function, inputs):
    """A loud error: a missing term would go unnoticed."""
    with pytest.raises(RuntimeError, match="(?i)not implemented|second|twice"):
        first = torch.autograd.grad(function(*inputs).pow(2).sum(), inputs, create_graph=True)
        torch.autograd.grad(sum(g.pow(2).sum() for g in first), inputs)


def poison_freed_memory(*sizes, device="cpu", count=64):
    """Leave NaN in the allocator's free blocks, where an uninitialised buffer would pick it up.
    NaN of the widest type is NaN in the narrower ones too: all its bytes are 0xFF."""
    blocks = []
    for size in sizes:
        for width in (2, 4, 8):
            blocks += [
                torch.full((size * width,), 255, dtype=torch.uint8, device=device)
                for _ in range(count)
            ]
    del blocks
