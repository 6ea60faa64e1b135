"""The script of the first run on a GPU: its commands, with programs that only note their arguments.

The commands then run as far as a machine without a GPU allows: pytest finds the tests, moe-lab
parses the options, and the probes run on the CPU.
"""

import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from moe_lab.benchmarks import cases

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts"

# Each of these programs notes its name and its arguments.
NOTE = 'printf "%s\\n" "$(basename "$0") $(printf "%q " "$@")" >> "$NOTES"\n'
PROGRAMS = {
    "python": """case "$*" in
  -) cat > /dev/null ;;
  *get_device_capability*) echo 9.0 ;;
  *"$FAILING"*) exit 1 ;;
esac""",
    # Runs the command, without the limit; `timeout` itself returns 124 for what hangs.
    "timeout": """case "$*" in *"$HANGING"*) exit 124 ;; esac
while [[ $1 == -* ]]; do shift 2; done
exec "${@:2}\"""",
    "compute-sanitizer": 'echo "found"',
    **dict.fromkeys(("ncu", "nvcc", "ninja"), ":"),
}
# The programs of the machine that the script needs.
BASICS = ["bash", "basename", "cat", "cp", "dirname", "grep", "gzip", "head", "mkdir", "nproc"]
BASICS += ["rm", "sed", "tail", "tar", "tee"]
PARTS = ["build", "probe", "test", "sanitize", "rates", "profile", "benchmark"]


class Suite:
    """The script in a folder of its own, with programs that do nothing."""

    def __init__(self, folder):
        self.folder = folder
        self.bin = folder / "bin"
        (folder / "scripts").mkdir()
        shutil.copy(SCRIPTS / "gpu_suite.sh", folder / "scripts")
        (folder / "moe_ext" / "lib").mkdir(parents=True)
        self.bin.mkdir()
        for name, body in PROGRAMS.items():
            program = self.bin / name
            program.write_text(f"#!/bin/bash\n{NOTE}{body}\n")
            program.chmod(0o755)

    def run(self, step, failing="no command", hanging="no command"):
        """Runs a step; returns its exit status, its output and the commands."""
        notes = self.folder / "notes"
        notes.write_text("")
        basics = self.folder / "basics"  # without the programs of this machine, such as cmake
        if not basics.exists():
            basics.mkdir()
            for name in BASICS:
                (basics / name).symlink_to(shutil.which(name))
        done = subprocess.run(
            [shutil.which("bash"), self.folder / "scripts/gpu_suite.sh", self.folder / "out", step,
             self.bin / "python"],
            env={"PATH": str(basics), "NOTES": str(notes), "FAILING": failing, "HANGING": hanging},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60,
        )  # fmt: skip
        return done.returncode, done.stdout, [shlex.split(line) for line in notes.open()]


@pytest.fixture
def suite(tmp_path):
    return Suite(tmp_path)


def calls(commands, program, *words):
    """Returns the places of the calls of a program with all these words."""
    return [i for i, c in enumerate(commands) if c[0] == program and {*words} <= {*c}]


def limits(commands):
    """Returns the seconds that the calls of `timeout` allow together."""
    given = [
        next(a for a in c[1:] if a.isdigit() and int(a) > 15) for c in commands if c[0] == "timeout"
    ]
    return sum(map(int, given))


def test_first_builds_then_probes_then_tests(suite):
    status, output, commands = suite.run("first")
    assert status == 0, output
    steps = [
        calls(commands, "python", "setup.py", "build_ext"),
        calls(commands, "python", "moe_ext.info"),
        calls(commands, "python", "scripts/gpu_probes.py", "device"),
        calls(commands, "python", "scripts/gpu_probes.py", "grouped-mm"),
        calls(commands, "python", "pytest", "cuda", "tests/ops"),
    ]
    assert [len(places) for places in steps] == [1] * 5
    assert steps == sorted(steps)
    (probe,) = calls(commands, "timeout", "grouped-mm")
    assert "30" in commands[probe]
    assert (suite.folder / "out.tar.gz").exists()


def test_second_runs_each_tool_on_five_tests_then_rates_and_a_profile(suite):
    status, output, commands = suite.run("second")
    assert status == 0, output
    for tool in ("memcheck", "racecheck", "synccheck"):
        (place,) = calls(commands, "compute-sanitizer", tool)
        assert sum("::" in word for word in commands[place]) == 5
    assert len(calls(commands, "python", "gemm-rates")) == 1
    assert len(calls(commands, "ncu", "gemm-rates")) == 1
    assert len(calls(commands, "python", "layer", "--profile")) == 1
    assert not calls(commands, "python", "setup.py")


def test_third_compares_with_other_implementations_in_bfloat16(suite):
    status, output, commands = suite.run("third")
    assert status == 0, output
    (place,) = calls(commands, "python", "layer")
    words = commands[place]
    assert words[words.index("--dtype") + 1] == "bfloat16"
    assert "HF grouped_mm" in words
    assert not calls(commands, "python", "float32")


def test_all_has_the_parts_of_every_step(suite):
    status, output, commands = suite.run("all")
    assert status == 0, output
    for words in (
        ("python", "setup.py"),
        ("python", "grouped-mm"),
        ("python", "tests/layer"),
        ("compute-sanitizer", "racecheck"),
        ("python", "--profile"),
    ):
        assert calls(commands, *words), words
    assert len(calls(commands, "python", "layer", "float32")) == 1


