"""Parallel text: sentences and their translations."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain, islice, zip_longest
from pathlib import Path

from moe_ext.checks import given, require, require_sizes
from moe_lab.data.sentences import CorpusError, require_parts, visible
from moe_lab.files import READ_ERRORS, file_fingerprint, open_plain, plain_lines, reason_of
from moe_lab.names import PARTS

Pair = tuple[str, str]

_COMPRESSED = r"(\.gz|\.xz)?"
# Names of texts that are never in the training part: those of dev and test, and of other sets.
_HELD_OUT = (
    "test*", "dev*", "val*", "newstest*", "news-test*", "newsdev*", "newsdiscuss*",
    "newssyscomb*", "news-dev*", "nc-dev*", "nc-test*", "tst*",
)  # fmt: skip
# The default dev and test parts; WMT's test sets of 2000 to 2009 are in neither.
_DEV = ("dev*", "val*", "newstest2012*", "newstest2013*")
_TEST = ("test*", "newstest2014*")
_NAMES = {"train": ("train*",), "dev": _DEV, "test": _TEST}
_OLD = ("dev200*", "devtest200*", "test200*")
_LINES_FOR_COLUMNS = 100  # lines that decide a table's number of columns; some may be invalid

KEPT = "kept"
_COLUMNS = "wrong number of columns"
_ENCODING = "not UTF-8"
_EMPTY = "empty side"
_DROPPED = "dropped source"


@dataclass(frozen=True)
class AlignedFiles:
    """Two aligned files: line i of one is the translation of line i of the other."""

    source: Path  # the file of the source language; may be compressed (.gz, .xz)
    target: Path  # the file of the target language; may be compressed (.gz, .xz)
    name: str  # name of the text, compared with ParallelText.drop

    def rows(self, counts: Counter[str]) -> Iterator[tuple[str, str, str]]:
        """Yields name, source and target of each line; counts invalid lines by reason."""
        lines = [0, 0]
        for source, target in zip_longest(_lines(self.source), _lines(self.target)):
            lines[0] += source is not None
            lines[1] += target is not None
            if lines[0] != lines[1]:
                continue  # read the longer file to its end to count lines for the error message
            try:
                yield self.name, source.decode("utf-8"), target.decode("utf-8")
            except UnicodeDecodeError:
                counts[_ENCODING] += 1
        if lines[0] != lines[1]:
            raise CorpusError(
                f"{self} must have the same number of lines, got {lines[0]:,} and {lines[1]:,}; "
                "line i of one file must be the translation of line i of the other"
            )

    def files(self) -> tuple[Path, ...]:
        return self.source, self.target

    def __str__(self) -> str:
        return f"{self.source} and {self.target}"


@dataclass(frozen=True)
class TableFile:
    """A file with one sentence pair per line, in columns separated by tabs."""

    file: Path  # the file; may be compressed (.gz, .xz)
    number: int  # number of columns
    source: int  # index of the source column
    target: int  # index of the target column
    name: int | str  # index of the column with the name of a row's text, or one name for all rows

    def rows(self, counts: Counter[str]) -> Iterator[tuple[str, str, str]]:
        """Yields name, source and target of each line; counts invalid lines by reason."""
        for line in _lines(self.file):
            try:
                columns = line.decode("utf-8").split("\t")
            except UnicodeDecodeError:
                counts[_ENCODING] += 1
                continue
            if len(columns) == self.number:
                name = self.name if isinstance(self.name, str) else columns[self.name]
                yield name, columns[self.source], columns[self.target]
            else:
                counts[_COLUMNS] += 1

    def files(self) -> tuple[Path, ...]:
        return (self.file,)

    def __str__(self) -> str:
        return str(self.file)


@dataclass(frozen=True)
class ParallelText(Iterable[Pair]):
    """Iterates over sentences and their translations; each iteration reads the files again.

    White space around a sentence is removed. Lines without a valid pair, and filtered pairs, are
    skipped and counted.
    """

    source: str  # source language, such as "en"
    target: str  # target language, such as "fr"
    places: tuple[AlignedFiles | TableFile, ...]  # the files, in order
    drop: tuple[str, ...] = ()  # shell patterns of names to skip; see `load_parallel`
    limit: int | None = None  # maximum number of kept pairs; None is no limit

    def __iter__(self) -> Iterator[Pair]:
        return self.read(Counter())

    def read(self, counts: Counter[str]) -> Iterator[Pair]:
        """Iterates over the pairs and counts the lines kept, and the lines skipped by reason."""
        return islice(self._kept(counts), self.limit)

    def _kept(self, counts: Counter[str]) -> Iterator[Pair]:
        for name, source, target in chain.from_iterable(p.rows(counts) for p in self.places):
            source, target = source.strip(), target.strip()
            if not (source and target):
                counts[_EMPTY] += 1
            elif any(fnmatchcase(name, pattern) for pattern in self.drop):
                counts[_DROPPED] += 1
            else:
                counts[KEPT] += 1
                yield source, target

    def fingerprint(self) -> str:
        """Returns a string that changes with the name, size or time of a file, or with a filter."""
        files = [file_fingerprint(file) for place in self.places for file in place.files()]
        tables = [replace(p, file=Path()) for p in self.places if isinstance(p, TableFile)]
        rest = (self.source, self.target, self.drop, self.limit)
        return "\n".join([*files, *map(repr, tables), repr(rest)])

    def __str__(self) -> str:
        return " and ".join(map(str, self.places))


@dataclass(frozen=True)
class ParallelCorpus:
    """Parallel text in three parts; each part can be iterated over repeatedly."""

    train: ParallelText
    dev: ParallelText
    test: ParallelText

    @property
    def all(self) -> ParallelText:
        """The text of all parts, without filters."""
        places = (*self.train.places, *self.dev.places, *self.test.places)
        return ParallelText(self.train.source, self.train.target, places)


def load_parallel(
    place: str | Path,
    *,
    source: str,
    target: str,
    parts: Sequence[str] = PARTS,
    drop: Sequence[str] = (),
    max_train_pairs: int | None = None,
) -> ParallelCorpus:
    """Opens a parallel corpus for translation from the language source into target.

    Files are UTF-8, plain or compressed (.gz, .xz). Each iteration reads the files. A folder is
    searched recursively, without hidden files and folders. For the languages en and fr, a folder
    may contain:

    - Two aligned files ``NAME.en`` and ``NAME.fr``, such as WMT's ``commoncrawl.fr-en.en`` and
      ``newstest2014.fr``. The names may end in ``.txt``, but not in ``.sgm``. To get a news test as
      lines, run ``sacrebleu -t wmt14/full -l en-fr --echo src``.
    - A table ``NAME.en-fr.tsv`` with one pair per line. The table has two columns, in the order of
      the languages in the file name. A third column in front may name the text of each row. The
      most frequent number of columns in the first lines decides between two and three.

    NAME is split at dots. The last word that is not a language pair decides the part of a text:

    - dev: ``dev*``, ``val*``, newstest2012 and newstest2013.
    - test: ``test*`` and newstest2014 (App. E).
    - train: ``train*``, or all other texts if no text is named ``train*``. Other known dev and test
      sets are never training text.

    WMT's sets of 2000 to 2009, such as ``test2007``, are in no part.

    Args:
        place: a folder or a table. A table has only a training part.
        source, target: the languages, as in the file names.
        parts: the attributes of the corpus that must contain at least one pair.
        drop: shell patterns of names to skip in training, such as ``*-ptpt``. A table can have a
            column with the name of each row; otherwise, NAME of the file counts.
        max_train_pairs: limits the training part to its first pairs that pass the filters; None is
            no limit.
    """
    require_parts("load_parallel", parts)
    require(source != target, "load_parallel: target", f"differ from source {source!r}", target)
    require_sizes("load_parallel", **given(max_train_pairs=max_train_pairs))
    is_folder = Path(place).is_dir()
    files: dict[str, list[AlignedFiles | TableFile]] = {part: [] for part in PARTS}
    if is_folder:
        files = _in_folder(Path(place), source, target)
    else:
        files["train"] = [_single_table(Path(place), source, target)]
    train, dev, test = (ParallelText(source, target, tuple(files[part])) for part in PARTS)
    corpus = ParallelCorpus(replace(train, drop=tuple(drop), limit=max_train_pairs), dev, test)
    for part in parts:
        counts: Counter[str] = Counter()
        text = getattr(corpus, part)
        if next(text.read(counts), None) is not None:
            continue
        got = f"none in {text}: {describe(counts)}" if text.places else "only a training part"
        if is_folder and not text.places:
            got = (
                f"no file; add X.{source}-{target}.tsv, or X.{source} and X.{target}, where X "
                f"matches {' or '.join(_NAMES.get(part, ['*']))}"
            )
        which = place if part == "all" else f"the {part} part of {place}"
        raise CorpusError(
            f"{which} must hold at least one pair of {source} and {target}, got {got}"
        )
    return corpus


def _single_table(file: Path, source: str, target: str) -> TableFile:
    if not file.is_file():
        raise CorpusError(
            f"there is no parallel corpus at {file}: give a folder with train.{source} and "
            f"train.{target} or with train.{source}-{target}.tsv, or give the .tsv file"
        )
    languages = languages_of(file, source, target)
    if languages is None and (named := _any_languages_of(file)):
        raise CorpusError(
            f"{file} must be a table of {source} and {target}, got {named} in the file name"
        )
    return _table(file, languages or (source, target), source, target, file.name)


def describe(counts: Counter[str]) -> str:
    """Formats the counts of `ParallelText.read` or `encode_pairs` as text."""
    skipped = counts.total() - counts[KEPT]
    words = f"{counts[KEPT]:,} of {counts.total():,} lines kept"
    if not skipped:
        return words
    kinds = [f"{number:,} {kind}" for kind, number in counts.most_common() if kind != KEPT]
    return f"{words}, {skipped:,} skipped ({', '.join(kinds)})"


def _in_folder(folder: Path, source: str, target: str) -> dict[str, list[AlignedFiles | TableFile]]:
    """Finds the files of each part."""
    files = sorted(file for file in visible(folder.rglob("*"), folder) if file.is_file())
    sides = {
        language: _by_name(files, rf"(.+)\.{re.escape(language)}(?:\.txt)?{_COMPRESSED}")
        for language in (source, target)
    }
    places: dict[str, AlignedFiles | TableFile] = {
        name: AlignedFiles(file, sides[target][name], name)
        for name, file in sides[source].items()
        if name in sides[target]
    }
    for languages in ((source, target), (target, source)):
        between = re.escape("-".join(languages))
        for name, file in _by_name(files, rf"(.+)\.{between}\.(?:tsv|txt){_COMPRESSED}").items():
            if name in places:
                raise CorpusError(
                    f"{folder} must hold each text once, got {name} as {places[name]} and {file}; "
                    "delete one of them"
                )
            places[name] = _table(file, languages, source, target, name)

    def last_word(name: str) -> str:
        directions = {f"{source}-{target}", f"{target}-{source}"}
        words = [word for word in name.split(".") if word not in directions]
        return words[-1] if words else name

    def named(name: str, patterns: Iterable[str]) -> bool:
        return any(fnmatchcase(last_word(name), pattern) for pattern in patterns)

    dev, test = (
        [name for name in places if named(name, patterns) and not named(name, _OLD)]
        for patterns in (_DEV, _TEST)
    )
    training = [name for name in places if not named(name, _HELD_OUT)]
    train = [name for name in training if named(name, _NAMES["train"])] or training
    return {
        part: [places[name] for name in names]
        for part, names in zip(PARTS, (train, dev, test), strict=True)
    }


def _by_name(files: Iterable[Path], pattern: str) -> dict[str, Path]:
    """Finds the files whose names match a pattern; the keys are the first group of the match."""
    by_name: dict[str, Path] = {}
    for file in files:
        if match := re.fullmatch(pattern, file.name):
            if (name := match[1]) in by_name:
                raise CorpusError(
                    f"a folder must hold each text once, got {by_name[name]} and {file}; give the "
                    "folder of one of them"
                )
            by_name[name] = file
    return by_name


def languages_of(table: Path, source: str, target: str) -> tuple[str, str] | None:
    """Returns the two languages in the order of a table's name; None if neither order."""
    words = table.name.split(".")
    orders = ((source, target), (target, source))
    return next((languages for languages in orders if "-".join(languages) in words), None)


