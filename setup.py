"""Builds the extension moe_ext._C for the CPU, and for CUDA if torch and a CUDA toolkit support it.

MOE_EXT_CUDA=0 disables CUDA. MOE_EXT_CUDA=1 makes the build fail if CUDA is missing.
MOE_EXT_WERROR=1 turns nvcc warnings into errors. TORCH_CUDA_ARCH_LIST and MAX_JOBS work as in every
torch extension.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import setuptools
from setuptools import setup

VERSION = "0.1.0"
CUDA_ARCHITECTURES = ["8.0", "9.0", "10.0", "12.0"]
HERE = Path(__file__).parent

try:
    import torch
    from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension
except ImportError:
    sys.exit(
        "moe_ext: the build needs an installed torch, found none: run "
        "`pip install 'torch>=2.11'`, then `pip install --no-build-isolation .`"
    )


if int(setuptools.__version__.split(".")[0]) < 77:
    sys.exit(f"moe_ext: the build needs setuptools 77 or later, got {setuptools.__version__}")
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
    sys.exit(f"moe_ext: the build needs torch 2.11 or later, got {torch.__version__}")


@functools.cache
def ask_nvcc(option: str) -> str:
    """Runs the nvcc of CUDA_HOME with an option and returns its output."""
    return subprocess.check_output([f"{CUDA_HOME}/bin/nvcc", option], text=True)


def toolkit_version() -> str:
    """Returns the version of the CUDA toolkit, such as "13.0"."""
    return ask_nvcc("--version").split("release ")[1].split(",")[0]


def architectures() -> str:
    """Returns TORCH_CUDA_ARCH_LIST if it is set, else the supported CUDA_ARCHITECTURES.

    In the second case, the kernels for the last architecture also include PTX.
    """
    if given := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return given
    has = ask_nvcc("--list-gpu-arch").split()
    ours = [name for name in CUDA_ARCHITECTURES if f"compute_{name.replace('.', '')}" in has]
    if ours:
        ours[-1] += "+PTX"
    return ";".join(ours)


def wants_cuda(has_sources: bool) -> bool:
    """Returns whether to build for CUDA; the build does not need a GPU."""
    choice = os.environ.get("MOE_EXT_CUDA", "auto")
    if choice not in ("auto", "0", "1"):
        sys.exit(f"moe_ext: MOE_EXT_CUDA must be auto, 0 or 1, got {choice}")
    if choice == "0":
        return False
    if not has_sources:
        missing = "the source tree has no CUDA kernels"
    elif torch.version.cuda is None:
        missing = "this torch was built without CUDA"
    elif CUDA_HOME is None or not Path(CUDA_HOME, "bin", "nvcc").exists():
        missing = f"no CUDA toolkit was found for torch's CUDA {torch.version.cuda}"
    elif toolkit_version().split(".")[0] != torch.version.cuda.split(".")[0]:
        missing = f"the toolkit has CUDA {toolkit_version()} and torch has {torch.version.cuda}"
    elif not architectures():
        missing = f"the toolkit supports none of the architectures {', '.join(CUDA_ARCHITECTURES)}"
    else:
        return True
    if choice == "1":
        sys.exit(f"moe_ext: MOE_EXT_CUDA=1, but {missing}")
    print(f"moe_ext: building only for the CPU, because {missing}")
    return False


def extension():
    """Returns the extension module with the C++ sources and, with CUDA, the .cu sources."""
    cpp = sorted(str(path.relative_to(HERE)) for path in HERE.glob("csrc/**/*.cpp"))
    cuda = sorted(str(path.relative_to(HERE)) for path in HERE.glob("csrc/cuda/*.cu"))
    # -ffp-contract=off: the compiler must not add fused multiply-adds to the source.
    cxx = ["-std=c++20", "-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
    cxx += ["-Wall", "-Wextra", "-Wno-unused-parameter"]
    if not wants_cuda(bool(cuda)):
        return CppExtension("moe_ext._C", cpp, extra_compile_args={"cxx": cxx})
    os.environ["TORCH_CUDA_ARCH_LIST"] = architectures()
    define = f'-DMOE_EXT_CUDA_VERSION="{toolkit_version()}"'
    nvcc = ["-std=c++20", "-O3", "-fmad=false"]
    nvcc += ["-Xcompiler", "-Wall,-Wextra,-Wno-unused-parameter"]
    if os.environ.get("MOE_EXT_WERROR") == "1":
        nvcc += ["-Werror", "all-warnings"]
    return CUDAExtension(
        "moe_ext._C", cpp + cuda, extra_compile_args={"cxx": [*cxx, define], "nvcc": nvcc}
    )


setup(
    version=VERSION,
    install_requires=[f"torch=={'.'.join(torch.__version__.split('.')[:2])}.*"],
    ext_modules=[extension()],
    cmdclass={"build_ext": BuildExtension},
)
