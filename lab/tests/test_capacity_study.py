"""The study of the number of experts at equal operations."""

import json
import math

import pytest
from moe_lab.errors import ConfigError
from moe_lab.experiments.arms import Arm, parse_arm
from moe_lab.experiments.store import Runs
from moe_lab.studies import _capacity as page_of
from moe_lab.studies import capacity as study
from moe_lab.training.config import read_config
from moe_lab.training.logging import read_metrics
from tiny import rebuilds

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = {"ops_per_timestep": 1_000_000, "parameters": 2_000_000, "total_parameters": 3_000_000}


def result(nll, quarter=5.0, dev=9.0):
    return {"test_nll": nll, "earlier_nll": {"0.25": quarter}, "dev": [[1, dev]], "cost": SIZE}


def runs_of(names):
    """Makes the table of runs from {name of an arm: {seed: run}}."""
    return Runs({parse_arm(name): runs for name, runs in names.items()})


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
    best = {str(model): str(arm) for model, arm in page_of.best_arms(runs).items()}
    assert best == {
        "moe-4": "moe-4 rate 0.016", "moe-4 x4": "moe-4 x4", "moe-16": "moe-16 rate 0.004",
    }  # fmt: skip
    results = page_of.at_best(runs)
    assert results[Arm("moe-4")][1]["test_nll"] == 3.6
    assert results[Arm("moe-4", times=4)][1]["test_nll"] == 2.9
    # A trial on a new seed does not change the selection.
    more = runs_of(names | {"moe-4 rate 0.032": {3: result(1.0, dev=1.0)}})
    assert page_of.best_arms(more)[Arm("moe-4")] == Arm("moe-4", rate=0.016)
    settings = {"optimizer.learning_rate": 8e-3, "model.dropout": 0.0}
    text = page_of.search(settings, runs)
    assert (
        "| model | seeds | rate 0.008, dropout 0 | rate 0.016 | dropout 0.1 | rate 0.004 |" in text
    )
    assert "| moe-4 | 1 | 20.29 | 20.09 | 22.20 |  |\n| moe-4 x4 | 1 | 16.44 |  |  |  |\n" in text
    assert "| moe-16 | 1 |  |  |  | 20.09 |" in text and "moe-64" not in text
    usual = page_of.search(settings, runs_of({"moe-4": names["moe-4"]}))
    assert usual.startswith("Every run has rate 0.008, dropout 0;")


def run(corpus, tmp_path, *options):
    return study.main(
        [
            f"data.corpus={corpus}",
            "steps=4",
            "data.vocab_size=40",
            "data.tokens_per_batch=200",
            "model.d_model=8",
            "log.progress=false",
            f"--runs={tmp_path / 'runs'}",
            f"--output={tmp_path / 'results'}",
            *options,
        ]
    )


