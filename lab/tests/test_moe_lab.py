"""The command moe-lab: it lists its commands, studies and benchmarks, and runs them."""

import json
import subprocess
import sys

import pytest
from moe_lab import __main__ as command

GROUPS = ("", "study", "benchmark")
COMMANDS = [(group, name) for group in GROUPS for name in command.commands(group)]


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/moe-lab", *(word for word in arguments if word)])
    return command.main()


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("help_option", ["", "-h", "--help"])
def test_the_help_has_one_line_for_each_command(monkeypatch, capsys, group, help_option):
    assert run(monkeypatch, group, help_option) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"usage: {f'moe-lab {group}'.strip()} ")
    listed = [line.split(maxsplit=1) for line in lines if line.startswith("  ")]
    names = [name for name, _ in listed if name not in GROUPS]
    assert names == list(command.commands(group))
    assert all(summary.endswith(".") for _, summary in listed)


@pytest.mark.parametrize("group", GROUPS)
def test_an_unknown_command(monkeypatch, capsys, group):
    assert run(monkeypatch, group, "nothing") == 2
    error = capsys.readouterr().err
    known = ", ".join(command.commands(group))
    program = f"moe-lab {group}".strip()
    assert error == f"{program}: {group.upper() or 'COMMAND'} must be one of {known}, got nothing\n"


ANSWERS = """
import contextlib, io, json, sys, time
sys.modules.update(dict.fromkeys(["torch", "moe_ext", "numpy", "matplotlib", "scipy"]))
from moe_lab.__main__ import main

answers = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["moe-lab", *words]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        with contextlib.redirect_stderr(io.StringIO()) as err:
            try:
                status = main()
            except SystemExit as ended:
                status = ended.code
            except ImportError as error:
                status = str(error)
    answers.append((words, status, out.getvalue(), err.getvalue()))
print(json.dumps((answers, time.process_time())))
"""


def test_every_command_answers_without_torch():
    """One process without torch runs all commands with --help, --version and a wrong argument."""
    commands = [[group, name] if group else [name] for group, name in COMMANDS]
    lines = [
        [*words, option] for words in commands for option in ("--help", "--version", "--what=1")
    ]
    lines += [[], ["--help"], ["--version"], ["study"], ["benchmark", "--help"]]
    child = subprocess.run(
        [sys.executable, "-c", ANSWERS, json.dumps(lines)], capture_output=True, text=True
    )
    answers, seconds = json.loads(child.stdout)
    for (*typed, option), status, out, err in filter(lambda answer: len(answer[0]) > 1, answers):
        begin = f"usage: {' '.join(['moe-lab', *typed])} "
        if option == "--what=1":
            assert status == 2 and err.startswith(begin) and "error: " in err, (typed, status)
        else:
            assert status == 0, (typed, status)
            assert out.startswith(begin if option == "--help" else "moe_lab "), (typed, out)
    assert seconds < 0.5 * len(lines)


def test_a_missing_corpus_is_an_error_before_slow_imports(tmp_path):
    """The parts of torch that only training needs take a second to import."""
    code = """
import sys
from moe_lab.__main__ import main
status = main()
print(status, *(m for m in ("torch.distributed.fsdp", "sympy", "scipy") if m in sys.modules))
"""
    arguments = ["train", "small/moe-32", f"data.corpus={tmp_path / 'x'}", f"output={tmp_path}/run"]
    child = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert "there is no corpus at" in child.stderr
    assert child.stdout == "2\n"


def test_a_command_runs_with_the_name_of_a_configuration(monkeypatch, capsys):
    assert run(monkeypatch, "plan-cluster", "small/moe-32", "--devices", "1", "2") == 0
    assert "step" in capsys.readouterr().out
    assert run(monkeypatch, "plan-cluster", "small/nothing") == 2
    assert "there is no configuration file small/nothing" in capsys.readouterr().err
