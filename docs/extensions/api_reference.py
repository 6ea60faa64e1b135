"""The directive `public-module`: a reference page for one public module.

The page documents the names in the module's `__all__`, each under the shortest path from which a
user imports it. A name that a module of `PAGES` re-exports is documented once, on the page of the
module that is furthest down.
"""

import importlib
import inspect
from types import ModuleType
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

PAGES = (
    "moe_ext",
    "moe_ext.gates",
    "moe_ext.experts",
    "moe_ext.losses",
    "moe_ext.recurrent",
    "moe_ext.ops",
    "moe_ext.optim",
    "moe_ext.distributed",
    "moe_ext.distributed.files",
    "moe_ext.checks",
    "moe_ext.info",
)


def public_path(module: str, name: str) -> str:
    """The shortest path to a name of a module."""
    package = module.partition(".")[0]
    short = f"{package}.{name}"
    value = getattr(importlib.import_module(module), name)
    found = getattr(importlib.import_module(package), name, None)
    return short if found is value else f"{module}.{name}"


def names_of(module: str) -> list[str]:
    """The names that the page of a module documents: those that no page below it documents."""
    names = importlib.import_module(module).__all__
    below = {
        name
        for other in PAGES
        if other.startswith(f"{module}.")
        for name in importlib.import_module(other).__all__
    }
    values = vars(importlib.import_module(module))
    return [n for n in names if n not in below and not isinstance(values[n], ModuleType)]


def first_sentence(value: Any) -> str:
    """The first paragraph of a docstring."""
    return (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")


class PublicModule(Directive):
    """A module's docstring, a table of its names, and the documentation of each."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        module = importlib.import_module(name)
        lines = [f".. py:module:: {name}", "", *(inspect.getdoc(module) or "").split("\n"), ""]
        lines += [".. list-table::", "   :class: names", "   :widths: auto", ""]
        for each in module.__all__:
            value = getattr(module, each)
            if isinstance(value, ModuleType):
                lines += [f"   * - :py:mod:`{value.__name__}`"]
            else:
                path = public_path(name, each)
                lines += [f"   * - :py:obj:`{each} <{path}>`"]
            lines += [f"     - {first_sentence(value)}"]
        for each in names_of(name):
            path = public_path(name, each)
            value = getattr(module, each)
            if inspect.isclass(value):
                kind = "exception" if issubclass(value, Exception) else "class"
            else:
                kind = "function" if callable(value) and not is_alias(value) else "data"
            lines += ["", f".. auto{kind}:: {path}"]
            if kind == "class":
                lines += ["   :members:", "   :show-inheritance:"]
        fenced = ["````{eval-rst}", *lines, "````"]
        node = nodes.container()
        source = self.state_machine.document.current_source or name
        self.state.nested_parse(StringList(fenced, source), self.content_offset, node)
        return node.children


def is_alias(value: object) -> bool:
    """Whether a value is the alias of a type."""
    return hasattr(value, "__origin__")


def aliases() -> dict[str, str]:
    """The documented path of every public name, by the other paths and by the name alone."""
    found: dict[str, str] = {}
    for module in PAGES:
        for name in importlib.import_module(module).__all__:
            path = public_path(module, name)
            value = getattr(importlib.import_module(module), name)
            found[f"{module}.{name}"] = path
            found.setdefault(name, path)
            if inspect.isclass(value):
                found[f"{value.__module__}.{value.__qualname__}"] = path
    return found


def resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: nodes.Element
) -> nodes.Node | None:
    """Resolves a public name that is written with another path, or with none."""
    if node.get("refdomain") != "py":
        return None
    known = aliases()
    target = node["reftarget"]
    head, _, attribute = target.rpartition(".")
    path = known.get(target) or (head in known and f"{known[head]}.{attribute}")
    if not path or path == target:
        return None
    domain = env.domains["py"]
    return domain.resolve_xref(
        env, node["refdoc"], app.builder, node["reftype"], path, node, contnode
    ) or domain.resolve_xref(env, node["refdoc"], app.builder, "obj", path, node, contnode)


def skip(app: Sphinx, what: str, name: str, obj: object, skip: bool, options: object) -> bool | None:
    """Leaves out the fields of named tuples: the section Attributes describes them."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("public-module", PublicModule)
    app.connect("missing-reference", resolve)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True}
