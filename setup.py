"""Builds libmoe_ext_kernels.so, and libmoe_ext.so for the installed torch.

The first has the kernels of the CPU. A third library, libmoe_ext_kernels_cuda.so, has those of
CUDA, if torch and a CUDA toolkit support it. Kernels know no torch. The library libmoe_ext.so has
the operators, and the modules of the C++ interface. No library has a Python symbol. CMakeLists.txt
builds the same libraries. A wheel can have libmoe_ext.so for more releases of torch:
MOE_EXT_LIBRARIES is a folder with them, which scripts/build_libraries.sh writes.

CUDA is built if a GPU is found, for its architecture, or if TORCH_CUDA_ARCH_LIST or MOE_EXT_CUDA=1
asks for it. MOE_EXT_CUDA=0 disables CUDA. MOE_EXT_CUDA=1 makes the build fail if CUDA is missing.
MOE_EXT_WERROR=1 turns nvcc warnings into errors. TORCH_CUDA_ARCH_LIST and MAX_JOBS work as in every
torch extension. MOE_EXT_LOCAL_VERSION=cu13 marks a wheel with kernels for CUDA 13.
"""

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import setuptools
from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

CUDA_ARCHITECTURES = ["8.0", "9.0", "10.0", "12.0"]
ROOT = Path(__file__).parent
HEADERS = ROOT / "moe_ext" / "include"
KERNELS = "moe_ext.lib.libmoe_ext_kernels"
KERNELS_CUDA = "moe_ext.lib.libmoe_ext_kernels_cuda"
LIBRARY = "moe_ext.lib.libmoe_ext"
# The environment that built the library in this folder, and the folder, in two lines.
BUILT_BY = ROOT / "moe_ext" / "lib" / "built_by.txt"
# The folders whose files are compiled as one file, because torch's headers take most of the time.
# The kernels stay apart: they include few of these headers, and the speed of a loop may depend on
# the rest of its file. CMakeLists.txt has the same folders.
TOGETHER = ["csrc", "csrc/autograd", "csrc/nn", "csrc/cuda_host"]

try:
    import torch
    from torch.utils.cpp_extension import (
        CUDA_HOME,
        BuildExtension,
        CppExtension,
        CUDAExtension,
        include_paths,
    )
except ImportError:
    sys.exit(
        "moe_ext: the build needs an installed torch, found none: run "
        "`pip install 'torch>=2.11'`, then `pip install --no-build-isolation .`"
    )


def release_of(version: str) -> str:
    """Returns "major.minor": the C++ interface of torch is stable within it."""
    return ".".join(version.split(".")[:2])


def library_of(release: str) -> str:
    """Returns the path of libmoe_ext.so for a release of torch."""
    return f"moe_ext/lib/torch{release}/libmoe_ext.so"


RELEASE = release_of(torch.__version__)
# The files that are built.
FILES = {
    KERNELS: "moe_ext/lib/libmoe_ext_kernels.so",
    KERNELS_CUDA: "moe_ext/lib/libmoe_ext_kernels_cuda.so",
    LIBRARY: library_of(RELEASE),
}
# The libraries for other releases of torch, in the folder MOE_EXT_LIBRARIES, by release.
LIBRARIES = {
    file.parent.name.removeprefix("torch"): file
    for file in Path(os.environ.get("MOE_EXT_LIBRARIES", os.devnull)).glob("torch*/libmoe_ext.so")
    if file.parent.name != f"torch{RELEASE}"
}

if int(setuptools.__version__.split(".")[0]) < 77:
    sys.exit(f"moe_ext: the build needs setuptools 77 or later, got {setuptools.__version__}")
if tuple(map(int, RELEASE.split("."))) < (2, 11):
    sys.exit(f"moe_ext: the build needs torch 2.11 or later, got {torch.__version__}")


@functools.cache
def ask_nvcc(option: str) -> str:
    """Runs the nvcc of CUDA_HOME with an option and returns its output."""
    return subprocess.check_output([f"{CUDA_HOME}/bin/nvcc", option], text=True)


def toolkit_version() -> str:
    """Returns the version of the CUDA toolkit, such as "13.0"."""
    return ask_nvcc("--version").split("release ")[1].split(",")[0]


