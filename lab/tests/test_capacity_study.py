"""The study of the number of experts at equal operations."""

import json
import math

import pytest
from moe_lab.errors import ConfigError
from moe_lab.experiments.arms import Arm, parse_arm
from moe_lab.experiments.store import Runs
from moe_lab.studies import capacity as study
from moe_lab.studies.table import run as run_study
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


def test_claims():
    """Each doubling of the experts lowers ln(ppl) by 0.01; the widening is half of that."""
    results = {
        arm: {seed: result(4 - 0.01 * math.log2(n), 5 - 0.005 * math.log2(n)) for seed in (1, 2, 3)}
        for arm, n in study.MIXTURES.items()
    }
    results |= {dense: {seed: result(4.0) for seed in (1, 2)} for dense in study.DENSE}
    results[study.LARGE] = {seed: result(3.9) for seed in (1, 2, 3)}
    # The runs with the usual settings end 0.5 above the best ones.
    usual = {
        arm: {seed: run | {"test_nll": run["test_nll"] + 0.5} for seed, run in runs.items()}
        for arm, runs in results.items()
    }
    usual["moe-4"] = results["moe-4"]
    claims = study.claims_of_length(runs_of(results), runs_of(usual), 1)
    found = {(c.claim, c.compared): c.difference for c in claims}
    assert study.slope(results).mean == pytest.approx(-0.01)
    means = [gap.mean for (_, what), gap in found.items() if what.endswith("against moe-4")]
    assert means == pytest.approx([-0.02, -0.04, -0.06])
    steps = [gap.mean for (claim, _), gap in found.items() if claim.startswith("each increase")]
    assert steps == pytest.approx([-0.02, -0.02])
    dense = [gap for (_, what), gap in found.items() if "against moe-1-wide" in what]
    assert [gap.mean for gap in dense] == pytest.approx([-0.04, -0.06, -0.08])
    assert all(gap.low is None for gap in dense)  # two seeds decide nothing
    assert found[
        "more operations lower the perplexity of a large mixture", "moe-64-2x against moe-64"
    ].mean == pytest.approx(-0.1 + 0.06)
    widening = [gap.mean for (claim, _), gap in found.items() if claim.startswith("more training")]
    assert widening == pytest.approx([0.49, 0.48, 0.47])
    results["moe-64"] = {}
    assert study.slope(results) is None


def test_longer_training():
    """The longer training adds 0.005 to each doubling of the experts; claims compare its models."""

    def results_with(doubling):
        return {
            model: {
                seed: result(4 - doubling * math.log2(study.MIXTURES.get(model, 1)))
                for seed in (1, 2, 3)
            }
            for model in study.MODELS
        }

    def claims_of(results):
        return study.claims(runs_of(results), runs_of(results))

    longer = {f"{model} x4": runs for model, runs in results_with(0.015).items()}
    results = results_with(0.01) | longer
    claims = claims_of(results)
    assert claims[:-3] == study.claims_of_length(runs_of(results), runs_of(results), 4)
    assert claims[0].compared == "moe-16 x4 against moe-4 x4"
    assert [c.difference.mean for c in claims[-3:]] == pytest.approx([-0.01, -0.02, -0.03])
    assert all("with x4 minus difference without it" in c.compared for c in claims[-3:])
    # Three seeds of a shorter training decide more than one of a longer training.
    one_seed = results | {"moe-4 x4": {1: results["moe-4 x4"][1]}}
    compared = [c.compared for c in claims_of(one_seed)]
    assert compared[:3] == [f"{m} against moe-4" for m in ("moe-16", "moe-64", "moe-256-h")]
    del results["moe-64 x4"][2], results["moe-4"][3]
    assert study.gain(runs_of(results), "moe-64", 1, 4).num_seeds == 1
    # A model that has trained for less is compared with the others at its number of steps.
    results["moe-64 x4"] = {}
    claims = claims_of(results)
    assert [c.compared for c in claims[:3]] == [
        "moe-16 x4 against moe-4 x4", "moe-64 against moe-4", "moe-256-h x4 against moe-4 x4",
    ]  # fmt: skip
    assert claims[5].difference == study.slope(results)
    assert "moe-64 against" not in "".join(c.compared for c in claims[-2:])
    # moe-4 has not trained for longer.
    results["moe-4 x4"] = {}
    compared = [c.compared for c in claims_of(results)]
    assert compared[0] == "moe-16 against moe-4" and not any("with x4 minus" in c for c in compared)
    assert "moe-256-h x4 against 4xlstm x4" in compared
    one = {"4xlstm x4": {1: ()}, "moe-4 x8": {1: ()}}
    assert study.lengths_of(runs_of(one)) == []
    assert study.lengths_of(runs_of(one | {"moe-16 x4": {1: ()}})) == [4]


