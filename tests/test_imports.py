"""What the packages import: the layer nothing of the lab, the lab public names of the layer."""

import ast
import functools
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import moe_ext
import moe_ext.distributed

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "moe_ext"
LAYER = sorted(PACKAGE.rglob("*.py"))
LAB = sorted((ROOT / "lab" / "moe_lab").rglob("*.py"))
PUBLIC = {
    "moe_ext",
    *(
        f"moe_ext.{name}"
        for name in ("checks", "distributed", "experts", "files", "formats", "gates", "info")
    ),
    *(f"moe_ext.{name}" for name in ("losses", "ops", "optim", "recurrent")),
    "moe_ext.integrations.peft",
    "moe_ext.integrations.transformers",
    "moe_ext.lora",
    "moe_ext.presets",
}
STREAMS = ("moe_ext_command", "with_streams")  # of no public module: it loads without torch


# A module or folder of the layer imports only what stands above it.
LEVELS = [
    "_build _compiled _argument_names _former_names _plain_names _ragged checks files",
    "ranks _counting formats ops",
    "routing _panel_parameters",
    "experts losses",
    "gates",
    "shared optim quantized lora",
    "_capacity _meanwhile dispatch",
    "_checked_parts _former_capacity",
    "moe",
    "hierarchical presets recurrent",
    "distributed",
    "integrations",
    "chat info",
]
ORDER = " ".join(LEVELS).split()


def name_of(file):
    """Returns the name of a module from its file."""
    folder = ROOT if PACKAGE in file.parents else ROOT / "lab"
    return ".".join(file.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def tree_of(file):
    return ast.parse(file.read_text())


def imports_of(file):
    """Returns (module, name) of each import of moe_ext; name is "" for a whole module."""
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if is_ours(alias.name))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            if is_ours(node.module):
                yield from ((node.module, alias.name) for alias in node.names)


def is_ours(module):
    return module.partition(".")[0] in ("moe_ext", "moe_ext_command", "moe_lab")


def in_lab(module, name=""):
    return f"{module}.{name}.".startswith("moe_lab.")


def is_public(module, name):
    """Returns whether it is a public module of the layer, or a name that such a module exports."""
    if not name:
        return module in PUBLIC
    if f"{module}.{name}" in PUBLIC:
        return True
    exported = module in PUBLIC and name in importlib.import_module(module).__all__
    return exported and (module == "moe_ext" or name not in moe_ext.__all__)  # the shortest path


def run(code):
    """Runs the code in a new process with the tested package."""
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'lab')!r}]\n{code}"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout


def part_of(module, name=""):
    """Returns the module or folder, directly in moe_ext, that an import is of."""
    part = f"{module}.{name}.".split(".")[1]
    return part if part in ORDER else "the public names of moe_ext"


def test_the_order_has_each_module_once():
    parts = {part for file in LAYER for part in name_of(file).split(".")[1:2]}
    assert sorted(ORDER) == sorted(parts)


FUNCTIONS = (ast.FunctionDef, ast.Lambda)
# gguf and matplotlib are optional.
LAZY = r"import gguf|from matplotlib\..*"


@pytest.mark.parametrize("file", LAYER, ids=name_of)
def test_a_module_of_the_layer(file):
    """It imports what stands above it, in no function, and does not mention the repository."""
    part, imports = name_of(file).split(".")[1:2], [*imports_of(file)]
    assert [name for name in imports if in_lab(*name)] == []
    order = [*ORDER[:-1], "the public names of moe_ext", ORDER[-1]]
    below = order[: order.index(part[0]) + 1] if part else order
    assert {part_of(*name) for name in imports if name != STREAMS} <= {*below}
    nodes = [*ast.walk(tree_of(file))]
    inner = [n for f in nodes if isinstance(f, FUNCTIONS) for n in ast.walk(f)]
    lazy = [ast.unparse(n) for n in inner if isinstance(n, ast.Import | ast.ImportFrom)]
    assert [name for name in lazy if not re.fullmatch(LAZY, name)] == []
    values = [node.value for node in nodes if isinstance(node, ast.Constant)]
    text = "\n".join(value for value in values if isinstance(value, str))
    assert re.findall(r"\b(?:scripts|configs|docs|tests|lab)/|\bmoe_lab\b", text) == []


@pytest.mark.parametrize("former", ["exchange", "files", "placement", "ranks", "sharding"])
def test_former_places_of_modules(former):
    module = importlib.import_module(f"moe_ext.distributed.{former}")
    assert module.__name__ != f"moe_ext.distributed.{former}"
    assert getattr(moe_ext.distributed, former) is module


@pytest.mark.parametrize("file", LAB, ids=name_of)
def test_the_lab_imports_public_names(file):
    names = [name for name in imports_of(file) if not in_lab(*name)]
    assert [name for name in names if not is_public(*name) and name != STREAMS] == []


PACKAGES = [name_of(file) for file in LAB if file.name == "__init__.py"]


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_exports_is_there_and_hides_no_module(package):
    module = importlib.import_module(package)
    assert len(set(module.__all__)) == len(module.__all__)
    folder = Path(module.__file__).parent
    modules = {path.stem for path in folder.iterdir() if path.suffix in (".py", "")}
    for name in module.__all__:
        assert not name.startswith("_")
        if name in modules:
            importlib.import_module(f"{package}.{name}")
            assert isinstance(getattr(module, name), ModuleType), f"{name} hides a module"
        assert hasattr(module, name)


def optional_packages():
    """Returns the modules of the packages that moe_ext does not require."""
    layer = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lab = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text())["project"]
    optional = [*layer["project"]["optional-dependencies"].values()]
    optional += [*layer["dependency-groups"].values(), *lab["optional-dependencies"].values()]
    packages = [requirement for group in [*optional, lab["dependencies"]] for requirement in group]
    assert len(packages) > 10
    names = {re.match(r"[\w-]+", package)[0].replace("-", "_") for package in packages}
    return sorted(names - {"moe_ext", "setuptools"})


LOADED = """
import torch
before = {{*sys.modules}}
from moe_ext import MoE
new = [name for name in sys.modules if name not in before and name.partition(".")[0] in {optional}]
print(*new, *(name for name in sys.modules if name.startswith({slow})))
sys.modules.update(dict.fromkeys({optional}))
import moe_ext.distributed, moe_ext.gates, moe_ext.info, moe_ext.optim, moe_ext.recurrent
assert "moe_ext.presets" not in sys.modules
import moe_ext.presets, moe_ext.integrations._transformers.balance
x = torch.randn(6, 8, requires_grad=True)
layer = MoE(8, 4, 2, hidden_sizes=[16])
y, aux = layer(x)
(y.sum() + aux.loss).backward()
assert x.grad.isfinite().all() and all(p.grad is not None for p in layer.parameters())
for name in {needed}:
    del sys.modules[name]
import {lab}
"""


def test_packages_load_without_what_is_optional():
    """The layer loads no optional package, and no module that is slow or knows models.

    Without the optional packages it trains. The lab loads with the packages that it requires:
    modules import the package of an extra only when they use it.
    """
    lab = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text())["project"]
    slow = ("moe_lab", "moe_ext.distributed", "sympy", "torch.distributed.tensor", "torch._dynamo")
    optional = optional_packages()
    needed = sorted({*lab["dependencies"]} & {*optional})
    code = LOADED.format(slow=slow, optional=optional, needed=needed, lab=", ".join(PACKAGES))
    assert run(code) == "\n"
