"""Parallel text: where pairs of a sentence and its translation come from."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain, islice, zip_longest
from pathlib import Path

from moe_ext.checks import require, require_at_least
from moe_ext.lab.data.corpora import PARTS, CorpusError
from moe_ext.lab.files import READ_ERRORS, file_fingerprint, open_plain, plain_lines

Pair = tuple[str, str]

_COMPRESSED = r"(\.gz|\.xz)?"
# Names that are never for training, whatever the patterns of dev and test.
_HELD_OUT = (
    "test*",
    "dev*",
    "val*",
    "newstest*",
    "news-test*",
    "newsdev*",
    "newsdiscuss*",
    "newssyscomb*",
    "news-dev*",
    "nc-dev*",
    "nc-test*",
    "tst*",
)
# By default the dev and test parts are these, but never the test sets of WMT's first years.
_DEV = ("dev*", "val*", "newstest2012*", "newstest2013*")
_TEST = ("test*", "newstest2014*")
_OLD = ("dev200*", "devtest200*", "test200*")
_LINES_FOR_COLUMNS = 100  # of a table, whose first line may be a bad one

KEPT = "kept"
COLUMNS = "wrong number of columns"
_ENCODING = "not UTF-8"
_EMPTY = "empty side"
_DROPPED = "dropped source"
_TOO_LONG = "too long"
_RATIO = "length ratio"


@dataclass(frozen=True)
class LengthFilter:
    """Which pairs are left out for their lengths.

    Args:
        max_length: of either side; None is no limit.
        max_ratio: of the longer side's length to the shorter one's; None is no limit.
    """

    max_length: int | None = None
    max_ratio: float | None = None

    def reason(self, source: int, target: int) -> str | None:
        """Why a pair of these lengths is left out; None for one that stays."""
        shorter, longer = sorted((source, target))
        if self.max_length is not None and longer > self.max_length:
            return _TOO_LONG
        if self.max_ratio is not None and longer > self.max_ratio * shorter:
            return _RATIO
        return None


@dataclass(frozen=True)
class AlignedFiles:
    """Two files; line i of one is the translation of line i of the other.

    Attributes:
        source, target: each may be compressed (.gz, .xz).
        name: of the text, which `drop` may name.
    """

    source: Path
    target: Path
    name: str

    def rows(self, counts: Counter[str]) -> Iterator[tuple[str, str, str]]:
        """Name, source and target of each line; lines without are counted by what is wrong."""
        lines = [0, 0]
        for source, target in zip_longest(_lines(self.source), _lines(self.target)):
            lines[0] += source is not None
            lines[1] += target is not None
            if lines[0] != lines[1]:
                continue  # to the end of the longer file, for the message
            try:
                yield self.name, source.decode("utf-8"), target.decode("utf-8")
            except UnicodeDecodeError:
                counts[_ENCODING] += 1
        if lines[0] != lines[1]:
            raise CorpusError(
                f"{self} must have as many lines as each other, got {lines[0]:,} and {lines[1]:,}: "
                "line i of one is to be the translation of line i of the other"
            )

    def files(self) -> tuple[Path, ...]:
        return self.source, self.target

    def __str__(self) -> str:
        return f"{self.source} and {self.target}"


@dataclass(frozen=True)
class TableFile:
    """One file of a pair a line, its columns apart by tabs.

    Attributes:
        file: may be compressed (.gz, .xz).
        number: of columns.
        source, target: which of them these are.
        name: which of them names the source of the row, or the text that the rows are of.
    """

    file: Path
    number: int
    source: int
    target: int
    name: int | str

    def rows(self, counts: Counter[str]) -> Iterator[tuple[str, str, str]]:
        """Name, source and target of each line; lines without are counted by what is wrong."""
        for line in _lines(self.file):
            try:
                columns = line.decode("utf-8").split("\t")
            except UnicodeDecodeError:
                counts[_ENCODING] += 1
                continue
            if len(columns) != self.number:
                counts[COLUMNS] += 1
                continue
            name = self.name if isinstance(self.name, str) else columns[self.name]
            yield name, columns[self.source], columns[self.target]

    def files(self) -> tuple[Path, ...]:
        return (self.file,)

    def __str__(self) -> str:
        return str(self.file)


@dataclass(frozen=True)
class ParallelText(Iterable[Pair]):
    """Pairs of a sentence and its translation, read anew on each iteration: they take no memory.

    White space around a sentence is removed. A line that is no pair, or one that is filtered out,
    is skipped and counted.

    Attributes:
        source, target: the languages, such as "en" and "fr".
        places: what it consists of, in order.
        lengths: filters by the number of words, which white space separates.
        drop: patterns of names (of the rows in a table that has them, else of files) to leave out.
        limit: only so many pairs, the first that are kept.
    """

    source: str
    target: str
    places: tuple[AlignedFiles | TableFile, ...]
    lengths: LengthFilter = LengthFilter()
    drop: tuple[str, ...] = ()
    limit: int | None = None

    def __iter__(self) -> Iterator[Pair]:
        return self.read(Counter())

    def read(self, counts: Counter[str]) -> Iterator[Pair]:
        """The pairs, while the lines are counted: those kept, and those skipped by their reason.

        Args:
            counts: to add to; `describe` puts them into words.

        Raises:
            CorpusError: a file cannot be read, or two aligned ones are not of equal length.
        """
        return islice(self._kept(counts), self.limit)

    def _kept(self, counts: Counter[str]) -> Iterator[Pair]:
        for name, source, target in chain.from_iterable(p.rows(counts) for p in self.places):
            source, target = source.strip(), target.strip()
            if not (source and target):
                reason: str | None = _EMPTY
            elif any(fnmatchcase(name, pattern) for pattern in self.drop):
                reason = _DROPPED
            else:
                reason = self.lengths.reason(len(source.split()), len(target.split()))
            counts[reason or KEPT] += 1
            if reason is None:
                yield source, target

    def fingerprint(self) -> str:
        """Of the text: changes with it (name, size or time of a file) and with the filters."""
        files = [file_fingerprint(file) for place in self.places for file in place.files()]
        tables = [replace(p, file=Path()) for p in self.places if isinstance(p, TableFile)]
        rest = (self.source, self.target, self.lengths, self.drop, self.limit)
        return "\n".join([*files, *map(repr, tables), repr(rest)])

    def __str__(self) -> str:
        return " and ".join(map(str, self.places))


@dataclass(frozen=True)
class ParallelCorpus:
    """Parallel text in parts, each of which can be read repeatedly.

    Attributes:
        train, dev, test: the three parts.
    """

    train: ParallelText
    dev: ParallelText
    test: ParallelText

    @property
    def all(self) -> ParallelText:
        """The text of all parts, without the filters of the training part."""
        places = (*self.train.places, *self.dev.places, *self.test.places)
        return ParallelText(self.train.source, self.train.target, places)


def load_parallel(
    place: str | Path | Sequence[str | Path],
    *,
    source: str,
    target: str,
    parts: Sequence[str] = PARTS,
    columns: Sequence[str] | None = None,
    dev: Sequence[str] | None = None,
    test: Sequence[str] | None = None,
    max_words: int | None = None,
    max_ratio: float | None = None,
    drop: Sequence[str] = (),
    max_train_pairs: int | None = None,
) -> ParallelCorpus:
    """The parallel corpus at that place, in either direction between its languages.

    Text is read as it is needed, UTF-8, plain or compressed (.gz, .xz). In a folder, and in its
    folders, a pair of languages has

    * two aligned files `NAME.en` and `NAME.fr`, as those of WMT (`commoncrawl.fr-en.en`,
      `newstest2014.fr`); `.txt` may follow (not `.sgm`: `sacrebleu -t wmt14/full -l en-fr --echo
      src` prints a news test as lines);
    * or a table `NAME.en-fr.tsv` of a pair a line: two columns, English and French in the order of
      the file's name, or three with the name of the row's source before them, or `columns`. What
      most of its first lines have counts.

    The parts go by the last word of NAME (that between dots, languages aside). Dev is `dev*`,
    `val*`, newstest2012 and newstest2013; test is `test*` and newstest2014 (App. E); WMT's sets of
    2000 to 2009 (`test2007`) are neither, unless `dev` or `test` says so. All others are for
    training; but if there are any of `train*` only those, and never a set made for dev or test.

    Args:
        place: a folder; or a table or two aligned files (source, target), which are a training part
            (`parts=["train"]`) that `ParallelCorpus(train=..., dev=..., test=...)` joins to others.
        source, target: the languages to translate from and into, as the files spell them.
        parts: the attributes of the corpus that must hold at least one pair.
        columns: what those of a table are, in order: `source`, `target`, "name" or anything else.
        dev, test: patterns of the names of these parts, as those of shells (None: as above).
        max_words: of either side; longer pairs are left out of the training part. Words are what
            white space separates: in Chinese or Japanese limit pieces instead (`encode_pairs`).
        max_ratio: of the words of the longer side to those of the shorter one, in training.
        drop: patterns of names to leave out of the training part, as "*-ptpt": of the rows where a
            table names them, else of the files (their NAME).
        max_train_pairs: keep the first ones of the training part (None: all of them).

    Raises:
        CorpusError: whatever is wrong with the corpus, here or when it is read.
        ValueError: another argument is out of range.
    """
    require(source != target, "load_parallel: target", f"differ from source {source!r}", target)
    sizes = {"max_train_pairs": max_train_pairs, "max_words": max_words, "max_ratio": max_ratio}
    require_at_least(1, "load_parallel", **sizes)
    for language in (source, target):
        if columns is not None and list(columns).count(language) != 1:
            raise ValueError(
                f"load_parallel: columns must name {language!r} once, got {list(columns)}"
            )

    found: dict[str, list[AlignedFiles | TableFile]]
    if not isinstance(place, str | Path):
        require(len(place) == 2, "load_parallel: place", "be two aligned files", place)
        found = {"train": [AlignedFiles(Path(place[0]), Path(place[1]), Path(place[0]).name)]}
    elif Path(place).is_dir():
        found = _in_folder(Path(place), source, target, columns, dev, test)
    else:
        found = {"train": [_single_table(Path(place), source, target, columns)]}
    corpus = ParallelCorpus(
        **{part: ParallelText(source, target, tuple(found.get(part, ()))) for part in PARTS}
    )
    train = replace(
        corpus.train,
        lengths=LengthFilter(max_words, max_ratio),
        drop=tuple(drop),
        limit=max_train_pairs,
    )
    corpus = replace(corpus, train=train)
    names = {"train": ["train*"], "dev": dev or _DEV, "test": test or _TEST}
    for part in parts:
        counts: Counter[str] = Counter()
        text = getattr(corpus, part)
        if next(text.read(counts), None) is not None:
            continue
        if text.places:
            got = f"none in {text}: {describe(counts)}"
        elif "dev" not in found:  # no folder
            got = "a training part alone"
        else:
            got = (
                f"no file: it must be X.{source}-{target}.tsv, or X.{source} and X.{target}, X "
                f"being {' or '.join(names.get(part, ['*']))}"
            )
        which = place if part == "all" else f"the {part} part of {place}"
        raise CorpusError(
            f"{which} must hold at least one pair of {source} and {target}, got {got}"
        )
    return corpus


def _single_table(file: Path, source: str, target: str, columns: Sequence[str] | None) -> TableFile:
    if not file.is_file():
        raise CorpusError(
            f"there is no parallel corpus at {file}: give a folder that holds train.{source} and "
            f"train.{target}, or train.{source}-{target}.tsv, or give such a table"
        )
    languages = languages_of(file, source, target)
    if languages is None and columns is None and (other := _any_languages_of(file)):
        raise CorpusError(f"{file} must be of {source} and {target}, got {other} by its name")
    return _table(file, languages or (source, target), source, target, columns, file.name)


def describe(counts: Counter[str]) -> str:
    """What `ParallelText.read` or `encode_pairs` has counted, in words."""
    skipped = counts.total() - counts[KEPT]
    words = f"{counts[KEPT]:,} of {counts.total():,} lines kept"
    if not skipped:
        return words
    kinds = [f"{number:,} {kind}" for kind, number in counts.most_common() if kind != KEPT]
    return f"{words}, {skipped:,} skipped ({', '.join(kinds)})"


def _in_folder(
    folder: Path,
    source: str,
    target: str,
    columns: Sequence[str] | None,
    dev: Sequence[str] | None,
    test: Sequence[str] | None,
) -> dict[str, list[AlignedFiles | TableFile]]:
    """The places of each part."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
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
                    f"{folder} must hold each text once, got {name} as {places[name]} and as {file}"
                )
            places[name] = _table(file, languages, source, target, columns, name)

    def last_word(name: str) -> str:
        both = {f"{source}-{target}", f"{target}-{source}"}
        words = [word for word in name.split(".") if word not in both]
        return words[-1] if words else name

    def named(name: str, patterns: Iterable[str]) -> bool:
        return any(fnmatchcase(last_word(name), pattern) for pattern in patterns)

    def of_part(patterns: Sequence[str] | None, default: Sequence[str]) -> list[str]:
        if patterns is None:
            return [name for name in places if named(name, default) and not named(name, _OLD)]
        return [name for name in places if named(name, patterns)]

    names = {"dev": of_part(dev, _DEV), "test": of_part(test, _TEST)}
    held_out = {*names["dev"], *names["test"]}
    training = [name for name in places if name not in held_out and not named(name, _HELD_OUT)]
    names["train"] = [name for name in training if named(name, ["train*"])] or training
    for name in {*names["dev"]} & {*names["test"]}:
        raise CorpusError(f"{places[name]} must be of one part, got the patterns of dev and test")
    return {part: [places[name] for name in names[part]] for part in PARTS}


