"""Fixtures and the few assertions that all test files share."""

import contextlib
import itertools
import multiprocessing
import pathlib
import random
import re

import emulated
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from workers import Workers

import moe_ext
from moe_ext.lab.training.device import avoid_missing_amx

avoid_missing_amx()  # before the first matrix product


def cpu_info(name):
    """A line of what the system says about the processor; "" where it says nothing."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    found = re.search(rf"^{name}\s*:(.*)$", text, re.M)
    return found[1].strip() if found else ""


def instruction_sets():
    """The values of MOE_EXT_ISA for this processor, each with what those before it have."""
    flags = set(cpu_info("flags").split())
    needed = {
        "default": set(),
        "avx2": {"avx2", "fma"},
        "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
        "avx512_bf16": {"avx512_bf16"},
        "amx": {"amx_tile", "amx_bf16"},
    }
    return list(itertools.takewhile(lambda isa: needed[isa] <= flags, needed))


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: needs a GPU")
    config.addinivalue_line(
        "markers", "emulated(also=True): a `device` too: CUDA's kernels emulated"
    )


def pytest_generate_tests(metafunc):
    """Tests of a `device` run on every one that is there."""
    if "device" in metafunc.fixturenames:
        has_gpu = moe_ext._C.cuda_version is not None and torch.cuda.is_available()
        gpu = [pytest.param("cuda", marks=pytest.mark.cuda)] if has_gpu else []
        marker = metafunc.definition.get_closest_marker("emulated")
        also = ["emulated"] if marker and (not marker.args or marker.args[0]) else []
        metafunc.parametrize("device", ["cpu", *gpu, *also], indirect=True)


@pytest.fixture
def device(request):
    """Where a test's tensors are; the CPU if CUDA's kernels are emulated."""
    if request.param == "emulated":
        with emulated.kernels():
            yield "cpu"
    else:
        yield request.param


@pytest.fixture(autouse=True)
def seed():
    """Every test starts from the same random state, whichever tests ran before it."""
    torch.manual_seed(20170123)
    return 20170123


@pytest.fixture(scope="session")
def workers():
    """The processes of the distributed tests."""
    processes = Workers()
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder with train.txt, dev.txt and test.txt; the words follow by a rule."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(5)
    for part, count in (("train", 300), ("dev", 40), ("test", 70)):
        lines = []
        for _ in range(count):
            word = draw.randrange(40)
            words = []
            for _ in range(draw.randint(2, 12)):
                words.append(f"w{word}")
                word = (3 * word + draw.randrange(2)) % 40
            lines.append(" ".join(words) + "\n")
        (folder / f"{part}.txt").write_text("".join(lines))
    return folder


@pytest.fixture(scope="session")
def parallel_corpus(tmp_path_factory):
    """English syllables into French ones, and into German ones in the opposite order; of the latter
    half as many. One French line has no translation."""
    folder = tmp_path_factory.mktemp("parallel")
    draw = random.Random(6)
    syllables = [consonant + vowel for consonant in "bcgkm" for vowel in "aio"]
    for part, number in (("train", 120), ("dev", 12), ("test", 15)):
        for language, share in (("fr", 1), ("de", 2)):
            lines = []
            for _ in range(number // share):
                words = [draw.choice(syllables) for _ in range(draw.randint(1, 7))]
                there = [f"{language}{word}" for word in words]
                if language == "de":
                    there.reverse()
                source = " ".join(f"n{word}" for word in words)
                lines.append(f"made\t{source}\t{' '.join(there)}\n")
            if (part, language) == ("train", "fr"):
                lines.insert(3, "made\tnba nda\t \n")
            (folder / f"{part}.en-{language}.tsv").write_text("".join(lines))
    return folder


@pytest.fixture
def children():
    """Calling it gives the processes started since the test began: not those of `workers`."""
    before = set(multiprocessing.active_children())
    return lambda: [each for each in multiprocessing.active_children() if each not in before]


@pytest.fixture
def threads():
    """torch.set_num_threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def one_thread(threads):
    """All tests of a file that says so by `pytestmark`."""
    threads(1)


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


def assert_exact(actual, expected):
    """Float64: 1e-12 is about 5000 roundings, far above what sums of this size leave behind, and
    far below any error in a formula."""
    torch.testing.assert_close(
        actual.cpu(), torch.as_tensor(expected).cpu(), rtol=1e-12, atol=1e-12
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


def gradients(outputs, inputs, cotangents):
    """Gradients of sum(output · cotangent); zeros where nothing flows."""
    found = torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


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


NOT_DIFFERENTIABLE = {"dispatch_plan", "batchwise_topm"}


def opcheck_all(function, expected_names):
    """opcheck every op that `function` (a forward and a backward) calls; these must be the expected
    ones. Forward ops are checked with gradients required, where they take any."""
    with recorded_ops() as calls:
        function()
    assert {name for name, *_ in calls} == set(expected_names)
    for name, op, args, kwargs in calls:
        differentiable = not name.startswith("_") and name not in NOT_DIFFERENTIABLE

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
