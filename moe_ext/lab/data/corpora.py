"""Text as sentences: where the training, development and test sentences of a corpus come from."""

import codecs
import hashlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

from moe_ext.checks import require, require_at_least
from moe_ext.lab.files import READ_ERRORS, file_fingerprint, open_plain

PARTS = ("train", "dev", "test")
PARTS_AND_ALL = (*PARTS, "all")  # what a Corpus has
_SUFFIXES = (".txt", ".txt.gz", ".txt.xz")
PIECE_BYTES = 16 * 2**20
_LM1B_TRAIN = "training-monolingual.tokenized.shuffled"
_LM1B_HELDOUT = "heldout-monolingual.tokenized.shuffled"


class CorpusError(ValueError):
    """A corpus that is missing, empty or unreadable; the message names the path and what to do."""


class Shard(Iterable[list[str]]):
    """Some sentences of a corpus; a small object that another process can read them by."""

    def fingerprint(self) -> str:
        """Of the text: changes with it."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Lines(Shard):
    """Sentences in memory."""

    lines: Sequence[str]

    def __iter__(self) -> Iterator[list[str]]:
        return map(str.split, self.lines)

    def __str__(self) -> str:
        return "the built-in corpus"

    def fingerprint(self) -> str:
        return hashlib.sha256("\n".join(self.lines).encode("utf-8")).hexdigest()


@dataclass(frozen=True)
class _FileRange(Shard):
    """The lines of a file that begin in a range of its bytes; all of them without an end."""

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
        return (words for words in self.shard if self.low <= _place(words) < self.high)

    def __str__(self) -> str:
        return str(self.shard)

    def fingerprint(self) -> str:
        return f"{self.shard.fingerprint()} {self.low} {self.high}"


@dataclass(frozen=True)
class Sentences(Shard):
    """Sentences as lists of words, read anew on each iteration, so that they take no memory.

    Attributes:
        shards: what they consist of, in order.
        limit: only so many of the first.
    """

    shards: tuple[Shard, ...]
    limit: int | None = None

    def __iter__(self) -> Iterator[list[str]]:
        return islice(chain.from_iterable(self.shards), self.limit)

    def __str__(self) -> str:
        return " and ".join(map(str, self.shards))

    @property
    def pieces(self) -> tuple[Shard, ...]:
        """What can be read independently: one after the other they are the sentences."""
        return self.shards if self.limit is None else (self,)

    def fingerprint(self) -> str:
        return "\n".join([*(shard.fingerprint() for shard in self.shards), f"limit {self.limit}"])


@dataclass(frozen=True)
class Corpus:
    """A corpus, whole and in parts, each an iterable of sentences that can be read repeatedly.

    Attributes:
        train, dev, test: the three parts.
        all: every sentence once.
    """

    train: Sentences
    dev: Sentences
    test: Sentences
    all: Sentences


def load_corpus(
    name_or_path: str | Path,
    *,
    parts: Sequence[str] = PARTS,
    max_train_sentences: int | None = None,
    dev_share: float = 0.02,
    test_share: float = 0.02,
) -> Corpus:
    """The corpus of that name or place; one sentence a line, its words apart by spaces, as UTF-8.

    Blank lines are skipped, the order of the lines is kept. Text is read as it is needed; a line
    that is not UTF-8 raises an error that names it, because guessing an encoding would silently
    change the vocabulary.

    Args:
        name_or_path: one of
            * "builtin": made from the documentation of Python and torch on this machine
              (builtin.py);
            * a folder in the 1-billion-word layout: training shards 1 to 99, heldout shard 1 as dev
              and heldout shard 0 as test;
            * a folder of WikiText, with `wiki.train.tokens`, `wiki.valid.tokens` and
              `wiki.test.tokens`: a paragraph or heading is one sentence here, `<unk>` and `@-@` are
              words like others (most published perplexities also predict an end of each blank line
              and carry the state from line to line: they are not comparable);
            * a folder with `train.txt`, `dev.txt` (or `valid.txt`) and `test.txt`;
            * the prefix `NAME` of `NAME.train.txt`, `NAME.dev.txt` (or `valid`), `NAME.test.txt`;
            * one text file, or a folder of them, split by a hash of the sentence: the same sentence
              is always in the same part, on every machine and whatever is added to the corpus
              later.
            Each `.txt` may be `.txt.gz` or `.txt.xz`, and in place of `train.txt`, say, there may
            be a folder `train` of such files.
        parts: the attributes of the corpus that must hold at least one sentence.
        max_train_sentences: keep the first ones of the training part (None: all of them); `all`
            stays whole.
        dev_share, test_share: of the sentences, where a hash decides; the rest is for training.

    Raises:
        CorpusError: whatever is wrong with the corpus, here or when it is read.
        ValueError: another argument is out of range.
    """
    require_at_least(1, "load_corpus", max_train_sentences=max_train_sentences)
    some = not isinstance(parts, str) and set(parts) <= {*PARTS_AND_ALL}
    rule = f"be some of {', '.join(PARTS_AND_ALL)} in a sequence"
    require(some, "load_corpus: parts", rule, parts)
    require(
        min(dev_share, test_share) > 0 and dev_share + test_share < 1,
        "load_corpus: dev_share and test_share",
        "be positive with a sum below 1",
        (dev_share, test_share),
    )
    if not str(name_or_path):
        raise CorpusError("must be a name or path, got ''")
    path = Path(name_or_path)
    if str(name_or_path) == "builtin":
        from moe_ext.lab.data.builtin import builtin_sentences

        corpus = _hash_split([_Lines(builtin_sentences())], dev_share, test_share)
    elif (path / _LM1B_TRAIN).is_dir():
        corpus = _lm1b(path)
    elif (path / "wiki.train.tokens").is_file():
        corpus = _of_parts(*([path / f"wiki.{part}.tokens"] for part in ("train", "valid", "test")))
    elif path.is_file():
        corpus = _hash_split(_shards([path]), dev_share, test_share)
    elif path.is_dir():
        if _variant(path / "train"):
            corpus = _given_parts(path, separator="/")
        else:
            files = _text_files(path)
            if named := [file for file in files if ".train.txt" in file.name]:
                prefix = path / named[0].name.partition(".train.txt")[0]
                raise CorpusError(
                    f"{path} must be one corpus, but it holds parts of named ones such as "
                    f"{named[0].name}; load that one as {prefix}"
                )
            corpus = _hash_split(_shards(files), dev_share, test_share)
    elif _variant(Path(f"{path}.train")):
        corpus = _given_parts(path, separator=".")
    else:
        raise CorpusError(
            f"there is no corpus at {path}: give a text file, a folder of text files, the prefix "
            "NAME of NAME.train.txt, NAME.dev.txt and NAME.test.txt, or 'builtin'"
        )

    for part in parts:
        if next(iter(getattr(corpus, part)), None) is None:
            if part == "all":
                raise CorpusError(f"{path} must hold at least one sentence, got none")
            raise CorpusError(
                f"the {part} part of {path} must hold at least one sentence, got none; "
                "give a longer text, a larger share, or each part as a file of its own"
            )
    if max_train_sentences is not None:
        corpus = replace(corpus, train=replace(corpus.train, limit=max_train_sentences))
    return corpus


def _of_parts(train: Sequence[Path], dev: Sequence[Path], test: Sequence[Path]) -> Corpus:
    """A corpus whose parts are files of their own."""
    for file in (*train, *dev, *test):
        if not file.is_file():
            raise CorpusError(f"{file} is missing; unpack the corpus again")
    return Corpus(
        *(Sentences(_shards(files)) for files in (train, dev, test, [*train, *dev, *test]))
    )


def _shards(files: Sequence[Path]) -> tuple[Shard, ...]:
    """The files, plain ones in pieces."""
    shards = []
    for file in files:
        if file.suffix in (".gz", ".xz"):
            shards.append(_FileRange(file))
        else:
            begins = range(0, max(file.stat().st_size, 1), PIECE_BYTES)
            shards += [_FileRange(file, begin, begin + PIECE_BYTES) for begin in begins]
    return tuple(shards)


def _lm1b(folder: Path) -> Corpus:
    shards = [
        shard
        for shard in sorted((folder / _LM1B_TRAIN).glob("news.en-000[0-9][0-9]-of-00100"))
        if "-00000-" not in shard.name  # held out: the test and dev files are cut from it
    ]
    if not shards:
        raise CorpusError(
            f"{folder / _LM1B_TRAIN} must hold the shards news.en-00001-of-00100 to "
            "news.en-00099-of-00100, it holds none; unpack the corpus again"
        )
    if len(shards) < 99:
        warnings.warn(
            f"{folder / _LM1B_TRAIN} holds {len(shards)} of the 99 training shards", stacklevel=3
        )
    heldout = [folder / _LM1B_HELDOUT / f"news.en.heldout-0000{i}-of-00050" for i in (0, 1)]
    return _of_parts(shards, heldout[1:], heldout[:1])


def _given_parts(path: Path, separator: str) -> Corpus:
    files = []
    for names in (("train",), ("dev", "valid"), ("test",)):
        found = [_variant(Path(f"{path}{separator}{name}")) for name in names]
        part = next((part for part in found if part), None)
        if part is None:
            raise CorpusError(
                f"{path}{separator}{names[0]}.txt is missing beside the training text; "
                "add it (or a .txt.gz or .txt.xz, or a folder of such files)"
            )
        files.append(part)
    return _of_parts(*files)


def _hash_split(shards: Sequence[Shard], dev_share: float, test_share: float) -> Corpus:
    def part(low: float, high: float) -> Sentences:
        return Sentences(tuple(_Placed(shard, low, high) for shard in shards))

    return Corpus(
        train=part(dev_share + test_share, 1.0),
        dev=part(0.0, dev_share),
        test=part(dev_share, dev_share + test_share),
        all=Sentences(tuple(shards)),
    )


def _place(words: Sequence[str]) -> float:
    """A fixed place in [0, 1) for each sentence, uniform over sentences."""
    digest = hashlib.blake2b(" ".join(words).encode("utf-8"), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def _text_files(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.iterdir() if file.name.endswith(_SUFFIXES))
    if not files:
        raise CorpusError(
            f"{folder} must hold text files ({', '.join(_SUFFIXES)}), it holds none; "
            "add some or give another folder"
        )
    return files


def _variant(stem: Path) -> list[Path]:
    """The file `stem`.txt, plain or compressed, or those of the folder `stem`, if there are any."""
    if stem.is_dir():
        return _text_files(stem)
    variants = [Path(f"{stem}{suffix}") for suffix in _SUFFIXES]
    return [file for file in variants if file.is_file()][:1]


def _read_lines(file: Path, begin: int, end: int | None) -> Iterator[list[str]]:
    """The sentences in the lines of a file that begin in [begin, end)."""
    first = begin  # where the first of these lines begins
    number = 0  # of the line being read, of these

    def line_number() -> int:
        with open_plain(file) as start:
            blocks = (start.read(min(2**20, first - i)) for i in range(0, first, 2**20))
            return number + sum(block.count(b"\n") for block in blocks)

    try:
        with open_plain(file) as lines:
            if begin:
                lines.seek(begin - 1)
                first += len(lines.readline()) - 1  # the rest of a line that began before
            position = first
            for line in lines:
                if end is not None and position >= end:
                    break
                number += 1
                position += len(line)
                if position == len(line):  # the file's first
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
        raise CorpusError(f"{file} cannot be read {place}: {error}") from error
