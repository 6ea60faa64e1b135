"""Studies: finished runs, paired differences, verdicts about claims, and the reports of scripts."""

import json
import math
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from filelock import FileLock
from moe_lab.errors import ConfigError
from moe_lab.experiments import results as results_module
from moe_lab.experiments import study as study_module
from moe_lab.experiments.report import markdown_table
from moe_lab.experiments.results import Result, finished, train_and_test
from moe_lab.experiments.statistics import (
    PairedDifference,
    bootstrap_difference,
    mean_difference,
)
from moe_lab.experiments.study import (
    as_change,
    difference,
    has_diverged,
    run_study,
    trials,
    verdict,
    widening,
)
from moe_lab.studies import balanced, capacity, efficiency, losses, paper_tables, routers
from moe_lab.training.config import config_from_dict, read_config
from moe_lab.training.metrics import evaluate
from moe_lab.training.text import load_text
from test_scripts import rebuilds

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def config(corpus, tmp_path):
    moe = {"num_experts": 4, "k": 2, "hidden_sizes": [16]}
    return config_from_dict(
        {
            "output": str(tmp_path / "run"),
            "steps": 8,
            "num_threads": 1,
            "data": {"corpus": str(corpus), "tokens_per_batch": 100},
            "model": {"d_model": 16, "dropout": 0.2, "moe": moe, "num_sampled": 9},
            "optimizer": {"learning_rate": 0.01, "warmup_steps": 4},
            "log": {"log_every": 2, "eval_every": 0, "save_every": 3, "progress": False},
        }
    )


def test_mean_difference_is_the_t_interval():
    interval = mean_difference([0.1, 0.2, 0.3])
    # The mean is 0.2, the standard error 0.1 / sqrt(3), and t(0.975, 2) = 4.30265.
    assert interval.num_seeds == 3 and interval.mean == pytest.approx(0.2)
    assert interval.high - interval.mean == pytest.approx(4.30265 * 0.1 / math.sqrt(3), rel=1e-5)
    assert interval.mean - interval.low == pytest.approx(interval.high - interval.mean)
    assert mean_difference([]) is None


def test_fewer_than_three_seeds_have_no_interval():
    one, two = mean_difference([0.1]), mean_difference([0.1, 0.3])
    for found in (one, two):
        assert found.low is None and found.high is None and verdict(found) == "not decided"
    assert f"{one:+.3f}" == "+0.100 (one seed, not decided)"
    assert f"{two:+.3f}" == "+0.200 (two seeds, not decided)"
    assert as_change(mean_difference([math.log(0.9)] * 2)) == "-10.00% (two seeds, not decided)"
    assert f"{mean_difference([0.1, 0.2, 0.3]):+.1f}" == "+0.2 [-0.0, +0.4]"


def test_width_of_the_bootstrap_interval():
    lengths = torch.full((400,), 10)
    a = torch.randn(400).double()
    interval = bootstrap_difference(a, a * 0, lengths)
    # 400 sentences with standard deviation 1 and 10 tokens each: the standard error of the mean per
    # token is 1 / (20 · 10).
    assert interval.mean == pytest.approx(a.sum().item() / 4000)
    assert interval.high - interval.low == pytest.approx(2 * 1.96 / 200, rel=0.15)
    assert interval.low < interval.mean < interval.high


def test_a_share_of_the_steps_equals_a_shorter_run(config, tmp_path):
    text = load_text(config.data)
    result = train_and_test(config, text, [0.25, 0.5])
    assert result.earlier_nll.keys() == {0.25, 0.5} and result.nll_at(1.0) == result.test_nll
    assert float(result.sentence_nll.sum()) / text.test.num_tokens == result.test_nll
    for share in (0.25, 0.5):
        short = replace(config, output=str(tmp_path / f"short-{share}"), steps=int(8 * share))
        assert train_and_test(short, text).test_nll == result.nll_at(share)
    with pytest.raises(ConfigError, match=r"shares must be a part of \[0.25, 0.5\].*got \[0.75\]"):
        train_and_test(config, text, [0.75])
    assert train_and_test(config, text, [0.5, 1.0]).test_nll == result.test_nll
    # The extra tests do not change the training.
    through = train_and_test(replace(config, output=str(tmp_path / "through")), text)
    assert through.test_nll == result.test_nll


