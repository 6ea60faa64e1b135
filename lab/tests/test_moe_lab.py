"""The command moe-lab: it lists its commands, studies and benchmarks, and runs them."""

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
def test_the_help_imports_no_torch(group):
    code = f"""
import sys
sys.argv = ["moe-lab", *{[group] if group else []}]
from moe_lab.__main__ import main
main()
print("torch" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "False", result.stderr


@pytest.mark.parametrize("group", GROUPS)
def test_an_unknown_command(monkeypatch, capsys, group):
    assert run(monkeypatch, group, "nothing") == 2
    error = capsys.readouterr().err
    known = ", ".join(command.commands(group))
    program = f"moe-lab {group}".strip()
    assert error == f"{program}: {group.upper() or 'COMMAND'} must be one of {known}, got nothing\n"


@pytest.mark.parametrize(("group", "name"), COMMANDS)
def test_the_help_of_a_command_names_what_was_typed(monkeypatch, capsys, group, name):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, group, name, "--help")
    assert ended.value.code == 0
    typed = f"moe-lab {group} {name}" if group else f"moe-lab {name}"
    assert capsys.readouterr().out.startswith(f"usage: {typed} ")


def test_a_command_runs_with_the_name_of_a_configuration(monkeypatch, capsys):
    assert run(monkeypatch, "plan-cluster", "small/moe-32", "--devices", "1", "2") == 0
    assert "step" in capsys.readouterr().out
    assert run(monkeypatch, "plan-cluster", "small/nothing") == 2
    assert "there is no configuration file small/nothing" in capsys.readouterr().err
