"""The benchmark of whole packed models: the file, results of every implementation, work, page."""

import json

import pytest
import torch
from moe_lab.benchmarks import llama, measurement, packed_models, roofline
from moe_lab.benchmarks.cases import run
from moe_lab.benchmarks.ggml import IK, LLAMA
from moe_lab.benchmarks.packed_models import STEPS, Problem, Sizes
from moe_lab.benchmarks.shapes import WHOLE_FORMATS, WHOLE_LINEAR, WHOLE_PEERS
from tiny import shrink_models, shrink_probes

pytest.importorskip("gguf")
pytest.importorskip("peft")
pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = Sizes(layers=2, num_experts=8, vocabulary=512)
PACKED = SIZES._replace(packed_linear=True)
FLOATS = ("eager", "grouped_mm")


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Makes the model and the probes of the machine small."""
    shrink_models(monkeypatch, packed_models, hidden_size=256, intermediate_size=256)
    shrink_probes(monkeypatch)
    monkeypatch.setattr(roofline, "PEAK_SIZE", 64)
    monkeypatch.setattr(packed_models, "HEAD", 8)
    monkeypatch.setattr(packed_models, "BACKEND", "aot_eager")


def make_problem(path, format="gguf_q4_k", sizes=SIZES):
    torch.manual_seed(0)
    packed_models.write_model(path, format, sizes)
    return Problem(path, format, sizes, 24)


@pytest.mark.parametrize("sizes", [SIZES, PACKED], ids=WHOLE_LINEAR)
@pytest.mark.parametrize("format", WHOLE_FORMATS)
def test_transformers_has_our_results(format, sizes, tmp_path):
    problem = make_problem(tmp_path / "model.gguf", format, sizes)
    assert {weight.format for weight in problem.weights()} == {format}
    for which, sizes in {
        "decode": [(512,)] * STEPS,
        "prefill": [(512,)],
        "training": [(1,)],
    }.items():
        (base,) = problem.results("ours", which).values()
        assert [tensor.shape for tensor in base] == sizes and base[0].isfinite().all()
        for peer in FLOATS:
            (actual,) = problem.results(peer, which).values()
            tolerance = 0.01 if which == "training" else problem.tolerances[peer]
            measurement.check({"y": actual}, {"y": base}, tolerance)


def test_a_pass_leaves_no_trace(tmp_path):
    """Decoding again starts after the same prompt, and integer arithmetic is switched off."""
    problem = make_problem(tmp_path / "model.gguf")
    first = problem.results("ours", "decode")["logits"]
    integer = problem.results("integer", "decode")["logits"]
    again = problem.results("ours", "decode")["logits"]
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, integer))
    measurement.check({"y": integer}, {"y": first}, problem.tolerances["integer"])
    for name in ("ours", *FLOATS):
        problem.results(name, "training")
        own = problem.model(name, trained=True).parameters()
        assert all(weight.grad is None for weight in own)
    assert all(map(torch.equal, first, problem.results("ours", "decode")["logits"]))


@pytest.mark.long
def test_compiled_decoding(tmp_path):
    problem = make_problem(tmp_path / "model.gguf")
    for name, plain in packed_models.COMPILED.items():
        expected = problem.results(plain, "decode")["logits"]
        for _ in range(2):  # the cache is cut to the prompt
            actual = problem.results(name, "decode")["logits"]
            measurement.check({"y": actual}, {"y": expected}, problem.tolerances[name])
        for which in ("prefill", "training"):
            with pytest.raises(NotImplementedError):
                problem.results(name, which)
        assert all(map(torch.equal, expected, problem.results(plain, "decode")["logits"]))


def test_decoding_is_that_of_the_whole_sequence(tmp_path):
    problem = make_problem(tmp_path / "model.gguf")
    decoded = torch.stack(list(problem.results("ours", "decode")["logits"]))
    ids = torch.cat([problem.prompt, problem.next])[None]
    with torch.no_grad():
        whole = problem.model("ours")(input_ids=ids).logits[0, -STEPS:].float()
    measurement.check({"y": decoded}, {"y": whole}, packed_models.TOLERANCE)


@pytest.mark.parametrize(("project", "sizes"), [(LLAMA, SIZES), (IK, SIZES), (LLAMA, PACKED)])
def test_llama_has_our_results(project, sizes, monkeypatch, tmp_path):
    monkeypatch.setattr(packed_models, "BATCH", 16)  # of the 24 tokens of prefill
    problem = make_problem(tmp_path / "model.gguf", sizes=sizes)
    try:
        problem.model(project)
    except ImportError as error:
        pytest.skip(str(error))
    for which in ("decode", "prefill", "decode"):
        base, actual = (problem.results(name, which)["logits"] for name in ("ours", project))
        measurement.check({"y": actual}, {"y": base}, problem.tolerances[project])
    with pytest.raises(NotImplementedError, match="no gradients"):
        problem.results(project, "training")


def test_work_by_hand(tmp_path):
    problem = make_problem(tmp_path / "model.gguf", "gguf_q8_0")
    attention, expert, head = 256 * 8 * (2 * 32 + 2 * 4), 3 * 256 * 256, 256 * 512
    token_flops = 2 * (attention + 2 * expert)  # two layers, two experts of a token
    packed = sum(weight.panels.nbytes for weight in problem.weights()) / 16
    assert packed == pytest.approx(expert * 34 / 32, rel=0.01)
    decode, prefill, training = map(problem.work, problem.passes)
    assert decode.flops == 2 * STEPS * (token_flops + head)
    assert decode.bytes == STEPS * (2 * (2 * packed + 2 * attention) + 2 * head)
    assert prefill.flops == 2 * (24 * token_flops + head)
    assert prefill.bytes == 2 * (8 * packed + 2 * attention) + 2 * head
    assert training == (2 * 2 * 24 * (token_flops + head), 2 * prefill.bytes)
    linear = make_problem(tmp_path / "packed.gguf", "gguf_q8_0", PACKED)
    expected = decode.bytes - STEPS * (2 * attention + head) * (2 - 34 / 32)
    assert linear.work("decode").bytes == pytest.approx(expected)


@pytest.mark.long
def test_page_plot_and_report(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(llama, "_MODULES", dict.fromkeys((LLAMA, IK), "not_a_package"))
    arguments = "--layers 2 --experts 8 --vocabulary 512 --tokens 24 --threads 1 --rounds 2"
    arguments += " --seconds 0 --output"
    assert run("packed-models", [*arguments.split(), str(tmp_path)]) == 0
    page = (tmp_path / "packed_models.md").read_text()
    assert page in capsys.readouterr().out
    for which in ("decode", "prefill", "training"):
        for name in ("gguf_q4_k", "gguf_q4_k, linear layers"):
            assert page.count(f"| {name} | {which} | ") == 1  # speeds
            assert page.count(f"| {name} | 1 | {which} | ") == 1  # shares of the time
    for project in (LLAMA, IK):
        assert f"- {project}, prefill: not installed: pip install " in page
        assert f"- {project}, training: fails: no gradients (" in page
    assert (tmp_path / "packed_models.png").read_bytes().startswith(b"\x89PNG")
    path = tmp_path / "packed_models.json"
    results = json.loads(path.read_text())["results"]
    assert len(results) == len(WHOLE_LINEAR)
    for result in results:
        assert {"ours", *FLOATS} <= {*result["figures"]} <= {"ours", *WHOLE_PEERS}
        for shares in result["parts"].values():
            assert sum(shares.values()) == pytest.approx(1)
            assert min(shares.values()) >= 0
            assert shares["experts"] > 0 and shares["linear layers"] > 0
        assert result["tokens"] == {"decode": STEPS, "prefill": 24, "training": 24}
    assert run("packed-models", ["--report", str(path)]) == 0
    assert capsys.readouterr().out == page
    assert run("packed-models", ["--report", str(path), str(path)]) == 0
    assert "medians over up to 2 runs" in capsys.readouterr().out
