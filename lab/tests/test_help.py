"""The help texts of the commands promise what the code does."""

import argparse
import re
import shlex
import sys

import pytest
from moe_lab import __main__ as command
from moe_lab import cli
from moe_lab.experiments.study import Study
from moe_lab.studies import entries
from moe_lab.training.config import DataConfig

COMMANDS = [(group, name) for group in command.GROUPS for name in command.commands(group)]
STUDIES = [name for name, entry in entries.STUDIES.items() if entry.arms]
# Options of other programs that the help of a command shows.
OTHER_NAMES = {
    "--cmake-prefix", "--build", "--target", "--standalone", "--nproc-per-node", "--max-restarts",
    "--logdir",
}  # fmt: skip


class Parsed(Exception):
    """Raised with the parser of a command instead of parsing its arguments."""


@pytest.fixture
def parser_of(monkeypatch):
    def parse(parser, *_):
        raise Parsed(parser)

    for method in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(cli._Parser, method, parse)

    def parser(group, name):
        monkeypatch.setattr(sys, "argv", ["moe-lab", *filter(None, [group, name])])
        with pytest.raises(Parsed) as raised:
            command._run()
        return raised.value.args[0]

    return parser


def joined(text):
    """Removes white space: argparse also breaks lines at hyphens."""
    return "".join(text.split())


@pytest.mark.parametrize("group, name", COMMANDS)
def test_every_option_has_a_help_with_its_default(parser_of, group, name):
    parser = parser_of(group, name)
    text = joined(parser.format_help())
    for action in parser._actions:
        assert action.help, action.dest
        default = action.default
        if default is None or default is False or default in ([], argparse.SUPPRESS):
            continue
        shown = shlex.join(map(str, default)) if isinstance(default, list | tuple) else str(default)
        assert joined(f"(default: {shown})") in text, action.dest
        written = action.help.count("(default: ")
        assert written == action.help.count("(default: %(default)s)"), action.dest  # not twice


@pytest.mark.parametrize("group, name", COMMANDS)
def test_a_help_names_only_options_that_exist(parser_of, group, name):
    parser = parser_of(group, name)
    known = {option for action in parser._actions for option in action.option_strings}
    texts = [parser.description, parser.epilog or "", *(a.help or "" for a in parser._actions)]
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", " ".join(texts)))
    assert named - OTHER_NAMES <= known


@pytest.mark.parametrize("name", STUDIES)
def test_the_help_of_a_study_names_its_files(monkeypatch, parser_of, name, tmp_path):
    text = joined(parser_of("study", name).format_help())
    monkeypatch.undo()
    monkeypatch.setattr(Study, "main", lambda study: study)
    study = entries.run(name, ["--output", str(tmp_path)])
    options = vars(study.options)
    for path in re.findall(r"OUTPUT/(\w+\.json|\w+\.md)", text):
        for option in ("text", "pair"):
            path = path.replace(option.upper(), str(options.get(option)))
        assert path in (f"{study.name}.json", f"{study.name}.md")
    assert "OUTPUT/" in text


def test_defaults_that_the_code_chooses(parser_of):
    """The parser leaves these options None."""
    text = joined(parser_of("", "prepare-data").format_help())
    assert joined(f"for text and languages only (default: {DataConfig.vocab_size})") in text
