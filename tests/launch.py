"""Runs scripts as `python` and `torchrun` do, in processes that have imported the layer already.

The import takes most of the processor time of a short script.
"""

import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from workers import forkserver


class Done(NamedTuple):
    """The exit status of a script, and what it printed; of several ranks together."""

    status: int
    stdout: str
    stderr: str


def run_code(code, **environment):
    """Runs Python code in a process of its own. Sets variables of its environment; None unsets."""
    lines = ["import os"]
    for name, value in environment.items():
        lines.append(f"os.environ[{name!r}] = {value or ''!r}")
        lines += [f"del os.environ[{name!r}]"] * (value is None)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "code.py")
        script.write_text("\n".join([*lines, code]))
        return launch(script)


def launch(script, arguments=(), *, folder=".", seconds=300, ranks=None, max_restarts=0):
    """Runs a script in a folder; with `ranks`, under the agent of torchrun, which restarts them."""
    with tempfile.TemporaryDirectory() as outputs:
        call = str(Path(folder).resolve()), outputs, str(script), [*map(str, arguments)]
        target, options = (_run, ()) if ranks is None else (_launch, (ranks, max_restarts))
        process = forkserver().Process(target=target, args=(*options, *call))
        process.start()
        process.join(seconds)
        status = process.exitcode
        if status is None:
            process.terminate()  # the agent ends its ranks
            process.join()
            status = 124  # as of the command timeout
        printed = (Path(outputs, name) for name in ("stdout", "stderr"))
        return Done(status, *(path.read_text() if path.exists() else "" for path in printed))


def _redirect(folder, outputs):
    os.chdir(folder)
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{outputs}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)


def _run(folder, outputs, script, arguments):
    _redirect(folder, outputs)
    torch.set_num_threads(1)  # as torchrun does
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def _launch(ranks, max_restarts, folder, outputs, script, arguments):
    _redirect(folder, outputs)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        max_restarts=max_restarts,
        run_id=Path(outputs).name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        start_method="fork",
    )
    elastic_launch(config, _run)(folder, outputs, script, arguments)
