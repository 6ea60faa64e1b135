"""The public names of the layer: each importable, typed, documented and in the API reference.

A module without an underscore is public. Its `__all__` holds all of its names but those that begin
with an underscore. The pages of docs/api list each name once.
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
from moe_ext import HierarchicalMoE, MoE, ops
from moe_ext.optim import split_parameters

ROOT = Path(__file__).parents[1]


def modules():
    packages = pkgutil.walk_packages(moe_ext.__path__, "moe_ext.")
    return ["moe_ext", *(module.name for module in packages)]


def public_modules():
    return [name for name in modules() if "._" not in name]


def has_examples(name):
    path = ROOT / name.replace(".", "/")
    files = [path.with_suffix(".py"), path / "__init__.py"]
    return any(">>> " in file.read_text() for file in files if file.exists())


def referenced():
    """Yields the full names that the pages of docs/api document, in the order of the pages."""
    module = r"\.\. (?:current|auto)?module:: (\S+)\n(?:   :no-members:\n)?"
    listing = module + r"\n.*\n\n\.\. autosummary::\n((?:   .*\n|\n)+)"
    for page in sorted((ROOT / "docs" / "api").glob("*.rst")):
        for module, names in re.findall(listing, page.read_text()):
            yield from (f"{module}.{name}" for name in re.findall(r"^   (\w+)$", names, re.M))


def value_of(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_the_reference_has_each_public_name_once():
    values = [id(value_of(path)) for path in referenced()]
    assert len(values) > 80 and len(set(values)) == len(values)
    public = {f"{name}.{member}" for name in public_modules() for member in module_names(name)}
    missing = sorted(path for path in public if id(value_of(path)) not in values)
    assert not missing, "docs/api lacks these names"


def module_names(name):
    """Returns the public names of a module, without its submodules."""
    module = importlib.import_module(name)
    return [member for member in module.__all__ if not inspect.ismodule(getattr(module, member))]


def test_each_operator_says_that_cuda_is_experimental():
    operators = {name for name in ops.__all__ if hasattr(torch.ops.moe_ext, name)}
    assert len(operators) >= 13
    sentence = "CUDA is experimental: no kernel has run on a GPU yet."
    assert {name for name in operators if sentence not in getattr(ops, name).__doc__} == set()
    header = (ROOT / "moe_ext" / "include" / "moe_ext" / "ops.h").read_text()
    assert sentence in header.partition("#pragma once")[0].replace("\n// ", " ")


def callables_of(value):
    """Returns a function, or a class with its methods and the methods of its bases in moe_ext."""
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
    flat_options = {"num_identity_experts", "num_null_experts", "capacity"}
    keywords = {
        parameter.name
        for parameter in inspect.signature(MoE).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    assert set(typing.get_type_hints(options)) == keywords - own - flat_options
    layer_hints = typing.get_type_hints(MoE.__init__)
    assert all(kind == layer_hints[key] for key, kind in typing.get_type_hints(options).items())


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


def test_tab_completion_shows_public_names():
    assert set(dir(moe_ext)) == {*moe_ext.__all__, "__version__"}


@pytest.mark.parametrize("name", [*filter(has_examples, modules())])
def test_examples_of_the_docstrings(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    module = importlib.import_module(name)
    names = {"torch": torch, "MoE": moe_ext.MoE, "split_parameters": split_parameters}
    failed, _ = doctest.testmod(module, extraglobs=names, optionflags=doctest.ELLIPSIS)
    assert not failed
