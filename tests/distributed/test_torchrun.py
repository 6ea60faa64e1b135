"""Ranks that torchrun starts again connect again."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from moe_ext.distributed import torchrun


def connected_twice(group, rank, port):
    """Connects two ranks to the store of torchrun, twice, as after a restart of both.

    torchrun counts a restart on the machine of the dead rank only. Rank 1 is first at each step: it
    finds the server and the addresses of the dead rank 0 in the store.
    """
    new_prefix = torchrun._new_prefix

    def late(*arguments):
        time.sleep(0.5 * (rank == 0))
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
            there = torchrun.init_process_group("gloo", timeout=timedelta(seconds=20))
            assert there.rank() == rank
            dist.all_reduce(total := torch.ones(1))
            assert total == 2


def test_ranks_connect_again(workers):
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    workers.run(2, connected_twice, store.port)
