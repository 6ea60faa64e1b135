"""Loads the library for the installed torch, explains failures, and returns facts of the build."""

import ctypes
import importlib.metadata
import os
from pathlib import Path
from typing import NamedTuple

import torch


def version() -> str:
    """Returns the installed version, or "unknown" in a source tree that is not installed."""
    try:
        return importlib.metadata.version("moe_ext")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


COMPILE = (
    "`pip install --no-build-isolation --no-deps --force-reinstall .` in a copy of the repository "
    "compiles it for the installed torch. It needs a C++ compiler, setuptools 77, wheel and ninja"
)


def release(version: str) -> str:
    """Returns "major.minor" of a version; torch's C++ ABI may change between minor versions."""
    return ".".join(version.split(".")[:2])


def major(version: str) -> str:
    return version.split(".")[0]


def libraries() -> dict[str, Path]:
    """Returns the library for each release of torch that has one, the oldest first."""
    paths = (Path(__file__).parent / "lib").glob("torch*/libmoe_ext.so")
    by_release = {path.parent.name.removeprefix("torch"): path for path in paths}
    return dict(sorted(by_release.items(), key=lambda item: [*map(int, item[0].split("."))]))


def load() -> None:
    """Loads the library for the installed torch, which registers the operators.

    The environment variable MOE_EXT_LIBRARY names another file, such as a library built with CMake.

    Raises:
        ImportError: There is no library for this release of torch, or it is for another CUDA.
    """
    package = Path(__file__).parent
    given = os.environ.get("MOE_EXT_LIBRARY")
    paths = {release(torch.__version__): Path(given)} if given else libraries()
    if not paths:
        raise ImportError(
            f"moe_ext was imported from {package}, which has no compiled library: run "
            f"`pip install --no-build-isolation -e .` in {package.parent}. To import an installed "
            "moe_ext instead, run Python from another folder"
        )
    path = paths.get(release(torch.__version__))
    if path is None:
        raise ImportError(
            f"moe_ext {version()} has libraries for torch {', '.join(paths)}, but torch "
            f"{torch.__version__} is installed. Install one of these releases of torch, or a newer "
            f"moe_ext, or compile moe_ext: {COMPILE}"
        )
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(
            f"moe_ext: {path} does not load with torch {torch.__version__}. It was probably built "
            f"for a different version of torch or CUDA. {COMPILE} ({error})"
        ) from None
    # As in setup.py, the major versions must agree.
    built = cuda_version()
    if built and major(built) != major(torch.version.cuda or "none"):
        raise ImportError(
            f"moe_ext was built for CUDA {built}, but torch for CUDA {torch.version.cuda}. "
            f"{COMPILE}"
        )


def torch_version() -> str:
    """Returns the version of torch that the library was compiled for, such as "2.15.0"."""
    fact: str = torch.ops.moe_ext_build.torch_version()
    return fact


def cuda_version() -> str | None:
    """Returns the CUDA version that the library was compiled for; None without CUDA kernels."""
    fact: str | None = torch.ops.moe_ext_build.cuda_version()
    return fact


def compiler() -> str:
    """Returns the version of the compiler, such as "12.2.0"."""
    fact: str = torch.ops.moe_ext_build.compiler()
    return fact


def isa() -> str:
    """Returns the instruction set of the CPU kernels, such as "avx512_bf16".

    The environment variable MOE_EXT_ISA selects a lower instruction set.

    Raises:
        ValueError: MOE_EXT_ISA names no instruction set of this processor.
    """
    fact: str = torch.ops.moe_ext_build.isa()
    return fact


def products() -> dict[str, str]:
    """Returns the name of the GEMM micro-kernels on the CPU for each dtype."""
    return dict(torch.ops.moe_ext_build.products())


class GemmRule(NamedTuple):
    """When a GEMM ``C = A B`` uses some kernels: a row of csrc/cpu/gemm/kernel_table.cpp."""

    types: list[str]
    isa: str  #: the instruction set that the kernels need
    vendor: str  #: the only vendor that prefers this instruction set; "any" otherwise
    last_rows: int  #: the most rows of A
    layout: str  #: whether B is contiguous "along_n" or "along_k"; "any" otherwise
    reading: str  #: "packs", or the kernel that reads B in place: "axpyf" or "dotxf"
    kernels: str


ANY_ROWS = 2**63 - 1


def gemm_rules() -> list[GemmRule]:
    """Returns the rules from best to worst: the first one that applies is used."""
    rules = []
    for line in torch.ops.moe_ext_build.gemm_rules():
        types, isa, vendor, last_rows, *rest = line.split("\t")
        rules.append(GemmRule(types.split(), isa, vendor, int(last_rows), *rest))
    return rules


def gemm_rule(isa: str, dtype: str, rows: int, layout: str) -> int:
    """Returns the index of the rule for a GEMM with an instruction set."""
    index: int = torch.ops.moe_ext_build.gemm_rule(isa, dtype, rows, layout)
    return index


def preferred_isa(vendor: str, highest: str) -> str:
    """Returns the instruction set that is used on a processor unless MOE_EXT_ISA is set.

    Args:
        vendor: "amd", "intel", or "any" for other vendors.
        highest: The highest instruction set of the processor.
    """
    name: str = torch.ops.moe_ext_build.preferred_isa(vendor, highest)
    return name


def empty_cache() -> None:
    """Returns the cached memory of freed CPU tensors to the operating system."""
    torch.ops.moe_ext_build.empty_cache()


def cached_bytes() -> int:
    """Returns the bytes of freed CPU tensors that moe_ext keeps for later tensors.

    torch's profiler counts them as freed. `moe_ext.empty_cache` returns them to the system.
    """
    fact: int = torch.ops.moe_ext_build.cached_bytes()
    return fact


def cache_limit() -> int:
    """Returns the most bytes that `cached_bytes` reaches: a quarter of the machine's memory.

    The environment variable MOE_EXT_CACHE_BYTES sets another limit; 0 disables the cache. Outside
    Linux, there is no cache, and the limit is 0.

    Raises:
        ValueError: MOE_EXT_CACHE_BYTES is not a number of bytes.
    """
    fact: int = torch.ops.moe_ext_build.cache_limit()
    return fact
