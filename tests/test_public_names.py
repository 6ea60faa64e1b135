"""The public names of the layer: listed once in docs/api.md, each importable and documented.

A module without an underscore is public. Its `__all__` holds all of its names but those that begin
with an underscore, and each of them is listed under the module or under the package around it.
"""

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
import types
from pathlib import Path

import pytest
import torch

import moe_ext
from moe_ext.optim import split_parameters

ROOT = Path(__file__).parents[1]


def public_modules():
    names = [module.name for module in pkgutil.walk_packages(moe_ext.__path__, "moe_ext.")]
    parts = [name.split(".") for name in ["moe_ext", *names]]
    return [
        ".".join(part)
        for part in parts
        if not any(name.startswith("_") for name in part) and "lab" not in part
    ]


def listed():
    """The names of docs/api.md by module."""
    text = (ROOT / "docs" / "api.md").read_text()
    sections = re.split(r"^## `([\w.]+)`$", text, flags=re.M)[1:]
    return {
        module: re.findall(r"^\| `(\w+)` \|", body, re.M)
        for module, body in zip(sections[::2], sections[1::2], strict=True)
    }


def row_of(module, name):
    """The row of a name: a docstring's first sentence; a constant's is written by hand."""
    value = getattr(importlib.import_module(module), name)
    if not isinstance(
        value, types.FunctionType | types.BuiltinFunctionType | type | types.ModuleType
    ):
        return f"| `{name}` |"
    first = inspect.getdoc(value).split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
    return f"| `{name}` | {first} |"


def test_the_list_is_that_of_the_modules():
    text = (ROOT / "docs" / "api.md").read_text()
    for module, names in listed().items():
        expected = sorted(importlib.import_module(module).__all__)
        assert names == expected, module
        for name in names:
            assert row_of(module, name) in text, "docs/api.md must have this row"


@pytest.mark.parametrize("name", public_modules())
def test_public_modules_name_all_that_they_offer(name):
    module = importlib.import_module(name)
    tree = ast.parse(Path(module.__file__).read_text())
    defined = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    }
    assert defined <= set(module.__all__)
    for public in module.__all__:
        value = getattr(module, public)
        if isinstance(value, types.FunctionType | type | types.ModuleType):
            assert inspect.getdoc(value), public
    package = name.rpartition(".")[0]
    where = {*listed().get(name, ()), *listed().get(package, ())}
    assert set(module.__all__) <= where, "docs/api.md lacks some of its names"


def test_tab_completion_shows_public_names():
    assert set(dir(moe_ext)) == {*moe_ext.__all__, "__version__"}


@pytest.mark.parametrize("name", public_modules())
def test_examples_of_the_docstrings(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    module = importlib.import_module(name)
    names = {"torch": torch, "MoE": moe_ext.MoE, "split_parameters": split_parameters}
    failed, _ = doctest.testmod(module, extraglobs=names, optionflags=doctest.ELLIPSIS)
    assert not failed
