"""Training in this process and on several ranks, and comparisons of runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from assertions import assert_same_bits
from moe_lab.training.checkpoint import checkpoints_of
from moe_lab.training.config import config_from_dict, read_config
from moe_lab.training.logging import read_metrics
from moe_lab.training.loop import make_trainer

QUIET = {"tensorboard": False, "progress": False}  # options of the log


def merged(table, **changes):
    """Makes the configuration with changes such as log={"save_every": 1}; tables are merged."""
    table = json.loads(json.dumps(table))
    for key, value in changes.items():
        if isinstance(value, dict):
            table[key] = {**table.get(key, {}), **value}
        else:
            table[key] = value
    return config_from_dict(table)


def train(config, text=None):
    trainer = make_trainer(config, text)
    trainer.run()
    return trainer


def train_on_rank(group, rank, config):
    return make_trainer(config, process_group=group).run()


def assert_same_state(a, b):
    assert a.keys() == b.keys()
    for key in a:
        if isinstance(a[key], list):
            assert_same_state(dict(enumerate(a[key])), dict(enumerate(b[key])))
        elif isinstance(a[key], dict):
            assert_same_state(a[key], b[key])
        elif isinstance(a[key], torch.Tensor):
            assert_same_bits(a[key], b[key])
        else:
            assert a[key] == b[key], key


def state_of(run):
    """Returns the whole state of the newest checkpoint."""
    config = replace(read_config(run / "config.toml"), output=str(run), resume=True)
    trainer = make_trainer(config)
    loaded = checkpoints_of(run).load()
    loaded.state.pop("config")
    return {
        "loaded": loaded._asdict(),
        "model": trainer.model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
    }


def assert_same_run(a, b):
    """Compares all state and logs bitwise, except for the throughput."""
    assert_same_state(*map(state_of, (a, b)))
    for kind in ("train", "dev"):
        lines = []
        for run in (a, b):
            records = read_metrics(run, kind)
            for record in records:
                record.pop("words_per_second", None)
            lines.append(records)
        assert lines[0] == lines[1]


def curve(config):
    """Returns every loss and perplexity of a run."""
    return [
        (record["kind"], record["step"], record["tokens"], record["nll"])
        for record in read_metrics(Path(config.output))
    ]


def assert_same_curve(actual, expected):
    """Compares curves in float32; the rounding differs with the world size."""
    assert [record[:3] for record in actual] == [record[:3] for record in expected]
    for a, b in zip(actual, expected, strict=True):
        assert a[3] == pytest.approx(b[3], rel=2e-5)
