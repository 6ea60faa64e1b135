"""The command moe-ext: it runs moe_ext.info and says where the former commands are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import moe_ext_command

ROOT = Path(__file__).resolve().parent.parent
INFO = "-m moe_ext.info --cmake-prefix"
COMMAND = "-c 'import sys, moe_ext_command; sys.exit(moe_ext_command.main())'"


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/moe-ext", *arguments])
    return moe_ext_command.main()


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]], ids=str)
def test_the_help(monkeypatch, capsys, arguments):
    assert run(monkeypatch, *arguments) == 0
    assert capsys.readouterr().out.startswith("usage: moe-ext info [--cmake-prefix]\n")


def test_the_help_imports_no_torch():
    code = "import sys, moe_ext_command; moe_ext_command.main(); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "False", result.stderr


def test_an_unknown_command(monkeypatch, capsys):
    assert run(monkeypatch, "study") == 2
    assert capsys.readouterr().err == "moe-ext: COMMAND must be chat or info, got study\n"


@pytest.mark.parametrize("name", ["train", "plan-cluster"])
def test_a_former_command_says_where_it_is(monkeypatch, capsys, name):
    assert run(monkeypatch, name, "--help") == 2
    assert f"{name} is now `moe-lab {name}`, a command of the package moe_lab" in (
        capsys.readouterr().err
    )


def test_info(monkeypatch, capsys):
    assert run(monkeypatch, "info", "--cmake-prefix") == 0
    assert str(ROOT / "moe_ext") in capsys.readouterr().out


def test_chat(monkeypatch, capsys):
    pytest.importorskip("transformers")
    with pytest.raises(SystemExit):
        run(monkeypatch, "chat", "--help")
    assert capsys.readouterr().out.startswith("usage: moe-ext chat [-h]")
    assert run(monkeypatch, "chat", "nowhere") == 2
    assert "moe-ext chat: name_or_folder must be" in capsys.readouterr().err


def test_chat_needs_transformers(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "moe_ext.chat", None)
    assert run(monkeypatch, "chat", "nowhere") == 2
    assert capsys.readouterr().err.startswith("moe-ext chat: import of moe_ext.chat halted")


CLOSED = (">&-", 2, "error: stdout must be open, got a closed stdout; to drop the output, use >")
FULL = (">/dev/full", 2, "error: stdout: No space left on device\n")


@pytest.mark.parametrize(
    ("command", "redirection", "status", "message"),
    [
        (COMMAND, *CLOSED),
        (COMMAND, *FULL),
        (COMMAND, ">/dev/full 2>/dev/full", 2, ""),
        (COMMAND, ">/dev/null 2>&-", 0, ""),
        (COMMAND, "| true; exit ${PIPESTATUS[0]}", 141, ""),
        (INFO, *CLOSED),
        (INFO, *FULL),
    ],
)
def test_closed_and_full_streams(command, redirection, status, message):
    environ = os.environ | {"PYTHONUNBUFFERED": ""}
    line = f"{sys.executable} {command} {redirection}"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, env=environ, stderr=subprocess.PIPE)
    assert done.returncode == status and done.stderr.decode().startswith(message)
    assert message or not done.stderr