def _any_languages_of(table: Path) -> str | None:
    """Finds a word in a table's name that looks like two languages, such as "en-fr"."""
    pattern = re.compile(r"[a-z]{2,3}-[a-z]{2,3}", re.IGNORECASE)
    return next(filter(pattern.fullmatch, table.name.split(".")), None)


def _table(
    file: Path, languages: tuple[str, str], source: str, target: str, name: str
) -> TableFile:
    """Creates the TableFile of a file; infers the columns from its first lines."""
    first = islice(filter(None, _lines(file)), _LINES_FOR_COLUMNS)
    numbers = Counter(line.count(b"\t") + 1 for line in first)
    ((number, _),) = numbers.most_common(1) or [(0, 0)]
    if number not in (2, 3):
        raise CorpusError(
            f"{file} must have two or three columns separated by tabs, got {number} in most of "
            "the first lines; give the folder of aligned files"
        )
    columns = ("name", *languages)[-number:]
    places = columns.index(source), columns.index(target)
    return TableFile(file, number, *places, 0 if number == 3 else name)


def _lines(file: Path) -> Iterator[bytes]:
    """Yields the lines of a file without line ends."""
    number = 0
    try:
        with open_plain(file) as lines:
            for line in plain_lines(lines):
                number += 1
                yield line
    except READ_ERRORS as error:
        raise CorpusError(
            f"{file} cannot be read after line {number}: {reason_of(error)}"
        ) from error
