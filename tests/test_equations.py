"""Compares docs/equations.md with the tests and their tags, the files and the names."""

import pkgutil
import re
from pathlib import Path

from marked import marked

ROOT = Path(__file__).resolve().parent.parent


def rows():
    """Returns the cells of the first table."""
    text = (ROOT / "docs" / "equations.md").read_text().split("\n## ")[0]
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line[:1] == "|"]
    cells = [[cell.strip() for cell in line] for line in lines[2:]]
    assert len(cells) > 30 and {len(row) for row in cells} == {6}
    return cells


def names(cell):
    return re.findall(r"`([\w./]+)`", cell)


def documented():
    """Returns (test file, equation) of all rows."""
    return {
        (test, equation)
        for paper, *_, tests in rows()
        for equation in paper.split(", ")
        for test in names(tests)
    }


def file_of(test):
    """Returns the file of a test; lab/test_x is lab/tests/test_x.py."""
    name = test.removeprefix("lab/")
    return ROOT / ("tests" if name == test else "lab/tests") / f"{name}.py"


def test_every_row_has_its_tests():
    """The files exist and have a test with the equation's tag."""
    missing = [test for test, _ in documented() if not file_of(test).exists()]
    assert missing == []
    # Tests of the lab have no tags.
    expected = {(test, equation) for test, equation in documented() if not test.startswith("lab/")}
    assert expected - marked("equation") == set()


def test_every_tag_has_its_row():
    assert marked("equation") - documented() == set()


def test_every_file_and_name_exists():
    schemas = (ROOT / "csrc" / "moe_ext.cpp").read_text()
    missing = []
    for _, _, modules, operators, sources, _ in rows():
        for name in names(modules):
            if "." in name:  # other names are options
                pkgutil.resolve_name(name if name.startswith("moe_lab.") else f"moe_ext.{name}")
        missing += [name for name in names(sources) if not (ROOT / "csrc" / name).exists()]
        called = set(names(operators)) - {"group_offsets"}
        missing += [name for name in called if f'"{name}(' not in schemas]
    assert missing == []
