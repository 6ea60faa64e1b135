"""Checks the prose of documents, docstrings, comments and messages.

    python docs/check_prose.py                 # the whole repository
    python docs/check_prose.py docs README.md  # these files and folders

A sentence of a document, docstring or comment has at most 32 words, which is enough for a main
clause with a relative clause. Code, numbers and formulas do not count as words. No text uses a term
that docs/prose.toml rejects; that file also lists the exceptions and their reasons. Prints each
finding with FILE:LINE and exits with 1 if there are any.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[1]
RULES = ROOT / "docs" / "prose.toml"
MAX_WORDS = 32
CPP = {".cpp", ".h", ".cu", ".cuh"}
HASH_COMMENTS = {".toml", ".sh"}

_ABBREVIATION = r"(?<!\be\.g\.)(?<!\bi\.e\.)(?<!\bal\.)(?<!\bvs\.)(?<!\bSec\.)(?<!\bApp\.)"
_SENTENCE_END = re.compile(rf"(?<=[.!?:])(?:[)\"'”*_]*){_ABBREVIATION}\s+(?=[^a-z\s])")
_WORD = re.compile(r"^[A-Za-z][A-Za-z'’-]*$")
_CODE = re.compile(r":[\w:]+:`[^`]*`|``?[^`]+``?")
_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields|Example|Examples|Note|Shape)s?:$")
_ENTRY = re.compile(r"^(?:[-*]|\d+[.)])\s+|^\**[\w.]+(?:, \**[\w.]+)*(?: \([^)]*\))?:\s")


class Text(NamedTuple):
    """A paragraph: its first line, its text, and whether the sentence length is checked."""

    line: int
    text: str
    measured: bool = True


class Finding(NamedTuple):
    """A violation, and the text that has it."""

    line: int
    message: str
    text: str


def sentences(text: str) -> list[str]:
    """Splits a paragraph into sentences; a colon before a capital letter ends a sentence too."""
    return _SENTENCE_END.split(text)


def num_words(sentence: str) -> int:
    """Counts the words of a sentence; inline code counts as one, a number or formula as none."""
    words = _CODE.sub(" code ", sentence).split()
    return sum(bool(_WORD.match(word.strip(".,;:!?()[]\"'“”*_"))) for word in words)


def markdown_texts(source: str) -> Iterator[Text]:
    """Yields the paragraphs, list items, headings and table cells of a document, without code."""
    for token in MarkdownIt("commonmark").enable("table").parse(source):
        if token.type == "inline" and token.map:
            parts = []
            for child in token.children or ():
                if child.type == "code_inline":
                    parts.append(f"`{child.content}`")
                elif child.type in ("softbreak", "hardbreak"):
                    parts.append(" ")
                elif child.type == "text":
                    parts.append(child.content)
            yield Text(token.map[0] + 1, "".join(parts))


def paragraphs(lines: Sequence[str], first_line: int, code_indent: int = 4) -> Iterator[Text]:
    """Yields the paragraphs of a docstring or comment, without examples and indented code."""
    collected: list[str] = []
    start = first_line
    section_indent = -1
    skipping = False
    after_blank = False
    for number, line in enumerate([*lines, ""], first_line):
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        entry = _ENTRY.match(text)
        if not text or _SECTION.match(text) or entry or text.startswith(">>>"):
            if collected:
                yield Text(start, " ".join(collected))
            collected = []
        if not text:
            skipping, after_blank = False, True
            continue
        if _SECTION.match(text):
            section_indent = indent
        elif indent <= section_indent:
            section_indent = -1
        code = after_blank and indent >= code_indent and section_indent < 0 and not entry
        skipping = skipping or text.startswith(">>>") or code
        after_blank = False
        if not skipping and not _SECTION.match(text):
            if not collected:
                start = number
            collected.append(text[entry.end() :] if entry else text)


def comment_blocks(lines: Sequence[tuple[int, str]], code_indent: int = 4) -> Iterator[Text]:
    """Yields the paragraphs of numbered comment lines; consecutive lines form one block."""
    block: list[str] = []
    last = -1
    for number, text in [*lines, (-1, "")]:
        if number != last + 1 and block:
            yield from paragraphs(block, last - len(block) + 1, code_indent)
            block = []
        block.append(text)
        last = number


def python_texts(source: str) -> Iterator[Text]:
    """Yields docstrings, comments and other strings of Python code."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            constant = node.body[0].value  # type: ignore[attr-defined]
            docstrings.add(constant)
            lines = ast.get_docstring(node, clean=True).splitlines()  # type: ignore[union-attr]
            yield from paragraphs(lines, constant.lineno)
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant))
    for node in constants:
        if isinstance(node.value, str) and " " in node.value and node not in docstrings:
            yield Text(node.lineno, node.value, measured=False)
    block: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.line[: token.start[1]].strip():  # after code: begins a block of its own
                yield from comment_blocks(block)
                block = []
            block.append((token.start[0], re.sub(r"^#+:? ?", "", token.string)))
    yield from comment_blocks(block)


