"""Studies of trained and of finished models: their runs, their stores and their pages."""

import json
import math
import shutil

import pytest
import torch
from moe_lab.benchmarks.cases import run as run_benchmark
from moe_lab.commands import train
from moe_lab.errors import ConfigError
from moe_lab.experiments.arms import Arm
from moe_lab.experiments.claims import as_change, verdict
from moe_lab.studies import balanced, efficiency, losses, routers, specialisation
from moe_lab.studies.entries import run as run_study
from moe_lab.training.config import read_config
from tiny import CONFIG, ROOT, TINY, rebuilds, status_and_error

from moe_ext import BalancedGate, MoE, batchwise_masks

pytestmark = pytest.mark.usefixtures("one_thread")

RESULTS = ROOT / "docs" / "results"
PAGES = {  # of the published pages that are made of a store: the study and its options
    "balanced": ("balanced",),
    "capacity_prose": ("capacity", "--text", "prose"),
    "capacity_sources": ("capacity",),
    "efficiency": ("efficiency",),
    "facts": ("facts",),
    "fine_tuning": ("fine-tuning",),
    "lora": ("lora",),
    "losses": ("losses",),
    "multilingual_captions": ("multilingual",),
    "packed": ("packed",),
    "routers": ("routers",),
    "specialisation": ("specialisation",),
    "translation_captions_en-de": ("translation",),
    "translation_captions_en-fr": ("translation", "--pair", "en-fr"),
}
BENCHMARKS = {  # of the published pages that are made of measurements: the case and the page
    "lora": "lora_speed",
    "low-precision": "low_precision",
    "packed-models": "packed_models",
    "transformers-experts": "transformers_experts",
}


@pytest.mark.parametrize("name", PAGES)
def test_published_pages_are_made_of_their_data(name, tmp_path):
    """The text is made again, byte by byte; the plot depends on the version of matplotlib."""
    study, *options = PAGES[name]
    shutil.copy(RESULTS / f"{name}.json", tmp_path)
    run_study(study, ["--report", *options, f"--output={tmp_path}"])
    for suffix in ("md", "json"):
        file = f"{name}.{suffix}"
        assert (tmp_path / file).read_text() == (RESULTS / file).read_text()
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("case, name", BENCHMARKS.items())
def test_published_benchmarks_are_made_of_their_data(case, name, tmp_path):
    """The page has the command of the run and what was written about its figures."""
    data = RESULTS / f"{name}.json"
    assert run_benchmark(case, ["--report", str(data), f"--output={tmp_path}"]) == 0
    for file in (f"{name}.md", data.name):
        assert (tmp_path / file).read_text() == (RESULTS / file).read_text()
    assert json.loads(data.read_text())["command"].startswith(f"moe-lab benchmark {case} ")


def test_every_store_of_the_results_is_checked():
    files = {file.stem: json.loads(file.read_text()) for file in RESULTS.glob("*.json")}
    stores = {
        name
        for name, data in files.items()
        if isinstance(data, dict) and {"settings", "runs"} <= data.keys()
    }
    assert stores == PAGES.keys() - {"efficiency"}


def tiny_study(study, corpus, tmp_path, *options):
    """Runs a study with two training steps for each model."""
    places = [f"--runs={tmp_path / 'runs'}", f"--output={tmp_path / 'results'}"]
    small = ["steps=2", "data.vocab_size=45", "data.tokens_per_batch=40", "model.num_sampled=9"]
    quiet = ["model.d_model=8", "log.tensorboard=false", "log.progress=false"]
    return run_study(study, [f"data.corpus={corpus}", *small, *quiet, *places, *options])


def test_losses_are_reported(corpus, tmp_path):
    arms = ("--arms", "0,0", "0.1,0.1", "0.01,0.01")
    results = tiny_study("losses", corpus, tmp_path, "--seeds=1", *arms).by_arm()
    page = (tmp_path / "results" / "losses.md").read_text()
    gap = results[Arm("0.1,0.1")].minus(results[Arm("0,0")])
    assert f"| 0.1,0.1 against 0,0 | {as_change(gap)} | {verdict(gap)} |" in page
    for arm in results:
        moe = read_config(tmp_path / "runs" / f"{arm}-seed1" / "config.toml").model.moe
        assert str(arm) == f"{moe.w_importance:g},{moe.w_load:g}"
    runs = json.loads((tmp_path / "results" / "losses.json").read_text())["runs"]
    assert all(run["balance"].keys() == losses.COLUMNS.keys() for run in runs)
    assert "moe-lab study losses data.corpus=CORPUS steps=2 data.vocab_size=45 " in page
    assert rebuilds("losses", "losses", tmp_path / "results")