@pytest.mark.parametrize("killed_at", [1, 2, 3])  # at the test after 2, 4 or 8 steps
def test_an_interrupted_run_has_the_same_result(config, tmp_path, monkeypatch, killed_at):
    text = load_text(config.data)
    whole = train_and_test(replace(config, output=str(tmp_path / "whole")), text, [0.25, 0.5])
    calls = []

    def killed(*arguments, **options):
        calls.append(arguments)
        if len(calls) == killed_at:
            raise KeyboardInterrupt
        return evaluate(*arguments, **options)

    monkeypatch.setattr(results_module, "evaluate", killed)
    with pytest.raises(KeyboardInterrupt):
        train_and_test(config, text, [0.25, 0.5])
    assert finished(config, text) is None
    result = train_and_test(config, text, [0.25, 0.5])
    assert len(calls) == 4  # 3 tests and the repeated one
    assert result.test_nll == whole.test_nll and result.earlier_nll == whole.earlier_nll
    assert torch.equal(result.sentence_nll, whole.sentence_nll)


def test_a_study_trains_only_missing_runs(config, tmp_path):
    text = load_text(config.data)
    arms = {"a": config, "b": replace(config, model=replace(config.model, dropout=0.0))}
    runs = tmp_path / "runs"
    # The lock means that a-seed2 is being trained elsewhere.
    (runs / "a-seed2").mkdir(parents=True)
    with FileLock(runs / "a-seed2" / ".lock"):
        results = run_study(arms, [1, 2], text, runs)
    assert results["a"].keys() == {1} and results["b"].keys() == {1, 2}
    results = run_study(arms, [1, 2], text, runs)
    assert all(each.keys() == {1, 2} for each in results.values())
    written = {path: path.stat().st_mtime_ns for path in runs.rglob("result.json")}
    run_study(arms, [1, 2], text, runs)
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("result.json")} == written
    assert results["b"][2].cost.parameters == 6272  # LSTMs 2 · 2,048, gate 128, experts 2,048
    with pytest.raises(ConfigError, match="steps must"):
        run_study({"a": replace(config, steps=9)}, [1], text, runs)
    for other in (replace(text, test=text.dev), replace(text, train=text.dev)):
        with pytest.raises(ConfigError, match="the text of data.corpus must"):
            run_study({"a": config}, [1], other, runs)


def test_a_diverged_run_does_not_stop_the_others(config, tmp_path, monkeypatch):
    text = load_text(config.data)
    arms = {"a": config, "b": replace(config, model=replace(config.model, dropout=0.0))}
    runs = tmp_path / "runs"
    calls = []

    def train(config, *arguments):
        calls.append(config.output)
        if "a-seed1" in config.output:
            raise FloatingPointError("the loss of step 3 is not finite")
        return train_and_test(config, *arguments)

    monkeypatch.setattr(study_module, "train_and_test", train)
    with pytest.raises(FloatingPointError, match="a-seed1: the loss of step 3 .*; run the command"):
        run_study(arms, [1, 2], text, runs)
    assert len(calls) == 4
    assert has_diverged(replace(config, output=str(runs / "a-seed1")))
    assert not has_diverged(replace(config, output=str(runs / "a-seed2"), seed=2))
    results = run_study(arms, [1, 2], text, runs)
    assert len(calls) == 7  # 3 more, which read the finished runs
    assert results["a"].keys() == {2} and results["b"].keys() == {1, 2}
    arms["a"] = replace(config, optimizer=replace(config.optimizer, learning_rate=1e-3))
    with pytest.raises(ConfigError, match="learning_rate must be as in the diverged run .*a-seed1"):
        run_study(arms, [1], text, runs)


def test_balance_is_the_mean_of_the_last_50_batches(config, monkeypatch):
    """Record i covers two batches and has the values i and i + 1 for two layers.

    The last 50 batches are the records 35 to 59; the mean of i is 47. A further record covers one
    batch: then, the mean is over the records 35 to 59 and half of the record 60.
    """
    keys = [*losses.COLUMNS]

    def record(i, step):
        values = {key: [i + at, i + at + 1] for at, key in enumerate(keys)}
        return {"words_per_second": 1.0, "step": step, **values}

    records = [record(i, 2 * i + 2) for i in range(60)]
    monkeypatch.setattr(results_module, "read_metrics", lambda *_: records)
    text = load_text(config.data)
    found = train_and_test(replace(config, steps=1), text)
    assert found.balance == {key: 47.5 + at for at, key in enumerate(keys)}
    records.append(record(60, 121))
    again = train_and_test(replace(config, steps=1, output=config.output + "-odd"), text)
    mean = (2 * 25 * 47 + 60) / 51 + 0.5
    assert again.balance == {key: pytest.approx(mean + at) for at, key in enumerate(keys)}


def result(nll, earlier=0.0, seed=1, **balance):
    unused = dict(run=None, cost=None, words_per_second=1.0, sentence_nll=None)
    return Result(seed=seed, test_nll=nll, earlier_nll={0.25: earlier}, balance=balance, **unused)