def architectures() -> str:
    """Returns TORCH_CUDA_ARCH_LIST if it is set, else that of the GPU, else CUDA_ARCHITECTURES.

    With MOE_EXT_CUDA=1, a build without TORCH_CUDA_ARCH_LIST is for all supported architectures,
    with PTX of the last one for later ones, and PTX of the first for those between, such as 11.0.
    """
    if given := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return given
    if os.environ.get("MOE_EXT_CUDA") != "1" and torch.cuda.is_available():
        return "{}.{}".format(*torch.cuda.get_device_capability())
    has = ask_nvcc("--list-gpu-arch").split()
    known = [name for name in CUDA_ARCHITECTURES if f"compute_{name.replace('.', '')}" in has]
    return ";".join(name + "+PTX" * (name in (known[0], known[-1])) for name in known)


def wants_cuda(has_sources: bool) -> bool:
    """Returns whether to build for CUDA; a build that is asked for does not need a GPU."""
    choice = os.environ.get("MOE_EXT_CUDA", "auto")
    if choice not in ("auto", "0", "1"):
        sys.exit(f"moe_ext: MOE_EXT_CUDA must be auto, 0 or 1, got {choice}")
    if choice == "0":
        return False
    asked = choice == "1" or os.environ.get("TORCH_CUDA_ARCH_LIST")
    if not asked and not torch.cuda.is_available():
        missing = "no GPU was found (MOE_EXT_CUDA=1 builds the CUDA kernels without one)"
    elif not has_sources:
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


def use_compiler() -> None:
    """Makes CXX a single program, which torch expects: CXX may start with a launcher, as ccache."""
    words = shlex.split(os.environ.get("CXX", ""))
    if len(words) < 2:
        return
    program = ROOT / "build" / "cxx"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o755)
    os.environ["CXX"] = str(program)


def flags(compiler: str) -> list[str]:
    """Returns the flags of a compiler, "cxx" or "nvcc", which CMakeLists.txt reads too.

    -ffp-contract=off and -fmad=false: no compiler must add fused multiply-adds to the source.
    """
    return ["-std=c++20", *(ROOT / "csrc" / f"{compiler}_flags.txt").read_text().split()]


def version() -> str:
    """Returns the version of moe_ext, with MOE_EXT_LOCAL_VERSION, such as 0.1.0+cu13."""
    header = (HEADERS / "moe_ext" / "version.h").read_text()
    public = re.search(r'MOE_EXT_VERSION "(.*)"', header)[1]
    local = os.environ.get("MOE_EXT_LOCAL_VERSION")
    return f"{public}+{local}" if local else public


def together(sources: list[str]) -> list[str]:
    """Replaces the sources of each folder of TOGETHER by a file that includes them."""
    folders, alone = {}, []
    for source in sources:
        folder, _, _ = source.rpartition("/")
        (folders.setdefault(folder, []) if folder in TOGETHER else alone).append(source)
    for folder, files in folders.items():
        unit = Path("build", "together", f"{folder.replace('/', '_')}.cpp")
        text = "".join(f'#include "{(ROOT / file).resolve()}"\n' for file in files)
        if not unit.exists() or unit.read_text() != text:  # ninja looks at its time
            unit.parent.mkdir(parents=True, exist_ok=True)
            unit.write_text(text)
        alone.append(str(unit))
    return alone


def link_args(name: str, *rpath: str) -> list[str]:
    """Returns the arguments that link a library; rpath are folders, from its own."""
    paths = [f"-Wl,-rpath,$ORIGIN/{path}" for path in rpath]
    return [f"-Wl,-soname,{name}", *paths]


