"""Several runs train at the same time, each in a separate process."""

import io
import operator
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import pytest
from moe_lab.commands import compare
from moe_lab.experiments import study as study_module
from moe_lab.experiments.at_once import run_at_once
from moe_lab.experiments.study import has_diverged, run_study, runs_at_once
from moe_lab.training import logging
from moe_lab.training.checkpoint import checkpoints_of
from moe_lab.training.config import Config, config_from_dict
from moe_lab.training.logging import LineBars, read_metrics
from moe_lab.training.text import load_text
from test_scripts import CONFIG, ROOT

from moe_ext.checks import require


@pytest.fixture
def config(corpus, threads):
    threads(1)
    moe = {"num_experts": 4, "k": 2, "hidden_sizes": [16]}
    log = {
        "log_every": 1,
        "eval_every": 0,
        "save_every": 0,
        "progress": False,
        "tensorboard": False,
    }
    return config_from_dict(
        {
            "steps": 4,
            "num_threads": 1,
            "data": {"corpus": str(corpus), "tokens_per_batch": 100},
            "model": {"d_model": 16, "moe": moe},
            "log": log,
        }
    )


def test_concurrent_runs_equal_sequential_runs(config, tmp_path, monkeypatch):
    text = load_text(config.data)
    arms = {"a": config, "b": replace(config, model=replace(config.model, dropout=0.2))}
    alone = run_study(arms, [1], text, tmp_path / "alone")
    train = study_module.train_and_test

    def train_no_more(config, *arguments):
        assert study_module.finished(config, text), "a separate process must have trained the run"
        return train(config, *arguments)

    monkeypatch.setattr(study_module, "train_and_test", train_no_more)
    together = run_study(arms, [1], text, tmp_path / "together", at_once=2)
    for arm, runs in alone.items():
        assert together[arm][1].test_nll == runs[1].test_nll
    monkeypatch.setattr(study_module, "run_at_once", None)  # finished runs start no process
    run_study(arms, [1], text, tmp_path / "together", at_once=2)


def test_a_run_that_diverges_stops_and_saves_the_others(config, tmp_path):
    long = replace(config, steps=10**6)
    wrong = replace(long, optimizer=replace(config.optimizer, learning_rate=1e30))
    with pytest.raises(FloatingPointError, match=r"wrong-seed1: .* not finite; lower"):
        run_study({"long": long, "wrong": wrong}, [1], load_text(long.data), tmp_path, at_once=2)
    assert has_diverged(replace(wrong, output=str(tmp_path / "wrong-seed1")))
    if read_metrics(tmp_path / "long-seed1"):  # the run had begun to train
        assert checkpoints_of(tmp_path / "long-seed1").steps()


def test_a_failed_process_reports_its_error():
    with pytest.raises(ValueError, match="invalid literal") as error:
        run_at_once([partial(int, "x"), partial(time.sleep, 600)])
    assert "in answer" in error.value.__notes__[0]
    with pytest.raises(ValueError, match="x must be short"):  # the message overfills a pipe
        run_at_once([partial(require, False, "x" * 200_000, "be short", 0)])
    with pytest.raises(RuntimeError, match=r"process \d+ ended with status 3"):
        run_at_once([partial(os._exit, 3)])
    run_at_once([partial(operator.add, 1, 2)])


@pytest.mark.long
def test_signals_save_both_models_and_the_quickstart_continues(corpus, tmp_path):
    output = tmp_path / "q"
    command = [
        sys.executable, "-m", "moe_lab", "quickstart", "--quick", "--output", output,
        f"data.corpus={corpus}", "log.tensorboard=false", "data.tokens_per_batch=100",
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
    assert "(words/s while both models were trained at the same time)" in done.stdout
    assert all(checkpoints_of(folder).steps()[-1] == steps for folder in folders)


def test_threads_are_divided(threads):
    arms = {"a": Config(), "b": Config()}
    threads(4)
    divided, number = runs_at_once(arms, 2)
    assert number == 2 and [each.num_threads for each in divided.values()] == [2, 2]
    given = {name: replace(each, num_threads=3) for name, each in arms.items()}
    assert runs_at_once(given, 2) == (given, 1)
    assert runs_at_once(arms, 1) == (arms, 1)
    gpu = {name: replace(each, device="cuda") for name, each in arms.items()}
    assert runs_at_once(gpu, 2) == (gpu, 1)
    threads(1)
    assert runs_at_once(arms, 2) == (arms, 1)


def test_compare_trains_runs_at_once_on_request(corpus, tmp_path, threads, monkeypatch):
    asked = []

    def run_study(arms, seeds, text, runs, at_once):
        asked.append((at_once, *(each.num_threads for each in arms.values())))
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "run_study", run_study)
    for options in ([], ["--at-once", "2"]):
        threads(2)
        with pytest.raises(KeyboardInterrupt):
            compare.main([str(CONFIG), f"data.corpus={corpus}", f"--output={tmp_path}", *options])
    assert asked == [(1, 0, 0), (2, 1, 1)]


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
