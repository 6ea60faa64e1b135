"""Initializes the process group of ranks that torchrun, srun or mpirun starts."""

import os
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store
from torch.distributed.constants import default_pg_timeout

from moe_ext.checks import require

__all__ = ["init_process_group"]

_PREFIX = "moe_ext/prefix"


class _Variables(NamedTuple):
    """The variables in which a launcher gives each rank its place."""

    world_size: str
    rank: str
    local_rank: str


_TORCH = _Variables("WORLD_SIZE", "RANK", "LOCAL_RANK")
_LAUNCHERS = {
    "torchrun": _TORCH,
    # SLURM_NTASKS would also be there for the script of sbatch, which is a single process.
    "srun": _Variables("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    "mpirun of Open MPI": _Variables(
        "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"
    ),
    "mpirun of MPICH": _Variables("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
}


def init_process_group(
    backend: str | None = None, *, timeout: timedelta | None = None, **options: Any
) -> ProcessGroup | None:
    """Calls `torch.distributed.init_process_group`; also works after a restart by torchrun.

    After a restart, the store of torchrun still has the addresses of dead ranks. A new prefix hides
    them. It comes from rank 0, because the machines count their restarts differently.

    Ranks that srun or mpirun starts find rank 0 by MASTER_ADDR and MASTER_PORT, which must be set.
    They get the variables RANK, WORLD_SIZE and LOCAL_RANK, as from torchrun.

    With NCCL, the current device of torch becomes device_id, by default the GPU with the number
    LOCAL_RANK. Objects and checkpoints are then sent over gloo. This has not run on a GPU yet.

    Args:
        backend: see `torch.distributed.init_process_group`; None: "cpu:gloo,cuda:nccl" if there are
            GPUs, else gloo.
        timeout: see `torch.distributed.init_process_group`.
        options: the other keyword arguments of `torch.distributed.init_process_group`, except
            store, rank and world_size.

    Returns:
        The process group of all ranks, or None if this process was started alone.

    Raises:
        ValueError: a launcher started several ranks, but a variable is missing. Or there are fewer
            GPUs than ranks of a machine.
    """
    times: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    launched = dist.is_torchelastic_launched()
    if not launched:
        variables = _variables(os.environ)
        if not variables:
            return None
        os.environ.update(variables)
    if backend is None and torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"  # torch would take NCCL alone, and send objects over it
    if torch.cuda.is_available() and backend is not None and "nccl" in backend:
        device = _own_device(os.environ, torch.cuda.device_count())
        options = {"device_id": device} | options
        torch.cuda.set_device(options["device_id"])
    if not launched:
        dist.init_process_group(backend, **times, **options)
        return dist.group.WORLD
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


def _own_device(environ: Mapping[str, str], num_devices: int) -> torch.device:
    """Returns the GPU of this rank: the one with the number LOCAL_RANK, or the only visible one.

    Raises:
        ValueError: the rank has no GPU of its own.
    """
    local_rank = int(environ.get("LOCAL_RANK") or 0)
    name, rule = "init_process_group: LOCAL_RANK", f"be below the number of GPUs, {num_devices}"
    require(local_rank < num_devices or num_devices == 1, name, rule, local_rank)
    return torch.device("cuda", local_rank if num_devices > 1 else 0)


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of torch for a rank that no torchrun started; {} if it is alone.

    Raises:
        ValueError: there are several ranks, but a variable is missing.
    """
    for launcher, names in _LAUNCHERS.items():
        if int(environ.get(names.world_size) or 1) > 1:
            needed = {"MASTER_ADDR", "MASTER_PORT", names.rank}
            missing = ", ".join(sorted(needed - environ.keys()))
            rule = f"be set for the {environ[names.world_size]} ranks of {launcher}"
            require(not missing, f"init_process_group: {missing}", rule, None)
            pairs = zip(_TORCH, names, strict=True)
            return {name: environ[source] for name, source in pairs if source in environ}
    return {}


def _new_prefix(store: Store, rank: int, world_size: int, timeout: timedelta | None) -> str:
    """Returns a text that rank 0 chooses and gives to the other living ranks.

    The store may still have the prefix of a dead rank 0. So each rank writes a text of its own to
    the store, and uses a prefix only after rank 0 has confirmed this text under the prefix.
    """
    if rank == 0:
        prefix = f"moe_ext/{uuid4()}"
        store.set(_PREFIX, prefix)
        for peer in range(1, world_size):
            nonce = store.get(f"{prefix}/{peer}").decode()
            store.set(f"{prefix}/{nonce}", "")
        return prefix
    end = time.monotonic() + (timeout or default_pg_timeout).total_seconds()
    nonce = str(uuid4())
    while True:
        prefix = store.get(_PREFIX).decode()
        store.set(f"{prefix}/{rank}", nonce)
        try:
            store.wait([f"{prefix}/{nonce}"], timedelta(seconds=1))
        except dist.DistError:
            if time.monotonic() > end:
                raise
        else:
            return prefix
