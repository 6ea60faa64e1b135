"""Directives of the API reference.

`public-module` is the reference of one public module, `module-index` a table of a module's names.

The reference documents the names in the module's `__all__`, each under the shortest path from which
a user imports it. A name that several of these modules export is documented once, on the page of
the module that is furthest down.
"""

import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.typing import stringify_annotation

DOCS = Path(__file__).parents[1]
PAGES = [
    name
    for page in sorted((DOCS / "api").rglob("*.md"))
    for name in re.findall(r"\{public-module\} (\S+)", page.read_text())
]


def public_path(module: str, name: str) -> str:
    """The shortest path to a name of a module."""
    package = module.partition(".")[0]
    short = f"{package}.{name}"
    found = getattr(importlib.import_module(package), name, None)
    return short if found is value_of(module, name) else f"{module}.{name}"


def value_of(module: str, name: str) -> Any:
    """The value of a name, or the module that is named."""
    found = getattr(importlib.import_module(module), name, None)
    return importlib.import_module(f"{module}.{name}") if found is None else found


def names_of(module: str) -> list[str]:
    """The names that the page of a module documents: those that no page below it documents."""
    names = importlib.import_module(module).__all__
    below = {
        name
        for other in PAGES
        if other.startswith(f"{module}.")
        for name in importlib.import_module(other).__all__
    }
    values = {n: value_of(module, n) for n in names if n not in below}
    own = [name for name, value in values.items() if not isinstance(value, ModuleType)]
    # A class comes after its bases, a function after the classes.
    return sorted(own, key=lambda n: len(getattr(values[n], "__mro__", range(99))))


def introduction(module: ModuleType) -> list[str]:
    """The lines of a module's docstring; the table of the page replaces an index of its names."""
    kept: list[str] = []
    for paragraph in (inspect.getdoc(module) or "").split("\n\n"):
        if not all(re.search(r"\S {2,}\S", line) for line in paragraph.split("\n")):
            kept.append(paragraph)
        elif not module.__all__:
            kept.append(indent(paragraph, "    "))
        elif kept[-1].endswith(":"):
            kept.pop()
    return escape("\n\n".join(kept).split("\n"))


def escape(lines: list[str]) -> list[str]:
    """Escapes what is a formula in a docstring and markup in reStructuredText: |X|, w_ and *.

    Code in backticks and doctests stay as they are. So do indented paragraphs, which become literal
    blocks: they are formulas, tables or code.
    """
    result: list[str] = []
    block, text = None, ""  # where the line is, and the last line before an empty one
    for line in lines:
        indented = line.startswith(" ")
        if block == "doctest":
            block = block if line.strip() else None
        elif block == "literal":
            block = block if indented or not line else None
        if line.lstrip().startswith(">>>"):
            block = "doctest"
        after_text = bool(result and not result[-1]) and re.match(r"(?!- |\d+\. )\S", text)
        if block is None and indented and after_text:
            block = "literal"
            result += [] if text.endswith("::") else ["::", ""]
        if block is None:
            text = line or text
            parts = re.split(r"(``.+?``|`[^`]+`)", line)
            parts[::2] = [re.sub(r"[|*]|(?<=\w)_(?!\w)", r"\\\g<0>", part) for part in parts[::2]]
            line = re.sub(r"(?<=[^\s`]`)(?=[a-z])", r"\\ ", "".join(parts))
            line = re.sub(r"(?<=: )(?=\w\.$)", r"\\", line)  # no list that begins with a letter
        result.append(line)
    return result


def first_paragraph(value: Any) -> str:
    """The first paragraph of a docstring, on one line; a constant's value."""
    if get_origin(value):
        text = stringify_annotation(value, "smart", short_literals=True)
        return f"``{re.sub(r'~[.a-z_]+', '', text)}``"
    if isinstance(value, tuple):
        return f"``{value}``"
    if not (callable(value) or inspect.ismodule(value)):
        return ""
    return " ".join(escape((inspect.getdoc(value) or "").split("\n\n")[0].split("\n")))


def type_text(kind: Any) -> str:
    """An annotation as autodoc writes it."""
    if get_origin(kind) is ClassVar:
        (kind,) = get_args(kind)
    return stringify_annotation(kind, "smart", short_literals=True)


def move_attributes(lines: list[str], types: dict[str, Any]) -> None:
    """Moves the attributes to the end, before the methods, each with its type."""
    if "Attributes:" not in lines:
        return
    begin = lines.index("Attributes:")
    end = begin + 1
    while end < len(lines) and (not lines[end].strip() or lines[end].startswith(" ")):
        end += 1
    section = lines[begin + 1 : end]
    del lines[begin:end]
    names: list[str] = []
    texts: list[list[str]] = []
    for line in section:
        if re.match(r" {4}\w", line):
            given, _, text = line.strip().partition(": ")
            names.append(given)
            texts.append([text])
        elif line.strip():
            texts[-1].append(line.strip())
    for given, text in zip(names, texts, strict=True):
        for name in given.split(", "):
            lines += ["", f".. attribute:: {name}"]
            if name in types:
                lines += [f"   :type: {type_text(types[name])}"]
            lines += ["", *(f"   {line}" for line in text)]


