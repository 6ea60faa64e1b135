"""Set-up of device, threads and instruction set."""

import torch

from moe_ext.info import avoid_missing_amx, cuda_version
from moe_lab.errors import ConfigError
from moe_lab.training.config import RunConfig


def set_up_for(config: RunConfig) -> None:
    """Sets up device, threads and autocast for a run."""
    if config.autocast:
        avoid_missing_amx()
    set_up_torch(config.device, config.num_threads)


def set_up_torch(device: str, num_threads: int) -> None:
    """Sets torch's threads and checks the device.

    Call set_up_torch before the first tensor operation.
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
        raise ConfigError(f"device must be cpu, cuda or cuda:N, got {device!r}")
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
