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


@pytest.mark.parametrize(
    ("arguments", "lines", "num_answers", "message"),
    [
        ([], [], 0, "got no package"),
        (["{package}", "--treads", "1"], [], 0, "got --treads"),
        (["{package}", "--threads", "x"], [], 0, "--threads must be a whole number from 1 to 1024"),
        (["{package}", "--perplexity"], [""], 1, "stdin must have at least one sentence, got none"),
        (["{package}"], ["w1", "w2 </s>", "w3"], 1, "line 2: a sentence must not contain </s>"),
    ],
)
def test_errors_of_serve(program, exported, arguments, lines, num_answers, message):
    arguments = [argument.format(package=exported[1]) for argument in arguments]
    done = serve(program("serve"), *arguments, lines=lines)
    assert done.returncode == 2
    assert done.stderr.startswith("serve: ") and message in done.stderr
    assert done.stderr.count("\n") == 1
    assert len(done.stdout.splitlines()) == num_answers  # of the lines before the error


@pytest.mark.parametrize(
    ("redirection", "message"),
    [(">&-", "stdout must be open"), (">/dev/full", "stdout must take all of the output")],
)
@pytest.mark.parametrize("option", ["", "--perplexity"])
def test_a_closed_or_full_stdout_is_an_error(program, exported, option, redirection, message):
    command = f"echo w1 | {program('serve')} {exported[1]} {option} {redirection}"
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr.startswith(f"serve: {message}")


def test_an_error_does_not_wait_for_the_next_line(program, exported):
    command = [program("serve"), exported[1], "--threads", "2"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
        process.stdin.write("w2 </s>\n")
        process.stdin.flush()
        assert process.wait(timeout=60) == 2


def test_errors_of_export(exported, capsys):
    capsys.readouterr()
    assert exit_status(lambda: export.main([str(exported[0]), "--output", "lm"])) == 2
    assert capsys.readouterr().err == "error: --output must end in .pt2, got lm\n"
