"""Experiments: trained and tested runs, paired differences, verdicts about claims, comparisons."""

import math
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from moe_lab.commands import compare, quickstart
from moe_lab.errors import ConfigError
from moe_lab.experiments import single_run as single_run_module
from moe_lab.experiments import study as study_module
from moe_lab.experiments.arms import Arm
from moe_lab.experiments.claims import as_change, verdict
from moe_lab.experiments.comparison import bootstrap_difference
from moe_lab.experiments.runs import PairedDifference, mean_difference
from moe_lab.experiments.single_run import train_and_test
from moe_lab.markdown import markdown_table
from moe_lab.studies import losses
from moe_lab.training.config import config_from_dict, read_config
from moe_lab.training.metrics import evaluate
from moe_lab.training.text import load_text
from tiny import CONFIG, TINY, comparison

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


def test_width_of_the_bootstrap_interval():
    lengths = torch.full((400,), 10)
    a = torch.randn(400).double()
    low, high = bootstrap_difference(a, a * 0, lengths)
    # 400 sentences with standard deviation 1 and 10 tokens each: the standard error of the mean per
    # token is 1 / (20 · 10).
    assert high - low == pytest.approx(2 * 1.96 / 200, rel=0.15)
    assert low < a.sum().item() / 4000 < high


def test_a_share_of_the_steps_equals_a_shorter_run(config, tmp_path):
    text = load_text(config.data)
    result = train_and_test(config, text, [0.25, 0.5])
    assert [*result.record()["earlier_nll"]] == ["0.25", "0.5"]
    assert float(result.sentence_nll.sum()) / text.test.num_tokens == result.test_nll
    for share in (0.25, 0.5):
        short = replace(config, output=str(tmp_path / f"short-{share}"), steps=int(8 * share))
        assert train_and_test(short, text).test_nll == result.earlier_nll[share]
    with pytest.raises(ConfigError, match="steps must be at least 8, the steps of the run .*got 6"):
        train_and_test(config, text, [0.75])
    with pytest.raises(ConfigError, match="steps must be at least 8, .*got 7"):
        train_and_test(replace(config, steps=7), text)
    assert train_and_test(config, text, [0.5, 1.0]).test_nll == result.test_nll
    # The extra tests do not change the training.
    through = train_and_test(replace(config, output=str(tmp_path / "through")), text)
    assert through.test_nll == result.test_nll


@pytest.mark.parametrize("killed_at", [1, 3])  # at the test after 2 or 8 steps
def test_an_interrupted_run_has_the_same_result(config, tmp_path, monkeypatch, killed_at):
    text = load_text(config.data)
    whole = train_and_test(replace(config, output=str(tmp_path / "whole")), text, [0.25, 0.5])
    calls = []

    def killed(*arguments, **options):
        calls.append(arguments)
        if len(calls) == killed_at:
            raise KeyboardInterrupt
        return evaluate(*arguments, **options)

    monkeypatch.setattr(single_run_module, "evaluate", killed)
    with pytest.raises(KeyboardInterrupt):
        train_and_test(config, text, [0.25, 0.5])
    result = train_and_test(config, text, [0.25, 0.5])
    assert len(calls) == 4  # 3 tests and the repeated one
    assert result.test_nll == whole.test_nll and result.earlier_nll == whole.earlier_nll
    assert torch.equal(result.sentence_nll, whole.sentence_nll)


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
    monkeypatch.setattr(single_run_module, "read_metrics", lambda *_: records)
    text = load_text(config.data)
    result = train_and_test(replace(config, steps=1), text)
    assert result.balance == {key: 47.5 + at for at, key in enumerate(keys)}
    records.append(record(60, 121))
    again = train_and_test(replace(config, steps=1, output=config.output + "-odd"), text)
    mean = (2 * 25 * 47 + 60) / 51 + 0.5
    assert again.balance == {key: pytest.approx(mean + at) for at, key in enumerate(keys)}


def test_verdicts():
    def interval(low, high):
        return PairedDifference((low + high) / 2, 3, low, high)

    assert verdict(interval(-3, -1)) == "supported"
    assert verdict(interval(-3, 1)) == verdict(interval(-1, 3)) == verdict(None) == "not decided"
    assert verdict(interval(1, 3)) == "contradicted"
    similar = partial(verdict, low=-losses.MARGIN, high=losses.MARGIN)
    assert similar(interval(-0.004, 0.004)) == "supported"
    assert similar(interval(-0.004, 0.006)) == similar(None) == "not decided"
    assert similar(interval(0.01, 0.03)) == similar(interval(-0.03, -0.01)) == "contradicted"
    positive = partial(verdict, low=0, high=math.inf)
    assert positive(interval(1, 3)) == "supported" and positive(interval(-3, -1)) == "contradicted"
    change = PairedDifference(math.log(0.9), 3, math.log(0.8), 0.0)
    assert as_change(change) == "-10.00% [-20.00, +0.00]" and as_change(None) == ""
    table = markdown_table(["a", "b"], [[1, "x"], [2, ""]])
    assert table == "| a | b |\n| --- | --- |\n| 1 | x |\n| 2 |  |\n"


def snapshot(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name[0] != "."}