def cpp_texts(source: str) -> Iterator[Text]:
    """Yields comments and strings of C++ code."""
    lines = list(enumerate(source.splitlines(), 1))
    strings = r'"((?:[^"\\]|\\.)* (?:[^"\\]|\\.)*)"'
    for number, line in lines:
        code = line.split("//")[0]
        yield from (Text(number, text, measured=False) for text in re.findall(strings, code))
    block: list[tuple[int, str]] = []
    for number, line in lines:
        if match := re.search(r"(?:^|\s)//+ ?(.*)$", line):
            if line[: match.start()].strip():  # a comment after code begins a block of its own
                yield from comment_blocks(block, code_indent=2)
                block = []
            block.append((number, match[1]))
    yield from comment_blocks(block, code_indent=2)


def hash_texts(source: str) -> Iterator[Text]:
    """Yields the comments of shell scripts and configurations."""
    matches = [
        (number, re.match(r"\s*#(?!!) ?(.*)$", line))
        for number, line in enumerate(source.splitlines(), 1)
    ]
    yield from comment_blocks([(number, match[1]) for number, match in matches if match])


def texts_of(path: Path) -> Iterator[Text]:
    """Yields the texts of a file, according to its suffix."""
    source = path.read_text()
    if path.suffix == ".md":
        return markdown_texts(source)
    if path.suffix == ".py":
        return python_texts(source)
    return cpp_texts(source) if path.suffix in CPP else hash_texts(source)


def findings(texts: Iterator[Text], terms: Sequence[dict[str, str]]) -> Iterator[Finding]:
    """Finds sentences that are too long and terms that prose.toml rejects."""
    for line, text, measured in texts:
        if measured:
            for sentence in sentences(text):
                if (count := num_words(sentence)) > MAX_WORDS:
                    yield Finding(line, f"{count} words in one sentence", sentence)
        for term in terms:
            if match := re.search(term["not"], _CODE.sub("`code`", text), re.IGNORECASE):
                yield Finding(line, f'"{match[0]}": say {term["say"]}', text)


def tracked(arguments: Sequence[str]) -> list[Path]:
    """Lists the checked kinds of files below the arguments that git tracks or would add.

    An unpacked source distribution lists its files itself.
    """
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    else:
        names = (ROOT / "moe_ext.egg-info" / "SOURCES.txt").read_text()
    kinds = {".md", ".py", *CPP, *HASH_COMMENTS}
    files = [ROOT / name for name in sorted(set(names.splitlines()))]
    if arguments:
        files = [file for file in files if any(file.is_relative_to(path) for path in arguments)]
    return [file for file in files if file.suffix in kinds and file.exists()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what breaks the rules, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("paths", nargs="*", help="files and folders (default: all)")
    paths = [str(Path(path).resolve()) for path in parser.parse_args(arguments).paths]
    rules = tomllib.loads(RULES.read_text())
    exceptions = rules.get("exceptions", [])
    num_findings, unused = 0, exceptions
    for file in tracked(paths):
        name = str(file.relative_to(ROOT))
        for finding in findings(texts_of(file), rules["terms"]):
            excepted = [
                exception
                for exception in exceptions
                if re.fullmatch(exception["file"], name) and exception["text"] in finding.text
            ]
            unused = [exception for exception in unused if exception not in excepted]
            if not excepted:
                num_findings += 1
                shown = finding.text if len(finding.text) < 300 else finding.text[:300] + " ..."
                print(f"{name}:{finding.line}: {finding.message}: {shown}")
    if not paths:
        for exception in unused:
            num_findings += 1
            print(f"docs/prose.toml: unused exception: {exception}")
    return int(num_findings > 0)


if __name__ == "__main__":
    sys.exit(main())
