"""The commands as a user runs them: output, files, errors and exit status."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
from moe_lab.cli import exit_status
from moe_lab.commands import compare, evaluate, inspect_experts, prepare_data, train
from moe_lab.errors import ConfigError
from moe_lab.studies.entries import run as run_study
from moe_lab.training.checkpoint import checkpoints_of
from moe_lab.training.config import read_config
from moe_lab.training.logging import read_metrics
from tiny import CONFIG, ROOT, TINY, assert_names_option, status_and_error

from moe_ext.distributed import CheckpointError

pytestmark = pytest.mark.usefixtures("one_thread")


def test_train_reports_model_text_and_result(run, corpus, capsys):
    options = [*TINY, f"data.corpus={corpus}", f"output={run}", "steps=8", "resume=true"]
    train.main([str(CONFIG), *options, "log.progress=false"])
    out = capsys.readouterr().out
    for part in ("ops/timestep", "42 entries in the", "from step 8 of 8", "dev perplexity"):
        assert part in out
    assert read_config(run / "config.toml").steps == 8


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["model.droput=0.1"], "did you mean model.dropout?"),
        (["model.moe.k=9"], "model.moe.k must"),
        (["data.corpus=/nowhere/text"], "there is no corpus at /nowhere/text"),
        (["data.corpus={broken}"], "broken, line 1 must"),
        (["data.vocabulary={broken}"], "broken, line 1 must"),
        (["output={run}"], "is not empty; continue the run in it with resume=true"),
        (["output={run}", "resume=true", "model.d_model=16"], "model.d_model must"),
        (["output={run}", "resume=true", "data.vocab_size=20"], "data.vocab_size must"),
    ],
)
def test_train_rejects_options_with_status_2(run, corpus, capsys, tmp_path, options, part):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    (tmp_path / "broken").write_bytes(b"\xff\xff")
    options = [option.format(run=run, broken=tmp_path / "broken") for option in options]
    status, error = status_and_error(
        capsys, train, CONFIG, *TINY, f"data.corpus={corpus}", f"output={tmp_path / 'x'}", *options
    )
    assert status == 2 and part in error
    assert error.startswith("error: ") and error.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert not (tmp_path / "x").exists()


def test_other_commands_reject_options_with_status_2(capsys, tmp_path, run):
    none = tmp_path / "none"
    (tmp_path / "file").touch()
    for command, arguments, message in (
        (evaluate, [none], "there is no checkpoint in"),
        (inspect_experts, [none], "there is no checkpoint in"),
        (evaluate, [run, "--corpus", none], "there is no corpus at"),
        (evaluate, [run, "--bleu"], "error: --bleu must"),
        (inspect_experts, [run, "--layer", 3], "layer must"),
        (evaluate, [run, "--device", "meta"], "device must"),
        (inspect_experts, [run, "--device", "meta"], "device must"),
        (compare, [none], "there is no configuration file"),
        (inspect_experts, [run, "--output", tmp_path / "file" / "x"], str(tmp_path / "file")),
    ):
        status, error = status_and_error(capsys, command, *arguments)
        assert status == 2 and message in error
        assert error.startswith("error: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("main", "option"),
    [
        (evaluate.main, "--threads=-1"),
        (inspect_experts.main, "--sentences=-1"),
        (compare.main, "--seeds=-1"),
        (partial(run_study, "kneser-ney"), "--order=0"),
        (partial(run_study, "kneser-ney"), "--shares=1.5"),
    ],
)
def test_options_out_of_range_are_refused_with_status_2(capsys, main, option):
    with pytest.raises(SystemExit) as stopped:
        main(["small/moe-32", option])
    assert stopped.value.code == 2
    assert_names_option(capsys, option)


def test_exit_status_and_message(capsys):
    def ends_with(error):
        def main():
            raise error

        return exit_status(main), capsys.readouterr().err

    assert exit_status(lambda: None) == exit_status(lambda: [3]) == 0
    assert exit_status(lambda: 3) == 3
    no_folder = NotADirectoryError(20, "Not a directory", "file/x")
    assert ends_with(ConfigError("a must b")) == (2, "error: a must b\n")
    assert ends_with(no_folder) == (2, "error: file/x: Not a directory\n")
    assert ends_with(OSError("disk full")) == (2, "error: disk full\n")
    assert ends_with(CheckpointError("saving step 5")) == (2, "error: saving step 5\n")
    assert ends_with(FloatingPointError("diverged")) == (1, "error: diverged\n")
    assert ends_with(KeyboardInterrupt()) == (130, "interrupted\n")


def test_a_closed_pipe_ends_a_command_without_message(tmp_path):
    code = (
        "import sys; from moe_lab.cli import exit_status; "
        "sys.exit(exit_status(lambda: [print(i) for i in range(10**5)]))"
    )
    with (tmp_path / "stderr").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=errors
        )
        assert process.stdout.readline() == b"0\n"
        process.stdout.close()
        assert process.wait(60) == 141
    assert (tmp_path / "stderr").read_bytes() == b""


def shell(line, folder):
    """Runs a line of a shell and returns its status and its stderr; $lab is the command moe-lab."""
    env = os.environ | {
        "lab": f"{sys.executable} -m moe_lab",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONUNBUFFERED": "",
    }
    done = subprocess.run(["bash", "-c", line], cwd=folder, env=env, stderr=subprocess.PIPE)
    return done.returncode, done.stderr.decode(errors="replace")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_or_full_stdout_is_an_error(tmp_path, unbuffered):
    for command in ("$lab --help", "$lab train --help", "$lab --version"):
        status, error = shell(f"{command} >&-", tmp_path)
        assert status == 2 and error.startswith("error: stdout must be open, got a closed stdout")
        status, error = shell(f"PYTHONUNBUFFERED={unbuffered} {command} >/dev/full", tmp_path)
        assert status == 2 and "No space left on device" in error and "\n" not in error[:-1]


@pytest.mark.long
def test_training_and_evaluation_with_closed_or_full_streams(run, corpus, tmp_path):
    """No file takes the place of a closed stream, and no work is lost silently."""
    options = " ".join([*TINY, f"data.corpus={corpus}", "steps=1"])
    train_to = f"$lab train {CONFIG} {options} output"
    assert shell(f"{train_to}=a 2>&- <&- >out", tmp_path) == (0, "")
    assert "next    moe-lab evaluate a" in (tmp_path / "out").read_text()
    read_metrics(tmp_path / "a")
    status, error = shell(f"{train_to}=b >&-", tmp_path)
    assert status == 2 and "stdout must be open" in error and not (tmp_path / "b").exists()
    for command, stream in (
        (f"$lab evaluate {run} >/dev/full", "stdout"),
        (f"$lab evaluate {run} --what 2>/dev/full", ""),
        (f"$lab evaluate {run} >&- 2>&- <&-", ""),
    ):
        status, error = shell(command, tmp_path)
        assert status == 2
        assert error == (f"error: {stream}: No space left on device\n" if stream else "")


def test_paths_that_are_not_utf8(run, corpus, capsys, tmp_path):
    options = [CONFIG, *TINY, f"data.corpus={corpus}", "steps=1", f"output={tmp_path / 'run'}"]
    for command, option, arguments in (
        (train, "option output", [*options, "output=runs-\udce9"]),
        (train, "option data.corpus", [*options, "data.corpus=runs-\udce9"]),
        (prepare_data, "--output", ["text", "--from", corpus, "--output", "runs-\udce9"]),
    ):
        status, error = status_and_error(capsys, command, *arguments)
        assert status == 2 and error == f"error: {option} must be UTF-8, got 'runs-\\udce9'\n"
    assert not list(tmp_path.iterdir())
    shutil.copytree(run, tmp_path / "run-\udce9")
    shutil.copy(corpus / "test.txt", tmp_path / "text-\udce9.txt")
    assert shell("$lab evaluate $'run-\\xe9' --corpus $'text-\\xe9.txt' >out", tmp_path) == (0, "")
    assert "ends of 70 sentences" in (tmp_path / "out").read_text()


def test_ctrl_c_saves_and_the_run_continues(corpus, tmp_path):
    folder = tmp_path / "run"
    command = [
        sys.executable, "-m", "moe_lab", "train", CONFIG, *TINY,
        f"data.corpus={corpus}", f"output={folder}",
    ]  # fmt: skip
    process = subprocess.Popen(
        [*command, "steps=1000000"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    metrics = folder / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, error = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in error
    assert f"continue with moe-lab train {folder / 'config.toml'} resume=true" in output
    last = checkpoints_of(folder).steps()[-1]
    assert last >= 1
    options = [*TINY, f"data.corpus={corpus}", f"output={folder}", "log.progress=false"]
    train.main([str(CONFIG), *options, f"steps={last + 2}", "resume=true"])
    assert checkpoints_of(folder).steps()[-1] == last + 2
    assert len(checkpoints_of(folder).steps()) == 2


def test_evaluate_measures_all_of_another_text(run, tmp_path, capsys):
    text = tmp_path / "text.txt"  # too short to split into parts
    text.write_text("w1 w2 w3\nw4 nowhere\n")
    result = evaluate.main([str(run), "--corpus", str(text)])
    assert capsys.readouterr().out.startswith("all perplexity ") and result.num_tokens == 7
    evaluate.main([str(run)])
    out = capsys.readouterr().out
    assert out.startswith("test perplexity ") and "70 sentences; step 8" in out
    status, error = status_and_error(capsys, evaluate, run, "--corpus", text, "--part", "test")
    assert status == 2 and "the test part of" in error
    assert evaluate.main([str(run), "--part", "all"]).sentence_nll.shape == (410,)


def test_inspect_experts_writes_text_and_one_page(run, tmp_path, capsys):
    tmp_path = tmp_path / "a" / "new"
    inspect_experts.main([str(run), "--output", str(tmp_path / "experts"), "--sentences", "3"])
    out = capsys.readouterr().out
    text = (tmp_path / "experts.txt").read_text()
    page = (tmp_path / "experts.html").read_text()
    assert text in out and text.count("expert ") == 4
    (data,) = re.findall('id="data">(.*)</script>', page)
    data = json.loads(data)
    (layer,) = data["layers"]
    assert layer["name"] == "layer 0"
    assert len(layer["experts"]) == 4 and len(layer["sentences"]) == 3
    assert "</s>" in data["words"] and "</s>" not in page
    assert data["title"] == "run, step 8, layer 0: what each expert sees"
