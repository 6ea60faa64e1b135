"""Training on several ranks equals training on one; killed ranks lose no step (Sec. 3.1)."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import moe_lab.training.loop
import pytest
import torch
import torch.distributed as dist
from moe_lab.training import launch
from moe_lab.training.config import Config, config_from_dict, read_config, to_toml
from moe_lab.training.logging import read_metrics
from moe_lab.training.loop import make_trainer
from moe_lab.training.metrics import evaluate
from trained import QUIET, assert_same_curve, curve, train, train_on_rank

import moe_ext.distributed

CONFIGS = sorted((Path(__file__).parents[2] / "configs/small").glob("*.toml"))


@pytest.fixture
def config(tmp_path):
    """A run without dropout and noise, so training is deterministic."""
    draw, text = random.Random(8), tmp_path / "text.txt"
    lines = (draw.choices(range(40), k=draw.randint(1, 8)) for _ in range(250))
    text.write_text("".join(" ".join(f"w{word}" for word in words) + "\n" for words in lines))
    moe = {"gate": "topk", "num_experts": 5, "k": 2, "hidden_sizes": [6], "w_load": 0.0}
    return config_from_dict(
        {
            "output": str(tmp_path / "run"),
            "steps": 6,
            "num_threads": 1,
            "timeout": 60.0,
            "data": {"corpus": str(text), "tokens_per_batch": 60},
            "model": {"d_model": 8, "dropout": 0.0, "moe": moe},
            "optimizer": {"learning_rate": 0.02, "warmup_steps": 5, "clip_norm": 0.5},
            "log": {"log_every": 1, "eval_every": 2, "save_every": 2} | QUIET,
        }
    )


def balance(config):
    """Returns the metrics of the MoE layers, step by step."""
    keys = ("cv_importance", "cv_load", "max_over_mean_load", "cv_tokens", "load")
    values = [r[key] for r in read_metrics(Path(config.output), "train") for key in keys]
    return torch.cat([torch.tensor(value).flatten() for value in values]).tolist()


LATER_ROUTER = {"score": "sigmoid", "bias_update_rate": 0.1, "shared_sizes": [4]}
LATER_ROUTER |= {"w_switch": 0.5, "w_switch_per_sequence": 0.5, "w_z": 0.5}


@pytest.mark.parametrize(
    ("options", "num_sampled", "accumulate", "world"),
    [
        ({}, 0, 1, 4),
        ({}, 9, 2, 2),
        ({"gate": "balanced"}, 0, 2, 4),
        ({"gate": "expert_choice"}, 0, 1, 2),
        (LATER_ROUTER, 0, 2, 2),
    ],
    ids=["topk", "sampled", "balanced", "expert_choice", "later"],
)
def test_the_curve_of_one_process(
    workers, config, tmp_path, options, num_sampled, accumulate, world
):
    config.model.moe = replace(config.model.moe, **options)
    config.model.num_sampled = num_sampled  # all ranks sample the same classes
    config.optimizer.accumulate = accumulate
    config.log.eval_every = config.log.save_every = config.steps
    train(config)
    run_config = replace(config, output=str(tmp_path / "ranks"))
    assert workers.run(world, train_on_rank, run_config) == [True] * world
    assert_same_curve(curve(run_config), curve(config))
    assert balance(run_config) == pytest.approx(balance(config), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("middle", ["moe", "moe_lstm", "ffn"])
def test_fewer_sentences_than_processes(workers, config, tmp_path, middle):
    """In most batches, some ranks have no row."""
    config.model.layers = ["lstm", middle, "lstm"]
    config.model.moe.w_importance = 5.0
    config.data.tokens_per_batch = 9
    config.log.eval_every = config.log.save_every = config.steps
    run_config = replace(config, output=str(tmp_path / "there"))
    train(config)
    workers.run(4, train_on_rank, run_config)
    assert_same_curve(curve(run_config), curve(config))
    if middle != "ffn":
        assert balance(run_config) == pytest.approx(balance(config), rel=1e-4, abs=1e-6)


def selection_bias(config):
    trainer = make_trainer(config)
    trainer.run()
    (bias,) = (b for n, b in trainer.model.named_buffers() if n.endswith("selection_bias"))
    return bias


def test_the_selection_bias_changes_once_in_each_step(config, tmp_path):
    config.model.moe = replace(config.model.moe, **LATER_ROUTER)
    config.optimizer.accumulate, config.steps = 3, 5
    bias = selection_bias(config)
    # Five steps of -0.1, 0 or 0.1 each.
    steps = bias / 0.1
    assert bias.any() and (steps - steps.round()).abs().max() < 1e-5 and steps.abs().max() < 5.01
    part = replace(config, output=str(tmp_path / "resumed"), steps=3)
    selection_bias(part)
    assert torch.equal(selection_bias(replace(part, steps=5, resume=True)), bias)


def start_of(group, rank, config):
    """Returns a rank's dense parameters and random numbers before its first step."""
    with pytest.MonkeyPatch.context() as patch:  # without broadcasting the parameters
        patch.setattr(moe_lab.training.loop, "parallelize", lambda model, group: model)
        trainer = make_trainer(config, process_group=group)
    dense = [p.detach() for name, p in trainer.model.named_parameters() if "experts" not in name]
    states = trainer.noise_generator.get_state(), torch.get_rng_state()
    noise = torch.empty(8).normal_(generator=trainer.noise_generator)
    return dense, [*states, noise, torch.rand(8)]