@pytest.mark.parametrize("step", ["first", "second", "third", *PARTS])
def test_the_limits_of_a_step_are_those_of_its_help(suite, step):
    """`first` gives its tests the rest of nine minutes, so that its limits depend on the build."""
    _, _, commands = suite.run(step)
    script = (SCRIPTS / "gpu_suite.sh").read_text()
    if step in ("first", "second", "third"):
        minutes = re.search(rf"#     {step} +([\d.]+) minutes", script)[1]
    else:
        minutes = re.search(rf"\b{step} \(([\d.]+)", re.sub(r"\n# *", " ", script))[1]
    if step == "first":
        commands = commands[calls(commands, "timeout", "grouped-mm")[0] :]  # built in no time
    probes = 90 if step == "test" else 0  # the probes come before the tests
    assert limits(commands) - probes <= 60 * float(minutes)


def test_a_failed_probe_is_told_and_the_tests_run(suite):
    status, output, commands = suite.run("first", hanging="grouped-mm")
    assert status == 1
    assert "torch's grouped GEMM: not finished in time" in output
    assert calls(commands, "python", "pytest")
    status, output, _ = suite.run("first", failing="moe_ext.info")
    assert (status, "the self-test: status 1" in output) == (1, True)


def test_a_failed_build_ends_the_run(suite):
    status, output, commands = suite.run("first", failing="setup.py")
    assert status == 1
    assert "the build: status 1" in output
    assert not calls(commands, "python", "scripts/gpu_probes.py")


def test_missing_programs_are_told(suite):
    for name in ("compute-sanitizer", "ncu", "ninja"):
        (suite.bin / name).unlink()
    status, output, commands = suite.run("second", failing="import xdist")
    assert status == 0
    for line in ("no compute-sanitizer: ", "no ncu: ", "no ninja: ", "no cmake: ", "no xdist: "):
        assert line in output
    assert output.count("skipped: found no compute-sanitizer") == 3
    assert "skipped the metrics of kernels: found no ncu" in output


def test_a_step_without_a_build_says_how_to_get_one(suite):
    status, output, commands = suite.run("third", failing="cuda_version")
    assert status == 2
    assert "run the step build, or cp -r OUTPUT/lib moe_ext/" in output


def test_an_unknown_step_is_refused(suite):
    assert suite.run("fourth")[0] == 2


@pytest.mark.long
def test_the_commands_are_valid(suite, request):
    """pytest finds the files and the tests, and moe-lab accepts its options."""
    _, _, commands = suite.run("all")
    for place in calls(commands, "python", "layer"):
        words = commands[place]
        if "--report" not in words:  # it reads a file that does not exist here
            cases.parse("layer", words[words.index("layer") + 1 :])
    (place,) = calls(commands, "python", "pytest", "tests/layer")
    for word in commands[place]:
        assert not word.startswith(("tests/", "lab/")) or (ROOT / word).exists(), word
    # A test on a GPU has the name of the same test in the emulation.
    place = calls(commands, "compute-sanitizer", "memcheck")[0]
    ids = [word for word in commands[place] if "::" in word]
    names = {"test_cuda": "emulated sm_80", "test_operators": "emulated"}
    wanted = [i.replace("[cuda-", f"[{names[Path(i.partition(':')[0]).stem]}-") for i in ids]
    if not {*wanted} <= {item.nodeid for item in request.session.items}:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
        command += ["--long", *wanted]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        lines = {line for line in done.stdout.splitlines() if "::" in line}
        assert lines == set(wanted), done.stdout


@pytest.fixture
def probe(monkeypatch, capsys):
    """Returns a function that runs a probe on the CPU; it returns the status and the lines."""

    def run(*arguments):
        path = SCRIPTS / "gpu_probes.py"
        monkeypatch.setattr(sys, "argv", [str(path), *arguments, "--device", "cpu"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(path), run_name="__main__")
        return ended.value.code, capsys.readouterr().out.splitlines()

    return run


def test_the_probe_of_grouped_gemms_on_the_cpu(probe):
    status, lines = probe("grouped-mm")
    assert status == 0 and len(lines) == 15
    assert all(line.endswith(" ... right") for line in lines)
    for empty in ("first", "middle", "last", "all but one"):
        assert sum(f"without rows: {empty} " in line for line in lines) == 3


def test_the_probe_notices_wrong_values(probe, monkeypatch):
    right = torch._grouped_mm
    monkeypatch.setattr(
        torch, "_grouped_mm", lambda *a: right(*a).index_fill_(0, torch.tensor([1]), 3.0)
    )
    status, lines = probe("grouped-mm")
    output = "\n".join(lines)
    assert status == 1
    assert "WRONG for the experts [0]" in output  # row 1 of the results is of expert 0
    assert "gradient of W, experts without rows: none ... WRONG for the experts [1]" in output


def test_the_rates_of_gemms(probe):
    status, lines = probe("gemm-rates", "--experts", "2", "--width", "16", "--rows", "4")
    assert status == 0
    rows = [line.strip("| ").split(" | ") for line in lines[2:]]
    assert [row[1] for row in rows] == [
        "bfloat16", "bfloat16, bias", "float16", "float32", "bfloat16, equal sizes",
    ]  # fmt: skip
    assert all(float(rate) > 0 for row in rows for rate in row[2:])


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_shellcheck_accepts_the_script():
    done = subprocess.run(["shellcheck", SCRIPTS / "gpu_suite.sh"], capture_output=True, text=True)
    assert done.stdout == ""
