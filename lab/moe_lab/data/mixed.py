"""Mixed corpora: text of many kinds, which needs more capacity than text of one kind.

The functions return the sentences of each part. Every kind has the same maximum number of training
sentences. A sentence has spaces between its words: line ends and indentation of code are lost.
"""

import random
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from moe_lab.data import builtin
from moe_lab.data.builtin import builtin_corpus, cached_lines, source_files, torch_folder
from moe_lab.data.parallel import ParallelText, load_parallel
from moe_lab.data.sentences import CorpusError, place_of
from moe_lab.data.wordpieces import uniform_sample
from moe_lab.files import write_text
from moe_lab.names import PARTS
from moe_lab.progress import progress

_KIND_SENTENCES = 60_000  # training sentences at most, in `sources`
_HELD_OUT = 2_000  # sentences of each kind at most, in dev and in test
_CODE_WORDS = 64  # words at most in a sentence of code

# A file of code is in the first part whose number exceeds the hash of the file's name. Dev and test
# need few sentences of many files, because a generated file has thousands of similar sentences.
_PART_ENDS = {"test": 0.05, "dev": 0.1, "train": 1.0}
_FILE_SENTENCES = 20  # sentences of a file at most, in dev and in test

Kind = dict[str, Iterable[str]]  # the sentences of one kind of text in each of PARTS
Parts = dict[str, list[str]]  # the sentences of a mixed corpus in each of PARTS


def mix_languages(folder: Path, languages: Iterable[str], max_sentences: int) -> Parts:
    """Mixes English and other languages, each side of a parallel corpus as text of its own.

    A training sentence of a language occurs once, and is in neither dev nor test.
    """
    distinct = dict.fromkeys(languages)
    corpora = [load_parallel(folder, source="en", target=language) for language in distinct]
    sides = [(corpora, 0), *(([corpus], 1) for corpus in corpora)]  # English, then the others
    kinds: Iterable[Kind] = (
        {part: _sides([getattr(corpus, part) for corpus in some], side) for part in PARTS}
        for some, side in progress(sides, "reading the languages", "languages")
    )
    return _mixed(kinds, max_sentences)


def mix_sources(max_sentences: int) -> Parts:
    """Mixes Python code, C++ headers and the documentation of Python and torch.

    The Python code is that of the standard library and of torch, without tests; the headers are
    those of torch. A file of code is in one part only; dev and test have at most 20 of its
    sentences. A sentence of code is a run of lines without a blank line, cut after 64 words.
    """
    corpus = builtin_corpus()
    documentation: Kind = {part: map(" ".join, getattr(corpus, part)) for part in PARTS}
    return _mixed([_code(source_files()), _code(_headers()), documentation], max_sentences)


def sources() -> Parts:
    """Returns the corpus "sources": `mix_sources` with 60,000 sentences of each kind.

    The corpus is fixed for given versions of Python and torch. The first call takes about a minute
    and caches the sentences; see `cached_lines`.
    """

    def made() -> Iterator[str]:
        for sentences in mix_sources(_KIND_SENTENCES).values():
            yield from sentences
            yield ""  # between two parts

    files = [*source_files(), *_headers()]
    lines = cached_lines("sources", made, files, [builtin.__file__, __file__])
    parts = (list(group) for filled, group in groupby(lines, bool) if filled)
    return dict(zip(PARTS, parts, strict=True))


def write_parts(parts: Parts, folder: Path) -> None:
    """Writes train.txt, dev.txt and test.txt to a folder, which is created if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, sentences in parts.items():
        write_text(folder / f"{part}.txt", "".join(f"{sentence}\n" for sentence in sentences))


def _mixed(kinds: Iterable[Kind], max_sentences: int) -> Parts:
    """Draws sentences of each kind and shuffles each part, always in the same way."""
    mixed: Parts = {part: [] for part in PARTS}
    for kind in kinds:
        held_out: set[str] = set()
        for part in ("test", "dev", "train"):
            new = dict.fromkeys(sentence for sentence in kind[part] if sentence not in held_out)
            if part != "train":
                held_out.update(new)
            most = max_sentences if part == "train" else _HELD_OUT
            mixed[part] += uniform_sample(new, most)
    for sentences in mixed.values():
        random.Random(0).shuffle(sentences)
    return mixed


def _sides(texts: Iterable[ParallelText], side: int) -> Iterator[str]:
    return (" ".join(pair[side].split()) for text in texts for pair in text)


def _headers() -> list[Path]:
    """Lists the C++ headers of torch in a fixed order."""
    headers = sorted((torch_folder() / "include").rglob("*.h"))
    if not headers:
        raise CorpusError("mix_sources: torch must be installed with its headers, got none")
    return headers


def _code(files: Iterable[Path]) -> Kind:
    """Returns the sentences of the code in files; a hash of each file's name decides its part."""
    code: Parts = {part: [] for part in PARTS}
    for file in progress(files, "reading code", "files"):
        place = place_of(file.parts[-2:])
        part = next(part for part, end in _PART_ENDS.items() if place < end)
        sentences = _sentences_of_code(file.read_text("utf-8", errors="ignore"))
        code[part] += sentences if part == "train" else uniform_sample(sentences, _FILE_SENTENCES)
    return {**code}


def _sentences_of_code(text: str) -> Iterator[str]:
    """Joins the lines of code up to a blank line, or up to about 64 words."""
    words: list[str] = []
    for line in [*text.splitlines(), ""]:
        line_words = line.split()
        if words and (not line_words or len(words) + len(line_words) > _CODE_WORDS):
            yield " ".join(words)
            words = []
        words += line_words
        while len(words) > _CODE_WORDS:
            yield " ".join(words[:_CODE_WORDS])
            words = words[_CODE_WORDS:]
