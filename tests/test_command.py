"""The command moe-ext: it names every command, and runs it as the script does."""

import subprocess
import sys
from pathlib import Path

import pytest

import moe_ext_command

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = list(moe_ext_command.commands())


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/moe-ext", *arguments])
    return moe_ext_command.main()


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]], ids=str)
def test_the_help_has_one_line_for_each_command(monkeypatch, capsys, arguments):
    assert run(monkeypatch, *arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "usage: moe-ext COMMAND ..."
    listed = [line.split(maxsplit=1) for line in lines if line.startswith("  ")]
    assert [name for name, _ in listed] == COMMANDS
    assert all(summary.endswith(".") for _, summary in listed)


def test_each_script_has_a_command():
    scripts = {path.stem.replace("_", "-") for path in (ROOT / "scripts").glob("*.py")}
    assert {*COMMANDS} == {*scripts, "info"}


def test_the_help_imports_no_torch():
    code = "import sys, moe_ext_command; moe_ext_command.main(); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "False", result.stderr


def test_an_unknown_command(monkeypatch, capsys):
    assert run(monkeypatch, "study") == 2
    error = capsys.readouterr().err
    assert error == f"moe-ext: COMMAND must be one of {', '.join(COMMANDS)}, got study\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_names_what_was_typed(monkeypatch, capsys, name):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, name, "--help")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: moe-ext {name} ")
    assert "python scripts/" not in shown


def test_a_command_runs_as_its_script(monkeypatch, capsys):
    config = str(ROOT / "configs" / "small" / "moe-32.toml")
    assert run(monkeypatch, "plan-cluster", config, "--devices", "1", "2") == 0
    assert "step" in capsys.readouterr().out
    assert run(monkeypatch, "evaluate", str(ROOT / "missing")) == 2
    assert "missing" in capsys.readouterr().err
