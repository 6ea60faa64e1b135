"""Initializes the process group of ranks that torchrun starts and restarts."""

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

__all__ = ["init_process_group"]


def init_process_group(
    backend: str | None = None, *, timeout: timedelta | None = None, **options: Any
) -> ProcessGroup | None:
    """Calls `torch.distributed.init_process_group`; also works after a restart by torchrun.

    After a restart, the store of torchrun still has the addresses of dead ranks. A store prefix for
    each restart hides them.

    Args:
        backend, timeout: see `torch.distributed.init_process_group`.
        options: the other keyword arguments of `torch.distributed.init_process_group`, except
            store, rank and world_size.

    Returns:
        The process group of all ranks, or None if torchrun did not start this process.
    """
    if not dist.is_torchelastic_launched():
        return None
    times: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    store, rank, world_size = next(dist.rendezvous("env://", **times))
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"restart-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store),
        rank=rank,
        world_size=world_size,
        **times,
        **options,
    )
    return dist.group.WORLD
