"""Text as sentences: where the training, development and test sentences of a corpus come from."""

import gzip
import hashlib
import lzma
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, cast

PARTS = ("train", "dev", "test")
_SUFFIXES = (".txt", ".txt.gz", ".txt.xz")
_LM1B_TRAIN = "training-monolingual.tokenized.shuffled"
_LM1B_HELDOUT = "heldout-monolingual.tokenized.shuffled"


class CorpusError(ValueError):
    """A corpus that is missing, empty or unreadable; the message names the path and what to do."""


class Sentences(Iterable[list[str]]):
    """Sentences as lists of words, read anew on each iteration, so that they take no memory."""

    def __init__(self, read: Callable[[], Iterator[list[str]]]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[list[str]]:
        return self._read()


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
            * a folder with `train.txt`, `dev.txt` (or `valid.txt`) and `test.txt`;
            * the prefix `NAME` of `NAME.train.txt`, `NAME.dev.txt` (or `valid`), `NAME.test.txt`;
            * one text file, or a folder of them, split by a hash of the sentence: the same sentence
              is always in the same part, on every machine and whatever is added to the corpus
              later.
            Each `.txt` may be `.txt.gz` or `.txt.xz`.
        parts: the attributes of the corpus that must hold at least one sentence.
        max_train_sentences: keep the first ones of the training part (None: all of them); `all`
            stays whole.
        dev_share, test_share: of the sentences, where a hash decides; the rest is for training.

    Raises:
        CorpusError: whatever is wrong with the corpus, here or when it is read.
        ValueError: another argument is out of range.
    """
    if max_train_sentences is not None and max_train_sentences < 1:
        raise ValueError(
            f"load_corpus: max_train_sentences must be at least 1, got {max_train_sentences}"
        )
    if not (min(dev_share, test_share) > 0 and dev_share + test_share < 1):
        raise ValueError(
            "load_corpus: dev_share and test_share must be positive with a sum below 1, "
            f"got {dev_share} and {test_share}"
        )
    path = Path(name_or_path)
    if str(name_or_path) == "builtin":
        from moe_ext.data.builtin import builtin_sentences

        lines = builtin_sentences()
        corpus = _hash_split(lambda: map(str.split, lines), dev_share, test_share)
    elif (path / _LM1B_TRAIN).is_dir():
        corpus = _lm1b(path)
    elif path.is_file():
        corpus = _hash_split(lambda: _read_files([path]), dev_share, test_share)
    elif path.is_dir():
        files = _text_files(path)
        if _variant(path / "train") is not None:
            corpus = _given_parts(path, separator="/")
        elif named := [file for file in files if ".train.txt" in file.name]:
            prefix = path / named[0].name.partition(".train.txt")[0]
            raise CorpusError(
                f"{path} must be one corpus, but it holds parts of named ones such as "
                f"{named[0].name}; load that one as {prefix}"
            )
        else:
            corpus = _hash_split(lambda: _read_files(files), dev_share, test_share)
    elif _variant(Path(f"{path}.train")) is not None:
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
        train = corpus.train
        limited = Sentences(lambda: islice(train, max_train_sentences))
        corpus = replace(corpus, train=limited)
    return corpus


def _of_parts(train: Sequence[Path], dev: Sequence[Path], test: Sequence[Path]) -> Corpus:
    """A corpus whose parts are files of their own."""
    return Corpus(
        train=Sentences(partial(_read_files, train)),
        dev=Sentences(partial(_read_files, dev)),
        test=Sentences(partial(_read_files, test)),
        all=Sentences(partial(_read_files, [*train, *dev, *test])),
    )


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
    for file in heldout:
        if not file.is_file():
            raise CorpusError(f"{file} is missing; unpack the corpus again")
    return _of_parts(shards, heldout[1:], heldout[:1])


def _given_parts(path: Path, separator: str) -> Corpus:
    files = []
    for names in (("train",), ("dev", "valid"), ("test",)):
        found = [_variant(Path(f"{path}{separator}{name}")) for name in names]
        file = next((file for file in found if file is not None), None)
        if file is None:
            raise CorpusError(
                f"{path}{separator}{names[0]}.txt is missing beside the training text; "
                "add it (or a .txt.gz or .txt.xz)"
            )
        files.append(file)
    train, dev, test = files
    return _of_parts([train], [dev], [test])


def _hash_split(
    read: Callable[[], Iterator[list[str]]], dev_share: float, test_share: float
) -> Corpus:
    def part(low: float, high: float) -> Sentences:
        def sentences() -> Iterator[list[str]]:
            return (words for words in read() if low <= _place(words) < high)

        return Sentences(sentences)

    return Corpus(
        train=part(dev_share + test_share, 1.0),
        dev=part(0.0, dev_share),
        test=part(dev_share, dev_share + test_share),
        all=Sentences(read),
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


def _variant(stem: Path) -> Path | None:
    """The file `stem`.txt, plain or compressed, if there is one."""
    variants = [Path(f"{stem}{suffix}") for suffix in _SUFFIXES]
    return next((file for file in variants if file.is_file()), None)


def _open(file: Path) -> IO[bytes]:
    if file.suffix == ".gz":
        return cast(IO[bytes], gzip.open(file))
    return lzma.open(file) if file.suffix == ".xz" else file.open("rb")


def _read_files(files: Sequence[Path]) -> Iterator[list[str]]:
    """The sentences of the files, one after the other."""
    for file in files:
        number = 0  # of the line being read, for the messages
        try:
            with _open(file) as lines:
                for line in lines:
                    number += 1
                    words = line.decode("utf-8").split()
                    if words:
                        yield words
        except UnicodeDecodeError as error:
            raise CorpusError(
                f"{file}, line {number} must be UTF-8, got the byte "
                f"{error.object[error.start]:#04x}; convert the file, for example with iconv"
            ) from error
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            raise CorpusError(f"{file} cannot be read after line {number}: {error}") from error
