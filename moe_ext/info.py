"""Prints the build configuration and runs a self-test.

``python -m moe_ext.info`` and ``moe-ext info`` do this.

``python -m moe_ext.info --verbose`` also prints the rules that select the kernels of a GEMM.

``python -m moe_ext.info --cmake-prefix`` prints the ``CMAKE_PREFIX_PATH`` of a C++ project that
calls ``find_package(moe_ext)``: the folders of moe_ext and of torch.
"""

import argparse
import itertools
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import torch

import moe_ext
from moe_ext import MoE, _build
from moe_ext._build import cache_limit, cached_bytes, cuda_version, isa

__all__ = [
    "avoid_missing_amx",
    "blas_name",
    "cache_limit",
    "cached_bytes",
    "cmake_prefix",
    "cpu_name",
    "cuda_version",
    "isa",
    "main",
    "products",
]


def cmake_prefix() -> str:
    """Returns the value of CMAKE_PREFIX_PATH for a C++ project: a list separated by semicolons."""
    return f"{Path(__file__).parent};{torch.utils.cmake_prefix_path}"


def cpu_name() -> str:
    """Returns the processor's name and its vector instruction sets that the CPU kernels can use.

    The names on virtual machines may be as short as "AMD EPYC", so the family and the model follow,
    or on 64-bit Arm the implementer and the part.
    """
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    lines = re.findall(r"^([\w ]+?)\s*:\s*(.*?)\s*$", text, re.M)
    facts = dict(reversed(lines))  # of the first processor
    flags = (facts.get("flags") or facts.get("Features", "")).split()
    vectors = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")  # asimd is NEON
    known = [flag for flag in vectors if flag in flags]
    numbers = ("cpu family", "model", "CPU implementer", "CPU part")
    identity = [f"{name.split()[-1]} {facts[name]}" for name in numbers if name in facts]
    name = " ".join([facts.get("model name", platform.machine()), *identity])
    return f"{name} ({', '.join(known) or 'no vector flags'})"


def blas_name() -> str:
    """Returns the BLAS library that torch was built with, such as "BLAS mkl"."""
    match = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    return f"BLAS {match[1] if match else 'unknown'}"


def products() -> str:
    """Returns the GEMM implementation for each dtype, such as "AVX-512 (float32), AMX (bfloat16)".

    The experts use these GEMMs on the CPU.
    """
    return ", ".join(f"{name} ({dtype})" for dtype, name in _build.products().items())


def _rules() -> list[str]:
    """Returns the rules that select the kernels of a GEMM, one a line, under a heading.

    Rules that GEMMs of this process can use are marked.
    """
    dtypes, layouts = ("float64", "float32", "bfloat16", "float16"), ("along_n", "along_k")
    rules = _build.gemm_rules()
    used = {
        _build.gemm_rule(isa(), dtype, rows, layout)
        for dtype, layout in itertools.product(dtypes, layouts)
        for rows in {rule.last_rows for rule in rules}
    }
    vendors = {"any": "any vendor", "amd": "AMD", "intel": "Intel"}
    layout_names = {"any": "any layout", "along_n": "[K, N]", "along_k": "[N, K]"}
    readings = {
        "packs": "packs B if that is faster",
        "axpyf": "reads the rows of B in place",
        "dotxf": "reads the columns of B in place",
    }
    lines = [
        "GEMM kernels for C = A B, from best to worst. The first rule that applies is used.",
        "* marks the rules of this process. A has the rows of an expert; B [K, N] is its weight or",
        "the transposed one. If N or K is not a multiple of 32, few rows may pack B too.",
    ]
    for index, rule in enumerate(rules):
        most = rule.last_rows
        fields = [
            "*" if index in used else " ",
            f"{', '.join(rule.types):36}",
            f"{rule.isa:11}",
            f"{vendors[rule.vendor]:10}",
            f"{'any rows' if most == _build.ANY_ROWS else f'1 to {most} rows':12}",
            f"{layout_names[rule.layout]:10}",
            f"{rule.kernels}, {readings[rule.reading]}",
        ]
        lines.append("  ".join(fields))
    return lines