def test_every_process_draws_for_itself(workers, config):
    """Noise and dropout differ by rank; the initial weights do not."""
    config.model.moe.gate = "noisy_topk"
    config.model.dropout = 0.5
    config.log.save_every = 1
    starts = workers.run(3, start_of, config)
    workers.run(2, train_on_rank, replace(config, steps=1))
    # The checkpoint has two ranks: the third rank starts with new seeds.
    starts += workers.run(3, start_of, replace(config, resume=True))
    for dense, _ in starts[1:3]:
        assert all(torch.equal(a, b) for a, b in zip(dense, starts[0][0], strict=True))
    for kind in zip(*(draws for _, draws in starts), strict=True):
        assert len({tuple(draw.tolist()) for draw in kind}) == len(starts)


def test_resumed_by_another_number_of_processes(workers, config, tmp_path):
    train(config)
    run_config = replace(config, output=str(tmp_path / "ranks"))
    for number, world in enumerate((4, 1, 3)):
        part = replace(run_config, steps=2 * (number + 1), resume=number > 0)
        if world == 1:
            train(part)
        else:
            workers.run(world, train_on_rank, part)
    curves = ([r for r in curve(c) if r[0] == "train"] for c in (run_config, config))
    assert_same_curve(*curves)


def perplexities(group, rank, config):
    """Computes test perplexities in float64, for 1, 7 and 64 sentences per batch."""
    trainer = make_trainer(replace(config, resume=True), process_group=group)
    trainer.model.double()
    test = trainer.text.test
    options = {"title": None, "ranks": trainer.ranks}
    sizes = (n * test.num_tokens // len(test) if n > 1 else 1 for n in (1, 7, 64))
    measured = (evaluate(trainer.model, test, tokens_per_batch=n, **options) for n in sizes)
    return [evaluation.perplexity for evaluation in measured]


@pytest.mark.parametrize("gate", ["noisy_topk", "balanced"])
def test_perplexity_does_not_depend_on_batches_or_processes(workers, config, gate):
    config.model.moe.gate = gate
    train(config)
    expected = perplexities(None, 0, config)
    assert expected == pytest.approx(expected[:1] * 3, rel=1e-12)
    for perplexity in workers.run(3, perplexities, config):
        assert perplexity == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_trains(workers, config, tmp_path, path):
    places = [f"output={tmp_path / 'run'}", f"data.corpus={config.data.corpus}"]
    options = ["steps=1", "data.tokens_per_batch=60", "num_threads=1", "log.tensorboard=false"]
    options = read_config(path, [*places, *options, "log.progress=false"])
    assert workers.run(2, train_on_rank, options) == [True] * 2
    assert len(read_metrics(tmp_path / "run", "dev")) == 1


PROGRAM = r"""
import os, sys, time
from moe_lab.commands.train import main
from moe_lab.cli import exit_status
from moe_lab.training.loop import Trainer, make_trainer

step = Trainer.train_step

def step_of_rank(self, *arguments):
    line = f"step {{self.step}} {{self.ranks.rank}} {{os.getpid()}}\n"
    os.write(1, line.encode())  # in one piece
    time.sleep(0.05)
    if {fails!r} and self.step == 3 and self.ranks.rank == 1:
        raise RuntimeError("the cat sat on the keyboard")
    return step(self, *arguments)

Trainer.train_step = step_of_rank
sys.exit(exit_status(main))
"""


class Run:
    """A run under torchrun, read line by line."""

    def __init__(self, config, tmp_path, *options, fails=False, restarts=0):
        program, toml = tmp_path / "program.py", tmp_path / "config.toml"
        program.write_text(PROGRAM.format(fails=fails))
        toml.write_text(to_toml(config))
        torchrun = "torch.distributed.run --standalone --nproc-per-node=2 --monitor-interval=0.1"
        command = [sys.executable, "-m", *torchrun.split(), f"--max-restarts={restarts}"]
        self.process = subprocess.Popen(
            [*command, str(program), str(toml), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.output = ""

    def until(self, start):
        """Reads up to the next line with this start; returns the rest of its words."""
        for line in self.process.stdout:
            self.output += line
            if line.startswith(start):
                return line[len(start) :].split()
        raise AssertionError(f"no line {start!r} in:\n{self.output}")

    def end(self, seconds):
        """Waits for the end; returns the exit status and the seconds it took."""
        started = time.monotonic()
        try:
            self.output += self.process.communicate(timeout=seconds)[0]
        finally:
            self.process.kill()
        return self.process.returncode, time.monotonic() - started


@pytest.mark.long  # examples/two_ranks.py also kills and continues
def test_killed_processes_resume(config, tmp_path):
    config = replace(config, steps=8)
    train(config)
    run_config = replace(config, output=str(tmp_path / "killed"))
    run = Run(run_config, tmp_path, restarts=1)
    os.kill(int(run.until("step 5 1")[0]), signal.SIGKILL)
    status, _ = run.end(120)
    assert status == 0, run.output
    assert_same_curve(curve(run_config), curve(config))


def wait_alone(group, rank):
    """Lets rank 1 miss an all-reduce; returns the error of rank 0."""
    short = dist.new_group(timeout=timedelta(seconds=1))
    if rank:
        return None
    try:
        dist.all_reduce(torch.ones(1), group=short)
    except RuntimeError as error:
        return str(error)


def test_the_error_of_a_rank_that_waits_is_known(workers):
    error, _ = workers.run(2, wait_alone)
    assert launch.is_lost(error)


LOST = "another rank ended or did not answer within timeout=600 seconds; see the errors"


@pytest.mark.parametrize(
    ("message", "error", "expected"),
    [
        ("Application timeout caused pair closure", ConnectionError, LOST),
        ("[pair.cc:534] Connection closed by peer [10.77.0.2]:41190", ConnectionError, LOST),
        ("Timed out waiting 20000ms for recv operation to complete", ConnectionError, LOST),
        ("a bug", RuntimeError, "^a bug$"),
    ],
)
def test_a_lost_rank_is_one_clear_error(monkeypatch, message, error, expected):
    """This process looks like a rank of torchrun, without a process group."""
    monkeypatch.setattr(launch.dist, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr(moe_ext.distributed, "init_process_group", lambda backend, timeout: None)
    monkeypatch.setattr(launch.dist, "destroy_process_group", lambda: None)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with pytest.raises(error, match=expected), launch.process_group_of_run(Config()):
        raise RuntimeError(message)


@pytest.mark.long
def test_an_error_of_one_process_ends_all(config, tmp_path):
    run = Run(config, tmp_path, fails=True)
    run.until("step 3 1")
    status, seconds = run.end(60)
    assert status != 0
    assert "the cat sat on the keyboard" in run.output
    assert seconds < 30


@pytest.mark.long
def test_a_process_that_stops_ends_the_others(config, tmp_path):
    run = Run(replace(config, timeout=4.0), tmp_path)
    stopped = int(run.until("step 3 1")[0])
    os.kill(stopped, signal.SIGSTOP)
    started = time.monotonic()
    run.until("error: another rank ended or did not answer within timeout=4 seconds")
    assert time.monotonic() - started < 30
    os.kill(stopped, signal.SIGKILL)
    assert run.end(60)[0] != 0


@pytest.mark.long
def test_sigterm_saves(config, tmp_path):
    config = replace(config, steps=1000)
    config.data = replace(config.data, encoded=str(tmp_path / "ids"), num_workers=1)
    run = Run(config, tmp_path)
    os.kill(int(run.until("step 5 1")[0]), signal.SIGTERM)
    status, _ = run.end(60)
    assert status == 0, run.output
    assert "config.toml resume=true" in run.output
    last = json.loads((Path(config.output) / "metrics.jsonl").read_text().splitlines()[-1])
    resumed = Run(replace(config, steps=last["step"] + 1), tmp_path, "resume=true")
    status, _ = resumed.end(60)
    assert status == 0, resumed.output
    assert f"resume  from step {last['step']} of" in resumed.output
