"""The models of the paper's Tables 7 and 8: configuration files, sizes and operations."""

import json
import re

import pytest
import torch
from moe_lab.analysis.cluster import plan
from moe_lab.analysis.costs import cost, training_flops
from moe_lab.analysis.devices import DEVICES
from moe_lab.analysis.paper import PUBLISHED
from moe_lab.benchmarks.memory import peak_mib
from moe_lab.models import LanguageModel
from moe_lab.studies import paper_tables
from moe_lab.studies.entries import run as run_study
from moe_lab.training.config import config_from_dict, read_config
from tiny import ROOT


def on_meta(config):
    with torch.device("meta"):
        return LanguageModel(config.model, config.data.vocab_size)


@pytest.fixture(scope="module")
def configs():
    return {
        f"{folder}/{path.stem}": read_config(path)
        for folder in ("lm1b", "news", "small")
        for path in sorted((ROOT / "configs" / folder).glob("*.toml"))
    }


DROPOUT = {  # of App. C.1, C.2 and D; 0.1 for all other models, an assumption for News
    "lm1b/2xlstm-8192-1024": 0.25, "lm1b/moe-1024-h": 0.2, "lm1b/moe-4096-h": 0.2,
    "lm1b/moe-34m": 0.3, "lm1b/moe-143m": 0.4,
}  # fmt: skip
WITHOUT_RESIDUAL = ["lstm-512-512", "lstm-1024-512", "lstm-2048-512", "2xlstm-8192-1024"]


def test_every_row_has_a_file(configs):
    names = {published.config for published in PUBLISHED}
    assert {name for name in configs if not name.startswith("small/")} == names


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda row: row.config)
def test_files_are_as_the_paper_says(configs, published):
    """The sizes of the layers follow from the published numbers of parameters and operations."""
    name = published.config
    config = configs[name]
    model, moe = config.model, config.model.moe
    assert model.dropout == DROPOUT.get(name, 0.1)
    assert model.residual == (name.partition("/")[2] not in WITHOUT_RESIDUAL)
    assert "moe" not in model.layers or (
        (moe.gate, moe.w_importance, moe.w_load) == ("noisy_topk", 0.1, 0.1)
    )
    news = name.startswith("news/")
    batch = config.data.tokens_per_batch * config.optimizer.accumulate
    expected = (100_000, 2_500_000, 40_000) if news else (793_471, 300_000, 27_000)
    assert (config.data.vocab_size, batch, config.steps) == expected
    assert model.num_sampled == 8192
    assert (config.data.vocabulary == "") == news  # the vocabulary of News is unknown
    optimizer = config.optimizer
    assert (optimizer.warmup_steps, optimizer.hold_steps) == (1_000, 0)
    constants = optimizer.beta1, optimizer.beta2, optimizer.eps, optimizer.clip_norm
    assert (optimizer.learning_rate, *constants) == (1e-3, 0.9, 0.98, 1e-9, 0)
    factored = config.optimizer.experts == "factored_adam"
    assert factored == model.moe.recompute == (news and "moe" in model.layers)


def test_comments_say_what_a_model_takes_and_what_was_published(configs):
    for published in PUBLISHED:
        path = ROOT / "configs" / f"{published.config}.toml"
        needs, figures = path.read_text().splitlines()[:2]
        assert figures == f"# Published: {published}."
        number = "7" if published.table == "lm1b" else "8"
        weights, kept = re.fullmatch(
            rf"# {published.name} of Table {number}: one device needs ([0-9,]+) GB for weights, "
            r"gradients and moments, and ([0-9,]+) GB for activations\.",
            needs,
        ).groups()
        if "moe" in configs[published.config].model.layers:
            p = plan(configs[published.config], DEVICES["k40"], 1)
            assert kept == f"{p.activation_bytes / 1e9:,.0f}"
            assert weights == f"{(p.memory_bytes - p.activation_bytes) / 1e9:,.0f}"
        else:
            parameters = cost(on_meta(configs[published.config])).total_parameters
            assert weights == f"{16 * parameters / 1e9:,.0f}"