def avoid_missing_amx() -> None:
    """Disables AMX in oneDNN if a bfloat16 GEMM crashes, unless ONEDNN_MAX_CPU_ISA is set.

    Some virtual machines advertise amx_bf16 without its tile palettes. A bfloat16 GEMM then ends in
    SIGILL, so a subprocess tries a bfloat16 GEMM. oneDNN reads ONEDNN_MAX_CPU_ISA only once, at the
    first GEMM of any dtype. The import of torch does not read ONEDNN_MAX_CPU_ISA.
    """
    try:
        cpu = Path("/proc/cpuinfo").read_text()
    except OSError:
        return
    advertised = re.search(r"\bamx_bf16\b", cpu) and re.search(r"\bhypervisor\b", cpu)
    if not advertised or "ONEDNN_MAX_CPU_ISA" in os.environ:
        return
    product = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
    if subprocess.run([sys.executable, "-c", product], stderr=subprocess.DEVNULL).returncode:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"


def _cuda_gemms() -> str:
    """Returns which GEMMs the experts use on CUDA."""
    setting = os.environ.get("MOE_EXT_GROUPED_MM", "unset")
    library = {"0": "", "quack": ", and QuACK's grouped GEMM"}.get(
        setting, ", and torch's grouped GEMM where it has a kernel"
    )
    return f"moe_ext{library} (MOE_EXT_GROUPED_MM={setting})"


def _operators() -> list[str]:
    """Returns the names of the registered operators."""
    names = (schema.name for schema in torch._C._jit_get_all_schemas())
    return sorted({name for name in names if name.startswith("moe_ext::")})


def _self_test(device: str) -> str:
    """Runs a `MoE` layer forward and backward on a device and checks Eq. 1."""
    torch.manual_seed(0)
    layer = MoE(8, 4, 2, experts=[torch.nn.Identity() for _ in range(4)]).to(device)
    x = torch.randn(16, 8, device=device, requires_grad=True)
    y, aux = layer(x)
    (y.sum() + aux.loss).backward()
    # With identity experts, y = x · (sum of the gates) = x.
    gradients = [parameter.grad for parameter in layer.parameters()]
    ok = torch.allclose(y, x) and all(bool(g is not None and g.isfinite().all()) for g in gradients)
    return "passed" if ok else "FAILED: wrong output, or a gradient is missing or not finite"


def main() -> int:
    """Runs the command and returns its exit status: 1 if a self-test failed."""
    parser = argparse.ArgumentParser(
        description="Prints the build configuration and runs a self-test."
    )
    parser.add_argument(
        "--cmake-prefix",
        action="store_true",
        help="print only the CMAKE_PREFIX_PATH of moe_ext and torch",
    )
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="print the rules that select the kernels of a GEMM, too",
    )
    options = parser.parse_args()
    if options.cmake_prefix:
        print(cmake_prefix())
        return 0

    cuda = torch.version.cuda or "none"
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "none"
    lines = {
        "moe_ext": moe_ext.__version__,
        "built with": f"torch {_build.torch_version()}, CUDA {cuda_version() or 'none'}, "
        f"compiler {_build.compiler()}",
        "running with": f"torch {torch.__version__}, {blas_name()}, CUDA {cuda}, "
        f"Python {platform.python_version()}",
        "processor": cpu_name(),
        "CPU kernels": f"{isa()} (MOE_EXT_ISA={os.environ.get('MOE_EXT_ISA', 'unset')})",
        "expert GEMMs": products(),
        "CUDA GEMMs": _cuda_gemms(),
        "cached memory": f"at most {cache_limit() / 2**30:.1f} GiB "
        f"(MOE_EXT_CACHE_BYTES={os.environ.get('MOE_EXT_CACHE_BYTES', 'unset')})",
        "threads": f"{torch.get_num_threads()} of {os.cpu_count()} processors",
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "NCCL": nccl,
        "operators": ", ".join(name.removeprefix("moe_ext::") for name in _operators()),
    }
    tests = {"self-test, cpu": _self_test("cpu")}
    if cuda_version() and torch.cuda.is_available():
        tests["self-test, cuda"] = _self_test("cuda")
    for name, value in {**lines, **tests}.items():
        print(f"{name:>16}: {value}")
    if options.verbose:
        print("", *_rules(), sep="\n")
    return 0 if set(tests.values()) == {"passed"} else 1


if __name__ == "__main__":
    from moe_ext_command import with_streams

    sys.argv[0] = "python -m moe_ext.info"  # the usage line begins with it
    sys.exit(with_streams(main))