def test_differences_are_over_the_seeds_that_both_have():
    a = {1: result(4.1, 5.0, 1), 2: result(4.3, 5.0, 2), 4: result(4.0, 5.0, 4)}
    b = {2: result(4.5, 5.1, 2), 1: result(4.2, 5.2, 1), 4: result(4.3, 5.0, 4)}
    a |= {3: result(9.0, 9.0, 3)}
    b |= {7: result(0.0, 0.0, 7)}
    gap = difference(a, b)  # -0.1, -0.2 and -0.3: t(.975, 2) = 4.30265
    assert gap.mean == pytest.approx(-0.2) and gap.num_seeds == 3
    error = 4.30265 * 0.1 / math.sqrt(3)
    assert gap.high - gap.mean == pytest.approx(error, rel=1e-5)
    assert difference(a, b, 0.25).mean == pytest.approx(-0.1)  # -0.2, -0.1 and 0
    change = widening(a, b, 0.25)  # -0.2 to -0.1, -0.1 to -0.2 and 0 to -0.3
    assert change.mean == pytest.approx(-0.1) and change.high > 0
    assert difference({1: result(1.0)}, b).num_seeds == 1
    assert difference({5: result(1.0)}, b) is None


def test_verdicts():
    def found(low, high):
        return PairedDifference((low + high) / 2, 3, low, high)

    assert verdict(found(-3, -1)) == "supported"
    assert verdict(found(-3, 1)) == verdict(found(-1, 3)) == verdict(None) == "not decided"
    assert verdict(found(1, 3)) == "contradicted"
    similar = partial(verdict, low=-losses.MARGIN, high=losses.MARGIN)
    assert similar(found(-0.004, 0.004)) == "supported"
    assert similar(found(-0.004, 0.006)) == similar(None) == "not decided"
    assert similar(found(0.01, 0.03)) == similar(found(-0.03, -0.01)) == "contradicted"
    positive = partial(verdict, low=0, high=math.inf)
    assert positive(found(1, 3)) == "supported" and positive(found(-3, -1)) == "contradicted"
    change = PairedDifference(math.log(0.9), 3, math.log(0.8), 0.0)
    assert as_change(change) == "-10.00% [-20.00, +0.00]" and as_change(None) == ""
    table = markdown_table(["a", "b"], [[1, "x"], [2, ""]])
    assert table == "| a | b |\n| --- | --- |\n| 1 | x |\n| 2 |  |\n"


def test_trials_compare_rates_and_dropouts_on_the_same_seeds():
    """Only seed 1 has all settings; the usual ones are 1% above the best of "moe"."""

    def of(nll, *seeds):
        return {seed: result(nll, seed=seed) for seed in seeds}

    on_dev = {"moe": of(3.01, 1) | of(9.0, 2), "moe rate 0.016": of(3.0, 1), "dense": of(3.0, 1)}
    settings = {"steps": 1500, "optimizer.learning_rate": 8e-3, "model.dropout": 0.0}
    compared = partial(trials, settings, models=("moe", "dense"), suffixes=(" rate 0.016", " slow"))
    text = compared(on_dev)
    assert "after 1,500 steps" in text
    assert "| model | seeds | rate 0.008, dropout 0 | rate 0.016 |\n" in text
    assert "| moe | 1 | 20.29 | 20.09 |" in text and "| dense |" not in text
    assert "above the lowest of its row by 1.01% (moe)." in text
    both = compared(on_dev | {"dense slow": of(3.5, 1)})
    assert "| moe | 1 | 20.29 | 20.09 |  |\n| dense | 1 | 20.09 |  | 33.12 |" in both
    assert "of its row by 1.01% (moe), 0.00% (dense)." in both
    assert compared({"moe": on_dev["moe"], "dense": on_dev["dense"]}) == ""
    # A run with other settings is always shown, also without the usual ones.
    text = compared({"moe rate 0.016": of(3.0, 1)})
    assert "| moe | 1 | 20.09 |" in text and text.endswith("have rate 0.008, dropout 0.\n\n")


