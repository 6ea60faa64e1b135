"""The built-in corpus: English sentences from the documentation of Python and torch.

The sources are the docstrings of the standard library and of torch, and the language manual in
``pydoc_data.topics``. The sources are installed wherever torch runs, so nothing is downloaded. The
sources are parsed, never imported.

Case is kept, as in the 1-billion-word benchmark: lower-casing makes the task easier, so
perplexities would not be comparable. Sentences are tokenised as in that benchmark. Punctuation and
the endings 's and n't are separate words; dotted names such as torch.nn.Linear are one word.
"""

import ast
import hashlib
import importlib.util
import inspect
import os
import platform
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from moe_lab.data.sentences import Corpus, Lines, hash_split
from moe_lab.files import atomic_file
from moe_lab.progress import progress

_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "__pycache__"}
# Files that hold documentation in plain string literals rather than in docstrings.
_LITERAL_DOCS = {"topics.py", "_torch_docs.py", "_tensor_docs.py"}
_MIN_LITERAL = 100  # characters; shorter literals are names and keys
_MIN_WORDS, _MAX_WORDS = 4, 80


def builtin_sentences() -> list[str]:
    """Returns the distinct sentences of the built-in corpus, with spaces between words.

    The order of the sentences is fixed for given versions of Python and torch. The first call takes
    about 20 seconds and caches the sentences; see `cached_lines`.
    """
    files = source_files()

    def made() -> Iterator[str]:
        bar = progress(files, "making the built-in corpus", "files")
        return _distinct(s for file in bar for s in _sentences_of(file))

    return cached_lines("builtin", made, files, [__file__])


def builtin_corpus() -> Corpus:
    """Returns the built-in corpus; a hash of each sentence decides its part."""
    return hash_split([Lines(builtin_sentences())])


def cached_lines(
    name: str, make: Callable[[], Iterable[str]], files: Iterable[Path], code: Iterable[str]
) -> list[str]:
    """Returns the lines that `make` makes of installed files, from the cache after the first call.

    The cache is a file in ``$XDG_CACHE_HOME/moe_ext`` or ``~/.cache/moe_ext``. If that folder is
    not writable, each call makes the lines again.

    Args:
        name: the beginning of the cache file's name. The rest of the name depends on the versions
            of Python and torch, on `files` and on `code`.
        make: function that makes the lines.
        files: the installed files of which the lines are made.
        code: the Python files that make the lines.
    """
    cached = _cache_folder() / f"{name}-{_key(files, code)}.txt"
    if cached.is_file():
        return cached.read_text("utf-8").splitlines()
    lines = list(make())
    with suppress(OSError):
        cached.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(cached) as file:
            file.writelines(f"{line}\n".encode() for line in lines)
    return lines


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "moe_ext"


def _key(files: Iterable[Path], code: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for module in code:
        digest.update(Path(module).read_bytes())
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size}\n".encode(errors="surrogateescape"))
    return f"python{platform.python_version()}-torch{version('torch')}-{digest.hexdigest()[:12]}"


def torch_folder() -> Path:
    """Returns the folder of the installed package torch, without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def source_files() -> list[Path]:
    """Lists the .py files of the standard library and of torch in a fixed order."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    roots = [stdlib / name for name in sorted(sys.stdlib_module_names | {"pydoc_data"})]
    roots.append(torch_folder())
    files = []
    for root in roots:
        module = root.with_name(f"{root.name}.py")
        paths = [module] if module.is_file() else root.rglob("*.py")
        for file in sorted(paths):
            if _SKIPPED_FOLDERS.isdisjoint(file.relative_to(root.parent).parts):
                files.append(file)
    return files


def _sentences_of(file: Path) -> Iterator[str]:
    for text in _documentation(file):
        for paragraph in _paragraphs(text):
            for sentence in _split(paragraph):
                words = _tokenise(sentence)
                if _is_prose(words):
                    yield " ".join(words)


