"""Initializes the process group of ranks that torchrun starts and restarts."""

import os
import time
import warnings
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch.distributed import ProcessGroup, Store, TCPStore
from torch.distributed.constants import default_pg_timeout

__all__ = ["init_process_group"]

_PORT = "moe_ext/port"


def init_process_group(
    backend: str | None = None, *, timeout: timedelta | None = None, **options: Any
) -> ProcessGroup | None:
    """Calls `torch.distributed.init_process_group`; also works after a restart by torchrun.

    After a restart, the store of torchrun still has the addresses of dead ranks. A new prefix hides
    them. It comes from rank 0, because the machines count their restarts differently.

    Args:
        backend, timeout: see `torch.distributed.init_process_group`.
        options: the other keyword arguments of `torch.distributed.init_process_group`, except
            store, rank and world_size.

    Returns:
        The process group of all ranks, or None if torchrun did not start this process.

    Warns:
        UserWarning: torchrun did not start this process, but WORLD_SIZE is greater than 1.
    """
    if not dist.is_torchelastic_launched():
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            warnings.warn(
                "init_process_group: this process trains alone, because torchrun did not start it; "
                f"its environment has WORLD_SIZE={os.environ['WORLD_SIZE']}",
                stacklevel=2,
            )
        return None
    times: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    store, rank, world_size = next(dist.rendezvous("env://", **times))
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(_new_prefix(store, rank, world_size, timeout), store),
        rank=rank,
        world_size=world_size,
        **times,
        **options,
    )
    return dist.group.WORLD


def _new_prefix(store: Store, rank: int, world_size: int, timeout: timedelta | None) -> str:
    """Returns a text that rank 0 chooses and gives to the other living ranks.

    Rank 0 writes the port of a server of its own to the store. Nobody answers at the port of a dead
    rank 0, which another rank may still find there.
    """
    limit = timeout or default_pg_timeout
    host = os.environ["MASTER_ADDR"]  # the machine of rank 0
    if rank == 0:
        server = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        prefix = f"moe_ext/{uuid4()}"
        server.set("prefix", prefix)
        store.set(_PORT, str(server.port))
        if world_size > 1:
            server.wait(["all are here"], limit)
        return prefix
    end = time.monotonic() + limit.total_seconds()
    while True:
        try:
            port = int(store.get(_PORT))
            brief = min(limit, timedelta(seconds=2))
            server = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=brief)
            prefix = server.get("prefix").decode()
            if server.add("others", 1) == world_size - 1:
                server.set("all are here", "")
            return prefix
        except dist.DistError:
            if time.monotonic() > end:
                raise
