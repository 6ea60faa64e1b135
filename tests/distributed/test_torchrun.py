"""Ranks that torchrun starts again connect again."""

import os
import socket
import subprocess
import sys
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


DIES_ONCE = """
import os, pathlib, sys, time, torch
from moe_ext.distributed import init_process_group

marker = pathlib.Path(sys.argv[1])
first = not marker.exists()
group = init_process_group("gloo")
torch.distributed.all_reduce(torch.ones(1))
if first:
    if sys.argv[2] == "dies":
        marker.touch()
        os._exit(1)
    time.sleep(60)  # ended by torchrun, which counts no restart of this machine
sys.stdout.write(f"{torch.distributed.get_rank()} of {group.size()}, all are here\\n")
"""


@pytest.mark.long
def test_restarted_on_two_machines(tmp_path):
    """torchrun counts a restart on the machine of the dead rank only."""
    program = tmp_path / "program.py"
    program.write_text(DIES_ONCE)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        endpoint = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=test"]
    command += ["--max-restarts=2", "--monitor-interval=0.1"]
    agents = [
        subprocess.Popen(
            [*command, program, tmp_path / "marker", what],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for what in ("lives", "dies")
    ]
    try:
        outputs = [agent.communicate(timeout=150) for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()  # it ends its worker too
            agent.wait(60)
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert sorted(output for output, _ in outputs) == [
        "0 of 2, all are here\n",
        "1 of 2, all are here\n",
    ]
