"""moe-lab export and examples/cpp/serve.cpp agree with moe-lab evaluate and eager mode."""

import math
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from locks import locked
from moe_lab.cli import exit_status
from moe_lab.commands import evaluate, export
from moe_lab.models.export import NextWord
from moe_lab.training.checkpoint import load_run

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    """Exports a tiny model, once for all test workers; returns the run and the package."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # the workers train equal runs
    package = folder / "serve" / "lm.pt2"
    with locked(package.parent):
        if not package.exists():
            export.main([str(run), "--output", str(package)])
    return run, package


def serve(program, *arguments, lines=()):
    """Runs serve; returns the completed process."""
    return subprocess.run(
        [str(program), *map(str, arguments)],
        input="".join(f"{line}\n" for line in lines),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.long
def test_serve(program, exported, corpus, capsys):
    run, package = exported
    lines = (corpus / "test.txt").read_text().splitlines()

    capsys.readouterr()
    expected = evaluate.main([str(run), "--threads", "1"])
    report = capsys.readouterr().out
    for threads in (1, 4):
        done = serve(program("serve"), package, "--perplexity", "--threads", threads, lines=lines)
        assert done.returncode == 0, done.stderr
        numbers = r"perplexity [\d.]+  \([\d.]+ nats per word, "
        assert re.search(numbers, done.stderr)[0] == re.search(numbers, report)[0]
        lengths = torch.tensor([len(line.split()) + 1 for line in lines])
        perplexities = (expected.sentence_nll / lengths).exp()
        printed = torch.tensor([float(line) for line in done.stdout.split()], dtype=torch.float64)
        torch.testing.assert_close(printed, perplexities, rtol=1e-5, atol=6e-4)

    trained = load_run(run)
    beginnings = [*(" ".join(line.split()[:3]) for line in lines[:20]), ""]
    done = serve(program("serve"), package, "--threads", 3, lines=beginnings)
    assert done.returncode == 0, done.stderr
    output = done.stdout.splitlines()
    assert len(output) == len(beginnings)
    for beginning, printed in zip(beginnings, output, strict=True):
        ids = [trained.vocabulary.eos_id, *trained.vocabulary.encode(beginning.split())]
        with torch.no_grad():
            probability = NextWord(trained.model)(torch.tensor([ids]))[0, -1].exp()
        best = [pair.split() for pair in printed.split("  ")]
        assert len(best) == 5
        for word, number in best:
            (index,) = trained.vocabulary.encode([word])
            assert math.isclose(float(number), probability[index], abs_tol=6e-5)
        values = [float(number) for _, number in best]
        assert values == sorted(values, reverse=True)
        assert math.isclose(values[-1], probability.topk(5).values[-1], abs_tol=6e-5)


def assert_refused(done, message, num_answers):
    assert done.returncode == 2
    assert done.stderr.startswith("serve: ") and message in done.stderr
    assert done.stderr.count("\n") == 1
    assert len(done.stdout.splitlines()) == num_answers  # of the lines before the error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "got no package"),
        (["lm.pt2", "--treads", "1"], "got --treads"),
        (["lm.pt2", "--threads", "x"], "--threads must be a whole number from 1 to 1024"),
    ],
)
def test_arguments_that_serve_refuses(program, arguments, message):
    assert_refused(serve(program("serve"), *arguments), message, 0)


# A package compiles for half a minute. test_cpp_examples.py has the streams of another program.
@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "lines", "message"),
    [
        (["--perplexity"], [""], "stdin must have at least one sentence, got none"),
        ([], ["w1", "w2 </s>", "w3"], "line 2: a sentence must not contain </s>"),
    ],
)
def test_lines_that_serve_refuses(program, exported, options, lines, message):
    assert_refused(serve(program("serve"), exported[1], *options, lines=lines), message, 1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("redirection", "message"),
    [(">&-", "stdout must be open"), (">/dev/full", "stdout must take all of the output")],
)
@pytest.mark.parametrize("option", ["", "--perplexity"])
def test_a_closed_or_full_stdout_is_an_error(program, exported, option, redirection, message):
    command = f"echo w1 | {program('serve')} {exported[1]} {option} {redirection}"
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr.startswith(f"serve: {message}")


@pytest.mark.long
def test_an_error_does_not_wait_for_the_next_line(program, exported):
    command = [program("serve"), exported[1], "--threads", "2"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
        process.stdin.write("w2 </s>\n")
        process.stdin.flush()
        assert process.wait(timeout=60) == 2


def test_what_is_compiled_equals_the_evaluation(run, corpus, monkeypatch, tmp_path):
    """For any number of sentences and words; the package has the vocabulary."""
    given = {}

    def compile_package(program, package_path, inductor_configs):
        given.update(program=program.module(), options=inductor_configs)
        Path(package_path).touch()

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compile_package)
    export.main([str(run), "--output", str(tmp_path / "lm.pt2")])
    trained = load_run(run)
    lines = (corpus / "test.txt").read_text().splitlines()
    eos, expected = trained.vocabulary.eos_id, evaluate.main([str(run), "--threads", "1"])
    for number, line, nll in zip((1, 3, 2), lines, expected.sentence_nll, strict=False):
        ids = trained.vocabulary.encode(line.split())
        sentences = torch.tensor([[eos, *ids, eos]]).repeat(number, 1)
        with torch.no_grad():
            log_p = given["program"](sentences[:, :-1]).gather(2, sentences[:, 1:, None])
        torch.testing.assert_close(-log_p.sum((1, 2)), nll.float().repeat(number))
    words = given["options"]["aot_inductor.metadata"]["vocabulary"].split("\n")
    assert words == list(trained.vocabulary.words)


def test_errors_of_export(run, capsys):
    capsys.readouterr()
    assert exit_status(lambda: export.main([str(run), "--output", "lm"])) == 2
    assert capsys.readouterr().err == "error: --output must end in .pt2, got lm\n"
