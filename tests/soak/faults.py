"""Disturbs a training run on two nodes and checks that it continues correctly or ends clearly.

    sudo python tests/soak/faults.py --faults 200

Two ranks train a small model. Each is in its own network and mount namespace, and a link connects
them. Random faults happen at random moments, in sequence:

    kill            SIGKILL ends a rank
    loss            the link drops 1% of the packets and delays all by 50 ms
    partition       the link drops all packets for 10 s
    cut             the link drops all packets until the run has ended
    slow            a rank has a tenth of its processor time for 5 s
    full            the disk has no space left
    read_only       the disk of a rank becomes read-only
    eio             fsync returns EIO on a rank
    bit             the run is killed, and a bit of its newest checkpoint is flipped
    clock           the clock of a rank jumps by an hour

After a fault, either the run continues, or all ranks end within the timeout and each rank that was
not killed prints one error. The script then starts the run again. The losses of all steps must be
bitwise identical with those of an undisturbed run. The script prints a table.
Status 0: no rank hung or ended without a message, and the losses are identical.

The script needs Linux, root, ip, unshare and nsenter. `eio` needs the Debian package fiu-utils, and
`clock` needs faketime.
"""

import argparse
import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from nodes import Link, Node
from restarts import PROGRAM, last_step, losses

_LIBRARIES = {  # that the ranks preload for a fault
    "clock": "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1",
    "eio": "/usr/lib/fiu/fiu_run_preload.so:/usr/lib/fiu/fiu_posix_preload.so",
}
# Seconds that a rank waits for the other rank; longer than a partition.
_TIMEOUT = 20
# Seconds that a rank may take to end, in addition.
_SLACK = 20
# Seconds that the ranks may take until the first step.
_START = 300


class Run:
    """A training run on two nodes.

    Args:
        folder: a folder for logs; a small file system is mounted at its subfolder ``disk``.
        names: the faults that will happen.
        draw: chooses ranks and bits.

    Attributes:
        ranks: the processes of the ranks.
        nodes: the node of each rank.
        link: the link between the nodes.
        output: the folder of the checkpoints.
        draw: see above.
    """

    def __init__(self, folder: Path, names: Sequence[str], draw: random.Random) -> None:
        self.draw = draw
        self.disk = folder / "disk"
        self.disk.mkdir()
        self.output = self.disk / "run"
        self._folder, self._names = folder, names
        self._port = 29500
        size = "size=16m"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(self.disk)], check=True)
        first, second = Node("10.77.0.1", "10.77.0.2"), Node("10.77.0.2", "10.77.0.1")
        self.nodes = [first, second]
        self.link = Link(first, second)
        self.ranks: list[subprocess.Popen[str]] = []

    def start(self, steps: int = 10**9) -> None:
        """Starts both ranks; they resume the run if it has begun."""
        self._port += 1  # the old port may still be in use
        arguments = [f"--steps={steps}", f"--timeout={_TIMEOUT}"]
        self.ranks = []
        for rank, node in enumerate(self.nodes):
            self.file("clock", rank).write_text("+0")
            environ = {
                "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": self.nodes[0].address, "MASTER_PORT": str(self._port),
                "GLOO_SOCKET_IFNAME": "wire", "TORCHELASTIC_RUN_ID": "faults",
                "TORCHELASTIC_RESTART_COUNT": "0",
            }  # fmt: skip
            command = [sys.executable, str(PROGRAM), str(self.output), *arguments]
            libraries = [path for name, path in _LIBRARIES.items() if name in self._names]
            environ |= {
                "LD_PRELOAD": ":".join(libraries), "FIU_CTRL_FIFO": str(self.file("fiu", rank)),
                "FAKETIME_TIMESTAMP_FILE": str(self.file("clock", rank)),
                "FAKETIME_CACHE_DURATION": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            }  # fmt: skip
            with self.file("log", rank).open("w") as log:
                process = subprocess.Popen(
                    # nsenter itself cannot have the threads of the preloaded libraries.
                    node.command("env", *(f"{k}={v}" for k, v in environ.items()), *command),
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    text=True,
                )
            self.ranks.append(process)

    def file(self, kind: str, rank: int) -> Path:
        """Returns a file of a rank: its errors ("log"), the offset of its "clock", or "fiu"."""
        return self._folder / f"{kind}-{rank}"

    def errors(self) -> str:
        """Returns the end of what the ranks printed."""
        return "".join(self.file("log", rank).read_text()[-3000:] for rank in range(2))

    def fail_fsync(self, rank: int) -> None:
        """Makes fsync of a rank return EIO from now on."""
        failure = f"enable name=posix/io/sync/fsync,failinfo={errno.EIO}"
        control, pid = str(self.file("fiu", rank)), str(self.ranks[rank].pid)
        subprocess.run(["fiu-ctrl", "-c", failure, "-f", control, pid], check=True)

    def step(self) -> int:
        """Returns the step of the newest checkpoint; 0 if there is none."""
        return last_step(self.output)

    def ended(self) -> bool:
        return all(process.poll() is not None for process in self.ranks)

    def wait(self, until: Callable[[], bool], seconds: float) -> bool:
        """Waits until a condition holds or all ranks have ended; False: the time is over."""
        last = time.monotonic() + seconds
        while not (until() or self.ended()):
            if time.monotonic() > last:
                return False
            time.sleep(0.02)
        return True

    def steps_more(self, number: int, seconds: float) -> bool:
        """Waits for a number of further steps or the end; False: the time is over."""
        target = self.step() + number
        return self.wait(lambda: self.step() >= target, seconds)

    def kill(self) -> None:
        for process in self.ranks:
            process.kill()
            process.wait()

    def close(self) -> None:
        self.kill()
        self.link.close()
        for node in self.nodes:
            node.close()
        subprocess.run(["umount", str(self.disk)], check=True)