def _by_name(files: Iterable[Path], pattern: str) -> dict[str, Path]:
    """The files whose name matches, by the NAME in it."""
    found: dict[str, Path] = {}
    for file in files:
        if match := re.fullmatch(pattern, file.name):
            if (name := match[1]) in found:
                raise CorpusError(
                    f"a text must be there once, got {found[name]} and {file}; give the folder of "
                    "one of them"
                )
            found[name] = file
    return found


def languages_of(table: Path, source: str, target: str) -> tuple[str, str] | None:
    """These languages in the order in which a table's name has them; None if it has neither."""
    words = table.name.split(".")
    orders = ((source, target), (target, source))
    return next((languages for languages in orders if "-".join(languages) in words), None)


def _any_languages_of(table: Path) -> str | None:
    """What looks like two languages in a table's name, such as "en-fr"."""
    pattern = re.compile(r"[a-z]{2,3}-[a-z]{2,3}", re.IGNORECASE)
    return next(filter(pattern.fullmatch, table.name.split(".")), None)


def _table(
    file: Path,
    languages: tuple[str, str],
    source: str,
    target: str,
    columns: Sequence[str] | None,
    name: str,
) -> TableFile:
    """The table of that file; its columns are those given, or else go by their number."""
    if columns is None:
        first = islice(filter(None, _lines(file)), _LINES_FOR_COLUMNS)
        numbers = Counter(line.count(b"\t") + 1 for line in first)
        number = max(numbers, key=numbers.__getitem__, default=0)
        if number not in (2, 3):
            raise CorpusError(
                f"{file} must have two or three columns apart by tabs, got {number} in most of its "
                "first lines; give aligned files by their folder, and other columns to "
                "`load_parallel` by its argument columns"
            )
        columns = ("name", *languages)[-number:]
    columns = list(columns)
    return TableFile(
        file,
        len(columns),
        columns.index(source),
        columns.index(target),
        columns.index("name") if "name" in columns else name,
    )


def _lines(file: Path) -> Iterator[bytes]:
    """The lines of a file, without their ends."""
    number = 0
    try:
        with open_plain(file) as lines:
            for line in plain_lines(lines):
                number += 1
                yield line
    except READ_ERRORS as error:
        raise CorpusError(f"{file} cannot be read after line {number}: {error}") from error
