"""The study of the number of experts at equal operations."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from moe_lab.analysis import cost
from moe_lab.errors import ConfigError
from moe_lab.experiments.arms import Arm
from moe_lab.studies import _capacity as page_of
from moe_lab.studies import capacity as study
from moe_lab.training.model import make_model
from tiny import rebuilds

pytestmark = pytest.mark.usefixtures("one_thread")


def run(corpus, tmp_path, *options):
    places = [f"--runs={tmp_path / 'runs'}", f"--output={tmp_path / 'results'}", "--seeds=1"]
    small = ["steps=4", "data.vocab_size=40", "data.tokens_per_batch=200", "model.d_model=8"]
    return study.main([f"data.corpus={corpus}", *small, "log.progress=false", *places, *options])


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
    settings = data["settings"]
    assert settings["test_bytes"] == len((corpus / "test.txt").read_bytes())
    nats = results.by_arm()[Arm("moe-16")][1]["test_nll"] * settings["test_tokens"]
    assert f"| {math.exp(nats / settings['test_bytes']):.4f} |" in text
    command = "moe-lab study capacity --text sources steps=4 data.vocab_size=40 "
    command += "data.tokens_per_batch=200 model.d_model=8"
    assert f"{command}\n" in text and f"{command} --seeds 1 --arms 'moe-4 x4' 'moe-16 x4'\n" in text
    assert rebuilds(study.main, "capacity_sources", tmp_path / "results")
    for more, message in (
        (["steps=5", "--seeds=2"], "capacity_sources.json must hold runs with"),
        (["data.kind=words"], 'data.kind must be "bpe" or "unigram"'),
        (["--text", "languages", "data.corpus=sources"], "data.corpus must be given for --text la"),
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
        config = page_of.Capacity(options).config(Arm(model), ["data.corpus=x"])
        assert config.model.d_model == 96 and config.model.dropout == 0
        assert config.model.num_sampled == 0 and config.data.kind == "bpe"
        with torch.device("meta"):
            ops[model] = cost(make_model(config.model, 40)).ops_per_timestep
    assert ops.pop("lstm-384-96") == 1.125 * ops["4xlstm"]
    assert 1.9 < ops.pop(study.LARGE) / ops["moe-64"] < 2.2
    assert max(ops.values()) < 1.05 * min(ops.values())
