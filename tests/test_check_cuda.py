"""The script that checks the resources of CUDA kernels finds each fault in what ptxas prints."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.cpp_extension import CUDA_HOME

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "check_cuda.py"
spec = importlib.util.spec_from_file_location("check_cuda", SCRIPT)
check_cuda = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_cuda)

REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5firstPf' for 'sm_90'
ptxas info    : Function properties for _Z5firstPf
    8 bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers, {shared} bytes smem, 352 bytes cmem[0]
ptxas info    : Compile time = 3.5 ms
ptxas info    : Compiling entry function '_Z6secondPf' for 'sm_90'
ptxas info    : Function properties for helper
    0 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Function properties for _Z6secondPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers, 348 bytes cmem[0]
"""
PTX = """
.visible .entry _Z5firstPf(
	.param .u64 .ptr .align 1 _Z5firstPf_param_0
)
.maxntid 1024, 1, 1
.minnctapersm 1
{
"""


def report(stores=0, loads=0, registers=64, shared=1024):
    text = REPORT.format(stores=stores, loads=loads, registers=registers, shared=shared)
    return check_cuda.parse(text, PTX)


def faults_of(kernels):
    return [check_cuda.faults_of(kernel, 256) for kernel in kernels]


def test_the_report_of_ptxas():
    first, second = report(stores=8, loads=12)
    assert first == ("_Z5firstPf", 64, 1024, 20, 8, 1024)
    assert second == ("_Z6secondPf", 12, 0, 0, 0, None)
    with pytest.raises(ValueError, match="found no properties of _Z1f"):
        check_cuda.parse(
            "Compiling entry function '_Z1f' for 'sm_90'\nptxas info : Used 3 registers"
        )


def test_kernels_that_fit_have_no_fault():
    assert faults_of(report()) == [[], []]
    assert faults_of(report(shared=48 << 10)) == [[], []]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(loads=4), "spills 4 bytes"),
        (dict(shared=(48 << 10) + 4), "has 49,156 bytes of shared memory, at most 49,152"),
        (dict(registers=65), "has 73,728 registers in a block, at most 65,536"),
    ],
)
def test_faults(sizes, message):
    """A warp gets registers in units of 256: 65 for each thread become 72."""
    assert faults_of(report(**sizes)) == [[message], []]


def test_a_spill_with_a_reason_may_not_grow():
    first, _ = report(stores=8, loads=8)
    allowed = first._replace(name="_Z11topm_kernelIfEvPf")
    assert check_cuda.faults_of(allowed, 256) == []
    larger = allowed._replace(spilled_bytes=20)
    assert check_cuda.faults_of(larger, 256) == ["spills 20 bytes"]


def test_a_kernel_without_launch_bounds_has_the_default_threads():
    (_, second) = report()
    assert check_cuda.registers_of_block(second, check_cuda.default_threads()) == 256 * 16
    assert check_cuda.faults_of(second._replace(registers=255), 512) != []
    assert check_cuda.faults_of(second._replace(registers=255), 256) == []


NVCC = shutil.which(f"{CUDA_HOME}/bin/nvcc") if CUDA_HOME else None


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
def test_a_file_of_two_kernels(tmp_path):
    source = tmp_path / "two.cu"
    source.write_text(
        "__global__ void __launch_bounds__(128) bounded(float* x) {\n"
        "  __shared__ float values[300];\n"
        "  values[threadIdx.x] = x[threadIdx.x];\n"
        "  __syncthreads();\n"
        "  x[threadIdx.x] = values[127 - threadIdx.x];\n"
        "}\n"
        "__global__ void plain(float* x) { x[threadIdx.x] = 0; }\n"
    )
    kernels = check_cuda.compile_file(source, "9.0", NVCC, [])
    names = check_cuda.readable([kernel.name for kernel in kernels])
    named = dict(zip(names, kernels, strict=True))
    assert {*named} == {"bounded", "plain"}
    assert (named["bounded"].shared_bytes, named["bounded"].threads) == (1200, 128)
    assert (named["plain"].shared_bytes, named["plain"].threads) == (0, None)
    assert all(kernel.spilled_bytes == 0 for kernel in kernels)


def test_the_architectures_are_those_of_the_build_and_of_the_workflow():
    root = SCRIPT.parents[1]
    listed = f"{check_cuda.ARCHITECTURES}".replace("'", '"')
    assert f"CUDA_ARCHITECTURES = {listed}" in (root / "setup.py").read_text()
    assert f"architecture: {listed}" in (root / ".github/workflows/long.yml").read_text()


def test_an_unknown_file_is_refused():
    done = subprocess.run(
        [sys.executable, SCRIPT, "9.0", "nothing"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "found no CUDA toolkit" in done.stderr or "no CUDA file nothing" in done.stderr
