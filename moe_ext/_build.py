"""Loads the compiled module and explains failures."""

import importlib.metadata
import importlib.util
import re
from pathlib import Path

import torch

REINSTALL = (
    "install the wheel for this torch, or run `pip install --no-build-isolation .` in the source "
    "tree of moe_ext"
)


def release(version: str) -> str:
    """Returns "major.minor" of a version; torch's C++ ABI may change between minor versions."""
    return ".".join(version.split(".")[:2])


def major(version: str) -> str:
    return version.split(".")[0]


def load() -> None:
    """Imports moe_ext._C, which registers the operators.

    Raises:
        ImportError: moe_ext._C is missing, or was built for a different version of torch or CUDA.
    """
    package = Path(__file__).parent
    built_with = package / "lib" / "built_with.cmake"
    if importlib.util.find_spec("moe_ext._C") is None or not built_with.exists():
        raise ImportError(
            f"moe_ext was imported from {package}, which has no compiled module: run "
            f"`pip install --no-build-isolation -e .` in {package.parent}. To import an installed "
            "moe_ext instead, run Python from another folder"
        )
    # Compared before the library is loaded, as the library may not load with another torch.
    built = re.sub(r"set\(moe_ext_torch_version (.*)\)\n", r"\1", built_with.read_text())
    if release(built) != release(torch.__version__):
        raise ImportError(
            f"moe_ext was built for torch {built}, but torch {torch.__version__} is installed: "
            f"{REINSTALL}"
        )
    try:
        import moe_ext._C as _C
    except ImportError as error:
        raise ImportError(
            f"moe_ext: the compiled module does not load with torch {torch.__version__}. It was "
            f"probably built for a different version of torch or CUDA: {REINSTALL} ({error})"
        ) from None
    # As in setup.py, the major versions must agree.
    if _C.cuda_version and major(_C.cuda_version) != major(torch.version.cuda or "none"):
        raise ImportError(
            f"moe_ext was built for CUDA {_C.cuda_version}, but torch for CUDA "
            f"{torch.version.cuda}: {REINSTALL}"
        )


def version() -> str:
    """Returns the installed version, or "unknown" in a source tree that is not installed."""
    try:
        return importlib.metadata.version("moe_ext")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