def extensions() -> list[setuptools.Extension]:
    """Returns the libraries, which have every source in csrc. The last one links the others."""
    cpp = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/**/*.cpp"))
    cuda = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/cuda/*.cu"))
    has_cuda = wants_cuda(bool(cuda))
    cxx = [*flags("cxx"), "-g0"]
    kernel_sources = [source for source in cpp if source.startswith("csrc/cpu/")]
    library_sources = [
        source
        for source in cpp
        if source not in kernel_sources and (has_cuda or not source.startswith("csrc/cuda_host/"))
    ]
    built = [
        setuptools.Extension(
            KERNELS,
            kernel_sources,
            include_dirs=include_paths(),  # of torch, the types of numbers
            language="c++",
            extra_compile_args={"cxx": cxx},
            extra_link_args=link_args("libmoe_ext_kernels.so"),
        )
    ]
    if has_cuda:
        os.environ["TORCH_CUDA_ARCH_LIST"] = architectures()
        nvcc = flags("nvcc")
        if os.environ.get("MOE_EXT_WERROR") == "1":
            nvcc += ["-Werror", "all-warnings"]
        kernels = CUDAExtension(
            KERNELS_CUDA,
            cuda,
            extra_compile_args={"cxx": [], "nvcc": nvcc},
            extra_link_args=link_args("libmoe_ext_kernels_cuda.so"),
        )
        kernels.libraries = ["cudart"]  # nothing of torch
        built.append(kernels)
    library = CppExtension(
        LIBRARY,
        library_sources,
        include_dirs=[str(HEADERS)],
        extra_compile_args={"cxx": [*cxx, "-DMOE_EXT_CUDA"] if has_cuda else cxx},
        extra_link_args=link_args("libmoe_ext.so", "..", "../../../torch/lib"),
    )
    library.libraries.remove("torch_python")
    return [*built, library]


def requirement() -> str:
    """Returns the releases of torch that have a library."""
    releases = sorted(tuple(map(int, release.split("."))) for release in (RELEASE, *LIBRARIES))
    (first_major, first), (major, last) = releases[0], releases[-1]
    return f"torch>={first_major}.{first},<{major}.{last + 1}"


def require_own_library() -> None:
    """Exits if another environment uses the library in this folder."""
    if not BUILT_BY.exists():
        return
    environment, folder = map(Path, BUILT_BY.read_text().splitlines())
    # No environment uses the library of a copied folder.
    if folder != ROOT.resolve() or not (environment / "bin").exists():
        return
    own = Path(sys.prefix).resolve()
    if environment != own:
        sys.exit(
            f"moe_ext: the environment {environment} uses the library in {BUILT_BY.parent}, which "
            f"a build for {own} would replace. Install without -e, or in a copy of this folder; or "
            f"remove {BUILT_BY.parent}"
        )


class BuildPython(build_py):
    """Copies the Python files."""

    def run(self) -> None:
        """Removes the files of earlier builds first: a wheel has all files of the folder."""
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib, "moe_ext"), ignore_errors=True)
        super().run()


class Build(BuildExtension):
    """Builds the libraries."""

    def finalize_options(self) -> None:
        """Keeps the objects in build/objects, and leaves to ninja what to compile again."""
        super().finalize_options()
        self.build_temp = str(ROOT / "build" / "objects")  # kept, so that later builds are short
        self.force = True  # ninja knows what has changed; setuptools does not compare headers

    def run(self) -> None:
        """Builds all. A build in place does not replace the library of another environment."""
        if self.inplace:
            require_own_library()
        super().run()
        for release, file in LIBRARIES.items():
            to = Path(self.build_lib, library_of(release))
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, to)

    def get_ext_filename(self, fullname: str) -> str:
        """Names a library without the suffix of Python modules, libmoe_ext.so with its torch."""
        # setuptools passes the full name of an extension or only its last part.
        package, _, name = fullname.rpartition(".")
        file = FILES[f"moe_ext.lib.{name}"]
        return file if package else str(Path(file).relative_to("moe_ext/lib"))

    def build_extension(self, extension: setuptools.Extension) -> None:
        """Builds a library. libmoe_ext.so links the kernels, which are built first."""
        if extension.name == LIBRARY:
            extension.sources = together(extension.sources)
            extension.extra_objects += self.get_outputs()[:-1]
        super().build_extension(extension)

    def copy_extensions_to_source(self) -> None:
        """Copies what was built into moe_ext/, for an editable install."""
        for built in self.get_outputs():
            file = Path(built).relative_to(self.build_lib)
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(built, file)
        BUILT_BY.write_text(f"{Path(sys.prefix).resolve()}\n{ROOT.resolve()}\n")

    def get_outputs(self) -> list[str]:
        """Returns the files that are built."""
        return [str(Path(self.build_lib, FILES[library.name])) for library in self.extensions]

    def get_output_mapping(self) -> dict[str, str]:
        """Returns the path in moe_ext/ of each file that is built; empty without inplace."""
        if not self.inplace:
            return {}
        return {file: str(Path(file).relative_to(self.build_lib)) for file in self.get_outputs()}


class Wheel(bdist_wheel):
    """Writes the wheel."""

    def get_tag(self) -> tuple[str, str, str]:
        """Returns a tag of every Python: the library is not a module."""
        return "py3", "none", super().get_tag()[2]


use_compiler()
setup(
    version=version(),
    install_requires=[requirement()],
    ext_modules=extensions(),
    cmdclass={"build_ext": Build, "build_py": BuildPython, "bdist_wheel": Wheel},
)