def _distinct(sentences: Iterable[str]) -> Iterator[str]:
    """Drops sentences whose letters equal those of an earlier sentence.

    Documentation repeats sentences with a different number or mark ("2D", "3D"). The comparison of
    letters keeps such near-duplicates of training sentences out of the test part.
    """
    seen = set()
    for sentence in sentences:
        letters = re.sub(r"[^a-z]+", "", sentence.lower())
        if letters not in seen:
            seen.add(letters)
            yield sentence


def _documentation(file: Path) -> Iterator[str]:
    """Yields the docstrings of a source file, or long string literals that are documentation."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the sources contain invalid escapes
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return  # a template, or a source for another version of Python
    if file.name in _LITERAL_DOCS:
        for node in ast.walk(tree):
            value = node.value if isinstance(node, ast.Constant) else None
            if isinstance(value, str) and len(value) >= _MIN_LITERAL:
                yield inspect.cleandoc(value)
    else:
        yield from _docstrings(tree)


def _docstrings(node: ast.AST) -> Iterator[str]:
    """Yields the docstrings of a module and of its definitions, in source order."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        text = ast.get_docstring(node)
        if text:
            yield text
    # Only lists of statements contain definitions; skipping expressions saves most of the work.
    for statements in ("body", "handlers", "orelse", "finalbody", "cases"):
        for statement in getattr(node, statements, ()):
            yield from _docstrings(statement)


_RULED = re.compile(r"\s*[-=~^+|*#_.]{3,}|.*\s{3,}\S.*\s{3,}|\s*\|")  # underlines, tables
_FENCE = re.compile(r"\s*(```|~~~)")
_DIRECTIVE = re.compile(r"\s*\.\.(\s+|$)")
_PROSE_DIRECTIVE = re.compile(r"\s*\.\. (note|warning|seealso|tip|important|caution)::\s*(.*)")
_ITEM = re.compile(r"\s*(?:[-*+•]|\(?(?:\d{1,2}|[a-zA-Z])[.)])\s+(?=\S)")
# "name (type): ..." and ":param name: ..."; the description follows the colon.
_FIELD = re.compile(
    r"\s*(?::\w+[^:]*:|"
    r"[*`]*\w[\w.]*[*`]*(?:[,/]? ?[*`]*\w[\w.]*[*`]*){0,2} ?(?:\([^)]*\))?\s*:)(?:\s+|$)"
)


def _paragraphs(text: str) -> Iterator[str]:
    """Yields the paragraphs of running text, without code, examples, tables and headings.

    A paragraph ends at a blank line, a list item, a described argument or a smaller indentation. A
    literal block follows a directive or a line that ends in "::", and is indented more deeply than
    that line.
    """
    lines: list[str] = []
    indent = 0  # of the first line of the paragraph
    literal: int | None = None  # in a literal block: the indentation of the line before it
    fenced = example = False
    for line in [*text.expandtabs().splitlines(), ""]:
        stripped = line.strip()
        depth = len(line) - len(line.lstrip())
        if _FENCE.match(line):
            fenced = not fenced
            stripped = ""
        elif fenced:
            stripped = ""
        elif stripped and literal is not None:
            if depth > literal:
                stripped = ""
            else:
                literal = None
        if stripped.startswith(">>>"):
            example = True
        elif not stripped:
            example = False
        ends_before = not stripped or example or bool(_RULED.match(line))
        directive = None if ends_before else _PROSE_DIRECTIVE.match(line)
        if not ends_before and _DIRECTIVE.match(line):
            ends_before = True
            if not directive:
                literal = depth
        field = None if ends_before else _ITEM.match(line) or _FIELD.match(line)
        if lines and (ends_before or field or depth < indent):
            yield " ".join(lines)
            lines = []
        if directive and directive[2]:
            lines, indent = [directive[2]], depth
        if ends_before:
            continue
        if field:
            stripped = line[field.end() :].strip()
            inner = _FIELD.match(stripped + " ")
            if inner:
                stripped = stripped[inner.end() :]
        if stripped.endswith("::"):
            literal = depth
            stripped = stripped[:-1]
        if stripped:
            if not lines:
                indent = depth
            lines.append(stripped)


