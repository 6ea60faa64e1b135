"""Ranks connect: those that torchrun starts again, and those of srun and mpirun."""

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from workers import on_ranks

from moe_ext.distributed import torchrun


def connected_twice(group, rank, port):
    """Connects two ranks to the store of torchrun, twice, as after a restart of backends.

    torchrun counts a restart on the machine of the dead rank only. Rank 1 is first at each step: it
    finds the texts and the addresses of the dead rank 0 in the store. The ranks reach no other port
    of its machine, as behind a service that forwards one port.
    """
    new_prefix = torchrun._new_prefix

    def late(*arguments):
        time.sleep(0.5 * (rank == 0))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MASTER_ADDR", "host.invalid")
            prefix = new_prefix(*arguments)
        time.sleep(0.5 * (rank == 0))
        return prefix

    environ = {
        "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchrun, "_new_prefix", late)
        for name, value in environ.items():
            patch.setenv(name, value)
        for restarts in (0, 1):
            dist.destroy_process_group()
            patch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts * rank))
            gloo = torchrun.init_process_group("gloo", timeout=timedelta(seconds=20))
            assert gloo.rank() == rank
            dist.all_reduce(total := torch.ones(1))
            assert total == 2


def test_ranks_connect_again(workers):
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    workers.run(2, connected_twice, store.port)


ADDRESS = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
SRUN = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
MPICH = {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALRANKID": "1"}
TORCH = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}


@pytest.mark.parametrize("environ", [SRUN, OPEN_MPI, MPICH, TORCH, SRUN | MPICH])
def test_variables_of_other_launchers(environ):
    assert torchrun._variables(environ | ADDRESS) == TORCH
    *_, local_rank = environ
    some = {name: value for name, value in environ.items() if name != local_rank}
    assert torchrun._variables(some | ADDRESS).items() <= TORCH.items()
    missing = "init_process_group: MASTER_ADDR, MASTER_PORT must be set for the 4 ranks of "
    with pytest.raises(ValueError, match=f"^{re.escape(missing)}"):
        torchrun._variables(environ)


@pytest.mark.parametrize(
    "environ",
    [{}, {"WORLD_SIZE": "1"}, {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, {"PMI_SIZE": "1"}],
)
def test_a_process_that_was_started_alone(monkeypatch, environ):
    """Also by a script of sbatch."""
    for names in torchrun._LAUNCHERS.values():
        for name in names:
            monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert torchrun.init_process_group("gloo") is None


def test_a_number_of_ranks_without_the_rank():
    message = "^init_process_group: RANK must be set for the 2 ranks of torchrun, got None$"
    with pytest.raises(ValueError, match=message):
        torchrun._variables({"WORLD_SIZE": "2"} | ADDRESS)


@on_ranks(2)
def test_ranks_of_srun_connect(group, rank):
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    ports = [None, None]
    dist.all_gather_object(ports, store and store.port)
    del store  # rank 0 opens its port again
    dist.barrier()  # no rank connects to the closed store
    dist.destroy_process_group()
    environ = {
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0",
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(ports[0]),
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.setenv(name, "")  # so that MonkeyPatch removes it at the end
            patch.delenv(name)
        for name, value in environ.items():
            patch.setenv(name, value)
        gloo = torchrun.init_process_group("gloo", timeout=timedelta(seconds=20))
        assert (gloo.rank(), gloo.size()) == (rank, 2)
        dist.all_reduce(total := torch.ones(1))
        assert total == 2


def test_each_rank_has_its_own_gpu(monkeypatch):
    """Checks the arguments only: there is no GPU."""
    calls, chosen = [], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(
        dist, "init_process_group", lambda *args, **options: calls.append((args, options))
    )
    for name, value in (TORCH | ADDRESS).items():
        monkeypatch.setenv(name, value)
    first_gpu = torch.device("cuda", 0)
    torchrun.init_process_group()
    torchrun.init_process_group("cpu:gloo,cuda:nccl", device_id=first_gpu)
    torchrun.init_process_group("gloo")
    backends = ("cpu:gloo,cuda:nccl",)  # gloo sends objects
    expected = [
        (backends, {"device_id": torch.device("cuda", 1)}),
        (backends, {"device_id": first_gpu}),
    ]
    assert calls == [*expected, (("gloo",), {})]
    assert chosen == [torch.device("cuda", 1), first_gpu]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="LOCAL_RANK must be below the number of GPUs, 2, got 2"):
        torchrun.init_process_group()
    assert torchrun._own_device({"LOCAL_RANK": "2"}, 1) == torch.device("cuda", 0)
