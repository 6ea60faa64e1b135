"""The study of the number of experts at equal operations."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from moe_lab.analysis.costs import cost
from moe_lab.errors import ConfigError
from moe_lab.experiments.arms import Arm, parse_arm
from moe_lab.experiments.runs import ArmRuns, Runs
from moe_lab.studies import capacity as study
from moe_lab.studies.entries import run as run_study
from moe_lab.training.model import make_model
from tiny import rebuilds

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = {"ops_per_timestep": 1_000_000, "parameters": 2_000_000, "total_parameters": 3_000_000}


def result(nll, quarter=5.0, dev=9.0):
    return {"test_nll": nll, "earlier_nll": {"0.25": quarter}, "dev": [[1, dev]], "cost": SIZE}


def runs_of(names):
    """Makes the table of runs from {name of an arm: {seed: run}}."""
    return Runs({parse_arm(name): ArmRuns(runs) for name, runs in names.items()})


def test_each_model_has_its_best_options():
    """The dev part selects among all options of a model and a length, on their common seeds."""
    names = {
        "moe-4": {
            1: result(3.5, dev=3.01),
            2: result(2.5, dev=2.0),  # the rate 0.016 has no such seed
        },
        "moe-4 rate 0.016": {1: result(3.6, dev=3.0)},
        "moe-4 dropout 0.1": {1: result(3.1, dev=3.1)},  # the best on the test part
        "moe-4 x4": {1: result(2.9, dev=2.8)},
        "moe-16 rate 0.004": {1: result(3.0, dev=3.0)},
    }
    runs = runs_of(names)
    best = {str(model): str(arm) for model, arm in study.best_arms(runs).items()}
    assert best == {
        "moe-4": "moe-4 rate 0.016", "moe-4 x4": "moe-4 x4", "moe-16": "moe-16 rate 0.004",
    }  # fmt: skip
    # A trial on a new seed does not change the selection.
    more = runs_of(names | {"moe-4 rate 0.032": {3: result(1.0, dev=1.0)}})
    assert study.best_arms(more)[Arm("moe-4")] == Arm("moe-4", rate=0.016)
    settings = {"optimizer.learning_rate": 8e-3, "model.dropout": 0.0}
    text = study.search(settings, runs)
    assert (
        "| model | seeds | rate 0.008, dropout 0 | rate 0.016 | dropout 0.1 | rate 0.004 |" in text
    )
    assert "| moe-4 | 1 | 20.29 | 20.09 | 22.20 |  |\n| moe-4 x4 | 1 | 16.44 |  |  |  |\n" in text
    assert "| moe-16 | 1 |  |  |  | 20.09 |" in text and "moe-64" not in text
    assert study.search(settings, runs_of({"moe-4": names["moe-4"]})) == ""


def run(corpus, tmp_path, *options):
    places = [f"--runs={tmp_path / 'runs'}", f"--output={tmp_path / 'results'}", "--seeds=1"]
    small = ["steps=4", "data.vocab_size=40", "data.tokens_per_batch=200", "model.d_model=8"]
    arguments = [f"data.corpus={corpus}", *small, "log.progress=false", *places, *options]
    return run_study("capacity", arguments)


def test_the_study_grows(corpus, tmp_path, capsys):
    page, stored = (tmp_path / "results" / f"capacity_sources.{end}" for end in ("md", "json"))
    run(corpus, tmp_path, "--arms", "4xlstm")
    assert "nothing to report yet" in capsys.readouterr().out and not page.exists()
    results = run(corpus, tmp_path, "--arms", "moe-4", "moe-16", "moe-4 x4", "moe-16 x4")
    text, data = page.read_text(), json.loads(stored.read_text())
    assert [r["arm"] for r in data["runs"]] == [
        "moe-4", "moe-16", "4xlstm", "moe-4 x4", "moe-16 x4"
    ]  # fmt: skip
    seen = {r["arm"]: r["dev"][-1][0] for r in data["runs"]}
    assert seen["moe-4 x4"] == pytest.approx(4 * seen["moe-4"], rel=0.2)
    assert "(one seed, not decided) | not decided |" in text and "| moe-16 x4 against" in text
    assert "Every run has rate 0.008, dropout 0; nothing was selected" in text
    settings = data["settings"]
    assert settings["test_bytes"] == len((corpus / "test.txt").read_bytes())
    nats = results.by_arm()[Arm("moe-16")][1]["test_nll"] * settings["test_tokens"]
    assert f"| {math.exp(nats / settings['test_bytes']):.4f} |" in text
    command = "moe-lab study capacity --text sources steps=4 data.vocab_size=40 "
    command += "data.tokens_per_batch=200 model.d_model=8"
    assert [line for line in text.splitlines() if line.startswith(command)] == [
        f"{command} --seeds 1 --arms moe-4 moe-16 4xlstm",
        f"{command} --seeds 1 --arms 'moe-4 x4' 'moe-16 x4'",
    ]
    assert rebuilds("capacity", "capacity_sources", tmp_path / "results")
    for more, message in (
        (["steps=5", "--seeds=2"], "capacity_sources.json must hold runs with"),
        (["data.kind=words"], 'data.kind must be "bpe" or "unigram"'),
        (["--text", "prose", "data.corpus=sources"], "data.corpus must be given for --text pr"),
        (["--arms", "moe-5"], "--arms must be one of moe-4, .*, got 'moe-5'"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(corpus, tmp_path, *more)


def test_all_models_have_equal_operations(tmp_path):
    """The gates' operations are the only difference, at most 5%, of most models.

    As in the paper, the LSTM with projection has one eighth more operations.
    """
    options = SimpleNamespace(text="prose", output=tmp_path, runs=tmp_path, overrides=[])
    ops = {}
    for model in study.MODELS:
        config = study.Capacity(options).config(Arm(model), ["data.corpus=x"])
        assert config.model.d_model == 96 and config.model.dropout == 0
        assert config.model.num_sampled == 0 and config.data.kind == "bpe"
        with torch.device("meta"):
            ops[model] = cost(make_model(config.model, 40)).ops_per_timestep
    assert ops.pop("lstm-384-96") == 1.125 * ops["4xlstm"]
    assert 1.9 < ops.pop(study.LARGE) / ops["moe-64"] < 2.2
    assert max(ops.values()) < 1.05 * min(ops.values())
