"""Several runs train at the same time, each in a separate process."""

import inspect
import io
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import pytest
from moe_lab.commands import compare
from moe_lab.experiments import at_once
from moe_lab.experiments import study as study_module
from moe_lab.experiments.arms import Arm
from moe_lab.experiments.at_once import run_at_once
from moe_lab.experiments.comparison import Comparison
from moe_lab.experiments.study import concurrent_runs
from moe_lab.training import logging
from moe_lab.training.checkpoint import checkpoints_of
from moe_lab.training.config import Config
from moe_lab.training.logging import LineBars, read_metrics
from tiny import CONFIG, ROOT, comparison

pytestmark = pytest.mark.usefixtures("one_thread")


def test_concurrent_runs_equal_sequential_runs(corpus, tmp_path, monkeypatch):
    alone = comparison(corpus, tmp_path / "alone", seeds=[1]).main()
    monkeypatch.setattr(study_module, "train_and_test", None)  # no run trains in this process
    together = comparison(corpus, tmp_path / "together", seeds=[1], at_once=2).main()
    assert [(run["arm"], run["test_nll"]) for run in together.runs] == [
        (run["arm"], run["test_nll"]) for run in alone.runs
    ]
    monkeypatch.setattr(at_once, "run_at_once", None)  # finished runs start no process
    comparison(corpus, tmp_path / "together", seeds=[1], at_once=2).main()


def test_a_failed_call_stops_the_others_and_reports_its_error(monkeypatch):
    """The processes run `answer` without the import of torch."""
    source = inspect.getsource(at_once.answer)
    program = f"import os, pickle, signal, sys, traceback\n{source}\nanswer()"
    monkeypatch.setattr(at_once, "_ANSWER", program)
    with pytest.raises(ValueError, match="invalid literal") as error:
        run_at_once([partial(int, "x"), partial(time.sleep, 600)])
    assert "in answer" in error.value.__notes__[0]
    run_at_once([partial(int, "1")])


@pytest.mark.parametrize(
    ("program", "error", "message"),
    [
        ("import os; os._exit(3)", RuntimeError, r"process \d+ ended with status 3"),
        (  # the error overfills a pipe
            "import pickle, sys; pickle.dump(ValueError('x' * 200_000), sys.stdout.buffer)",
            ValueError,
            "xxx$",
        ),
    ],
)
def test_a_failed_process_reports_its_error(monkeypatch, program, error, message):
    monkeypatch.setattr(at_once, "_ANSWER", program)
    with pytest.raises(error, match=message):
        run_at_once([print])


@pytest.mark.long
def test_signals_save_both_models_and_the_quickstart_continues(corpus, tmp_path):
    output = tmp_path / "q"
    command = [
        sys.executable, "-m", "moe_lab", "quickstart", "--quick", "--output", output,
        f"data.corpus={corpus}", "log.tensorboard=false", "data.tokens_per_batch=100",
        "data.vocab_size=45",
    ]  # fmt: skip
    options = {
        "cwd": ROOT,
        "env": {**os.environ, "OMP_NUM_THREADS": "2"},
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    folders = [output / "moe-seed1", output / "dense-seed1"]

    def logged():
        return [len(read_metrics(folder)) for folder in folders]

    def end_with(send):
        before = logged()
        process = subprocess.Popen([*command, "steps=1000000"], **options, start_new_session=True)
        try:
            deadline = time.monotonic() + 120
            while not all(now > then for now, then in zip(logged(), before, strict=True)):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            send(process.pid)
            out, error = process.communicate(timeout=120)
        finally:
            process.kill()
        assert process.returncode == 130 and "Traceback" not in error
        assert "both at the same time, threads of each: 1" in out
        assert error.endswith("interrupted\n")
        return [checkpoints_of(folder).steps()[-1] for folder in folders]

    first = end_with(lambda pid: os.killpg(pid, signal.SIGINT))  # like Ctrl-C on a terminal
    second = end_with(lambda pid: os.kill(pid, signal.SIGTERM))
    assert all(now > then for now, then in zip(second, first, strict=True))
    steps = max(second) + 10
    done = subprocess.run([*command, f"steps={steps}"], **options, check=True)
    assert f"moe-seed1: step {steps}/{steps}, train" in done.stderr
    assert f"dense-seed1: step {steps}/{steps}, train" in done.stderr
    assert "(tokens/s while both models were trained at the same time)" in done.stdout
    assert all(checkpoints_of(folder).steps()[-1] == steps for folder in folders)


def test_threads_are_divided(threads):
    two = [Config(), Config()]
    threads(4)
    assert concurrent_runs(two, 2) == (2, ["num_threads=2"])
    assert concurrent_runs([replace(each, num_threads=2) for each in two], 2) == (2, [])
    assert concurrent_runs([replace(each, num_threads=3) for each in two], 2) == (1, [])
    assert concurrent_runs(two, 1) == (1, [])
    assert concurrent_runs([replace(each, device="cuda") for each in two], 2) == (1, [])
    threads(1)
    assert concurrent_runs(two, 2) == (1, [])


def test_compare_trains_runs_at_once_on_request(corpus, tmp_path, threads, monkeypatch):
    asked = []

    def main(study):
        config = study.config(Arm("dense"), study.options.overrides)
        asked.append((study.options.at_once, config.num_threads))

    monkeypatch.setattr(Comparison, "main", main)
    for options in ([], ["--at-once", "2"]):
        threads(2)
        compare.main([str(CONFIG), f"data.corpus={corpus}", f"--output={tmp_path}", *options])
    assert asked == [(1, 0), (2, 1)]


def test_a_terminal_shows_one_bar_for_each_run(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(logging.sys, "stderr", terminal)
    with LineBars() as bars:
        for step in (20, 40):
            for name in ("moe-seed1", "dense-seed1"):
                bars.show(f"{name}: step {step}/100, train nll 8.5, words/s 7,000")
        bars.show("moe-seed1: step 40/100, dev nll 8.1, ppl 90")
        bars.show("a warning")
        assert [(bar.n, bar.total) for bar in bars._bars.values()] == [(40, 100), (40, 100)]
    shown = terminal.getvalue()
    assert "moe-seed1:  40%" in shown and "dense-seed1:  40%" in shown
    assert "nll 8.5, words/s 7,000" in shown
    assert "moe-seed1: step 40/100, dev nll 8.1, ppl 90\n" in shown and "a warning\n" in shown
