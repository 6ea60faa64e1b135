"""The processor that the tests run on."""

import itertools
import pathlib
import platform
import re


def cpu_info(name):
    """Returns a line of the system's description of the processor; "" if there is none."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    match = re.search(rf"^{name}\s*:(.*)$", text, re.M)
    return match[1].strip() if match else ""


def instruction_sets():
    """Returns the values of MOE_EXT_ISA that this processor supports, from lowest to highest."""
    if platform.machine() in ("aarch64", "arm64"):
        bf16 = "bf16" in cpu_info("Features").split()
        return ["default", "neon", *["neon_bf16"] * bf16]
    flags = set(cpu_info("flags").split())
    needed = {
        "default": set(),
        "avx2": {"avx2", "fma"},
        "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
        "avx512_bf16": {"avx512_bf16"},
        "amx": {"amx_tile", "amx_bf16"},
    }
    return list(itertools.takewhile(lambda isa: needed[isa] <= flags, needed))
