"""Loads the compiled module, or says in one sentence why it cannot be."""

import importlib.metadata
import importlib.util
from pathlib import Path

import torch

REINSTALL = "run `pip install --no-build-isolation .` in its source tree"


def release(version: str) -> str:
    """The major and minor version: what the C++ interface of torch depends on."""
    return ".".join(version.split(".")[:2])


def major(version: str) -> str:
    return version.split(".")[0]


def load() -> None:
    """Imports moe_ext._C, which registers the operators.

    Raises:
        ImportError: the module was not built, or was built for another torch or CUDA.
    """
    if importlib.util.find_spec("moe_ext._C") is None:
        raise ImportError(
            f"moe_ext was imported from {Path(__file__).parent}, where its compiled module was not "
            "built: run `pip install --no-build-isolation -e .` there, or leave that folder if "
            "moe_ext is installed elsewhere"
        )
    try:
        import moe_ext._C as _C
    except ImportError as error:
        raise ImportError(
            f"moe_ext's compiled module does not load with torch {torch.__version__}, most likely "
            f"because it was built for another one: {REINSTALL} ({error})"
        ) from None
    if _C.cxx11_abi != torch.compiled_with_cxx11_abi():
        raise ImportError(f"moe_ext was built with another C++ ABI than torch's: {REINSTALL}")
    if release(_C.torch_version) != release(torch.__version__):
        raise ImportError(
            f"moe_ext was built for torch {_C.torch_version}, "
            f"running {torch.__version__}: {REINSTALL}"
        )
    # As in setup.py, the major version has to be the same.
    if _C.cuda_version and major(_C.cuda_version) != major(torch.version.cuda or "none"):
        raise ImportError(
            f"moe_ext was built for CUDA {_C.cuda_version}, torch's is {torch.version.cuda}: "
            f"{REINSTALL}"
        )


def version() -> str:
    """The installed version, or "unknown" in a source tree that is not installed."""
    try:
        return importlib.metadata.version("moe_ext")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
