"""Kills ranks of a training run at random moments and checks that the run continues correctly.

    moe-lab study restarts --kills 50

Trains a small model on two or more ranks, once without interruption and once with kills. SIGKILL
ends a random rank at a random moment, and torchrun restarts the run. The run writes a checkpoint
every second step, so some kills happen during a write. The losses that both runs log must be
bitwise identical. The script takes about 15 seconds per kill. Status 0: the losses are identical.
Status 1: the losses differ, or the run with kills did not finish.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from moe_lab.cli import at_least, make_parser
from moe_lab.progress import progress
from moe_lab.training.logging import read_metrics

SMALL_MODEL = [
    "data.vocab_size=200", "data.tokens_per_batch=200", "model.d_model=16", "num_threads=1",
    "model.moe.num_experts=6", "model.moe.k=2", "model.moe.hidden_sizes=[16]", "timeout=60",
    "log.save_every=2", "log.eval_every=0", "log.eval_sentences=20", "log.log_every=1",
    "log.tensorboard=false", "log.progress=false",
]  # fmt: skip


@contextmanager
def running(
    output: Path, processes: int, steps: int, restarts: int
) -> Iterator[subprocess.Popen[str]]:
    """Runs moe-lab train under torchrun, at most until the end of the body.

    The file OUTPUT.log next to `output` gets its stderr.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", f"--max-restarts={restarts}"]
    command += ["--monitor-interval=0.1", "-m", "moe_lab", "train"]
    command += ["small/moe-32", f"output={output}"]
    with (output.parent / f"{output.name}.log").open("w") as log:
        process = subprocess.Popen(
            [*command, f"steps={steps}", *SMALL_MODEL],
            stdout=subprocess.DEVNULL,
            stderr=log,
            text=True,
        )
        try:
            yield process
        finally:
            process.terminate()  # has no effect on a process that has ended
            process.wait()


def workers(launcher: int) -> list[int]:
    """Lists the process ids of the ranks that the torchrun process `launcher` started."""
    found = []
    with suppress(FileNotFoundError, ProcessLookupError):  # a process may end at any moment
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        for pid in children:
            if b"moe_lab" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found


def _last_step(run: Path) -> int:
    records = read_metrics(run, "train")
    return records[-1]["step"] if records else 0


def losses(run: Path) -> list[tuple[int, float, float]]:
    """Reads step, nats per token and auxiliary loss of each logged step."""
    return [(r["step"], r["nll"], r["aux_loss"]) for r in read_metrics(run, "train")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the study and returns the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--kills", type=at_least(1), default=50, help="number of kills (%(default)s)"
    )
    parser.add_argument(
        "--processes", type=at_least(2), default=2, help="number of ranks (%(default)s)"
    )
    parser.add_argument(
        "--steps-between",
        type=at_least(1),
        default=6,
        help="maximum number of steps from one kill to the next (%(default)s)",
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the kills (%(default)s)")
    options = parser.parse_args(arguments)
    draw = random.Random(options.seed)
    steps = options.kills * options.steps_between + 10

    with TemporaryDirectory() as folder:
        killed, undisturbed = Path(folder) / "killed", Path(folder) / "undisturbed"
        done = 0
        with running(killed, options.processes, steps, 10 * options.kills) as run:
            for _ in progress(range(options.kills), "kills", "kills", options.kills):
                # The step is later than that of the last kill, so the run makes progress.
                target = _last_step(killed) + draw.randint(1, options.steps_between)
                while _last_step(killed) < min(target, steps - 1) and run.poll() is None:
                    time.sleep(0.02)
                time.sleep(draw.uniform(0, 0.2))
                if run.poll() is not None:
                    break
                if pids := workers(run.pid):
                    with suppress(ProcessLookupError):
                        os.kill(draw.choice(pids), signal.SIGKILL)
                        done += 1
            status = run.wait()
        with running(undisturbed, options.processes, steps, 0) as run:
            other = run.wait()
        same = losses(killed) == losses(undisturbed)
        report = {"kills": done, "steps": _last_step(killed), "of": steps, "same_losses": same}
        print(json.dumps(report | {"status": status, "status_undisturbed": other}))
        if not same or status or other:
            print((Path(folder) / "killed.log").read_text()[-3000:], file=sys.stderr)
    return 0 if same and status == 0 and done == options.kills else 1