def test_every_model_is_built_without_memory(configs):
    """The weights of the largest model would take half a terabyte."""
    models = []
    assert not peak_mib(lambda: models.extend(map(on_meta, configs.values()))) > 100  # true for NaN
    assert all(p.is_meta for model in models for p in model.parameters())
    largest = models[list(configs).index("news/moe-131072-h")]
    assert sum(p.numel() for p in largest.parameters()) > 137e9


@pytest.fixture(scope="module")
def rows():
    return [paper_tables.count(published) for published in PUBLISHED]


def test_sizes_are_the_published_ones_to_the_printed_digit(rows):
    assert len(rows) == 23
    misses = {
        (row["table"], row["model"], column)
        for row in rows
        for column in ("ops", "parameters", "total")
        if not row[column]["match"]
    }
    assert misses == {("lm1b", "MoE-256", "ops"), ("lm1b", "MoE-34M", "total")}
    by_name = {(row["table"], row["model"]): row for row in rows}
    # 2 LSTMs of 8 · 512 · 512, 4 experts of 2 · 512 · 1024, a gate of 2 · 512 · 256
    ops = 2 * 8 * 512**2 + 4 * 2 * 512 * 1024 + 2 * 512 * 256
    assert by_name["lm1b", "MoE-256"]["ops"]["counted"] == pytest.approx(ops / 1e6)
    assert by_name["lm1b", "MoE-256"]["ops"]["deviation"] == pytest.approx(0.0508, abs=5e-5)
    assert by_name["lm1b", "MoE-34M"]["total"]["deviation"] == pytest.approx(-0.0603, abs=5e-5)
    # The gates of the LSTM cell have 4 · 512 · (512 + 512) weights, its projection 512 · 512.
    small = by_name["lm1b", "LSTM-512-512"]["parameters"]["counted"]
    assert small == pytest.approx((4 * 512 * 1024 + 512**2) / 1e6)


@pytest.mark.parametrize("vocab_size", [75_200, 109_400])
def test_news_vocabularies_that_give_the_printed_totals(configs, vocab_size):
    for published in PUBLISHED:
        if published.table == "news":
            config = configs[published.config]
            total = cost(on_meta(config)).total_parameters
            total += (vocab_size - config.data.vocab_size) * 1025
            assert f"{total / 1e9:.1f}" == f"{published.total:.1f}"


def test_flops_worked_by_hand():
    moe = {"num_experts": 8, "num_groups": 4, "k": 2, "hidden_sizes": [6]}
    model = {"d_model": 4, "layers": ["lstm", "moe", "ffn"], "moe": moe}
    model["ffn"] = {"hidden_sizes": [5]}
    config = config_from_dict({"model": model, "data": {"vocab_size": 10}})
    # LSTM 4 · 4 · (4 + 4). Gates 2 · 4 · (4 groups + 2 · 2 experts). Experts 4 · 2 · 4 · 6,
    # dense layer 2 · 4 · 5. Softmax 4 · 10 classes, or 4 · (3 sampled classes + the target).
    lstm, gates, experts = 128, 64, 192 + 40
    for num_sampled, softmax in ((0, 40), (3, 16)):
        config.model.num_sampled = num_sampled
        flops = training_flops(on_meta(config))
        assert flops.total == 6 * (lstm + gates + experts + softmax)
        assert flops.experts == 6 * experts
        assert flops.expert_share == experts / (lstm + gates + experts + softmax)
    config.model.moe.recompute = True
    assert training_flops(on_meta(config)) == flops


def test_the_command_writes_the_files_of_docs_from_any_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_study("paper-tables", ["--output", str(tmp_path)])
    out = capsys.readouterr().out
    assert (
        "Of 23 models, these agree to the printed digit:\nops 22, parameters 23, total 22." in out
    )
    assert out.count("| no (") == 2 and "\n2. The count 5.9397" in out
    for name in ("paper_tables.md", "paper_tables.json"):
        assert (tmp_path / name).read_text() == (ROOT / "docs" / "results" / name).read_text()
    report = json.loads((tmp_path / "paper_tables.json").read_text())
    assert len(report["language_models"]) == 23
    for row in report["translation"]:
        assert round(row["counted"]["ops"]) == row["published"]["ops"]
        assert round(row["counted"]["total"], 1) == row["published"]["total"]
