"""The benchmark of transformers' experts: sizes, work, results of every implementation, page."""

import json
import sys
import warnings

import pytest
import torch

pytest.importorskip("transformers")

from moe_lab.benchmarks import measurement
from moe_lab.benchmarks import transformers_experts as benchmark
from moe_lab.benchmarks.cases import run
from moe_lab.benchmarks.shapes import IMPLEMENTATIONS, MODELS, experts_that_fit
from moe_lab.benchmarks.transformers_experts import TASKS, Problem
from moe_lab.cli import exit_status
from tiny import assert_reports, shrink_models, shrink_probes

pytest.importorskip("moe_ext.integrations.transformers")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def tiny(monkeypatch):
    """Makes all models and the probes of the machine small."""
    shrink_models(monkeypatch, benchmark, hidden_size=16, intermediate_size=24)
    shrink_probes(monkeypatch)


def test_experts_are_halved_until_they_fit():
    # An expert of Mixtral has 3 · 4096 · 14336 float32 weights: 0.656 GiB.
    assert [experts_that_fit("mixtral", gib) for gib in (5.3, 5.2, 1.4)] == [8, 4, 2]
    assert {name: experts_that_fit(name, 3.0) for name in MODELS} == {
        "mixtral": 4, "qwen3_moe": 128, "olmoe": 64, "deepseek_v3": 16, "gpt_oss": 32,
    }  # fmt: skip


def test_work_by_hand(tiny):
    problem = Problem("olmoe", 4, torch.float32, tokens=6)
    (step,) = problem.steps["training"]
    used, weights = step.expert_index.unique().numel(), 3 * 16 * 24
    prefill, training, recompute = map(problem.work, ("prefill", "training", "recompute"))
    assert prefill == (2 * 12 * weights, 4 * (2 * 6 * 16 + used * weights))
    assert training.flops == 3 * prefill.flops
    # The first GEMM has two thirds of the weights.
    assert recompute.flops == training.flops + 2 * 12 * weights * 2 / 3
    assert recompute.bytes == training.bytes + 4 * (6 * 16 + used * weights * 2 / 3)
    # A token of a decode pass uses two experts.
    decode = problem.work("decode, T = 1")
    assert decode == (10 * 2 * 2 * weights, 10 * 4 * (2 * 16 + 2 * weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_implementations_have_our_results(tiny, name, dtype):
    torch.manual_seed(0)
    problem = Problem(name, 8, dtype, tokens=12)
    biases = 2 * (name == "gpt_oss")
    base = {task: problem.results("ours", task) for task in TASKS}
    for task, task_options in TASKS.items():
        assert len(base[task]["y"]) == task_options.steps
        assert len(base[task]) == (5 + biases if task_options.backward else 1)
        for implementation in IMPLEMENTATIONS:
            measurement.check(problem.results(implementation, task), base[task])
    for recomputed, again in base["recompute"].items():
        assert all(map(torch.equal, again, base["training"][recomputed])), recomputed


def test_extra_costs_by_hand(tiny):
    problem = Problem("mixtral", 4, torch.float32, tokens=8)
    expert = 4 * 3 * 16 * 24  # bytes
    assert problem.extra("batched_mm", "decode, T = 1") == (2 * expert, 0, 0)
    assert problem.extra("batched_mm", "training") == (2 * 8 * 2 * expert, 0, 0)  # and gradients
    assert problem.extra("eager", "prefill") == problem.extra("grouped_mm", "training") == (0, 0, 0)
    # For each used expert, four times the gradient of all 4 experts.
    moved = 4 * problem.used_experts * 4 * expert
    assert problem.extra("eager", "training") == (0, 0, moved)


def test_page_plot_and_report(tiny, capsys, tmp_path):
    arguments = "--models olmoe mixtral --tokens 10 --rounds 2 --weights 2e-5 --dtype float32"
    assert run("transformers-experts", [*arguments.split(), "--output", str(tmp_path)]) == 0
    path = tmp_path / "transformers_experts.json"
    page = path.with_suffix(".md").read_text()
    # An expert has 4608 bytes: four of eight fit into 2e-5 GiB.
    for name in ("olmoe", "mixtral"):
        for task in TASKS:
            assert f"| {name} | 4 of 8 | {task} | " in page
            assert f"| {name} | swiglu | {task} | " in page  # peak memory
    assert "| prefill | 5 |" in page and "| decode, T = 8 | 4 |" in page
    assert "eager | batched_mm | grouped_mm | best / moe_ext |" in page
    assert "Warnings" not in page and "Not timed" not in page
    results = json.loads(path.read_text())["results"]
    assert [result["name"] for result in results] == ["olmoe", "mixtral"]
    for result in results:
        assert set(result["figures"]) == {"ours", *IMPLEMENTATIONS}
        assert list(result["limit_ms"]) == list(TASKS)
        for by_task in result["figures"].values():
            assert set(by_task) == set(TASKS)
            assert all(f["ms"][0] > 0 and f["rounds"] == 2 for f in by_task.values())
        # The gradients of all weights, 4 · 4608 bytes, are a part of the peak.
        assert result["peak_mib"]["ours"]["training"] > 4 * 4608 / 2**20
        assert result["peak_mib"]["ours"]["prefill"] < result["peak_mib"]["ours"]["training"]
    assert_reports("transformers-experts", path, capsys)


def test_warnings_are_reported(tiny, monkeypatch, capsys):
    def warns(self, implementation, task):
        warnings.warn("uses grouped_mm: no such activation", stacklevel=2)
        return results(self, implementation, task)

    results = Problem.results
    monkeypatch.setattr(Problem, "results", warns)
    arguments = "--models olmoe --tokens 4 --rounds 2 --dtype float32 --implementations grouped_mm"
    assert run("transformers-experts", arguments.split()) == 0
    out = capsys.readouterr().out
    assert out.endswith("## Warnings\n\n- uses grouped_mm: no such activation\n")


def test_a_missing_package_is_one_error(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "moe_ext.integrations.transformers", None)
    assert exit_status(lambda: run("transformers-experts", [])) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --implementations: transformers must be installed (pip install")