# The faults. Each returns the ranks that it killed.


def _until_end(run: Run) -> None:
    run.wait(run.ended, _TIMEOUT + _SLACK)


def _kill(run: Run) -> set[int]:
    rank = run.draw.randrange(2)
    run.ranks[rank].kill()
    _until_end(run)
    return {rank}


def _loss(run: Run) -> set[int]:
    run.link.loss, run.link.delay = 0.01, 0.05
    run.steps_more(2, _TIMEOUT)
    run.link.loss = run.link.delay = 0
    return set()


def _partition(run: Run) -> set[int]:
    run.link.loss = 1
    time.sleep(10)
    run.link.loss = 0
    return set()


def _cut(run: Run) -> set[int]:
    run.link.loss = 1
    _until_end(run)
    run.link.loss = 0
    return set()


def _slow(run: Run) -> set[int]:
    process = run.draw.choice(run.ranks)
    for _ in range(50):
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.09)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.01)
    return set()


def _full(run: Run) -> set[int]:
    ballast = run.disk / "ballast"
    try:
        with ballast.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
    except OSError:
        _until_end(run)
    ballast.unlink()
    return set()


def _read_only(run: Run) -> set[int]:
    node, disk = run.draw.choice(run.nodes), str(run.disk)
    subprocess.run(node.command("mount", "--bind", disk, disk), check=True)
    read_only = node.command("mount", "-o", "remount,bind,ro", disk)
    # The mount is busy while a file is open for writing.
    run.wait(lambda: subprocess.run(read_only, stderr=subprocess.DEVNULL).returncode == 0, _SLACK)
    _until_end(run)
    subprocess.run(node.command("umount", disk), check=True)
    return set()


def _eio(run: Run) -> set[int]:
    run.fail_fsync(run.draw.randrange(2))
    _until_end(run)
    return set()


def _checkpoints(run: Run) -> list[Path]:
    """Returns the folders of the checkpoints from the oldest to the newest."""
    folders = run.output.glob("step-*")
    return sorted(folders, key=lambda path: int(path.name.removeprefix("step-").split(".")[0]))


def _bit(run: Run) -> set[int]:
    # The run continues from the checkpoint before the corrupted one.
    run.wait(lambda: len(_checkpoints(run)) > 1, _TIMEOUT)
    run.kill()
    newest = _checkpoints(run)[-1]
    files = [path for path in newest.rglob("*") if path.is_file() and path.stat().st_size]
    path = run.draw.choice(sorted(files))
    content = bytearray(path.read_bytes())
    content[run.draw.randrange(len(content))] ^= 1 << run.draw.randrange(8)
    path.write_bytes(content)
    return {0, 1}


