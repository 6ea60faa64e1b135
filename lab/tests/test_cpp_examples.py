"""The programs of examples/cpp build, run and agree with Python."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from moe_lab.training.checkpoint import load_run

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def run(*command):
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def text(tmp_path):
    """Writes sentences of Python's language manual; every 20th is in dev.txt."""
    folder = tmp_path / "text"
    folder.mkdir()
    manual = " ".join(topics[name] for name in sorted(topics)[:12])
    sentences = [
        " ".join(re.findall(r"\w+|[^\w\s]", sentence)) + "\n"
        for sentence in re.split(r"(?<=[.:])\s+", manual)
    ]
    sentences[1] = "\ufeffOn\u00a0peut\u2003manger\u3000ici\x85\n"  # a mark and other white space
    (folder / "train.txt").write_text(
        "".join(s for i, s in enumerate(sentences) if i % 20), "utf-8"
    )
    (folder / "dev.txt").write_text("".join(sentences[::20]))
    (folder / "test.txt").write_text("".join(sentences[::20]))
    return folder


OPTIONS = {
    "steps": 30, "data.vocab_size": 300, "data.tokens_per_batch": 300, "model.d_model": 32,
    "model.moe.num_experts": 8, "model.moe.k": 2, "optimizer.warmup_steps": 10,
    "log.log_every": 1, "log.eval_every": 10, "log.save_every": 10,
}  # fmt: skip


def measured(output):
    """Returns step, part, nll, and aux or ppl of each line, as printed."""
    number = r"([\d.,e+-]*\d)"
    lines = re.findall(rf"step (\d+)/\d+, (train|dev) nll {number}, (?:aux|ppl) {number}", output)
    return [tuple(word.replace(",", "") for word in line) for line in lines]


def interrupted(command, number, line):
    """Sends a signal once a line begins with `line`; returns status and output."""
    output = ""
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        for printed in process.stdout:
            output += printed
            if printed.startswith(line):
                process.send_signal(number)
    return process.returncode, output


def weights_of(checkpoint):
    values = torch.load(checkpoint)
    return {k.removeprefix("model."): v for k, v in values.items() if k.startswith("model.")}


@pytest.mark.long
def test_train_lm(program, text, tmp_path):
    train_lm = program("train_lm")
    names = {name.split(".")[-1]: value for name, value in OPTIONS.items()}
    options = [f"{name}={value}" for name, value in names.items()] + ["hidden_size=64"]
    output = run(train_lm, text, tmp_path / "cpp", *options)

    # The same seed gives the same run in Python.
    expected = run(
        sys.executable, "-m", "moe_lab", "train", ROOT / "configs" / "small" / "moe-32.toml",
        f"data.corpus={text}", f"output={tmp_path / 'python'}", "num_threads=1",
        "log.tensorboard=false", "model.moe.hidden_sizes=[64]",
        *(f"{name}={value}" for name, value in OPTIONS.items()),
    )  # fmt: skip
    curve = measured(expected)
    assert len(curve) == 33 and float(curve[-1][2]) < 0.9 * float(curve[0][2])
    assert measured(output) == curve
    assert re.search(r"^data .*", output, re.M)[0].replace(",", "") == re.search(
        r"^data .*", expected, re.M
    )[0].replace(",", "")
    model = load_run(tmp_path / "python").model.state_dict()
    weights = weights_of(tmp_path / "cpp" / "checkpoint.pt")
    assert weights.keys() == model.keys()
    assert all(torch.equal(weights[name], value) for name, value in model.items())

    # A run that is interrupted repeats at most the steps since the last checkpoint.
    everything = torch.load(tmp_path / "cpp" / "checkpoint.pt")
    for number in (signal.SIGKILL, signal.SIGTERM):
        command = [train_lm, text, tmp_path / number.name, *options]
        status, before = interrupted(command, number, "step 14/")
        assert status == (-number if number == signal.SIGKILL else 0)
        resumed = run(*command)
        (start,) = re.findall(r"^resume  from step (\d+) of 30$", resumed, re.M)
        if number == signal.SIGKILL:
            assert int(start) in (10, 20)
        else:
            assert before.endswith(f"stopped at step {start}; the same command resumes the run\n")
        assert measured(resumed) == [line for line in curve if int(line[0]) > int(start)]
        again = torch.load(tmp_path / number.name / "checkpoint.pt")
        assert everything.keys() == again.keys()
        assert all(torch.equal(again[name], value) for name, value in everything.items())
    changed = subprocess.run([*map(str, command), "k=1"], env=ENVIRONMENT, stderr=subprocess.PIPE)
    assert (
        changed.returncode == 1 and b"text and options must be those of the run" in changed.stderr
    )

    # Weights from Python: a step that changes nothing gives the perplexity of Python.
    torch.save(dict(model), tmp_path / "weights.pt")
    start = [f"init={tmp_path / 'weights.pt'}", "learning_rate=1e-30", "seed=2"]
    output = run(train_lm, text, tmp_path / "init", *options, *start, "steps=1")
    assert measured(output)[-1][2:] == curve[-1][2:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: train_lm TEXT RUN [OPTION=VALUE ...]"),
        (["nowhere", "run"], 'cannot read "nowhere/train.txt"'),
        (["nowhere", "run", "step=3"], "name of struct Options, got step=3"),
        (["nowhere", "run", "steps=3x"], "name of struct Options, got steps=3x"),
        (["nowhere", "run", "steps=0"], "at least 1, got steps=0"),
        (["nowhere", "run", "hidden_size=0"], "at least 1, got hidden_size=0"),
        (["nowhere", "run", "log_every=0"], "at least 1, got log_every=0"),
        (["nowhere", "run", "learning_rate=0"], "at least 1, got learning_rate=0"),
    ],
)
def test_train_lm_rejects(program, arguments, message, tmp_path):
    command = [program("train_lm"), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("train_lm: ") and done.stderr.endswith(f"{message}\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("redirection", "message"),
    [(">&-", "stdout must be open"), (">/dev/full", "stdout must take all of the output")],
)
def test_a_closed_or_full_stdout_is_an_error(program, text, tmp_path, redirection, message):
    train_lm = f"{program('train_lm')} {text} run steps=1 vocab_size=30 d_model=8 num_experts=4 k=2"
    for command in (program("ops"), train_lm):
        done = subprocess.run(
            ["bash", "-c", f"{command} 2>error {redirection}"], cwd=tmp_path, env=ENVIRONMENT
        )
        assert done.returncode == 1
    assert (tmp_path / "error").read_text().startswith(f"train_lm: {message}")