def test_claims_about_a_larger_w_load():
    """Max/mean load falls by the difference of w_load; all other metrics grow by it."""
    results = {}
    for arm in losses.ARMS:
        w_load = float(arm.partition(",")[2])
        balance = dict.fromkeys(losses.COLUMNS, w_load) | {"max_over_mean_load": -w_load}
        results[arm] = {seed: result(w_load, seed=seed, **balance) for seed in (1, 2, 3)}
    found = [row for row in losses.comparisons(results) if "max/mean" in row.claim]
    assert [(row.compared, row.shown, row.verdict) for row in found] == [
        ("0,0.2 against 0,0", "-0.200 [-0.200, -0.200]", "supported"),
        ("0.1,0.1 against 0.01,0.01", "-0.090 [-0.090, -0.090]", "supported"),
        ("1,1 against 0.1,0.1", "-0.900 [-0.900, -0.900]", "supported"),
        ("0,0.2 against 0.2,0", "-0.200 [-0.200, -0.200]", "supported"),
    ]


def run_script(script, corpus, tmp_path, *options):
    """Runs the script with two training steps for each model."""
    return script.main(
        [
            f"data.corpus={corpus}",
            "steps=2",
            "data.vocab_size=45",
            "data.tokens_per_batch=40",
            "model.num_sampled=9",
            "model.d_model=8",
            "log.tensorboard=false",
            "log.progress=false",
            f"--runs={tmp_path / 'runs'}",
            f"--output={tmp_path / 'results'}",
            *options,
        ],
    )


def test_losses_are_reported(corpus, tmp_path):
    results = run_script(losses, corpus, tmp_path, "--seeds", "1", "2")
    page = (tmp_path / "results" / "losses.md").read_text()
    gap = difference(results["0.1,0.1"], results["0,0"])
    assert f"| 0.1,0.1 against 0,0 | {as_change(gap)} | {verdict(gap)} |" in page
    assert page.count("| a larger w_load lowers ") == page.count("| w_load lowers ") == 1
    assert page.count("| larger weights lower ") == 2 and page.count("within 0.5% |") == 4
    for arm in results:
        moe = read_config(tmp_path / "runs" / f"{arm}-seed1" / "config.toml").model.moe
        assert arm == f"{moe.w_importance:g},{moe.w_load:g}"
    assert "| w_importance | w_load | seeds |" in page
    rows = re.findall(r"^\| ([\d.]+) \| ([\d.]+) \| 2 \|", page, re.M)
    assert [",".join(row) for row in rows] == [*losses.ARMS]
    data = json.loads((tmp_path / "results" / "losses.json").read_text())
    assert all(run["balance"].keys() == losses.COLUMNS.keys() for run in data["runs"])
    assert data["claims"][0]["difference"]["mean"] == gap.mean
    assert "losses.py data.corpus=CORPUS steps=2 data.vocab_size=45 " in page
    assert rebuilds(losses.main, "losses", tmp_path / "results")


def test_routers_are_reported(corpus, tmp_path, capsys):
    run_script(routers, corpus, tmp_path, "--seeds", "1", "--arms", "switch rate 0.004")
    assert "nothing to report yet" in capsys.readouterr().out
    results = run_script(routers, corpus, tmp_path, "--seeds", "1", "2")
    page = (tmp_path / "results" / "routers.md").read_text()
    assert [name for name, runs in results.items() if len(runs) == 2] == [*routers.ROUTERS]
    for name in ("switch", "bias", "balanced"):
        gap = difference(results[name], results["noisy"])
        assert f"| {name} against noisy | {as_change(gap)} | {verdict(gap)} |" in page
    assert "expert_choice against" not in page  # it is not a language model
    assert page.count("| expert_choice (not causal) |") == 1
    runs = json.loads((tmp_path / "results" / "routers.json").read_text())["runs"]
    busiest = {run["arm"]: routers.busiest(run) for run in runs}
    assert 1 <= busiest["balanced"] < 1.2 < busiest["noisy"]
    folders = {name: tmp_path / "runs" / f"{name}-seed1" for name in routers.ROUTERS}
    models = {name: read_config(folder / "config.toml") for name, folder in folders.items()}
    assert {name: config.model.moe.gate for name, config in models.items()} == {
        "noisy": "noisy_topk",
        "switch": "topk",
        "bias": "topk",
        "balanced": "balanced",
        "expert_choice": "expert_choice",
    }
    trial = read_config(tmp_path / "runs" / "switch-rate-0.004-seed1" / "config.toml")
    assert trial.optimizer.learning_rate == 4e-3 and trial.model.moe == models["switch"].model.moe
    assert "with other learning rates" in page and "--seeds 1 --arms 'switch rate 0.004'\n" in page
    assert rebuilds(routers.main, "routers", tmp_path / "results")


@pytest.mark.parametrize("study", [balanced, capacity, efficiency, losses, paper_tables, routers])
def test_a_study_says_which_configuration_is_missing(study, tmp_path):
    with pytest.raises(ConfigError, match=f"{tmp_path}/configs/.*toml"):
        study.main([], tmp_path)
