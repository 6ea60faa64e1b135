"""One process of several, as torchrun starts them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from moe_ext.distributed import init_process_group
from moe_ext.lab.training.config import C


@contextmanager
def process_group_of_run(config: C) -> Iterator[tuple[C, ProcessGroup | None]]:
    """The process group that torchrun started, and the configuration for this process of it.

    The device "cuda" becomes the GPU of the process. After torchrun has restarted the processes
    they resume what they had begun. Without torchrun, the configuration as it is and None.
    """
    if not dist.is_torchelastic_launched():
        yield config, None
        return
    if config.device == "cuda":
        config = replace(config, device=f"cuda:{os.environ['LOCAL_RANK']}")
        torch.cuda.set_device(config.device)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        begun = (Path(config.output) / "config.toml").is_file()
        config = replace(config, resume=config.resume or begun)
    backend = "gloo" if config.device == "cpu" else "cpu:gloo,cuda:nccl"
    yield config, init_process_group(backend, timeout=timedelta(seconds=config.timeout))
    dist.destroy_process_group()  # after an error the others might not come along