def test_the_study_grows_on_several_machines(corpus, tmp_path, capsys):
    page, stored = (tmp_path / "results" / f"capacity_sources.{end}" for end in ("md", "json"))
    run(corpus, tmp_path, "--seeds", "1", "--arms", "4xlstm")
    assert "nothing to report yet" in capsys.readouterr().out and not page.exists()
    run(corpus, tmp_path, "--seeds", "1", "--arms", *study.MIXTURES, "moe-1-wide")
    assert "(one seed, not decided) | not decided |" in page.read_text()
    of_file = {(r["arm"], r["seed"]): r for r in json.loads(stored.read_text())["runs"]}
    assert [*of_file] == [(model, 1) for model in (*study.MIXTURES, "moe-1-wide", "4xlstm")]
    folder = tmp_path / "runs" / "sources" / "moe-16-seed1"
    assert of_file["moe-16", 1]["dev"] == [
        [record["tokens"], record["nll"]] for record in read_metrics(folder, "dev")
    ]
    # Another machine has the file, but neither the runs nor their checkpoints.
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    results = run(corpus, tmp_path, "--seeds", "1", "2", "--arms", "moe-4", "moe-64")
    assert {str(arm): [*seeds] for arm, seeds in results.by_arm().items()} == {
        "moe-4": [1, 2], "moe-16": [1], "moe-64": [1, 2], "moe-256-h": [1],
        "moe-1-wide": [1], "4xlstm": [1],
    }  # fmt: skip
    assert not (tmp_path / "runs" / "sources" / "moe-4-seed1").exists()
    assert (tmp_path / "runs" / "sources" / "moe-4-seed2" / "config.toml").exists()
    run(corpus, tmp_path, "--seeds", "1", "--arms", "moe-4 x4", "moe-16 x4")
    seen = {r["arm"]: r["dev"][-1][0] for r in json.loads(stored.read_text())["runs"]}
    assert seen["moe-4 x4"] == pytest.approx(4 * seen["moe-4"], rel=0.2)
    assert "| moe-16 x4 |" in page.read_text() and "| moe-16 x4 against" in page.read_text()
    text, settings = page.read_text(), json.loads(stored.read_text())["settings"]
    assert settings["test_bytes"] == len((corpus / "test.txt").read_bytes())
    nats = (
        results.by_arm()[Arm("moe-16")][1]["test_nll"]
        * settings["test_tokens"]
        / settings["test_bytes"]
    )
    assert f"| {math.exp(nats):.4f} |" in text
    data = json.loads(stored.read_text())
    assert all(each["seconds"] > 0 for each in data["runs"])
    for each in data["runs"]:
        each["seconds"] = 1800
    stored.write_text(json.dumps(data))
    study.main(["--report", f"--output={tmp_path / 'results'}"])
    assert f"All runs took at least {len(data['runs']) / 2:.2f} core-hours." in page.read_text()
    command = "moe-lab study capacity --text sources "
    command += "steps=4 data.vocab_size=40 data.tokens_per_batch=200 "
    assert command + "model.d_model=8\n" in text
    assert command + "model.d_model=8 --seeds 1 --arms 'moe-4 x4' 'moe-16 x4'\n" in text
    assert rebuilds(study.main, "capacity_sources", tmp_path / "results")


def test_other_text_or_options_are_refused(corpus, tmp_path):
    run(corpus, tmp_path, "--seeds", "1", "--arms", "moe-4")
    with pytest.raises(ConfigError, match="capacity_sources.json must hold runs with"):
        run(corpus, tmp_path, "steps=5", "--seeds", "2", "--arms", "moe-4")
    with pytest.raises(ConfigError, match='data.kind must be "bpe" or "unigram"'):
        run(corpus, tmp_path, "data.kind=words")
    with pytest.raises(ConfigError, match="data.corpus must be given for --text languages"):
        run("sources", tmp_path, "--text", "languages")


def test_all_models_have_equal_operations(corpus, tmp_path):
    """The gates' operations are the only difference, at most 5%, of most models.

    As in the paper, the LSTM with projection has one eighth more operations.
    """
    stored = study.main(
        [
            f"data.corpus={corpus}", "steps=1", "data.vocab_size=40", "log.progress=false",
            "--text", "prose", "--seeds", "1",
            f"--runs={tmp_path / 'runs'}", f"--output={tmp_path / 'results'}",
        ],
    )  # fmt: skip
    ops = {run["arm"]: run["cost"]["ops_per_timestep"] for run in stored.runs}
    assert [*ops] == [*study.MODELS]
    assert ops.pop("lstm-384-96") == 1.125 * ops["4xlstm"]
    assert 1.9 < ops.pop(study.LARGE) / ops["moe-64"] < 2.2
    assert max(ops.values()) < 1.05 * min(ops.values())
    config = read_config(tmp_path / "runs" / "prose" / "moe-64-seed1" / "config.toml")
    assert config.model.d_model == 96 and config.model.dropout == 0
    assert config.model.num_sampled == 0 and config.data.kind == "bpe"
    page = (tmp_path / "results" / "capacity_prose.md").read_text()
    assert page.startswith("# More experts: English prose\n")
    assert "--text prose data.corpus=CORPUS steps=1 " in page
