"""Sentences of a text in shards, which worker processes can read, and corpora of three parts."""

import codecs
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from moe_ext.checks import require
from moe_lab.files import READ_ERRORS, file_fingerprint, open_plain, read_lines, reason_of
from moe_lab.names import PARTS_AND_ALL

PIECE_BYTES = 16 * 2**20


class CorpusError(ValueError):
    """Raised if a corpus is missing, empty or unreadable; the message says what to do."""


class Shard(Iterable[list[str]]):
    """Iterates over a part of the sentences of a corpus; can be pickled to worker processes."""

    def fingerprint(self) -> str:
        """Returns a string that changes when the text of the shard changes."""
        raise NotImplementedError(f"{type(self).__name__} must implement fingerprint()")


@dataclass(frozen=True)
class Lines(Shard):
    """A shard of sentences in memory."""

    lines: Sequence[str]

    def __iter__(self) -> Iterator[list[str]]:
        return map(str.split, self.lines)

    def __str__(self) -> str:
        return "the built-in corpus"

    def fingerprint(self) -> str:
        return hashlib.sha256("\n".join(self.lines).encode("utf-8")).hexdigest()


@dataclass(frozen=True)
class FileRange(Shard):
    """The lines of a file that begin in the byte range [begin, end); end=None is the file's end."""

    file: Path
    begin: int = 0
    end: int | None = None

    def __iter__(self) -> Iterator[list[str]]:
        return _read_lines(self.file, self.begin, self.end)

    def __str__(self) -> str:
        return f"{self.file} from byte {self.begin}"

    def fingerprint(self) -> str:
        return f"{file_fingerprint(self.file)} {self.begin} {self.end}"


@dataclass(frozen=True)
class _Placed(Shard):
    """The sentences of a shard whose hash is in [low, high)."""

    shard: Shard
    low: float
    high: float

    def __iter__(self) -> Iterator[list[str]]:
        return (words for words in self.shard if self.low <= place_of(words) < self.high)

    def __str__(self) -> str:
        return str(self.shard)

    def fingerprint(self) -> str:
        return f"{self.shard.fingerprint()} {self.low} {self.high}"


@dataclass(frozen=True)
class Sentences(Shard):
    """Iterates over sentences as lists of words; each iteration reads the text again."""

    shards: tuple[Shard, ...]  # the shards in order
    limit: int | None = None  # the maximum number of sentences; None reads all sentences

    def __iter__(self) -> Iterator[list[str]]:
        return islice(chain.from_iterable(self.shards), self.limit)

    def __str__(self) -> str:
        return " and ".join(map(str, self.shards))

    @property
    def pieces(self) -> tuple[Shard, ...]:
        """The shards that workers can read independently; in order, they give all sentences."""
        return self.shards if self.limit is None else (self,)

    def fingerprint(self) -> str:
        return "\n".join([*(shard.fingerprint() for shard in self.shards), f"limit {self.limit}"])


@dataclass(frozen=True)
class Corpus:
    """A corpus in three parts; each part can be iterated over repeatedly."""

    train: Sentences  # the training sentences
    dev: Sentences  # the development sentences
    test: Sentences  # the test sentences
    all: Sentences  # the sentences of all three parts


def require_parts(function: str, parts: Sequence[str]) -> None:
    """Requires that the argument `parts` of a function is a sequence of names of parts."""
    known = not isinstance(parts, str) and set(parts) <= {*PARTS_AND_ALL}
    rule = f"be a sequence of names out of {', '.join(PARTS_AND_ALL)}"
    require(known, f"{function}: parts", rule, parts)


def visible(files: Iterable[Path], folder: Path) -> Iterator[Path]:
    """Yields the files that are neither hidden nor in a hidden folder within `folder`.

    Editors and notebooks keep copies in hidden files, which would be a second text.
    """
    for file in files:
        if not any(name.startswith(".") for name in file.relative_to(folder).parts):
            yield file


def shards_of(files: Sequence[Path]) -> tuple[Shard, ...]:
    """Makes the shards of files; uncompressed files are split into byte ranges."""
    shards: list[Shard] = []
    for file in files:
        if file.suffix in (".gz", ".xz"):
            shards.append(FileRange(file))
        else:
            begins = range(0, max(file.stat().st_size, 1), PIECE_BYTES)
            shards += [FileRange(file, begin, begin + PIECE_BYTES) for begin in begins]
    return tuple(shards)


def hash_split(shards: Sequence[Shard]) -> Corpus:
    """Splits a text by a hash of each sentence: 2% are dev and 2% are test."""

    def part(low: float, high: float) -> Sentences:
        return Sentences(tuple(_Placed(shard, low, high) for shard in shards))

    train, dev, test = part(0.04, 1.0), part(0.0, 0.02), part(0.02, 0.04)
    return Corpus(train, dev, test, Sentences(tuple(shards)))


def place_of(words: Sequence[str]) -> float:
    """Hashes a sentence to a number in [0, 1), uniformly over sentences."""
    digest = hashlib.blake2b(" ".join(words).encode("utf-8"), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def _read_lines(file: Path, begin: int, end: int | None) -> Iterator[list[str]]:
    """Yields the sentences of the lines that begin in the byte range [begin, end)."""
    first = begin  # the byte at which the first of these lines begins
    number = 0  # the number of the current line, counted from byte `first`

    def line_number() -> int:
        with open_plain(file) as start:
            blocks = (start.read(min(2**20, first - i)) for i in range(0, first, 2**20))
            return number + sum(block.count(b"\n") for block in blocks)

    try:
        with open_plain(file) as lines:
            if begin:
                lines.seek(begin - 1)
                first += len(next(read_lines(lines), b"")) - 1  # the end of the previous line
            position = first
            for line in read_lines(lines):
                if end is not None and position >= end:
                    break
                number += 1
                position += len(line)
                if position == len(line):  # the first line of the file
                    line = line.removeprefix(codecs.BOM_UTF8)
                words = line.decode("utf-8").split()
                if words:
                    yield words
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{file}, line {line_number()} must be UTF-8, got the byte "
            f"{error.object[error.start]:#04x}; convert the file, for example with iconv"
        ) from error
    except READ_ERRORS as error:
        place = f"near byte {first}" if begin else f"after line {number}"
        raise CorpusError(f"{file} cannot be read {place}: {reason_of(error)}") from error
