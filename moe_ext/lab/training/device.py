"""What a run computes with: device, threads, instruction set."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from moe_ext.info import cuda_version
from moe_ext.lab.training.config import ConfigError, RunConfig


def set_up_for(config: RunConfig) -> None:
    """`set_up_torch` as a run asks for, and its autocast."""
    if config.autocast:
        avoid_missing_amx()
    set_up_torch(config.device, config.num_threads)


def set_up_torch(device: str, num_threads: int) -> None:
    """To be called before the first tensor operation.

    Args:
        device: "cpu", "cuda" or "cuda:N".
        num_threads: of torch; 0 leaves its default.

    Raises:
        ConfigError: the operators do not run on the device, or torch cannot use it.
    """
    if num_threads:
        torch.set_num_threads(num_threads)
    check_device(device)


def check_device(device: str) -> None:
    """Raises ConfigError unless the operators are built for the device and torch can use it."""
    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = ""
    if kind == "cpu":
        return
    if kind != "cuda":
        raise ConfigError(f"device must be cpu or cuda, got {device!r}")
    if cuda_version() is None:
        raise ConfigError(
            f"device must be cpu where moe_ext is built without CUDA, got {device!r}; "
            "install it with a CUDA build of torch and its toolkit"
        )
    if not torch.cuda.is_available():
        raise ConfigError(f"device must be cpu where torch finds no GPU, got {device!r}")
    index = torch.device(device).index or 0
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"device must be one of the {torch.cuda.device_count()} GPUs here, got {device!r}"
        )


def avoid_missing_amx() -> None:
    """Keep oneDNN from AMX where it would crash, unless ONEDNN_MAX_CPU_ISA is set.

    Some virtual machines advertise amx_bf16 without its tile palettes, and a bfloat16 product then
    ends in SIGILL: so one is tried in a process of its own there. oneDNN reads the variable once,
    when the process first asks it for anything: loading torch is not yet that, the first matrix
    product, in float32 too, is.
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
