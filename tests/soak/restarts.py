"""Kills ranks of a training run at random moments and checks that the run continues correctly.

    python tests/soak/restarts.py --kills 50

Trains a small model on two or more ranks, once without interruption and once with kills. SIGKILL
ends a random rank at a random moment, and torchrun restarts the run. The run writes a checkpoint
every second step, so some kills happen during a write. The losses of both runs must be bitwise
identical. Status 0: the losses are identical. Status 1: the losses differ, or the run with kills
did not finish.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from moe_ext.distributed import Checkpoints

PROGRAM = Path(__file__).with_name("soak_training.py")


@contextmanager
def running(folder, processes, steps, restarts):
    """Runs the training under torchrun, at most until the end of the body.

    The file FOLDER.log gets its stderr.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", f"--max-restarts={restarts}"]
    command += ["--monitor-interval=0.1", str(PROGRAM), str(folder), f"--steps={steps}"]
    with folder.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        try:
            yield process
        finally:
            process.terminate()  # has no effect on a process that has ended
            process.wait()


def ranks_of(launcher):
    """Lists the process ids of the ranks that the torchrun process `launcher` started."""
    ranks = []
    with suppress(FileNotFoundError, ProcessLookupError):  # a process may end at any moment
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        for pid in children:
            if PROGRAM.name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                ranks.append(int(pid))
    return ranks


def last_step(folder):
    """Returns the step of the newest checkpoint; 0 if there is none."""
    return max(Checkpoints(folder).steps(), default=0)


def losses(folder):
    """Returns the losses of all steps up to the newest checkpoint."""
    return Checkpoints(folder).load().state


def main(arguments=None):
    """Kills ranks, prints what happened, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50, help="number of kills (%(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="number of ranks (%(default)s)")
    help = "maximum number of steps from one kill to the next (%(default)s)"
    parser.add_argument("--steps-between", type=int, default=6, help=help)
    parser.add_argument("--seed", type=int, default=1, help="seed of the kills (%(default)s)")
    options = parser.parse_args(arguments)
    draw = random.Random(options.seed)
    steps = options.kills * options.steps_between + 10

    with TemporaryDirectory() as root:
        killed, undisturbed = Path(root, "killed"), Path(root, "undisturbed")
        done = 0
        with running(killed, options.processes, steps, 10 * options.kills) as run:
            while done < options.kills:
                # The step is later than that of the last kill, so the run makes progress.
                target = last_step(killed) + draw.randint(1, options.steps_between)
                while last_step(killed) < min(target, steps - 1) and run.poll() is None:
                    time.sleep(0.02)
                time.sleep(draw.uniform(0, 0.1))
                if run.poll() is not None:
                    break
                if pids := ranks_of(run.pid):
                    with suppress(ProcessLookupError):
                        os.kill(draw.choice(pids), signal.SIGKILL)
                        done += 1
                        print(f"kill {done} of {options.kills}", file=sys.stderr)
            status = run.wait()
        with running(undisturbed, options.processes, steps, 0) as run:
            status_undisturbed = run.wait()
        same = status == status_undisturbed == 0 and losses(killed) == losses(undisturbed)
        report = {"kills": done, "steps": last_step(killed), "of": steps, "same_losses": same}
        print(json.dumps(report | {"status": status, "status_undisturbed": status_undisturbed}))
        if not same:
            print(killed.with_suffix(".log").read_text()[-3000:], file=sys.stderr)
    return 0 if same and done == options.kills else 1


if __name__ == "__main__":
    sys.exit(main())
