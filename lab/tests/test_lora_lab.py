"""The benchmark and the study of adapters (LoRA)."""

import json

import pytest
import torch
from moe_lab.benchmarks import cases, lora, measurement, tables, transformers_experts
from moe_lab.benchmarks.lora import FROZEN, MOE_EXT, PEER, PEFT, Problem
from moe_lab.experiments.claims import NOT_DECIDED, as_change
from moe_lab.experiments.runs import ArmRuns, number_of
from moe_lab.studies import lora as study
from moe_lab.studies.entries import run as run_study
from tiny import ROOT, rebuilds, shrink_models, shrink_probes

pytestmark = pytest.mark.usefixtures("one_thread")


# The benchmark


@pytest.fixture
def tiny(monkeypatch):
    """Makes all models and the probes of the machine small."""
    pytest.importorskip("transformers")
    pytest.importorskip("moe_ext.integrations.peft")
    modules = (transformers_experts, lora)
    shrink_models(monkeypatch, *modules, hidden_size=16, intermediate_size=24)
    shrink_probes(monkeypatch)


def test_work_and_memory_by_hand(tiny):
    problem = Problem(8, torch.float32, [3, 5], rank=2)
    assert problem.passes == {"3 rows": 12, "5 rows": 20}
    weights, thin = 3 * 16 * 24, 2 * (16 + 48 + 24 + 16)
    assert sum(weight.numel() for weight in problem.own) == 8 * thin
    work = problem.work("5 rows")
    assert work.flops == 2 * 40 * (2 * weights + 3 * thin)
    assert work.bytes == 4 * 2 * 8 * (weights + thin)
    paper = 40 * (48 + 16) + 2 * 20 * 16 + 8 * thin
    assert problem.paper_mib("5 rows") == 4 * paper / 2**20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_implementations_have_our_results(tiny, dtype):
    torch.manual_seed(0)
    problem = Problem(8, dtype, [4], rank=2)
    base, frozen, *peers = (
        problem.results(name, "4 rows") for name in (MOE_EXT, FROZEN, PEFT, PEER)
    )
    assert len(base) == 3 + 4 and len(frozen) == 3
    for peer in peers:
        measurement.check(peer, base)
    with pytest.raises(measurement.WrongResult, match="y differs"):  # the adapters are in use
        measurement.check(frozen, base)


def test_run(tiny, tmp_path, capsys):
    options = ["--rows", "2", "3", "--rank=2", "--rounds=2", f"--output={tmp_path}"]
    assert cases.run("lora", options) == 0
    page = (tmp_path / "lora_speed.md").read_text()
    assert "with adapters of rank 2." in page
    assert "moe-lab benchmark lora --rows 2 3 --rank=2" in page
    (result,) = json.loads((tmp_path / "lora_speed.json").read_text())["results"]
    assert result["peak_mib"].keys() == result["figures"].keys() == {MOE_EXT, FROZEN, PEFT, PEER}
    before = (tmp_path / "lora_speed.md").read_bytes()
    report = [f"--report={tmp_path / 'lora_speed.json'}", f"--output={tmp_path / 'again'}"]
    assert cases.run("lora", report) == 0
    assert (tmp_path / "again" / "lora_speed.md").read_bytes() == before


def test_a_plot_of_one_pass():
    record = json.loads((ROOT / "docs" / "results" / "lora_speed.json").read_text())
    result = measurement.results_of(record)[0]
    result.limit_ms = dict(list(result.limit_ms.items())[:1])
    assert len(tables.plot([result], "machine", lambda result: result.name).axes) == 1


# The study


def test_the_study_is_reported(corpus, tmp_path):
    places = [f"--runs={tmp_path / 'runs'}", f"--output={tmp_path / 'results'}"]
    small = ["steps=2", "data.kind=words", "data.vocab_size=45", "data.tokens_per_batch=40"]
    sizes = ["model.d_model=32", "model.moe.hidden_sizes=[32]", "model.moe.num_experts=4"]
    quiet = ["log.tensorboard=false", "log.progress=false"]
    target = tmp_path / "target.txt"
    target.write_text("".join(f"{i} a new sentence of number {i % 7}\n" for i in range(400)))
    options = [f"--target={target}", "--lora-steps=3", "--seeds=1"]
    arguments = [f"data.corpus={corpus}", *small, *sizes, *quiet, *places, *options]
    (run,) = run_study("lora", arguments).runs
    assert run["tuned"].keys() == study.FORMATS.keys()
    assert len({run["before"], *run["tuned"].values()}) == 4
    assert run["tuned"]["int4"] == pytest.approx(run["tuned"]["float32"], rel=0.05)
    assert run["trained"] == 4 * 16 * (32 + 32 + 32 + 32)
    page = (tmp_path / "results" / "lora.md").read_text()
    gap = ArmRuns({1: run}).gap(number_of("tuned", "int4"), number_of("tuned", "float32"))
    row = f"| int4 against float32, at most 1% above | {as_change(gap)} | {NOT_DECIDED} |"
    assert row in page and "--lora-steps 3" in page
    assert rebuilds("lora", "lora", tmp_path / "results")
