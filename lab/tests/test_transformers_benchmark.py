"""The benchmark of transformers' experts: sizes, work, results of every implementation, page."""

import json
import warnings

import pytest
import torch

pytest.importorskip("transformers")

from moe_lab.benchmarks import roofline
from moe_lab.benchmarks import transformers_experts as benchmark
from moe_lab.benchmarks.measurement import Options
from moe_lab.benchmarks.measurement import check as check_results
from moe_lab.benchmarks.transformers_experts import MODELS, TASKS, Problem, experts_that_fit

pytest.importorskip("moe_ext.integrations.transformers")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def tiny(monkeypatch):
    """Makes all models and the probes of the machine small."""
    small = {
        name: model._replace(hidden_size=16, num_experts=8, intermediate_size=24, k=2)
        for name, model in MODELS.items()
    }
    monkeypatch.setattr(benchmark, "MODELS", small)
    for name, size in (("GEMM_SIZE", 64), ("STREAM_SIZE", 1)):
        monkeypatch.setattr(roofline, name, dict.fromkeys(("cpu", "cuda"), size))


def options(**changes):
    values = {"memory": 1.0, "patience": 10.0, "peers": list(benchmark.IMPLEMENTATIONS)}
    return Options([1], 2, 0.1, **(values | changes), long=0.5)


FAST = {("machine", "gemm"): 1e12, ("machine", "stream"): 1e11}


def test_experts_are_halved_until_they_fit():
    # An expert of Mixtral has 3 · 4096 · 14336 float32 weights: 0.656 GiB.
    assert experts_that_fit("mixtral", 5.3) == 8
    assert experts_that_fit("mixtral", 5.2) == 4
    assert experts_that_fit("mixtral", 1.4) == 2
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
    for task, each in TASKS.items():
        expected = problem.run(task, benchmark.OURS)
        assert len(expected["y"]) == each.steps
        assert len(expected) == (5 + biases if each.backward else 1)
        for implementation in benchmark.IMPLEMENTATIONS:
            check_results(problem.run(task, implementation), expected)
    for (recomputed, again), saved in zip(
        problem.run("recompute", benchmark.OURS).items(),
        problem.run("training", benchmark.OURS).values(),
        strict=True,
    ):
        assert all(map(torch.equal, again, saved)), recomputed


def test_implementations_are_left_out_for_a_reason(tiny, monkeypatch):
    problem = Problem("mixtral", 4, torch.float32, tokens=8)
    run = Problem.run

    def run_wrong(self, task, implementation):
        found = run(self, task, implementation)
        if implementation == "grouped_mm" and task == "decode, T = 8":
            raise RuntimeError("no group\nat line 7")
        return found | {"y": [2 * y for y in found["y"]]} if implementation == "eager" else found

    monkeypatch.setattr(Problem, "run", run_wrong)
    copies = 4 * 3 * 16 * 24 * 2  # of a token's two experts
    few = options(memory=copies / 2**30, peers=["eager", "batched_mm", "grouped_mm"])
    chosen = benchmark.candidates(problem, FAST, few)
    assert {task for name, task in chosen.functions if name == "ours"} == set(TASKS)
    assert {task for name, task in chosen.functions if name == "batched_mm"} == {"decode, T = 1"}
    assert chosen.remarks["batched_mm", "prefill"] == "would need 0.0 GiB"
    assert chosen.remarks["eager", "prefill"].startswith("WRONG: y differs from moe_ext by")
    assert chosen.remarks["grouped_mm", "decode, T = 8"] == "fails: no group"
    assert chosen.functions.keys() == chosen.seconds.keys() == chosen.peak_mib.keys()
    slow = FAST | {("machine", "stream"): 1e2}
    chosen = benchmark.candidates(problem, slow, options(peers=["eager"]))
    # Four experts, and four times 4 experts of 4608 bytes: 2949 seconds at 100 bytes/s.
    used = problem.used_experts
    expected = f"would take {4 * used * 4 * 4608 / 100:.0f} s more"
    assert chosen.remarks["eager", "training"] == expected
    assert ("eager", "training") not in chosen.functions