def _clock(run: Run) -> set[int]:
    run.file("clock", run.draw.randrange(2)).write_text(run.draw.choice(["+3600", "-3600"]))
    time.sleep(2)
    return set()


_FAULTS: dict[str, Callable[[Run], set[int]]] = {
    "kill": _kill, "loss": _loss, "partition": _partition, "cut": _cut, "slow": _slow,
    "full": _full, "read_only": _read_only, "eio": _eio, "bit": _bit, "clock": _clock,
}  # fmt: skip


@dataclass
class Outcomes:
    """What happened after the faults of one kind."""

    continued: int = 0
    ended: int = 0
    hung: int = 0
    seconds: float = 0.0  # longest time until both ranks had ended
    messages: Counter[str] = field(default_factory=Counter)


def disturb(run: Run, name: str, outcomes: Outcomes) -> None:
    """Lets a fault happen and notes its outcome."""
    begin = time.monotonic()
    killed = _FAULTS[name](run)
    alive = run.steps_more(2, _TIMEOUT + _SLACK)
    if run.ended():
        outcomes.ended += 1
        outcomes.seconds = max(outcomes.seconds, time.monotonic() - begin)
        for rank in {0, 1} - killed:
            errors = re.findall(r"^error: .*", run.file("log", rank).read_text(), re.MULTILINE)
            outcomes.messages[_general(errors[-1]) if len(errors) == 1 else "no message"] += 1
    elif alive:
        outcomes.continued += 1
    else:
        outcomes.hung += 1
        run.kill()


def _general(message: str) -> str:
    """Returns a message without its numbers, addresses and folders."""
    return re.sub(r"\d+", "N", re.sub(r"/\S+/", "…/", message))


def main(arguments: Sequence[str] | None = None) -> int:
    """Disturbs a run, prints what happened, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=20, help="number (%(default)s)")
    parser.add_argument(
        "--kinds", nargs="+", choices=list(_FAULTS), default=list(_FAULTS), help="default: all"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the faults (%(default)s)")
    options = parser.parse_args(arguments)
    for tool in ("ip", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            parser.error(f"needs the program {tool}")
    for name, paths in _LIBRARIES.items():
        if name in options.kinds and not all(map(os.path.isfile, paths.split(":"))):
            parser.error(f"--kinds {name} needs {paths}")
    draw = random.Random(options.seed)
    kinds = {name: Outcomes() for name in options.kinds}

    with TemporaryDirectory() as folder:
        run = Run(Path(folder), options.kinds, draw)
        try:
            for number in range(options.faults):
                if not run.ranks or run.ended():
                    run.start()
                    if not run.steps_more(3, _START) or run.ended():
                        raise RuntimeError(f"the run does not start:\n{run.errors()}")
                time.sleep(draw.uniform(0, 0.5))
                disturb(run, (name := draw.choice(options.kinds)), kinds[name])
                print(f"fault {number + 1} of {options.faults}: {name}", file=sys.stderr)
            if run.ended():
                run.start()
                run.steps_more(3, _START)
            for process in run.ranks:
                process.send_signal(signal.SIGTERM)  # saves a checkpoint
            run.wait(run.ended, _TIMEOUT + _SLACK)
            logs = run.errors()
            disturbed = losses(run.output)
            run.kill()
            shutil.move(run.output, Path(folder) / "disturbed")
            run.start(steps := len(disturbed))
            run.wait(run.ended, 3600)
            same = disturbed == losses(run.output)
        finally:
            run.close()
    print("| fault | number | continued | ended | hung | longest time to the end, s |")
    print("|---|---|---|---|---|---|")
    for name, o in kinds.items():
        numbers = [o.continued + o.ended + o.hung, o.continued, o.ended, o.hung, f"{o.seconds:.1f}"]
        print(f"| {name} | {' | '.join(map(str, numbers))} |")
    for name, outcome in kinds.items():
        for message, number in outcome.messages.most_common():
            print(f"- {name}, {number} times: {message}")
    hung = sum(o.hung for o in kinds.values())
    report = {"faults": options.faults, "hung": hung, "steps": steps, "same_losses": same}
    print(json.dumps(report))
    silent = sum(outcome.messages["no message"] for outcome in kinds.values())
    good = same and not hung and not silent
    if not good:
        print(logs, file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
