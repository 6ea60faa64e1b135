"""Kills ranks of a training run at random moments and checks that the run continues correctly.

    python tests/soak/restarts.py --kills 50

Trains a small model on two or more ranks, once without interruption and once with kills. SIGKILL
ends a random rank at a random moment, and torchrun restarts the run. The run writes a checkpoint
every second step, so some kills happen during a write. The losses of both runs must be bitwise
identical. Status 0: the losses are identical. Status 1: the losses differ, or the run with kills
did not finish.

    python tests/soak/restarts.py --kind mesh --steps 150

With --kind, each kill ends torchrun, and the next run has another number of ranks, from 1 to 4. The
losses must be those of one rank without kills, up to rounding: a relative difference of at most
2e-15.
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

import soak_training
from soak_training import KINDS

from moe_ext.distributed import Checkpoints

PROGRAM = Path(soak_training.__file__)
TIMEOUT = 120  # seconds that a rank waits for the others, with --kind


@contextmanager
def running(folder, processes, steps, restarts, *options):
    """Runs the training under torchrun, at most until the end of the body.

    The file FOLDER.log gets its stderr. options: other arguments of the training.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", f"--max-restarts={restarts}"]
    command += ["--monitor-interval=0.1", str(PROGRAM), str(folder), f"--steps={steps}"]
    command += options
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


def kill_one(launcher, draw):
    """Kills a rank of a torchrun process; returns whether there was one."""
    with suppress(ProcessLookupError):
        if pids := ranks_of(launcher.pid):
            os.kill(draw.choice(pids), signal.SIGKILL)
            return True
    return False


def wait_for(folder, step, run):
    """Waits until the training has saved a step, or has ended."""
    while last_step(folder) < step and run.poll() is None:
        time.sleep(0.02)


def resize(options, draw, killed, alone):
    """Runs the training on changing numbers of ranks; returns a report, and if losses are equal."""
    arguments = f"--kind={options.kind}", f"--timeout={TIMEOUT}"
    kills, sizes = 0, [0]
    while last_step(killed) < options.steps:
        sizes.append(draw.choice([size for size in range(1, 5) if size != sizes[-1]]))
        with running(killed, sizes[-1], options.steps, 0, *arguments) as run:
            start = last_step(killed)
            wait_for(killed, start + draw.randint(1, options.steps_between), run)
            time.sleep(draw.uniform(0, 0.1))
            if last_step(killed) < options.steps:
                kills += kill_one(run, draw)
            run.wait(TIMEOUT + 60)  # raises an error if a rank hangs
        print(f"step {last_step(killed)}, {sizes[-1]} ranks", file=sys.stderr)
        if last_step(killed) == start:
            break
    with running(alone, 1, options.steps, 0, *arguments) as run:
        run.wait()
    disturbed, expected = losses(killed), losses(alone)
    difference = max(abs(a / b - 1) for a, b in zip(disturbed, expected, strict=False))
    report = {"kind": options.kind, "kills": kills, "sizes": sizes[1:], "steps": len(disturbed)}
    report |= {"of": options.steps, "largest_difference": difference}
    return report, len(disturbed) == len(expected) == options.steps and difference <= 2e-15


def restart(options, draw, killed, alone):
    """Kills ranks, which torchrun restarts; returns a report, and if losses are equal."""
    steps, done = options.kills * options.steps_between + 10, 0
    with running(killed, options.processes, steps, 10 * options.kills) as run:
        while done < options.kills:
            # The step is later than that of the last kill, so the run makes progress.
            target = last_step(killed) + draw.randint(1, options.steps_between)
            wait_for(killed, min(target, steps - 1), run)
            time.sleep(draw.uniform(0, 0.1))
            if run.poll() is not None:
                break
            if kill_one(run, draw):
                done += 1
                print(f"kill {done} of {options.kills}", file=sys.stderr)
        status = run.wait()
    with running(alone, options.processes, steps, 0) as run:
        status_undisturbed = run.wait()
    same = status == status_undisturbed == 0 and losses(killed) == losses(alone)
    report = {"kills": done, "steps": last_step(killed), "of": steps, "same_losses": same}
    report |= {"status": status, "status_undisturbed": status_undisturbed}
    return report, same and done == options.kills


def main(arguments=None):
    """Kills ranks, prints what happened, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50, help="number of kills (%(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="number of ranks (%(default)s)")
    help = "maximum number of steps from one kill to the next (%(default)s)"
    parser.add_argument("--steps-between", type=int, default=6, help=help)
    parser.add_argument("--seed", type=int, default=1, help="seed of the kills (%(default)s)")
    help = "change the number of ranks after each kill, with a model that is parallel in this way"
    parser.add_argument("--kind", choices=KINDS, help=help)
    help = "number of steps with --kind (%(default)s)"
    parser.add_argument("--steps", type=int, default=150, help=help)
    options = parser.parse_args(arguments)
    with TemporaryDirectory() as root:
        killed, alone = Path(root, "killed"), Path(root, "alone")
        disturb = resize if options.kind else restart
        report, good = disturb(options, random.Random(options.seed), killed, alone)
        print(json.dumps(report))
        if not good:
            print(killed.with_suffix(".log").read_text()[-3000:], file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