def test_page_plot_and_report(tiny, capsys, tmp_path):
    arguments = ["--models", "olmoe", "mixtral", "--tokens", "10", "--rounds", "2"]
    arguments += ["--weights", "2e-5", "--dtype", "float32", "--output", str(tmp_path)]
    assert benchmark.main(arguments) == 0
    page = (tmp_path / "transformers_experts.md").read_text()
    assert page in capsys.readouterr().out
    # An expert has 4608 bytes: four of eight fit into 2e-5 GiB.
    for name in ("olmoe", "mixtral"):
        for task in TASKS:
            assert f"| {name} | 4 of 8 | {task} | " in page
            assert f"| {name} | swiglu | {task} | " in page  # peak memory
    assert "| prefill | 5 |" in page and "| decode, T = 8 | 4 |" in page
    assert "eager | batched_mm | grouped_mm | best / moe_ext |" in page
    assert "Warnings" not in page and "Not timed" not in page
    assert (tmp_path / "transformers_experts.png").read_bytes().startswith(b"\x89PNG")
    path = tmp_path / "transformers_experts.json"
    results = json.loads(path.read_text())["results"]
    assert [result["name"] for result in results] == ["olmoe", "mixtral"]
    for result in results:
        assert set(result["figures"]) == {"ours", *benchmark.IMPLEMENTATIONS}
        assert list(result["limit_ms"]) == list(TASKS)
        for found in result["figures"].values():
            assert list(found) == list(TASKS)
            assert all(
                figures["ms"][0] > 0 and figures["rounds"] == 2 for figures in found.values()
            )
        # The gradients of all weights, 4 · 4608 bytes, are a part of the peak.
        assert result["peak_mib"]["ours"]["training"] > 4 * 4608 / 2**20
        assert result["peak_mib"]["ours"]["prefill"] < result["peak_mib"]["ours"]["training"]
    assert benchmark.main(["--report", str(path)]) == 0
    assert capsys.readouterr().out == page
    assert benchmark.main(["--report", str(path), str(path)]) == 0
    assert "medians over up to 2 runs" in capsys.readouterr().out


def test_wrong_results_and_warnings_are_reported(tiny, monkeypatch, capsys):
    run = Problem.run

    def run_wrong(self, task, implementation):
        found = run(self, task, implementation)
        if implementation == "grouped_mm":
            return found | {"y": [y + 1 for y in found["y"]]}
        if implementation == benchmark.OURS:
            warnings.warn("uses grouped_mm: no such activation", stacklevel=2)
        return found

    monkeypatch.setattr(Problem, "run", run_wrong)
    arguments = ["--models", "olmoe", "--tokens", "4", "--rounds", "2", "--dtype", "float32"]
    assert benchmark.main([*arguments, "--implementations", "grouped_mm"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: olmoe, float32: grouped_mm: WRONG: y differs")
    assert captured.out.endswith("## Warnings\n\n- uses grouped_mm: no such activation\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "mistral"], "--models: invalid choice: 'mistral'"),
        (["--dtype", "float16"], "--dtype: invalid choice: 'float16'"),
        (["--implementations", "sonicmoe"], "--implementations: invalid choice: 'sonicmoe'"),
        (["--rounds", "1"], "--rounds: must be a whole number of at least 2, got '1'"),
        (["--memory", "much"], "--memory: must be a positive number, got 'much'"),
        (
            ["--models", "mixtral", "--weights", "1"],
            "--weights must hold 2 experts of mixtral, which take 1.31 GiB, got 1 GiB",
        ),
    ],
)
def test_invalid_options(arguments, message, capsys):
    with pytest.raises(SystemExit):
        benchmark.main(arguments)
    assert message in capsys.readouterr().err