def test_spread_over_the_seeds():
    results = {"a": {1: result(3.0, dev=4.0), 2: result(3.2, dev=4.1)}, "b": {1: result(9.0)}}
    text = study.spread_sentence(runs_of(results))
    assert "0.141 on the test part and 0.071 on the dev part" in text
    assert study.spread_sentence(runs_of({"b": results["b"]})) == ""


def test_found_names_the_mixture_that_is_best_on_dev():
    results = {"moe-16": {1: result(2.99, dev=3.2)}, "moe-4": {1: result(3.0, dev=3.3)}}
    text = study.found(runs_of(results))
    assert "is moe-16." in text and "-1.00% (one seed, not decided) from moe-4." in text
    results["moe-4"] = {1: result(3.0, dev=3.1)}
    text = study.found(runs_of(results))
    assert text == "The mixture with the lowest dev perplexity is moe-4."
    # The comparison has the same number of training steps.
    results |= {"moe-64 x4": {1: result(2.5, dev=2.7)}, "4xlstm x4": {1: result(2.6)}}
    text = study.found(runs_of(results))
    assert text.endswith(
        "is moe-64 x4. The change of its test perplexity is "
        "-9.52% (one seed, not decided) from 4xlstm x4."
    )


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
    results = study.at_best(runs)
    assert results[Arm("moe-4")][1]["test_nll"] == 3.6
    assert results[Arm("moe-4", times=4)][1]["test_nll"] == 2.9
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
    usual = study.search(settings, runs_of({"moe-4": names["moe-4"]}))
    assert usual.startswith("Every run has rate 0.008, dropout 0;")


def run(corpus, tmp_path, *options):
    return run_study(
        "capacity",
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
        ],
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
    run_study("capacity", ["--report", f"--output={tmp_path / 'results'}"])
    assert f"All runs took at least {len(data['runs']) / 2:.2f} core-hours." in page.read_text()
    command = "moe-lab study capacity --text sources "
    command += "steps=4 data.vocab_size=40 data.tokens_per_batch=200 "
    assert command + "model.d_model=8\n" in text
    assert command + "model.d_model=8 --seeds 1 --arms 'moe-4 x4' 'moe-16 x4'\n" in text
    assert rebuilds("capacity", "capacity_sources", tmp_path / "results")


def test_other_text_or_options_are_refused(corpus, tmp_path):
    run(corpus, tmp_path, "--seeds", "1", "--arms", "moe-4")
    with pytest.raises(ConfigError, match="capacity_sources.json must hold runs with"):
        run(corpus, tmp_path, "steps=5", "--seeds", "2", "--arms", "moe-4")
    with pytest.raises(ConfigError, match='data.kind must be "bpe" or "unigram"'):
        run(corpus, tmp_path, "data.kind=words")
    with pytest.raises(ConfigError, match="data.corpus must be given for --text prose"):
        run("sources", tmp_path, "--text", "prose")
    with pytest.raises(ConfigError, match="--arms must be one of moe-4, .*, got 'moe-5'"):
        run(corpus, tmp_path, "--arms", "moe-5")


def test_all_models_have_equal_operations(corpus, tmp_path):
    """The gates' operations are the only difference, at most 5%, of most models.

    As in the paper, the LSTM with projection has one eighth more operations.
    """
    stored = run_study(
        "capacity",
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


def test_an_arm_with_another_rate_or_dropout(corpus, tmp_path):
    trials = ("rate 0.016", "rate 0.016 experts 0.008", "dropout 0.1")
    arms = [f"moe-4 {trial}" for trial in trials]
    stored = run(corpus, tmp_path, "--seeds", "1", "--arms", "moe-4", "4xlstm", *arms)
    found = []
    for arm in arms:
        folder = tmp_path / "runs" / "sources" / f"{arm.replace(' ', '-')}-seed1"
        config = read_config(folder / "config.toml")
        optimizer = config.optimizer
        found.append(
            (optimizer.learning_rate, optimizer.expert_learning_rate, config.model.dropout)
        )
    assert found == [(0.016, 0, 0), (0.016, 0.008, 0), (0.008, 0, 0.1)]
    options = {each["arm"]: each["options"] for each in stored.runs}
    assert options["moe-4 dropout 0.1"] == {"model.dropout": 0.1}
    best = study.best_arms(stored.by_arm())[Arm("moe-4")].trial
    page = (tmp_path / "results" / "capacity_sources.md").read_text()
    assert f"| moe-4 | {best or 'rate 0.008, dropout 0'} |" in page
    assert page.count("\n| moe-4 | ") == 2  # the table of the models, and that of the options
