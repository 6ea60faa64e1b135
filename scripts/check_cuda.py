#!/usr/bin/env python3
"""Compiles the CUDA files for a GPU architecture and checks the resources of each kernel.

    python scripts/check_cuda.py 9.0
    python scripts/check_cuda.py 12.0 experts gating    # some of the files

Prints the largest figures of each file. Needs torch and a CUDA toolkit, but no GPU. A file takes 10
to 25 s on one core. The exit status is 1 if a kernel

- spills registers to memory, unless SPILLS allows it,
- has more than 48 KiB of static shared memory; the emulation of the tests compares static and
  dynamic memory with the limit of the device,
- has more than 65,536 registers in a block, which then cannot start. A block has the threads of the
  launch bounds, or kThreads of launch.cuh.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURES = ["8.0", "9.0", "10.0", "12.0"]  # of setup.py
MOST_STATIC = 48 << 10  # bytes of shared memory of a block
MOST_REGISTERS = 1 << 16  # of a block
REGISTER_UNIT = 256  # A warp gets a multiple of it.
WARP = 32
# The kernels that may spill, with their bytes.
SPILLS = {
    "topm_kernel": 16,  # 1,024 threads leave 64 registers for each.
    "DeviceRadixSortOnesweepKernel": 44,  # Of CUB, for 10.0.
}


class Kernel(NamedTuple):
    """What ptxas says of an entry function."""

    name: str  # Mangled.
    registers: int  # Of a thread.
    shared_bytes: int  # Static, of a block.
    spilled_bytes: int  # Stores and loads.
    stack_bytes: int  # Local memory of a thread, such as an array with a variable index.
    threads: int | None = None  # Launch bounds.


def parse(report: str, ptx: str = "") -> list[Kernel]:
    """Returns the entry functions in the report of ``ptxas -v``, with the launch bounds of ptx."""
    bounds = {
        name: int(threads)
        for name, threads in re.findall(
            r"\.entry (\w+)\([^)]*\)\s*\.(?:max|req)ntid (\d+)(?:, 1, 1)?\s", ptx
        )
    }
    kernels = []
    for part in re.split(r"Compiling entry function '", report)[1:]:
        name = part[: part.index("'")]
        # A device function that was not inlined has properties of its own before "Used".
        properties = re.search(
            rf"Function properties for {re.escape(name)}\s+(\d+) bytes stack frame, "
            r"(\d+) bytes spill stores, (\d+) bytes spill loads",
            part,
        )
        used = re.search(r"Used (\d+) registers([^\n]*)", part)
        if not properties or not used:
            raise ValueError(f"found no properties of {name} in the report of ptxas:\n{part}")
        stack, stores, loads = map(int, properties.groups())
        shared = re.search(r"(\d+) bytes smem", used[2])
        kernels.append(
            Kernel(
                name, int(used[1]), int(shared[1]) if shared else 0, stores + loads, stack,
                bounds.get(name),
            )
        )  # fmt: skip
    return kernels


def registers_of_block(kernel: Kernel, default_threads: int) -> int:
    """Returns the registers that a block takes."""
    warp_registers = -(-kernel.registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
    return -(-(kernel.threads or default_threads) // WARP) * warp_registers


def faults_of(kernel: Kernel, default_threads: int) -> list[str]:
    """Returns what is wrong with a kernel, as sentences without the subject."""
    faults = []
    allowed = max((size for name, size in SPILLS.items() if name in kernel.name), default=0)
    if kernel.spilled_bytes > allowed:
        faults.append(f"spills {kernel.spilled_bytes} bytes")
    if kernel.shared_bytes > MOST_STATIC:
        faults.append(
            f"has {kernel.shared_bytes:,} bytes of shared memory, at most {MOST_STATIC:,}"
        )
    if (registers := registers_of_block(kernel, default_threads)) > MOST_REGISTERS:
        faults.append(f"has {registers:,} registers in a block, at most {MOST_REGISTERS:,}")
    return faults


def default_threads() -> int:
    """Returns the threads of a block without launch bounds."""
    (header,) = (ROOT / "csrc").rglob("launch.cuh")
    return int(re.search(r"constexpr int kThreads = (\d+);", header.read_text())[1])


def compile_file(source: Path, architecture: str, nvcc: str, include: list[str]) -> list[Kernel]:
    """Compiles a file to machine code; returns its kernels."""
    flags = ["-std=c++20", *(ROOT / "csrc" / "nvcc_flags.txt").read_text().split()]
    number = architecture.replace(".", "")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(nvcc, "-cubin", f"-arch=sm_{number}", *flags, "-Xptxas", "-v"),
            *("-keep", f"-keep-dir={folder}", "-o", f"{folder}/out.cubin"),
            *(f"-isystem={path}" for path in include),
            f"-I{ROOT / 'moe_ext' / 'include'}",
            str(source),
        ]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        if done.returncode:
            sys.exit(f"{source.name}, {architecture}: nvcc failed\n{done.stderr}")
        ptx = "".join(file.read_text() for file in Path(folder).glob("*.ptx"))
    return parse(done.stderr, ptx)


def readable(names: list[str]) -> list[str]:
    """Returns the names of kernels without namespaces and parameters, with template arguments."""
    text = subprocess.check_output(["c++filt"], input="\n".join(names), text=True)
    short = []
    for line in text.splitlines():
        name = re.sub(r"\(anonymous namespace\)::|\b\w+::", "", line).removeprefix("void ")
        short.append(re.sub(r"\(.*", "", name))
    return short


def main() -> int:
    """Prints a row for each file, then the faults; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("architecture", choices=ARCHITECTURES)
    parser.add_argument("stems", nargs="*", help="files of csrc/cuda (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="files at the same time (default: 1)")
    args = parser.parse_args()

    from torch.utils.cpp_extension import CUDA_HOME, include_paths

    if CUDA_HOME is None:
        parser.error("found no CUDA toolkit: set CUDA_HOME")
    sources = sorted((ROOT / "csrc").rglob("*.cu"))
    if unknown := sorted({*args.stems} - {source.stem for source in sources}):
        parser.error(f"csrc has no CUDA file {', '.join(unknown)}")
    sources = [source for source in sources if not args.stems or source.stem in args.stems]
    nvcc, include, threads = f"{CUDA_HOME}/bin/nvcc", include_paths("cuda"), default_threads()

    def kernels_of(source: Path) -> list[Kernel]:
        return compile_file(source, args.architecture, nvcc, include)

    wrong = []
    count = 0
    print("| file | kernels | registers | static shared bytes | stack bytes | spilled bytes |")
    print("|---|---|---|---|---|---|")
    with ThreadPoolExecutor(args.jobs) as pool:
        for source, kernels in zip(sources, pool.map(kernels_of, sources), strict=True):
            count += len(kernels)
            most = [
                f"{max((getattr(kernel, field) for kernel in kernels), default=0):,}"
                for field in ("registers", "shared_bytes", "stack_bytes", "spilled_bytes")
            ]
            row = [source.name, str(len(kernels)), *most]
            print(f"| {' | '.join(row)} |", flush=True)
            for kernel, name in zip(kernels, readable([k.name for k in kernels]), strict=True):
                for fault in faults_of(kernel, threads):
                    wrong.append(f"{source.name}: {name} {fault}")
    print(f"\n{args.architecture}: {count} kernels, {len(wrong)} faults")
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
