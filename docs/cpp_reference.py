"""The Sphinx directive `cpp-header`: the reference of a public C++ header, made from its comments.

    .. cpp-header:: ops.h

The page gets the comment of the file, its sections (`// ---- TITLE`), and each declaration with the
comment above it. Classes are shown as the header declares them, without their private part.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

HEADERS = Path(__file__).resolve().parents[1] / "moe_ext" / "include" / "moe_ext"
SECTION = "// ---- "


class Entry(NamedTuple):
    """A comment with the declaration that follows; or a comment alone; or a section's title."""

    comment: list[str]
    code: str = ""
    namespace: str = ""
    title: str = ""

    @property
    def kind(self) -> str:
        """The directive of Sphinx's C++ domain that describes the declaration."""
        kinds = {"struct": "struct", "class": "class", "using": "type"}
        return kinds.get(self.code.split()[0], "function")

    @property
    def name(self) -> str:
        """The declared name."""
        return re.findall(r"(\w+)\(" if self.kind == "function" else r"\w+ (\w+)", self.code)[0]

    @property
    def signature(self) -> str:
        """The declaration on one line, without the body of a class."""
        code = self.code.removesuffix(";")
        if self.kind != "function":
            code = re.sub(r"^\w+ | \{.*", "", code, flags=re.S)
        return re.sub(r"\s+", " ", code)


def entries(source: str) -> Iterator[Entry]:
    """Yields the comment of a header, its sections and its declarations, in their order."""
    comment: list[str] = []
    code = namespace = ""
    for line in source.splitlines():
        if code:
            code += "\n" + line
        elif line.startswith(SECTION):
            yield Entry([], title=line.removeprefix(SECTION))
        elif line.startswith("//"):
            comment.append(line[3:])
        elif line == "#pragma once":
            yield Entry(comment)
            comment = []
        elif match := re.match(r"namespace (\S+) {", line):
            namespace = match[1]
        elif not line:
            comment = []
        elif not re.match(r"#|}|\s|TORCH_MODULE|using \S+;", line):
            code = line
        bare = re.sub(r"\s*//.*", "", code)
        if bare.endswith(";") and bare.count("{") == bare.count("}"):
            yield Entry(comment, code.replace("MOE_EXT_API ", ""), namespace)
            comment, code = [], ""


def public_names() -> dict[str, str]:
    """Returns the full name of each declaration of the headers."""
    sources = [header.read_text() for header in sorted(HEADERS.glob("*.h"))]
    declared = [entry for source in sources for entry in entries(source) if entry.code]
    names = [(entry.namespace, entry.name.removesuffix("Impl")) for entry in declared]
    return {name: f"{namespace}::{name}" for namespace, name in names}


def inline(text: str, names: dict[str, str]) -> str:
    """Returns reStructuredText of a sentence: code stays code, and public names become links.

    Only a name that cannot be an English word becomes a link.
    """

    def word(match: re.Match[str]) -> str:
        name = match[0].rpartition("::")[2]
        if name in names and re.search(r"_|::|[A-Z].*[A-Z]", match[0]):
            return f":cpp:any:`{match[0]} <{names[name]}>`"
        return re.sub(r"([*_|\\])", r"\\\1", match[0])

    parts = text.split("`")
    parts[0::2] = [
        re.sub(r"(?<!\.)(?:\w+::)*\b\w+\b(?!\.h|\()|[*|\\]", word, part) for part in parts[0::2]
    ]
    parts[1::2] = [f"``{code}``" for code in parts[1::2]]
    return "".join(parts)


def prose(comment: list[str], names: dict[str, str]) -> Iterator[str]:
    """Yields reStructuredText of a comment.

    An indented paragraph is a list of arguments ("name: text"), a list ("- text"), or code.
    """
    for paragraph in "\n".join(comment).split("\n\n"):
        if not paragraph.startswith("  "):
            yield inline(paragraph.replace("\n", " "), names)
        elif re.match(r"  (- |\w+(, \w+)*: )", paragraph):
            for item in re.split(r"\n  (?! )", paragraph[2:]):
                text = re.sub(r"\s+", " ", item)
                mark, text = text.split(" ", 1) if item[0] == "-" else text.split(": ", 1)
                yield (mark if mark == "-" else f":param {mark}:") + f" {inline(text, names)}"
        else:
            yield f".. code-block:: {'cpp' if ';' in paragraph else 'text'}\n"
            yield paragraph
        yield ""


class CppHeader(SphinxDirective):
    """Describes a header; see the top of this file."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Returns the nodes of the header's entries."""
        path = HEADERS / self.arguments[0]
        self.env.note_dependency(str(path))
        names = public_names()
        text = ""
        for entry in entries(path.read_text()):
            body = "\n".join(prose(entry.comment, names))
            if entry.title:
                text += f"{entry.title}\n{'-' * len(entry.title)}\n\n"
            elif entry.code:
                text += self.described(entry, body)
            else:
                text += f"{body}\n\n"
        lines = StringList(text.splitlines(), str(path))
        return self.parse_text_to_nodes(lines, allow_section_headings=True)

    def described(self, entry: Entry, body: str) -> str:
        """Returns the entry of a declaration in reStructuredText."""
        directive = f".. cpp:{entry.kind}:: "
        signatures = [entry.signature]
        if entry.name.endswith("Impl"):  # TORCH_MODULE declares the module that holds it
            module = entry.name.removesuffix("Impl")
            signatures.insert(0, f"{module} : public torch::nn::ModuleHolder<{entry.name}>")
        if "{" in entry.code:
            code = re.sub(r"\n*^ private:.*(?=^};)", "\n", entry.code, flags=re.S | re.M)
            body += "\n.. code-block:: cpp\n\n" + indented(code)
        head = ("\n" + " " * len(directive)).join(signatures)
        scope = f".. cpp:namespace:: {entry.namespace}\n\n"
        return f"{scope}{directive}{head}\n\n{indented(body)}\n\n"


def indented(text: str) -> str:
    """Indents the lines of a text."""
    return re.sub(r"^(?=.)", "   ", text, flags=re.M)


def setup(app: Sphinx) -> None:
    """Registers the directive with Sphinx."""
    app.add_directive("cpp-header", CppHeader)
