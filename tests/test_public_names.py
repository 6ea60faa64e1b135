"""The public names of the layer: each importable, typed, documented and in the API reference.

A module without an underscore is public. Its `__all__` holds all of its names but those that begin
with an underscore. The reference has a page for the module or for the package around it.
"""

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
import types
import typing
from pathlib import Path

import pytest
import torch

import moe_ext
from moe_ext import HierarchicalMoE, MoE
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


def referenced():
    """The modules whose names the pages of docs/api document, each in the order of the pages."""
    pages = sorted((ROOT / "docs" / "api").rglob("*.md"))
    return [
        name
        for page in pages
        for name in re.findall(r"^```\{public-module\} (\S+)$", page.read_text(), re.M)
    ]


def test_the_reference_has_each_module_once():
    modules = referenced()
    assert len(modules) > 10 and len(set(modules)) == len(modules)


def callables_of(value):
    """A function; or a class with its own methods and those of its bases in moe_ext."""
    if not inspect.isclass(value):
        return [value] if inspect.isfunction(value) else []
    methods = [getattr(value, name) for name in dir(value) if name in ("__init__", "__call__")]
    methods += [getattr(value, name) for name in dir(value) if not name.startswith("_")]
    functions = [inspect.unwrap(getattr(method, "__func__", method)) for method in methods]
    own = [f for f in functions if inspect.isfunction(f) and f.__module__.startswith("moe_ext")]
    return [value, *own]


@pytest.mark.parametrize("name", public_modules())
def test_annotations_can_be_resolved(name):
    module = importlib.import_module(name)
    for public in module.__all__:
        for function in callables_of(getattr(module, public)):
            typing.get_type_hints(function)


def test_a_hierarchical_layer_takes_the_options_of_a_layer():
    hints = typing.get_type_hints(HierarchicalMoE.__init__)
    (options,) = typing.get_args(hints["options"])
    own = {"gate", "noise_epsilon", "generator"}
    keywords = {
        parameter.name
        for parameter in inspect.signature(MoE).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    assert set(options.__annotations__) == keywords - own
    of_layer = typing.get_type_hints(MoE.__init__)
    assert all(kind == of_layer[key] for key, kind in typing.get_type_hints(options).items())


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
    pages = [importlib.import_module(page) for page in (name, package) if page in referenced()]
    where = {public for page in pages for public in page.__all__}
    assert set(module.__all__) <= where, "docs/api lacks some of its names"


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
