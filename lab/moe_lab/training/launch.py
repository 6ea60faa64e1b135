"""The process group of a training run that torchrun has started."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from moe_lab.training.config import C

# Gloo's errors when the connection to another rank is lost.
_LOST = re.compile(
    r"gloo|Connection (closed|reset) by peer|Timed out waiting|timeout caused pair closure",
    re.IGNORECASE,
)


def is_lost(error: str) -> bool:
    """Returns whether an error of gloo means that another rank ended or does not answer."""
    return _LOST.search(error) is not None


@contextmanager
def process_group_of_run(config: C) -> Iterator[tuple[C, ProcessGroup | None]]:
    """Creates torchrun's process group and adapts the configuration to this rank.

    The device "cuda" becomes the GPU of this rank. If torchrun has restarted the ranks, the ranks
    resume the run. Without torchrun, the function yields the unchanged configuration and None.

    Raises:
        ConnectionError: another rank ended, or did not answer within config.timeout.
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
    from moe_ext.distributed import init_process_group  # imports FSDP, which takes a second

    backend = "gloo" if config.device == "cpu" else "cpu:gloo,cuda:nccl"
    group = init_process_group(backend, timeout=timedelta(seconds=config.timeout))
    try:
        yield config, group
    except RuntimeError as error:
        if not is_lost(str(error)):
            raise
        raise ConnectionError(
            f"another rank ended or did not answer within timeout={config.timeout:g} seconds; see "
            "the errors of the other ranks, and resume the run with resume=true"
        ) from error
    dist.destroy_process_group()  # may hang after an exception if other ranks still run
