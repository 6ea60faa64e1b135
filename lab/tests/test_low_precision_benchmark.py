"""The benchmark of packed experts: random weights, work, results of every implementation, page."""

import json
import time
from functools import partial

import pytest
import torch
from moe_lab.benchmarks import cases, ggml, low_precision, measurement, roofline
from moe_lab.benchmarks.cases import run
from moe_lab.benchmarks.low_precision import Pass, Problem, draw_experts, problem_of
from moe_lab.benchmarks.random_codes import RandomWeight
from moe_lab.benchmarks.roofline import Work
from moe_lab.benchmarks.shapes import PACKED_FORMATS, PACKED_PEERS, Shape
from moe_lab.cli import exit_status
from tiny import assert_reports, shrink_models, shrink_probes

from moe_ext.formats import dequantize

pytestmark = pytest.mark.usefixtures("one_thread")
PASSES = {
    "decode T = 1": Pass(1, calls=5),
    "prefill": Pass(12),
    "forward + dX": Pass(12, backward=True),
}
NOT_INSTALLED = {project: ("not_a_package", "not-a-package") for project in ggml.PACKAGES}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Makes all models and the probes of the machine small."""
    sizes = {"hidden_size": 256, "intermediate_size": 256}
    small = shrink_models(monkeypatch, low_precision, **sizes)
    small["gpt_oss"] = small["gpt_oss"]._replace(intermediate_size=96)
    shrink_probes(monkeypatch)
    monkeypatch.setattr(roofline, "PEAK_SIZE", 64)


def make_problem(format, dtype=torch.float32, libraries=None):
    torch.manual_seed(0)
    return Problem("qwen3_moe", 4, format, dtype, PASSES, libraries or {})


@pytest.mark.parametrize("format", PACKED_FORMATS)
def test_random_weights_are_finite_and_have_the_variance_of_their_width(format):
    torch.manual_seed(0)
    packed, blocks = RandomWeight.draw(format, 2, 144, 512)
    weight = dequantize(*packed, format=format)
    assert weight.shape == (2, 144, 512) and weight.isfinite().all()
    # Scales have the factors 0.5 to 1.5, whose mean square is 1.08.
    assert 0.9 < weight.std() * 512**0.5 < 1.2
    assert abs(weight.mean()) < 0.12 * weight.std()
    gguf_name = {"mxfp4": "gguf_mxfp4"}.get(format, format)
    assert (blocks is None) == (not gguf_name.startswith("gguf"))
    if blocks is not None:
        assert torch.equal(dequantize(blocks, format=gguf_name), weight)


def test_calls_with_one_token_use_all_experts_in_turn():
    torch.manual_seed(0)
    calls = draw_experts(Shape(1, 7, 2, 1, 1), 8)
    assert [call.shape for call in calls] == [(1, 2)] * 8
    assert all(torch.cat(calls[at : at + 3]).unique().numel() == 6 for at in (0, 3))
    many = draw_experts(Shape(5, 7, 2, 1, 1), 3)
    assert [call.shape for call in many] == [(5, 2)] * 3 and not torch.equal(many[0], many[1])


def test_work_by_hand():
    problem = make_problem("gguf_q4_0")
    weights, used = 3 * 256 * 256, problem.experts_of["prefill"][0].unique().numel()
    assert problem.work("decode T = 1") == (5 * 2 * 2 * weights, 5 * 2 * weights * 18 / 32)
    assert problem.work("prefill") == (2 * 12 * 2 * weights, used * weights * 18 / 32)
    training, used = problem.work("forward + dX"), problem.used_experts
    assert training == (2 * 2 * 12 * 2 * weights, 2 * used * weights * 18 / 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", PACKED_FORMATS)
def test_float_implementations_have_our_results(format, dtype):
    problem = make_problem(format, dtype)
    for name, work in PASSES.items():
        base = problem.results("ours", name)
        assert [*base] == (["y", "dx"] if work.backward else ["y"])
        assert len(base["y"]) == work.calls and base["y"][0].norm() > 0.1
        for implementation in ("float-experts", "grouped_mm"):
            measurement.check(problem.results(implementation, name), base)


@pytest.mark.parametrize("implementation", PACKED_PEERS[3:])
@pytest.mark.parametrize("format", ggml.TYPES)
def test_ggml_has_our_results(format, implementation):
    libraries = ggml.find_libraries([])
    if implementation.removesuffix("-repacked") not in libraries:
        pytest.skip(f"needs {implementation}")
    problem = make_problem(format, libraries=libraries)
    try:
        problem.layer(implementation)
    except NotImplementedError as error:
        pytest.skip(f"{implementation}: {error}")
    for name in ("decode T = 1", "prefill"):
        base, actual = problem.results("ours", name), problem.results(implementation, name)
        measurement.check(actual, base, problem.tolerances[implementation])
    with pytest.raises(NotImplementedError, match="forward only"):
        problem.results(implementation, "forward + dX")


@pytest.mark.parametrize("format", PACKED_FORMATS)
def test_integer_arithmetic_is_near_to_our_results(format):
    problem = make_problem(format)
    if format in ("fp8", "nf4"):
        with pytest.raises(ValueError, match="arithmetic"):
            problem.results("integer", "prefill")
        return
    for name in ("decode T = 1", "prefill"):
        base, actual = problem.results("ours", name), problem.results("integer", name)
        measurement.check(actual, base, problem.tolerances["integer"])
        assert not torch.equal(actual["y"][0], base["y"][0])
    with pytest.raises(ValueError, match="arithmetic"):
        problem.results("integer", "forward + dX")


def test_the_faster_probe_is_the_peak():
    slow, fast = (
        roofline.Probe(partial(time.sleep, seconds), Work(flops, 0))
        for seconds, flops in ((0.02, 1), (0.01, 10**9))
    )
    assert roofline.faster([slow, fast]) is fast is roofline.faster([fast, slow])


def test_formats_need_multiples_of_their_blocks():
    assert problem_of("gpt_oss", "gguf_q4_k") == "256 and 96 must be multiples of 256"
    assert problem_of("gpt_oss", "mxfp4") == problem_of("olmoe", "gguf_q6_k") == ""


def test_page_plot_and_report(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(ggml, "PACKAGES", NOT_INSTALLED)
    arguments = "--models olmoe gpt_oss --formats mxfp4 gguf_q4_k fp8 --tokens 10 --decode 1 2"
    arguments += " --rounds 2 --seconds 0 --dtype float32 --output"
    assert run("low-precision", [*arguments.split(), str(tmp_path)]) == 0
    path = tmp_path / "low_precision.json"
    page = path.with_suffix(".md").read_text()
    problems = [("olmoe", "mxfp4"), ("olmoe", "gguf_q4_k"), ("olmoe", "fp8")]
    problems += [("gpt_oss", "mxfp4"), ("gpt_oss", "fp8")]
    passes = ["decode T = 1", "decode T = 2", "prefill", "forward + dX"]
    for model, format in problems:
        for name in passes:
            assert f"| {model} | 8 | {format} | {name} | " in page
    assert "; no ggml\n" in page
    lines = page.split("## Not timed\n\n")[1].splitlines()
    missing = ", ".join(PACKED_PEERS[3:])
    assert lines[-1] == "- gpt_oss, gguf_q4_k: 256 and 96 must be multiples of 256"
    assert f"- {missing}: fails: forward only (forward + dX)" in lines
    assert any(line.startswith(f"- {missing}: not installed: pip install") for line in lines)
    assert any(line.startswith(f"- {missing}: fails: ggml has no type for fp8 (") for line in lines)
    results = json.loads(path.read_text())["results"]
    assert [(result["model"], result["format"]) for result in results] == problems
    for result in results:
        assert list(result["limit_ms"]) == passes
        assert {"ours", "float-experts", "grouped_mm"} <= set(result["figures"])
        for figures in result["figures"]["ours"].values():
            assert figures["rounds"] == 2 and figures["gbytes"] > 0
    assert_reports("low-precision", path, capsys)


def test_times_and_bytes_are_those_of_one_call():
    problem = make_problem("gguf_q8_0")
    args = cases.parse("low-precision", ["--rounds", "2", "--seconds", "0"])
    more = {"memory": 1, "patience": 1, "device": "cpu", "long": 1}
    for name, value in more.items():
        setattr(args, name, value)

    def clock(function):
        function()
        return 0.01

    args.clock = clock
    (result,) = measurement.measure("q8", problem, [], args)
    result = low_precision.per_call(result, problem)
    figures = result["figures"]["ours"]
    assert figures["decode T = 1"]["ms"].median == pytest.approx(2)  # of five calls
    assert figures["decode T = 1"]["gbytes"] == pytest.approx(2 * 3 * 256 * 256 * 34 / 32 / 2e6)
    assert figures["prefill"]["ms"].median == pytest.approx(10)


def test_a_folder_without_ggml_is_refused(tmp_path, capsys):
    assert exit_status(lambda: run("low-precision", ["--ggml", str(tmp_path)])) == 2
    assert "--ggml must be folders with a libggml.so of llama.cpp" in capsys.readouterr().err
    (tmp_path / "libggml.so").write_text("no library")
    assert exit_status(lambda: run("low-precision", ["--ggml", str(tmp_path)])) == 2
    assert str(tmp_path) in capsys.readouterr().err
