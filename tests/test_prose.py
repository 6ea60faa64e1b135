"""The check of the prose finds what it is for, and nothing in code."""

import importlib.util
import sys
import tomllib
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "docs" / "check_prose.py"
TERMS = [{"not": r"\bfor ever\b", "say": "hang"}]
LONG = " ".join(["The words of this sentence are counted and there are too many"] * 3)


@pytest.fixture(scope="module")
def prose():
    spec = importlib.util.spec_from_file_location("check_prose", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_prose"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["check_prose"]


def lines_found(prose, name, source, tmp_path):
    file = tmp_path / name
    file.write_text(source)
    return [finding.line for finding in prose.findings(prose.texts_of(file), TERMS)]


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("a.md", f"Short.\n\n{LONG}.\n", [3]),
        ("a.md", f"```\n{LONG}.\n```\n", []),
        ("a.md", "| a |\n|---|\n| it waits for ever |\n", [3]),
        ("a.py", f'"""Short.\n\n{LONG}.\n"""\n', [3]),
        ("a.py", f'"""Short.\n\n    {LONG}\n\nEnd.\n"""\n', []),  # an indented command
        ("a.py", f'def f():\n    """F.\n\n    Args:\n        x: {LONG}.\n    """\n', [5]),
        ("a.py", f"x = 1\n# {LONG[:40]}\n# {LONG}\n", [2]),
        ("a.py", 'raise ValueError("op: waits for ever")\n', [1]),
        ("a.py", f'text = "{LONG}"\n', []),
        ("a.cpp", f"int x;  // {LONG}\n", [1]),
        ("a.h", f"// Adds.\n//\n//   {LONG} = x\n", []),  # an equation
        ("a.h", f"// Adds.\n//\n//   x: {LONG}.\n", [3]),
        ("a.cpp", 'TORCH_CHECK(false, "op: waits for ever");\n', [1]),
        ("a.sh", f"# {LONG}\necho 1\n", [1]),
    ],
)
def test_findings(prose, name, source, expected, tmp_path):
    assert lines_found(prose, name, source, tmp_path) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three?", 3),
        ("See Shazeer et al. (2017), e.g. Sec. 3.1 and 0.5 nats.", 1),
        ("It has two parts: The first. The second.", 3),
        ("The list is: a, b.", 1),
    ],
)
def test_sentences(prose, text, expected):
    assert len(prose.sentences(text)) == expected


@pytest.mark.parametrize(
    ("text", "pronouns"),
    [
        ("None: that of the dimension before the last of x.", True),
        ("None: m_t is what it would multiply.", True),
        ("Counts what the steps pass back.", True),
        ("The copies, and what else is sent for each row.", True),
        ("Returns y, whose backward pass also runs that of x.", True),
        ("The first four are of x86-64.", True),
        (
            "The page shows what the layer computes, which depends on the gate that you choose.",
            False,
        ),
        ("Outputs are bitwise identical to those of a single rank.", False),
    ],
)
def test_pronouns_without_a_noun_are_found(prose, text, pronouns):
    terms = tomllib.loads(prose.RULES.read_text())["terms"]
    assert bool(list(prose.findings(iter([prose.Text(1, text)]), terms))) == pronouns


def test_code_numbers_and_formulas_are_not_words(prose):
    assert prose.num_words("Sum y_H = Σ_i G(x)_i over `all the experts` of 4,096 tokens.") == 5
