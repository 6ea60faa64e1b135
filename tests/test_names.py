"""Identifiers are nouns or verbs, which say what a thing is: `results`, not `found`."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRONOUNS = "each|both|others?|ours|theirs|mine|its|this|that|these|those|it|they|them|whose"
ADVERBS = "here|there|found"
PUBLIC = {("moe_ext/ranks/layout.py", "of")}  # `Layout.of`
# A name may contain a preposition, as in `rows_of`, but not begin with "of".
REJECTED = re.compile(rf"(?i:_*(?:(?:{PRONOUNS}|{ADVERBS}|of)_*|of_\w+))|_*Of[A-Z]\w*")


def bound_names(source):
    """Yields the line and the identifier of each definition, argument and assigned name."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(getattr(node, "ctx", node), ast.Load) and type(node) is not ast.keyword:
            for field in ("id", "attr", "arg", "name", "asname"):
                if isinstance(name := getattr(node, field, None), str):
                    yield node.lineno, name


def rejected(source):
    return [(line, name) for line, name in bound_names(source) if REJECTED.fullmatch(name)]


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("for each in rows: total = rows_of(each)", ["each"]),
        ("def of_rows(x, *, other=1): return x.found", ["of_rows", "other"]),
        ("self._other, offset, both_ways = 1, 2, 3", ["_other"]),
        ("class OfPairs: there: int\nimport numpy as theirs", ["OfPairs", "there", "theirs"]),
    ],
)
def test_rejected_names(source, names):
    assert sorted(name for _, name in rejected(source)) == sorted(names)


def test_names_are_nouns_or_verbs():
    files = subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True).split()
    names = [
        f"{file}:{line}: {name}"
        for file in files
        for line, name in rejected((ROOT / file).read_text())
        if (file, name) not in PUBLIC
    ]
    rule = "a name must not be a pronoun or adverb, or begin with `of_`; say what the thing is"
    assert len(files) > 400 and not names, f"{rule}:\n" + "\n".join(names)