def test_packed_formats_are_reported(corpus, tmp_path):
    """A format with smaller errors costs less; codes and scales count as bits."""
    sizes = ("model.d_model=128", "model.moe.hidden_sizes=[128]", "model.moe.num_experts=4")
    (run,) = tiny_study("packed", corpus, tmp_path, *sizes, "--seeds=1").runs
    formats = run["formats"]
    assert formats["nf4"]["bits"] == 4.5 and formats["int8, a scale for each row"]["bits"] == 8.25
    assert 0.003 < formats["gguf_q8_0"]["error"] < 0.01 < formats["mxfp4"]["error"] < 0.2
    assert all(f["nll"] == pytest.approx(run["test_nll"], rel=1e-2) for f in formats.values())
    assert formats["mxfp4"]["nll"] != run["test_nll"]
    assert rebuilds("packed", "packed", tmp_path / "results")


def test_routers_are_reported(corpus, tmp_path, capsys):
    tiny_study("routers", corpus, tmp_path, "--seeds=1", "--arms", "switch rate 0.004")
    assert "nothing to report yet" in capsys.readouterr().out
    results = tiny_study("routers", corpus, tmp_path, "--seeds=1").by_arm()
    page = (tmp_path / "results" / "routers.md").read_text()
    for name in ("switch", "bias", "balanced"):
        gap = results[Arm(name)].minus(results[Arm("noisy")])
        assert f"| {name} against noisy | {as_change(gap)} | {verdict(gap)} |" in page
    assert "expert_choice against" not in page  # it is not a language model
    busiest = {str(arm): routers.busiest(runs[1]) for arm, runs in results.items()}
    assert 1 <= busiest["balanced"] < 1.2 < busiest["noisy"]
    configs = {
        str(arm): read_config(tmp_path / f"runs/{str(arm).replace(' ', '-')}-seed1/config.toml")
        for arm in results
    }
    trial = configs.pop("switch rate 0.004")
    assert {name: config.model.moe.gate for name, config in configs.items()} == {
        "noisy": "noisy_topk", "switch": "topk", "bias": "topk", "balanced": "balanced",
        "expert_choice": "expert_choice",
    }  # fmt: skip
    assert trial.optimizer.learning_rate == 4e-3
    assert trial.model.moe == configs["switch"].model.moe
    assert "with other learning rates" in page and "--seeds 1 --arms 'switch rate 0.004'\n" in page
    assert rebuilds("routers", "routers", tmp_path / "results")


def test_balanced_gating_is_checked_and_reported(corpus, tmp_path, capsys):
    places = ["--output", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]
    arguments = [
        *TINY, f"data.corpus={corpus}", "steps=6", "log.eval_every=3", "log.progress=false",
        *places,
    ]  # fmt: skip
    stored = run_study("balanced", arguments)
    (run,) = stored.runs
    assert run["checked_batches"] == 6 and [r["step"] for r in run["dev"]] == [3, 6]
    last = run["dev"][-1]
    assert run["final"] == {
        "difference": last["perplexity"] / last["perplexity_batchwise"] - 1,
        **{key: value for key, value in run["train"][-1].items() if key != "step"},
    }
    page = (tmp_path / "results" / "balanced.md").read_text()
    assert page in capsys.readouterr().out and "in all of the 6 training batches" in page
    assert "moe-lab study balanced data.corpus=CORPUS steps=6 " in page
    assert rebuilds("balanced", "balanced", tmp_path / "results")
    assert run_study("balanced", arguments).runs == [run]
    with pytest.raises(ConfigError, match=r"model.layers must .*got \[.lstm.\]"):
        run_study("balanced", [*arguments, 'model.layers=["lstm"]'])


def test_an_unequal_load_stops_the_run():
    check = balanced.EqualLoads(k=1, num_experts=3)
    layer = MoE(4, 3, 1, gate=BalancedGate(4, 3, 1))
    layer.register_forward_hook(check)
    layer(torch.randn(6, 4))
    with batchwise_masks(layer):
        layer.eval()(torch.randn(6, 4))
    assert check.num_batches == 1
    _, aux = layer(torch.randn(6, 4))
    layer.train()
    uneven = aux._replace(tokens_per_expert=torch.tensor([2, 1, 3]))
    with pytest.raises(RuntimeError, match=r"every expert must .*got \[2, 1, 3\]"):
        check(layer, (), (None, uneven))


def test_efficiency_compares_equal_operations(tmp_path):
    options = ["--width=8", "--tokens", "64", "--rounds=2", f"--output={tmp_path}"]
    stored_rows = run_study("efficiency", options)["rows"]
    rows = [efficiency.Row(**row) for row in stored_rows]
    steps = {row.name: row for row in rows if row.part == "training step"}
    expected = {*efficiency.DENSE, *efficiency.MIXTURES}
    assert steps.keys() == {*expected, efficiency.PEAK}
    assert steps["moe-256-h"].rows_per_expert == 1 and steps["moe-4"].rows_per_expert == 64
    assert all(row.gflops > 0 and row.low <= row.median <= row.high for row in rows)
    layer = [row.rows_per_expert for row in rows if row.part == "layer"]
    assert layer == [0, 2048, 512, 128, 32, 8]
    by_itself, at_once = (row for row in rows if row.part == "time steps")
    assert (by_itself.rows_per_expert, at_once.rows_per_expert) == (16, 320)
    page = (tmp_path / "efficiency.md").read_text()
    assert (
        "Claim: with at least 64 rows" in page
        and "The slowest mixture is moe-4 with 64 words" in page
    )
    assert rebuilds("efficiency", "efficiency", tmp_path)


