"""Fixtures and hooks that all test files share."""

import multiprocessing
import random
import shutil
import subprocess
from pathlib import Path

import emulated
import pytest
import torch
from browser import chromium, prefer, resize
from locks import locked
from workers import Workers

import moe_ext
from moe_ext.info import cmake_prefix
from moe_ext.lab.training.device import avoid_missing_amx

ROOT = Path(__file__).resolve().parents[1]
EMULATED = pytest.param("emulated", marks=pytest.mark.emulator)

pytest.register_assert_rewrite("assertions")  # a failing assertion shows its values
avoid_missing_amx()  # before the first GEMM


def pytest_addoption(parser):
    parser.addoption("--equation", help='run the tests of one equation alone, as "Eq. 8"')
    parser.addoption(
        "--guarantee", help='run the tests of one guarantee of README alone, as "Determinism"'
    )
    parser.addoption("--long", action="store_true", help="also run the tests that take minutes")


def pytest_configure(config):
    config.addinivalue_line("markers", "equation(*names): of these equations of docs/equations.md")
    config.addinivalue_line("markers", "guarantee(name): of this guarantee of README.md")
    config.addinivalue_line("markers", "cuda: needs a GPU")
    config.addinivalue_line("markers", "long: runs only with --long")
    config.addinivalue_line(
        "markers", "emulated(also=True): a `device` too: CUDA's kernels emulated"
    )
    config.addinivalue_line("markers", "emulator: runs on the device `emulated`")


def pytest_generate_tests(metafunc):
    """Parametrizes tests of a `device` over all devices that exist."""
    if "device" in metafunc.fixturenames:
        has_gpu = moe_ext._C.cuda_version is not None and torch.cuda.is_available()
        gpu = [pytest.param("cuda", marks=pytest.mark.cuda)] if has_gpu else []
        marker = metafunc.definition.get_closest_marker("emulated")
        also = [EMULATED] if marker and (not marker.args or marker.args[0]) else []
        metafunc.parametrize("device", ["cpu", *gpu, *also], indirect=True)


def pytest_collection_modifyitems(config, items):
    """Keeps only the tests of --equation and --guarantee; drops the long ones without --long."""
    wanted = {marker: config.getoption(f"--{marker}") for marker in ("equation", "guarantee")}

    def is_kept(item):
        if item.get_closest_marker("long") and not config.getoption("--long"):
            return False
        return all(
            name is None or name in names_in(item, marker) for marker, name in wanted.items()
        )

    config.hook.pytest_deselected(items=[item for item in items if not is_kept(item)])
    items[:] = [item for item in items if is_kept(item)]


def names_in(item, marker):
    """Returns the names in a test's markers `equation` or `guarantee`."""
    return {name for mark in item.iter_markers(marker) for name in mark.args}


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
    torch.manual_seed(20170123)
    return 20170123


@pytest.fixture(scope="session")
def workers():
    """Provides the worker processes of the distributed tests."""
    processes = Workers()
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def program():
    """Returns a function that builds a program of examples/cpp and returns its path."""
    if not (shutil.which("cmake") and shutil.which("ninja")):
        pytest.skip("needs cmake and ninja")
    source, build = ROOT / "examples" / "cpp", ROOT / "build" / "examples"
    prefix = f"-DCMAKE_PREFIX_PATH={cmake_prefix()}"
    with locked(build):
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
    """A selenium driver with an empty page of 1280x800 pixels, in light mode.

    browser.py has functions for the size, the light or dark mode and the console.
    """
    _chromium.get("about:blank")
    _chromium.get_log("browser")
    resize(_chromium, 1280)
    prefer(_chromium, "light")
    return _chromium


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Makes a folder with train.txt, dev.txt and test.txt; the words follow a rule."""
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
    """Makes a parallel corpus of syllables: English to French, and English to reversed German.

    German has half the lines. One French line has no translation.
    """
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
    """Returns a function that lists the processes started by the test, without `workers`."""
    before = set(multiprocessing.active_children())
    return lambda: [each for each in multiprocessing.active_children() if each not in before]


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
