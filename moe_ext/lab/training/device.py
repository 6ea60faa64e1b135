"""Set-up of device, threads and instruction set."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from moe_ext.info import cuda_version
from moe_ext.lab.training.config import ConfigError, RunConfig


def set_up_for(config: RunConfig) -> None:
    """Sets up device, threads and autocast for a run."""
    if config.autocast:
        avoid_missing_amx()
    set_up_torch(config.device, config.num_threads)


def set_up_torch(device: str, num_threads: int) -> None:
    """Sets torch's threads and checks the device. Call it before the first tensor operation.

    Args:
        device: "cpu", "cuda" or "cuda:N".
        num_threads: number of torch's threads; 0 keeps torch's default.

    Raises:
        ConfigError: the operators are not built for the device, or torch cannot use it.
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
            f"device must be cpu because moe_ext is built without CUDA, got {device!r}; install a "
            "CUDA build of torch and the CUDA toolkit, then build moe_ext again"
        )
    if not torch.cuda.is_available():
        raise ConfigError(f"device must be cpu because torch finds no GPU, got {device!r}")
    index = torch.device(device).index or 0
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"device must be one of the {torch.cuda.device_count()} available GPUs, got {device!r}"
        )


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
