"""Runs the CUDA kernels of the operators on the CPU, to test them without a GPU.

csrc/cuda is compiled as C++, and with it the host functions of csrc/cuda_host. The folder
emulation/ replaces the CUDA headers. The result is the operators
moe_ext_emulated::noisy_topk_gating, ... on CPU tensors. This tests the arithmetic of the kernels
for any order of threads. It does not test speed, streams, graphs or synchronization.
"""

import contextlib
import functools
import os
import re
import sys
import warnings
from pathlib import Path
from unittest import mock

import torch
from locks import locked

ROOT = Path(__file__).parents[1]
EMULATION = ROOT / "tests" / "emulation"
BUILD = ROOT / "build" / "emulation"


def names_in(declaration):
    """Returns the names of the variables in a declaration, as "a, b" for "T a[2][3], b[4]"."""
    declarators = re.sub(r"\[.*?\]", "", declaration).split(",")
    return ", ".join(declarator.split()[-1] for declarator in declarators)


# Replacements for what is not C++, and for the registration of the kernels.
CHANGES = [
    (r"kernel<<<(.*)>>>\(", r"emulation::launch<Parameters...>(kernel, \1, "),
    (
        r"extern __shared__ __align__\(\d+\) unsigned char shared_space\[\];",
        "unsigned char* const shared_space = emulation::shared_memory();",
    ),
    (r"__shared__ ([^;]+);", lambda match: f"{match[0]} emulation::enter({names_in(match[1])});"),
    (r"TORCH_LIBRARY_IMPL\(moe_ext, CUDA, m\)", "TORCH_LIBRARY_IMPL(moe_ext_emulated, CPU, m)"),
]


def write_if_changed(path, text):
    """Writes a file; one that is up to date keeps its time, so it is not compiled again."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def write_sources():
    """Writes the changed csrc/cuda, csrc/cuda_host and their headers to BUILD.

    Returns two files to compile, which include the kernels and the host functions: headers take
    most of the time.
    """
    paths = [*ROOT.glob("csrc/**/*.h"), EMULATION / "broken_kernels.cpp"]
    paths += [*ROOT.glob("csrc/cuda/*.cu*"), *ROOT.glob("csrc/cuda_host/*.cpp")]
    units, used = {".cu": [], ".cpp": []}, set()
    for path in paths:
        instead = EMULATION / path.name
        text = (instead if instead.exists() else path).read_text()
        to = BUILD / path.relative_to(ROOT)
        if path.suffix != ".h":
            for pattern, replacement in CHANGES:
                text, count = re.subn(pattern, replacement, text)
                if count:
                    used.add(pattern)
        if path.suffix in units:
            units[path.suffix].append(to)
        write_if_changed(to, text)
    assert used == {pattern for pattern, _ in CHANGES}, "csrc/cuda has changed"
    for suffix, included in units.items():
        lines = "".join(f'#include "{source}"\n' for source in sorted(included))
        write_if_changed(BUILD / f"unit_{suffix[1:]}.cpp", lines)
    return [str(BUILD / f"unit_{suffix[1:]}.cpp") for suffix in units]


def operators_of_the_cpu():
    """Returns the names of the operators that need a CUDA kernel too, without moe_ext::."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("moe_ext::")]
    return sorted(name.removeprefix("moe_ext::") for name in names if has_kernel(name, "CPU"))


# Whether the kernels can count the bytes that they read and write; it makes them slower, and must
# be set before the first use.
counts_traffic = False
# gcc then calls a function of emulation/traffic.cpp before each access to memory. If it optimized,
# it would leave out the call of a write after a read.
COUNTING = [
    *("-O0", "-fsanitize=kernel-address"),
    *("--param=asan-instrumentation-with-call-threshold=0", "--param=asan-stack=0"),
    *("--param=asan-globals=0", "-DNDEBUG"),  # with NDEBUG, classes are as in torch's libraries
]


@functools.cache
def operators():
    """Builds the emulated kernels and returns the names of the operators."""
    from torch.utils.cpp_extension import load  # imported here: other tests need no compiler

    names = operators_of_the_cpu()
    library = torch.library.Library("moe_ext_emulated", "DEF")
    for name in names:
        schema = str(getattr(torch.ops.moe_ext, name).default._schema)
        library.define(schema.removeprefix("moe_ext::"))
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    operators.library = library  # the operators exist as long as this object
    objects = BUILD / ("counting" if counts_traffic else "objects")
    objects.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    # ninja is installed next to this Python.
    with locked(BUILD), mock.patch.dict(os.environ, PATH=path):
        load(
            "moe_ext_emulated",
            write_sources() + [str(EMULATION / "traffic.cpp")] * counts_traffic,
            extra_cflags=[
                *("-std=c++20", "-O1", "-g0", "-ffp-contract=off", "-Wno-unknown-pragmas"),
                "-march=native",  # std::fma is then one instruction
                "-U_FORTIFY_SOURCE",  # the fortified longjmp must not jump to another stack
                *("-include", str(EMULATION / "emulation.h")),
                *(COUNTING if counts_traffic else []),
            ],
            extra_include_paths=[str(EMULATION), str(EMULATION / "include")],
            build_directory=str(objects),
            is_python_module=False,
        )
    return names


active = False  # True within kernels()


@contextlib.contextmanager
def kernels(major=8):
    """Makes CPU tensors use the CUDA kernels, as on a device of this major architecture."""
    global active
    names = operators()
    torch.ops.moe_ext_emulated.set_device(major)
    with torch.library._scoped_library("moe_ext", "IMPL") as library:
        with warnings.catch_warnings(action="ignore"):  # the warning that kernels exist already
            for name in names:
                kernel = getattr(torch.ops.moe_ext_emulated, name).default
                library.impl(name, kernel, "CPU", allow_override=True)
        active = True
        try:
            yield
        finally:
            active = False


if __name__ == "__main__":
    operators()  # builds the kernels, before the tests