_MARKUP = [
    (re.compile(r":math:`[^`]*`"), "{}"),  # _is_prose rejects a sentence with a formula
    (re.compile(r":[\w:+-]+:`([^`<]*?)\s*<[^`]*>`"), r"\1"),  # :ref:`text <place>`
    (re.compile(r":[\w:+-]+:`[~!]?([^`]*)`"), r"\1"),  # :class:`~torch.Tensor`
    (re.compile(r"`([^`<]+?)\s*<[^`]*>`_+"), r"\1"),  # `text <address>`_
    (re.compile(r"`+([^`]*)`+_*"), r"\1"),  # ``code``
    (re.compile(r"\*\*?([^\s*](?:[^*]*[^\s*])?)\*\*?"), r"\1"),  # *emphasis*
    (re.compile(r"\[([^\]]+)\]\([^)]*\)"), r"\1"),  # [text](address)
    (re.compile(r"\s*\[\w+\]_?"), ""),  # [1], [Knuth]_
    (re.compile(r"(?<=\w)-\s+(?=\w)"), "-"),  # a word split at its hyphen
    (re.compile(r"(?<=\w)--?-?(?=\s)|(?<=\s)--?-?(?=\s)|(?<=\w)---?(?=\w)|[–—]"), " -- "),
    (re.compile("[‘’]"), "'"),
    (re.compile("[“”]"), '"'),
    (re.compile("…"), "..."),
]
_ABBREVIATED = re.compile(
    r"(?:\b(?:[eE]\.g|[iI]\.e|etc|vs|cf|al|approx|resp|incl|Mr|Dr|St|No|no|Fig|Eq|Sec|a\.k\.a)|\b[A-Z])\.$"
)
_END = re.compile(r"[.!?][\"')\]]*\s+(?=[\"'(\[]?[A-Z])")


def _split(paragraph: str) -> Iterator[str]:
    """Yields the sentences of a paragraph, without markup and without an unfinished last one."""
    for pattern, replacement in _MARKUP:
        paragraph = pattern.sub(replacement, paragraph)
    begin = 0
    for end in _END.finditer(paragraph):
        if _ABBREVIATED.search(paragraph, begin, end.start() + 1):
            continue
        yield paragraph[begin : end.end()].strip()
        begin = end.end()
    last = paragraph[begin:].strip()
    if re.search(r"[.!?][\"')\]]*$", last):
        yield last


_WORD = re.compile(
    r"""
    (?:[eE]\.g\.|[iI]\.e\.|etc\.(?=\s*[\w,)])|vs\.|cf\.|a\.k\.a\.)  # abbreviations, with the period
    | https?://[^\s)>,]*[^\s)>,.]
    | [A-Za-z]+(?=n't\b) | n't\b | '(?:s|re|ve|ll|d|m)\b    # do n't, it 's
    | -?\d+(?:[.,:]\d+)*%?(?!-?\w)                       # 3.14, 50%
    | _*\w+(?:(?:[./:-]|::)_*\w+)*(?:\(\))?               # well-known, torch.nn.Linear, close()
    | --|->|\.\.\.
    | \S
    """,
    re.VERBOSE,
)


def _tokenise(sentence: str) -> list[str]:
    return _WORD.findall(sentence)


_LETTERS = re.compile(r"[A-Za-z]+(?:-[A-Za-z]+)*")
_PUNCTUATION = frozenset([",", ".", ";", ":", "!", "?", "(", ")", '"', "'", "'s", "n't", "--", "-"])


def _is_prose(words: list[str]) -> bool:
    """Tests whether the words are a sentence: capitalised, and mostly plain words."""
    if not _MIN_WORDS <= len(words) <= _MAX_WORDS:
        return False
    if not words[0][0].isupper() and words[0] not in '("':
        return False
    if words.count("(") != words.count(")"):
        return False
    if any(mark in word for word in words for mark in "\\`{}"):
        return False  # remains of formulas, markup or placeholders
    plain = sum(bool(_LETTERS.fullmatch(word)) for word in words)
    marks = sum(word in _PUNCTUATION for word in words)
    odd = sum(not word[0].isalnum() and word not in _PUNCTUATION for word in words)
    return plain >= 4 and plain + marks >= 0.8 * len(words) and odd <= 0.05 * len(words)
