"""The examples in the documents work."""

import doctest
import re
import runpy
import shlex
from argparse import ArgumentParser
from pathlib import Path

import pytest

import moe_ext.moe

README = Path(__file__).resolve().parent.parent / "README.md"


def test_readme_examples():
    result = doctest.testfile(str(README), module_relative=False)
    assert result.attempted > 5 and result.failed == 0


def test_docstring_examples():
    namespace = {"torch": moe_ext.moe.torch}
    result = doctest.testmod(moe_ext.moe, extraglobs=namespace)
    assert result.attempted > 2 and result.failed == 0


def test_files_named_in_the_readme_exist():
    text = README.read_text()
    for name in ("scripts/quickstart.sh", "scripts/test.sh", "docs/equations.md"):
        assert name in text and (README.parent / name).exists()


def commands_that_are_shown():
    """Returns (file, script, arguments) of every command; joins continued lines."""
    root = README.parent
    for place in ("*.md", "docs/**/*.md", "configs/**/*.toml", "moe_ext/lab/**/*.py"):
        for file in root.glob(place):
            text = re.sub(r"\\+\n[\s#]*", "", file.read_text())
            of_line = r"^[\s#]*(?:[A-Z_]+=\S+ )*python scripts/([\w/]+)\.py ([^`\n|#<]+)"
            within_text = r"(?:`python |\| `)scripts/([\w/]+)\.py ([^`<]+)`"
            found = re.findall(of_line, text, re.M) + re.findall(within_text, text)
            for script, arguments in found:
                yield file.relative_to(root), script, shlex.split(arguments)


def test_commands_that_are_shown_can_be_parsed(monkeypatch):
    class Parsed(Exception):
        pass

    def parsing(parse):
        def parsed(*arguments):
            parse(*arguments)
            raise Parsed

        return parsed

    for name in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(ArgumentParser, name, parsing(getattr(ArgumentParser, name)))
    commands = list(commands_that_are_shown())
    assert len(commands) > 80
    for file, script, arguments in commands:
        try:
            runpy.run_path(str(README.parent / "scripts" / f"{script}.py"))["main"](arguments)
        except Parsed:
            continue
        except SystemExit:
            pytest.fail(f"{file}: scripts/{script}.py {shlex.join(arguments)}")


def test_documents_that_are_named_exist():
    root = README.parent
    places = ("*.md", "configs/**/*.toml", "docs/**/*.md", "moe_ext/**/*.py", "scripts/**/*.*")
    files = [file for place in places for file in root.glob(place)]
    text = "\n".join(file.read_text() for file in files)
    names = set(re.findall(r"docs/(?:results/)?\w+\.\w+", text))
    names |= set(re.findall(r"\b(?:scripts|tests)/[a-z_/]+\.(?:py|sh)\b", text))
    assert len(names) > 80
    assert [name for name in sorted(names) if not (root / name).exists()] == []