def prepare_docstring(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Handles autodoc's event before napoleon does.

    Napoleon takes what is before a colon for a type in a property's docstring and in "Returns:".
    """
    kept = [line for line in lines if not line.startswith("Create new instance of ")]
    lines[:] = escape(kept)  # without the text that a named tuple gives __new__
    if what in ("class", "exception"):
        move_attributes(lines, get_type_hints(obj))
    if what in ("attribute", "property"):
        lines.insert(0, "\\ ")
    if "Returns:" in lines:
        at = lines.index("Returns:") + 1
        if re.search(r":( |$)", lines[at]):
            lines.insert(at, "    \\ ")


def hide_private_bases(
    app: Sphinx, name: str, obj: type, options: object, bases: list[type]
) -> None:
    """Shows the public bases of a private base in its place."""
    while private := [base for base in bases if "._" in f"{base.__module__}.{base.__name__}"]:
        at = bases.index(private[0])
        bases[at : at + 1] = private[0].__bases__


def hide_types(
    app: Sphinx, what: str, name: str, obj: object, options: object, *signature: str | None
) -> None:
    """Leaves out types that say nothing: private ones, "returns None", fields of a named tuple."""
    types = app.env.current_document.autodoc_annotations.get(name, {})
    if inspect.isclass(obj) and issubclass(obj, tuple):
        types.clear()
    elif inspect.isclass(obj):  # autodoc gives an argument the type of an attribute of its name
        hints = get_type_hints(obj.__init__)
        types.update({each: type_text(hints[each]) for each in types if each in hints})
    if types.get("return") == "None":
        del types["return"]
    for argument in [each for each, kind in types.items() if re.search(r"\._\w*\b(?<!_C)", kind)]:
        del types[argument]


class PublicModule(Directive):
    """A module's docstring, a table of its names, and the documentation of each."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        lines = module_lines(name)
        for each in names_of(name):
            path = public_path(name, each)
            value = value_of(name, each)
            if inspect.isclass(value):
                kind = "exception" if issubclass(value, Exception) else "class"
            else:
                kind = "function" if callable(value) and not get_origin(value) else "data"
            lines += ["", f".. auto{kind}:: {path}"]
            if kind == "class":
                lines += ["   :members:"]
                if not set(value.__bases__) <= {object, tuple}:
                    lines += ["   :show-inheritance:"]
        return parsed(self, lines)


class ModuleIndex(Directive):
    """A module's docstring and a table of its names, which are documented nowhere else."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return parsed(self, module_lines(self.arguments[0], linked=False))


def module_lines(name: str, linked: bool = True) -> list[str]:
    """The introduction of a module and the table of its names."""
    module = importlib.import_module(name)
    lines = [f".. py:module:: {name}", "", *introduction(module), ""]
    if module.__all__:
        lines += [".. list-table::", "   :class: names", "   :widths: auto", ""]
    for each in module.__all__:
        value = value_of(name, each)
        text = first_paragraph(value)
        if isinstance(value, ModuleType):
            label = f":py:mod:`{value.__name__}`"
        elif linked:
            label = f":py:obj:`{each} <{public_path(name, each)}>`"
        else:
            label, text = f"``{each}``", re.sub(r"(?<!`)`(?!`)", "``", text)
        lines += [f"   * - {label}", f"     - {text}"]
    return lines


def parsed(directive: Directive, lines: list[str]) -> list[nodes.Node]:
    """The nodes of reStructuredText in a Markdown page."""
    node = nodes.container()
    source = directive.state_machine.document.current_source or ""
    content = StringList(["````{eval-rst}", *lines, "````"], source)
    directive.state.nested_parse(content, directive.content_offset, node)
    return node.children


@cache
def own_paths() -> dict[str, str]:
    """The documented path of every public name, by its other paths and by the name alone."""
    found: dict[str, str] = {}
    for module in PAGES:
        for name in importlib.import_module(module).__all__:
            value = value_of(module, name)
            path = public_path(module, name)
            found.setdefault(name, path)
            found[f"{module}.{name}"] = path
            if inspect.isclass(value):
                found[f"{value.__module__}.{value.__qualname__}"] = path
    return found


@cache
def foreign_paths() -> dict[str, str]:
    """The documented path of every name of the inventories, by where it is defined."""
    found: dict[str, str] = {}
    for file in (DOCS / "inventories").glob("*.txt"):
        for line in file.read_text().splitlines():
            path = line.split()[0]
            module, _, name = path.rpartition(".")
            if module and not line.startswith("#"):
                value = getattr(importlib.import_module(module), name)
                found.setdefault(name, path)
                found[path.removeprefix("torch.")] = path
                if inspect.isclass(value) or inspect.isfunction(value):
                    found[f"{value.__module__}.{value.__qualname__}"] = path
    return found


def resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: nodes.Element
) -> nodes.Node | None:
    """Resolves a name that is not written with its documented path.

    Text in single backticks that cannot be a public name, such as that of an argument, is code.
    """
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    if target in foreign_paths():
        node["reftarget"] = foreign_paths()[target]  # intersphinx goes on with it
        return None
    if target.startswith("'"):  # the value of a Literal
        return contnode
    head, _, attribute = target.rpartition(".")
    path = own_paths().get(target)
    if path is None and head in own_paths():
        path = f"{own_paths()[head]}.{attribute}"
    for kind in (node["reftype"], "obj"):
        found = path and env.domains["py"].resolve_xref(
            env, node["refdoc"], app.builder, kind, path, node, contnode
        )
        if found:
            return found
    is_name = "._" not in target and re.fullmatch(r"[A-Z]\w+|\w+(\.\w+)+", target)
    return contnode if node["reftype"] == "obj" and not is_name else None


def skip(
    app: Sphinx, what: str, name: str, obj: object, skip: bool, options: object
) -> bool | None:
    """Leaves out the fields of named tuples: the section Attributes describes them."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("public-module", PublicModule)
    app.add_directive("module-index", ModuleIndex)
    app.connect("missing-reference", resolve, priority=400)  # before intersphinx
    app.connect("autodoc-process-docstring", prepare_docstring, priority=400)
    app.connect("autodoc-process-bases", hide_private_bases)
    app.connect("autodoc-process-signature", hide_types, priority=600)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True}