def test_a_study_trains_only_missing_runs(corpus, tmp_path, capsys):
    stored = comparison(corpus, tmp_path).main()
    runs = stored.by_arm()
    assert [(run["arm"], run["seed"]) for run in stored.runs] == [
        (arm, seed) for arm in ("moe", "dense") for seed in (1, 2)
    ]
    page = (tmp_path / "comparison.md").read_text()
    gap = runs[Arm("moe")].minus(runs[Arm("dense")])
    assert page in capsys.readouterr().out and "(two seeds, not decided). As a change" in page
    assert f"MoE - dense: {gap:+.4f}. As a change of the perplexity: {as_change(gap)}." in page
    assert "data.corpus=CORPUS" in page and "steps=3" in page and "--seeds 1 2\n" in page
    moe, dense = runs[Arm("moe")][2], runs[Arm("dense")][2]
    assert dense["balance"] == {} and moe["balance"]["cv_load"] > 0
    nll = sum(moe["sentence_nll"]) / sum(stored.settings["sentence_tokens"])
    assert nll == pytest.approx(moe["test_nll"], abs=1e-4)
    assert f"| 2 | {math.exp(moe['test_nll']):.2f} | {math.exp(dense['test_nll']):.2f} |" in page
    # Neither runs nor corpus are needed again.
    trained = snapshot(tmp_path / "moe-seed1")
    assert comparison(corpus, tmp_path).main().runs == stored.runs
    assert snapshot(tmp_path / "moe-seed1") == trained
    arguments = [str(CONFIG), "--report", "--output", str(tmp_path)]
    shutil.rmtree(tmp_path / "moe-seed1")
    assert compare.main(arguments).runs == stored.runs
    assert (tmp_path / "comparison.md").read_text() == page
    for change in ("steps=4", "data.vocab_size=20", "model.d_model=16"):
        with pytest.raises(ConfigError, match=f"must hold runs with .*{change.partition('=')[0]}"):
            comparison(corpus, tmp_path, change).main()
    for path in tmp_path.glob("*.json"):
        path.unlink()
    alone = comparison(corpus, tmp_path, seeds=[1])
    alone.arms = [Arm("moe")]
    with pytest.raises(ConfigError, match="must hold finished runs of both models .*, got none"):
        alone.main()


def test_a_diverged_run_does_not_stop_the_others(corpus, tmp_path, monkeypatch):
    calls = []

    def train(config, *arguments):
        calls.append(config.output)
        if "moe-seed1" in config.output:
            raise FloatingPointError("the loss of step 3 is not finite")
        return train_and_test(config, *arguments)

    monkeypatch.setattr(study_module, "train_and_test", train)
    with pytest.raises(FloatingPointError, match="moe with seed 1: the loss .*; the same"):
        comparison(corpus, tmp_path).main()
    assert len(calls) == 4
    stored = comparison(corpus, tmp_path).main()  # neither the diverged nor the finished runs
    assert len(calls) == 4 and len(stored.runs) == 3
    assert "These runs diverged: moe with seed 1." in (tmp_path / "comparison.md").read_text()


def test_compare_with_other_options(corpus, tmp_path, capsys):
    arguments = [str(CONFIG), *TINY, f"data.corpus={corpus}", "steps=3", "log.progress=false"]
    arguments += ["optimizer.experts=factored_adam", "--seeds", "1", "--output", str(tmp_path)]
    changes = ["--against", "optimizer.experts=adam", "optimizer.beta2=0.9"]
    stored = compare.main([*arguments, *changes])
    page = (tmp_path / "comparison.md").read_text()
    assert "| beta2=0.98, experts=factored_adam |" in page and "(one seed, not decided)" in page
    assert stored.settings["titles"][1] == "beta2=0.9, experts=adam"
    for arm in ("config", "against"):
        optimizer = read_config(tmp_path / f"{arm}-seed1" / "config.toml").optimizer
        assert (optimizer.experts, optimizer.beta2) == (
            ("factored_adam", 0.98) if arm == "config" else ("adam", 0.9)
        )
    first, second = stored.runs
    assert first["test_nll"] != second["test_nll"]
    assert second["options"] == {"optimizer.experts": "adam", "optimizer.beta2": 0.9}
    for change, message in (
        ("log.log_every=2", "must differ"),
        ("seed=5", "seed must"),
        ("data.vocab_size=20", "the same seed and data, got different data.vocab_size"),
        ("optimizer.beta2=0.8", "must hold runs"),
    ):
        with pytest.raises(ConfigError, match=message):
            compare.main([*arguments, "--against", change])
    with pytest.raises(ConfigError, match=r"--seeds must be distinct, got \[1, 1\]"):
        compare.main([*arguments, "--seeds", "1", "1"])


def test_quickstart_runs_again_without_training(corpus, tmp_path, capsys):
    arguments = [
        "--quick", "--output", str(tmp_path / "q"), f"data.corpus={corpus}", "data.vocab_size=45",
        "num_threads=1", "log.progress=false",
    ]  # fmt: skip
    results = quickstart.main(arguments)
    out = capsys.readouterr().out
    for part in (
        "MoE, 2 of 8 experts", "dense, one wide expert", "CV(Importance)", "CV(Load)",
        "max/mean load", "three most specialised experts",
    ):  # fmt: skip
        assert part in out
    assert out.count("highest gates:") == 3
    assert (tmp_path / "q" / "quickstart.png").read_bytes().startswith(b"\x89PNG")
    assert quickstart.main(arguments) == results
