"""Several runs train at the same time, each in a separate process."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from moe_lab.experiments import study as study_module
from moe_lab.experiments.study import concurrent_runs
from moe_lab.training.checkpoint import checkpoints_of
from moe_lab.training.config import Config
from moe_lab.training.logging import read_metrics
from tiny import ROOT, comparison

pytestmark = pytest.mark.usefixtures("one_thread")


def results_of(stored):
    """Returns the arm, the seed and the loss of each finished run, and the runs that diverged."""
    finished = {(run["arm"], run["seed"], run["test_nll"]) for run in stored.runs}
    return finished, {(run["arm"], run["seed"]) for run in stored.diverged}


@pytest.mark.long
def test_concurrent_runs_equal_sequential_runs(corpus, tmp_path, monkeypatch, capfd):
    """One model diverges, which gives the status. The other one is trained and stored."""
    options = {"seeds": [1, 2], "against": ["optimizer.learning_rate=1e30"]}
    alone = comparison(corpus, tmp_path / "alone", **options)
    with pytest.raises(FloatingPointError):
        alone.main()
    monkeypatch.setattr(study_module, "train_and_test", None)  # no run trains in this process
    together = comparison(corpus, tmp_path / "together", **options, at_once=2)
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        together.main()
    assert ended.value.code == 1
    error = capfd.readouterr().err
    assert "error: against with seed " in error
    assert all(f"against with seed {seed}: " in error for seed in (1, 2))
    finished, diverged = results_of(together.store.read())
    assert (finished, diverged) == results_of(alone.store.read())
    assert len(finished) == 2 and diverged == {("against", 1), ("against", 2)}
    monkeypatch.setattr(study_module, "_run_at_once", None)  # finished runs start no process
    together.run_missing(together.settings())


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
    assert concurrent_runs([replace(run, num_threads=2) for run in two], 2) == (2, [])
    assert concurrent_runs([replace(run, num_threads=3) for run in two], 2) == (1, [])
    assert concurrent_runs(two, 1) == (1, [])
    assert concurrent_runs([replace(run, device="cuda") for run in two], 2) == (1, [])
    threads(1)
    assert concurrent_runs(two, 2) == (1, [])
