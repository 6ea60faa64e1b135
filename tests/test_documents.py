"""Python and bash blocks of README, docs and examples run; shown commands can be parsed.

CONTRIBUTING.md describes the kinds of code blocks.
"""

import os
import re
import runpy
import shlex
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest
import torch
from sybil import Document
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    path for place in ("*.md", "docs/**/*.md", "examples/*.md") for path in ROOT.glob(place)
)
LANGUAGES = {"", "bash", "console", "python", "text", "toml"}
SECONDS = 60  # time limit of a command


def without_files(parse):
    """Wraps a parser: a block after `<!-- file: NAME -->` is written to NAME and not run."""

    def parse_document(document):
        for region in parse(document):
            name = re.search(r"<!-- file: (\S+) -->\s*$", document.text[: region.start])
            if name:
                region.evaluator = lambda example, name=name: (
                    Path(name[1]).write_text(example.parsed) and None
                )
            yield region

    return parse_document


PROGRAMS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
}


def run_commands(example):
    """Runs commands of files that earlier blocks wrote; returns the output of a failed command."""
    for line in re.sub(r"\\\n\s*", "", example.parsed).splitlines():
        words = shlex.split(line, comments=True)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        while words and "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            environment[name] = value
        if not words or words[0] not in PROGRAMS or not any(Path(w).is_file() for w in words):
            continue
        command = ["timeout", str(SECONDS), *PROGRAMS[words[0]], *words[1:]]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            return f"{line}\n{done.stdout}{done.stderr}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_run(page, monkeypatch, tmp_path):
    parsers = (
        without_files(PythonCodeBlockParser()),
        CodeBlockParser(language="bash", evaluator=run_commands),
    )
    document = Document.parse(str(page), *parsers)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    for example in document.examples():
        example.evaluate()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_are_of_a_known_kind(page):
    found = re.findall(r"^ *```+(.*)\n(?:.*\n)*? *```+$", page.read_text(), re.M)
    assert {name for name in found if not name.startswith("{")} <= LANGUAGES


def test_the_readme_has_examples():
    assert (ROOT / "README.md").read_text().count(">>> ") > 5


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=lambda page: page.name)
def test_linked_files_exist(page):
    """Checks the top-level pages; docs/build.py checks the links of the site."""
    links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", page.read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []


def commands_that_are_shown():
    """Yields (file, script, arguments) of every shown command that has arguments."""
    for place in ("*.md", "docs/**/*.md", "configs/**/*.toml", "moe_ext/lab/**/*.py"):
        for file in ROOT.glob(place):
            text = re.sub(r"\\+\n[\s#]*", "", file.read_text())
            program = r"(?:[A-Z_]+=\S+ )*(?:python|torchrun(?: --\S+)*)"
            of_line = rf"^[\s#]*{program} scripts/([\w/]+)\.py ([^`\n|#<]+)"
            within_text = r"(?:`python |\| `)scripts/([\w/]+)\.py ([^`<]+)`"
            found = re.findall(of_line, text, re.M) + re.findall(within_text, text)
            for script, arguments in found:
                yield file.relative_to(ROOT), script, shlex.split(arguments)


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
            runpy.run_path(str(ROOT / "scripts" / f"{script}.py"))["main"](arguments)
        except Parsed:
            continue
        except SystemExit:
            pytest.fail(f"{file}: scripts/{script}.py {shlex.join(arguments)}")


def test_documents_that_are_named_exist():
    places = (
        "*.md",
        "configs/**/*.toml",
        "docs/**/*.md",
        "examples/*",
        "moe_ext/**/*.py",
        "scripts/**/*.*",
    )
    files = [file for place in places for file in ROOT.glob(place) if file.is_file()]
    text = "\n".join(file.read_text() for file in files)
    names = set(re.findall(r"(?<!/)docs/(?:\w+/)?\w+\.\w+", text))
    names |= set(re.findall(r"\b(?:examples|scripts|tests)/[a-z_/]+\.(?:py|sh)\b", text))
    assert len(names) > 80
    assert [name for name in sorted(names) if not (ROOT / name).exists()] == []
