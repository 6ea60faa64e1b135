"""Calls functions at the same time, each in its own process.

Each process has its own process group, so that Ctrl-C on the terminal reaches only the parent. The
parent forwards Ctrl-C once, as SIGTERM; a training run then saves a checkpoint and ends. A process
reads a pickled call on stdin, writes its pickled exception to stdout, and its progress to stderr.
"""

import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, Queue
from threading import Thread

from moe_lab.training.logging import LineBars
from moe_lab.training.loop import stop_signal

Call = Callable[[], object]
_ANSWER = f"from {__name__} import answer; answer()"
_POLL = 0.2  # seconds between two looks at the signal


class _Process:
    """Runs a call in a new process.

    Puts each line of the process's stderr into ``events``, then this object. ``error`` is then the
    exception of the call, or None.
    """

    def __init__(self, call: Call, events: "Queue[str | _Process]") -> None:
        self.error: BaseException | None = None
        pickled = pickle.dumps(call)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ANSWER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            # Threads that spin while they wait are ten times slower when a core is shared.
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
        )
        self._thread = Thread(target=self._follow, args=(pickled, events), daemon=True)
        self._thread.start()

    def _follow(self, call: bytes, events: "Queue[str | _Process]") -> None:
        with self._process as process:
            assert process.stdin and process.stdout and process.stderr
            with suppress(BrokenPipeError), process.stdin:  # stderr says why the process ended
                process.stdin.write(call)
            # A full pipe would stop the process, so both are read at the same time.
            with ThreadPoolExecutor(1) as reader:
                reading = reader.submit(process.stdout.read)
                for line in process.stderr:
                    events.put(line.decode("utf-8", "replace").rstrip())
                reply = reading.result()
            status = process.wait()
            try:
                self.error = pickle.loads(reply)
            except Exception:
                self.error = RuntimeError(
                    f"process {process.pid} ended with status {status} and without a result; "
                    "see its output on stderr"
                )
        events.put(self)

    def stop(self) -> None:
        """Asks the process to save a checkpoint and end."""
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()
        self._thread.join()


def run_at_once(calls: Sequence[Call]) -> None:
    """Calls functions at the same time, each in its own process, and shows their progress.

    SIGINT, SIGTERM and a failing call stop the other calls: training runs save a checkpoint and
    end. A second signal kills the processes.

    Args:
        calls: functions of a module, or `functools.partial` of them. The results of the functions
            are dropped.

    Raises:
        KeyboardInterrupt: SIGINT or SIGTERM stopped the calls.
        Exception: the exception of the call that failed first.
    """
    events: Queue[str | _Process] = Queue()
    running: list[_Process] = []
    stopping, error = False, None
    with stop_signal() as signalled, LineBars() as bars:
        try:
            for call in calls:
                running.append(_Process(call, events))
            while running:
                if not stopping and (error is not None or signalled()):
                    stopping = True
                    for process in running:
                        process.stop()
                try:
                    event = events.get(timeout=_POLL)
                except Empty:
                    continue
                if isinstance(event, str):
                    bars.show(event)
                    continue
                running.remove(event)
                if not stopping and error is None and event.error is not None:
                    error = event.error
                    if running:
                        bars.show("a run failed: the other runs save a checkpoint and stop")
        finally:
            for process in running:
                process.kill()
        if signalled():
            raise KeyboardInterrupt
    if error is not None:
        raise error


def answer() -> None:
    """Runs the pickled call on stdin; writes its pickled exception, or None, to stdout."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # outside of training runs
    with os.fdopen(os.dup(1), "wb") as stdout:
        os.dup2(2, 1)  # stdout must contain only the pickled exception
        error = None
        try:
            pickle.load(sys.stdin.buffer)()
        except (Exception, KeyboardInterrupt) as raised:
            raised.add_note(traceback.format_exc())
            error = raised
        pickle.dump(error, stdout)
