"""Builds the extension moe_ext._C: for the CPU always, for CUDA where torch and a toolkit have it.

MOE_EXT_CUDA=0 leaves CUDA out, MOE_EXT_CUDA=1 insists on it; with MOE_EXT_WERROR=1 a warning in its
kernels is an error. TORCH_CUDA_ARCH_LIST and MAX_JOBS are honoured as in every torch extension.
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
        "moe_ext is built against the installed torch, and none is here: "
        "`pip install 'torch>=2.11'`, then `pip install --no-build-isolation .`"
    )


if int(setuptools.__version__.split(".")[0]) < 77:
    sys.exit(f"moe_ext is built with setuptools 77 or later, this is {setuptools.__version__}")
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
    sys.exit(f"moe_ext needs torch 2.11 or later, this is {torch.__version__}")


@functools.cache
def ask_nvcc(option: str) -> str:
    """What the toolkit under CUDA_HOME says of itself."""
    return subprocess.check_output([f"{CUDA_HOME}/bin/nvcc", option], text=True)


def toolkit_version() -> str:
    """Such as "13.0"."""
    return ask_nvcc("--version").split("release ")[1].split(",")[0]


def architectures() -> str:
    """TORCH_CUDA_ARCH_LIST; unset, those of ours that the toolkit has, the last as PTX too."""
    if given := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return given
    has = ask_nvcc("--list-gpu-arch").split()
    ours = [name for name in CUDA_ARCHITECTURES if f"compute_{name.replace('.', '')}" in has]
    if ours:
        ours[-1] += "+PTX"
    return ";".join(ours)


def wants_cuda(has_sources: bool) -> bool:
    """Whether to build for CUDA: never asks for a GPU, which a building machine need not have."""
    choice = os.environ.get("MOE_EXT_CUDA", "auto")
    if choice not in ("auto", "0", "1"):
        sys.exit(f"moe_ext: MOE_EXT_CUDA must be 0 or 1, got {choice}")
    if choice == "0":
        return False
    if not has_sources:
        missing = "this version has no CUDA kernels"
    elif torch.version.cuda is None:
        missing = "this torch was built without CUDA"
    elif CUDA_HOME is None or not Path(CUDA_HOME, "bin", "nvcc").exists():
        missing = f"no CUDA toolkit was found for torch's CUDA {torch.version.cuda}"
    elif toolkit_version().split(".")[0] != torch.version.cuda.split(".")[0]:
        missing = f"the toolkit is CUDA {toolkit_version()} and torch's {torch.version.cuda}"
    elif not architectures():
        missing = f"the toolkit has none of the architectures {', '.join(CUDA_ARCHITECTURES)}"
    else:
        return True
    if choice == "1":
        sys.exit(f"moe_ext: MOE_EXT_CUDA=1, but {missing}")
    print(f"moe_ext: building for the CPU alone, as {missing}")
    return False


def extension():
    """The one extension module, of the C++ sources and, with CUDA, the .cu ones."""
    cpp = sorted(str(path.relative_to(HERE)) for path in HERE.glob("csrc/**/*.cpp"))
    cuda = sorted(str(path.relative_to(HERE)) for path in HERE.glob("csrc/cuda/*.cu"))
    # No contraction: a product is fused into a sum where the source says so, and nowhere else.
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
