"""Fixtures and hooks that the tests of the layer and of the lab share."""

import atexit
import collections
import gc
import multiprocessing
import os
import shutil
import subprocess
from pathlib import Path

import emulated
import marked
import pytest
import torch
from browser import chromium, prefer, resize
from locks import locked
from workers import Workers

import moe_ext
from moe_ext.info import avoid_missing_amx, cmake_prefix

ROOT = Path(__file__).resolve().parent
EMULATED = pytest.param("emulated", marks=pytest.mark.emulator)
HAS_GPU = moe_ext._build.cuda_version() is not None and torch.cuda.is_available()

pytest.register_assert_rewrite("assertions", "layers")  # a failing assertion shows its values
avoid_missing_amx()  # before the first GEMM


def pytest_addoption(parser):
    """Adds the options that choose tests."""
    parser.addoption("--equation", help='run the tests of one equation alone, as "Eq. 8"')
    parser.addoption(
        "--guarantee", help='run the tests of one guarantee of README alone, as "Determinism"'
    )
    parser.addoption("--long", action="store_true", help="also run the tests that take minutes")


def pytest_configure(config):
    """Declares the markers."""
    config.addinivalue_line("markers", "equation(*names): tests equations of docs/equations.md")
    config.addinivalue_line("markers", "guarantee(name): tests a guarantee of README.md")
    config.addinivalue_line("markers", "cuda: needs a GPU")
    config.addinivalue_line("markers", "long: runs only with --long")
    config.addinivalue_line(
        "markers", "emulated(also=True): a `device` is also the emulation of CUDA on the CPU"
    )
    config.addinivalue_line("markers", "emulator: runs in the emulation of CUDA on the CPU")


def pytest_generate_tests(metafunc):
    """Parametrizes tests of a `device` over all devices that exist."""
    if "device" in metafunc.fixturenames:
        gpu = [pytest.param("cuda", marks=pytest.mark.cuda)] if HAS_GPU else []
        marker = metafunc.definition.get_closest_marker("emulated")
        also = [EMULATED] if marker and (not marker.args or marker.args[0]) else []
        metafunc.parametrize("device", ["cpu", *gpu, *also], indirect=True)


@pytest.hookimpl(tryfirst=True)  # before -k drops tests
def pytest_collection_modifyitems(config, items):
    """Keeps only the tests of --equation and --guarantee; drops the long ones without --long."""
    if {*config.getini("testpaths")} <= {*config.args}:
        marked.note(items)
    wanted = {marker: config.getoption(f"--{marker}") for marker in ("equation", "guarantee")}

    long = config.getoption("--long")
    left_out = set() if long else most_emulated(items)

    def is_kept(item):
        if item in left_out or (item.get_closest_marker("long") and not long):
            return False
        return all(
            name is None or name in marked.names_in(item, marker) for marker, name in wanted.items()
        )

    config.hook.pytest_deselected(items=[item for item in items if not is_kept(item)])
    items[:] = in_parts([item for item in items if is_kept(item)])


def most_emulated(items):
    """Returns the emulated tests that only --long runs: of each operator, three of four in turn.

    The emulation of CUDA is slow, and its kernels change rarely.
    """
    by_operator = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("emulator"):
            operator = item.callspec.params.get("name")
            by_operator[item.path, item.originalname, operator].append(item)
    return {item for group in by_operator.values() for i, item in enumerate(group) if i % 4}


SHORT = {ROOT / "tests" / name for name in ("layer", "ops")}  # the folders of short tests


def shared_processes(item):
    """Sorts the tests that share processes first."""
    return ["workers" not in item.fixturenames, "browser" not in item.fixturenames]


def in_parts(items):
    """Orders the tests for the workers of pytest-xdist, which begin with equal parts of the list.

    Each part ends with short tests. A worker that has finished its part takes tests from the end of
    another part, so that all workers end at the same time. Tests of several ranks come first, then
    those in a browser: one worker starts the ranks and the browser.
    """
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if count == 1:
        return items
    kinds = [], []
    for item in sorted(items, key=shared_processes):
        kinds[item.path.parent in SHORT].append(item)
    return [
        item
        for part in range(count)
        for kind in kinds
        for item in kind[part * len(kind) // count : (part + 1) * len(kind) // count]
    ]


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collects without a search for garbage, which takes half of the time and finds none.

    What collection makes stays to the end. The searches in the tests leave it out, and are rarer
    than by default. The end of the process frees it: some modules report what remains.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000)
        gc.enable()
        atexit.register(gc.unfreeze)


@pytest.fixture
def device(request):
    """Yields the device of a test's tensors: the CPU if CUDA kernels are emulated."""
    if request.param == "emulated":
        with emulated.kernels():
            yield "cpu"
    else:
        yield request.param


@pytest.fixture(autouse=True)
def seed():
    """Seeds every test, independently of the tests before it."""
    # torch.manual_seed also notes the call stack for each kind of device that is missing.
    seed_torch = torch.manual_seed if HAS_GPU else torch.default_generator.manual_seed
    seed_torch(20170123)
    return 20170123


WORKERS = Workers()


@pytest.fixture(scope="session")
def workers():
    """Provides the worker processes of the distributed tests."""
    yield WORKERS
    WORKERS.close()


def pytest_runtest_teardown(nextitem):
    """Ends the worker processes after the last of consecutive tests that use them.

    Each process group that torch keeps has a thread that wakes a hundred times a second.
    """
    if nextitem is None or "workers" not in nextitem.fixturenames:
        WORKERS.close()


@pytest.fixture(scope="session")
def program():
    """Returns a function that builds a program of examples/cpp and returns its path."""
    if not (shutil.which("cmake") and shutil.which("ninja")):
        pytest.skip("needs cmake and ninja")
    source, build = ROOT / "examples" / "cpp", ROOT / "build" / "examples"
    prefix = f"-DCMAKE_PREFIX_PATH={cmake_prefix()}"
    with locked(build):
        if not (build / "build.ninja").exists():  # it configures again what has changed
            subprocess.run(["cmake", "-S", source, "-B", build, "-G", "Ninja", prefix], check=True)

    def path_of(name):
        with locked(build):
            subprocess.run(["cmake", "--build", build, "--target", name], check=True)
        return build / name

    return path_of


@pytest.fixture(scope="session")
def _chromium():
    with chromium() as driver:
        yield driver


@pytest.fixture
def browser(_chromium):
    """Returns a selenium driver with an empty page of 1280x800 pixels, in light mode.

    browser.py has functions for the size, the light or dark mode and the console.
    """
    _chromium.get("about:blank")
    _chromium.get_log("browser")
    resize(_chromium, 1280)
    prefer(_chromium, "light")
    return _chromium


@pytest.fixture
def children():
    """Returns a function that lists the processes started by the test, without `workers`."""
    before = set(multiprocessing.active_children())
    return lambda: [p for p in multiprocessing.active_children() if p not in before]


@pytest.fixture
def threads():
    """Provides torch.set_num_threads and restores the number of threads after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def one_thread(threads):
    """Runs a test with one thread; a file selects it by `pytestmark`."""
    threads(1)
