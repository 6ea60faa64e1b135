"""The ranks that torchrun starts, and starts again."""

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

__all__ = ["init_process_group"]


def init_process_group(
    backend: str | None = None, *, timeout: timedelta | None = None, **options: Any
) -> ProcessGroup | None:
    """`torch.distributed.init_process_group` that also works after torchrun has restarted.

    After a restart torchrun reuses its store, which still holds the addresses of dead ranks. A
    prefix for each restart hides them.

    Args:
        backend, timeout: as torch's.
        options: the others of torch's, by name, but for those that torchrun decides.

    Returns:
        The group of all ranks; None where torchrun did not start this one: it is alone.
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