def test_kneser_ney_on_shares_of_the_text(corpus, tmp_path, capsys):
    options = [CONFIG, *TINY, f"data.corpus={corpus}", "--output", tmp_path]
    shares = [*options, "--order", 3, "--shares", 0.25, 1]
    report = run_study("kneser-ney", [str(option) for option in shares])
    part, whole = report["models"]
    assert (part["train_sentences"], whole["train_sentences"]) == (75, 300)
    for model in (part, whole):
        assert 1 < model["test_perplexity"] < report["vocabulary"]
        assert len(model["num_ngrams"]) == len(model["discounts"]) == 3
        nll = sum(model["test_sentence_nll"]) / report["test_tokens"]
        assert math.exp(nll) == pytest.approx(model["test_perplexity"])
    assert sum(report["test_sentence_tokens"]) == report["test_tokens"]
    assert json.loads((tmp_path / "kneser_ney.json").read_text()) == report
    table = (tmp_path / "kneser_ney.md").read_text()
    assert "3-gram models (modified, three discounts" in table and table in capsys.readouterr().out
    one_discount = [*options, "--discounts", 1]
    report = run_study("kneser-ney", [str(option) for option in one_discount])
    (model,) = report["models"]
    assert report["order"] == 5 and all(len(set(d)) == 1 for d in model["discounts"])


def test_specialisation_of_two_runs(run, corpus, tmp_path, capsys, monkeypatch):
    options = [*TINY, f"data.corpus={corpus}", f"output={tmp_path / 'second'}", "steps=8"]
    train.main([str(CONFIG), *options, "seed=2", "log.progress=false"])
    arguments = [
        run, tmp_path / "second", "--part", "all", "--positions", 600, "--permutations", 20,
        "--output", tmp_path / "results",
    ]  # fmt: skip
    arguments = [str(argument) for argument in arguments]
    stored = run_study("specialisation", arguments)
    page = (tmp_path / "results" / "specialisation.md").read_text()
    assert page in capsys.readouterr().out
    assert (tmp_path / "results" / "specialisation.png").read_bytes().startswith(b"\x89PNG")
    claims = json.loads((tmp_path / "results" / "specialisation.json").read_text())["claims"]
    assert len(claims) == 3 * 4 and page.count("| experts specialise |") == 6
    for entry in stored.runs:
        assert [e["how"] for e in entry["table"]] == [*["most specialised"] * 3, "drawn at random"]
        assert len({e["expert"] for e in entry["table"]}) == 4
        for gate in ("trained", "untrained"):
            assert list(entry[gate]) == ["current word", "previous word", "word class"]
        assert entry["trained"] != entry["untrained"]
    # The difference in a claim is the mean of the differences of the runs.
    gaps = [r["trained"]["word class"]["purity"] - r["untrained"]["word class"]["purity"]
            for r in stored.runs]  # fmt: skip
    (claim,) = [c for c in claims if "purity of the word class, against a random" in
                c["compared"]]  # fmt: skip
    assert claim["difference"]["mean"] == pytest.approx(sum(gaps) / 2)

    assert rebuilds("specialisation", "specialisation", tmp_path / "results")
    # A second call reads the stored measurements. Other permutations are refused.
    monkeypatch.setattr(specialisation, "measure", None)
    assert run_study("specialisation", arguments).runs == stored.runs
    with pytest.raises(ConfigError, match="must hold runs with {'permutations': 21}"):
        run_study("specialisation", [*arguments, "--permutations", "21"])


def test_specialisation_rejects_arguments(run, corpus, tmp_path, capsys):
    second = tmp_path / "other"
    options = [*TINY, f"data.corpus={corpus}", f"output={second}", "steps=1", "model.moe.k=1"]
    train.main([str(CONFIG), *options, "log.progress=false"])
    for arguments, message in (
        ([run, second], "must differ from the first run only in its seed, but ['steps', 'model."),
        ([run, run], "distinct seeds, got [1, 1]"),
        ([run, "--layer", "1"], "layer must"),
        ([], "the folder of a run must be given, or --report instead"),
        ([run, "--report"], "the folder of a run must be given, or --report instead"),
    ):
        arguments += ["--output", tmp_path / "results"]
        outcome = status_and_error(capsys, "specialisation", *arguments)
        assert outcome[0] == 2 and message in outcome[1] and outcome[1].count("\n") == 1
