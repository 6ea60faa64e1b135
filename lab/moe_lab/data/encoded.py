"""Sentences as ids of words or wordpieces, in memory or in memory-mapped files."""

import hashlib
import os
import shutil
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from moe_ext.checks import is_whole, require
from moe_lab.data.sentences import CorpusError, Sentences, Shard
from moe_lab.data.vocabulary import Vocabulary
from moe_lab.data.wordpieces import Wordpieces
from moe_lab.data.workers import in_workers
from moe_lab.files import file_lock, read_json, require_regular, sync_folder, write_json
from moe_lab.progress import progress

_STREAM, _STARTS, _ABOUT = "stream.int32", "starts.int64", "about.json"
AGAIN = "delete the folder, so that the text is encoded again"  # the end of errors
_CHECKED_AT_A_TIME = 2**22  # ids

Block = tuple[array, array]  # stream and starts of some sentences


class EncodedSentences:
    """Stores sentences as ids in two tensors: 4 bytes per word and 12 bytes per sentence.

    The inputs of a sentence are a slice of ``stream``. The targets of the sentence are the slice of
    equal length that begins one id later. The sentences are given as word ids without ``</s>``, and
    eos_id is the id of ``</s>``.

    Attributes:
        stream: [1 + words + sentences] int32, all sentences in sequence, with ``</s>`` before the
            first and after each.
        starts: [sentences + 1] int64, index in the stream of each sentence's first input.
    """

    _folder: Path | None = None  # of the memory-mapped files

    def __init__(self, sentences: Iterable[Sequence[int]], eos_id: int) -> None:
        self.stream, self.starts = tensors_of(flatten(sentences, eos_id))
        self.eos_id = eos_id

    @classmethod
    def from_tensors(cls, stream: Tensor, starts: Tensor, eos_id: int) -> Self:
        """Creates EncodedSentences from stream, starts and eos_id, without copying the tensors."""
        self = cls.__new__(cls)
        self.stream, self.starts, self.eos_id = stream, starts, eos_id
        return self

    @classmethod
    def open(cls, folder: str | Path, num_ids: int | None = None) -> Self:
        """Maps the files that `encode_to_files` has written to a folder into memory.

        With num_ids, the number of entries of the vocabulary, the files are read once to check that
        they hold sentences of such ids. None checks only the sizes of the files.
        """
        folder = Path(folder)
        try:
            about = read_json(folder / _ABOUT)
            keys = ("num_tokens", "num_sentences", "eos_id")
            num_tokens, num_sentences, eos_id = (_count(about, key) for key in keys)
            stream = _mapped(folder / _STREAM, num_tokens + 1, torch.int32)
            starts = _mapped(folder / _STARTS, num_sentences + 1, torch.int64)
        except (OSError, ValueError, RuntimeError) as error:
            raise CorpusError(
                f"{folder} must hold encoded sentences, got an error: {error}; {AGAIN}"
            ) from error
        self = cls.from_tensors(stream, starts, eos_id)
        self._folder = folder
        if num_ids is not None and (wrong := self._wrong(num_ids)):
            raise CorpusError(f"{folder}: {wrong}; {AGAIN}")
        return self

    def _wrong(self, num_ids: int) -> str | None:
        """Returns what is wrong with stream and starts, in bounded memory; None if nothing is."""
        starts, stream, eos_id = self.starts, self.stream, self.eos_id
        if int(starts[0]) != 0 or int(starts[-1]) != self.num_tokens:
            return f"{_STARTS} must begin with 0 and end with {self.num_tokens}"
        num_ends, at_starts = 0, True
        for begin in range(0, len(stream), _CHECKED_AT_A_TIME):
            block = stream[begin : begin + _CHECKED_AT_A_TIME]
            low, high = map(int, block.aminmax())
            if low < 0 or high >= num_ids:
                return f"the ids in {_STREAM} must be in [0, {num_ids}), got {low} to {high}"
            ends = (block == eos_id).nonzero()[:, 0] + begin
            at_starts &= torch.equal(ends, starts[num_ends : num_ends + len(ends)])
            num_ends += len(ends)
        if num_ends != len(starts):
            return f"{_STREAM} must hold the id {eos_id} {len(starts)} times, got {num_ends}"
        if not at_starts:
            return f"{_STARTS} must hold the places of the id {eos_id} in {_STREAM}"
        return None

    def __reduce__(self) -> Any:
        """Pickles memory-mapped sentences as the path of their folder."""
        return super().__reduce__() if self._folder is None else (self.open, (self._folder,))

    @property
    def num_tokens(self) -> int:
        """The number of predictions: all words, and the end of each sentence."""
        return len(self.stream) - 1

    @property
    def lengths(self) -> Tensor:
        """The number of predictions of each sentence, [N] int64."""
        return self.starts.diff()

    def __len__(self) -> int:
        return len(self.starts) - 1

    def fingerprint(self) -> str:
        """Returns the SHA-256 (hex) of the number of sentences, the number of ids, and the ids.

        Of more than 4,194,304 ids, only 1,024 evenly spaced blocks of 4,096 ids are hashed.
        """
        size, blocks = 4096, 1024
        digest = hashlib.sha256(f"{len(self)} {self.num_tokens}".encode())
        if len(self.stream) <= size * blocks:
            size, blocks = len(self.stream), 1
        for i in range(blocks):
            start = i * (len(self.stream) - size) // max(blocks - 1, 1)
            digest.update(self.stream[start : start + size].numpy().tobytes())
        return digest.hexdigest()

    def first(self, number: int) -> Self:
        """Returns the first `number` sentences, or all if there are fewer, without copying them."""
        starts = self.starts[: number + 1]
        return self.from_tensors(self.stream[: int(starts[-1]) + 1], starts, self.eos_id)

    def __getitem__(self, index: int) -> list[int]:
        """Returns the word ids of sentence `index`, without ``</s>``."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"EncodedSentences: index must be in [0, {len(self)}), got {index}")
        index %= len(self)
        return self.stream[self.starts[index] + 1 : self.starts[index + 1]].tolist()


AnyVocabulary = Vocabulary | Wordpieces


def encode_sentences(
    sentences: Iterable[Sequence[str]], vocabulary: AnyVocabulary
) -> EncodedSentences:
    """Encodes sentences with a vocabulary, in memory; reads the sentences once, in order."""
    return EncodedSentences(_ids(sentences, vocabulary), vocabulary.eos_id)


def _ids(sentences: Iterable[Sequence[str]], vocabulary: AnyVocabulary) -> Iterator[list[int]]:
    if isinstance(vocabulary, Vocabulary):
        return map(vocabulary.encode, sentences)
    return map(vocabulary.encode, map(" ".join, sentences))


def encode_to_files(
    sentences: Sentences,
    vocabulary: AnyVocabulary,
    folder: str | Path,
    *,
    name: str,
    num_workers: int = 0,
) -> EncodedSentences:
    """Encodes sentences into files and maps the files into memory.

    The files are written atomically and reused for the same text and vocabulary. If the name, size
    or modification time of a text file changes, new files are written. The old files stay until you
    delete them. If concurrent runs need the same files, the first run writes the files and the
    other runs wait.

    Args:
        sentences: a part of a corpus.
        vocabulary: words or wordpieces; see `encode_sentences`.
        folder: the parent folder of all encoded texts; created if missing.
        name: name of the part; the files are in a subfolder whose name begins with `name`.
        num_workers: number of worker processes that read and encode; 0 uses the calling process.
            Each holds 16 MiB of a text file in memory, or a whole compressed file.
    """

    recipe = f"1 {sys.byteorder} {vocabulary.fingerprint()}"
    make = partial(_encode_into, sentences, vocabulary, num_workers)
    made = made_once(Path(folder), name, recipe, sentences.fingerprint, make)
    return EncodedSentences.open(made, len(vocabulary))


def made_once(
    folder: Path, name: str, recipe: str, text: Callable[[], str], make: Callable[[Path], None]
) -> Path:
    """Creates a subfolder of files atomically and only once, even for concurrent runs; returns it.

    Args:
        folder: the parent folder.
        name: name of the subfolder; a hash of recipe and text is appended.
        recipe: everything except the text that determines the contents of the files.
        text: function that returns the fingerprint of the text.
        make: function that reads the text and writes the files to a given empty folder.
    """
    before = text()
    content = f"{recipe} {before}".encode(errors="surrogateescape")  # has names of files
    made = folder / f"{name}-{hashlib.sha256(content).hexdigest()[:16]}"
    if made.is_dir():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    with file_lock(folder / ".lock", wait=True):
        if made.is_dir():
            return made
        for left in folder.glob(".encoding-*"):  # left by a killed process
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(prefix=".encoding-", dir=folder) as temporary:
            result = Path(temporary) / name
            result.mkdir()
            make(result)
            if text() != before:
                raise CorpusError(
                    f"the text of {name} changed while it was read; run the command again"
                )
            result.rename(made)
        sync_folder(folder)
    return made


class SentencesWriter:
    """Writes the files for `EncodedSentences.open`, one block of sentences at a time.

    The folder is created if missing.
    """

    def __init__(self, folder: Path, eos_id: int, **about: Any) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._about = {"num_sentences": 0, "num_tokens": 0, "eos_id": eos_id, **about}
        self._stream, self._starts = (folder / _STREAM).open("wb"), (folder / _STARTS).open("wb")
        array("i", [eos_id]).tofile(self._stream)
        array("q", [0]).tofile(self._starts)

    def write(self, stream: array, starts: array) -> None:
        """Appends a block of sentences; ``flatten`` makes stream and starts."""
        torch.frombuffer(starts, dtype=torch.int64).add_(self._about["num_tokens"])
        self._stream.write(memoryview(stream)[1:])
        self._starts.write(memoryview(starts)[1:])
        self._about["num_tokens"] += len(stream) - 1
        self._about["num_sentences"] += len(starts) - 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        with self._stream, self._starts:
            if error is not None:
                return
            for file in (self._stream, self._starts):
                file.flush()
                os.fsync(file.fileno())
        write_json(self._folder / _ABOUT, self._about)


def _encode_into(
    sentences: Sentences, vocabulary: AnyVocabulary, num_workers: int, folder: Path
) -> None:
    pieces = sentences.pieces
    encoded = in_workers(partial(_encode_piece, vocabulary), pieces, num_workers)
    recipe = {"vocabulary": vocabulary.fingerprint(), "text": sentences.fingerprint().splitlines()}
    with SentencesWriter(folder, vocabulary.eos_id, **recipe) as writer:
        for block in progress(encoded, f"encoding {folder.name}", "pieces", len(pieces)):
            writer.write(*block)


def _encode_piece(vocabulary: AnyVocabulary, piece: Shard) -> Block:
    try:
        return flatten(_ids(piece, vocabulary), vocabulary.eos_id)
    except CorpusError:
        raise
    except ValueError as error:
        raise CorpusError(f"{piece}: {error}") from error


def _count(about: Any, key: str) -> int:
    value: Any = about.get(key) if isinstance(about, dict) else None
    require(is_whole(value) and 0 <= value < 2**60, key, "be a whole number", value)
    return int(value)


def _mapped(file: Path, length: int, dtype: torch.dtype) -> Tensor:
    """Maps a file of `length` numbers into memory."""
    num_bytes, size = require_regular(file), dtype.itemsize * length
    require(num_bytes == size, str(file), f"have {size:,} bytes", num_bytes)
    return torch.from_file(str(file), size=length, dtype=dtype)


def tensors_of(block: Block) -> tuple[Tensor, Tensor]:
    """Returns a block as tensors, which share its memory."""
    stream, starts = block
    return torch.frombuffer(stream, dtype=torch.int32), torch.frombuffer(starts, dtype=torch.int64)


def flatten(sentences: Iterable[Sequence[int]], eos_id: int) -> Block:
    """Makes ``stream`` and ``starts`` of `EncodedSentences` from sentences of ids."""
    stream = array("i", [eos_id])
    starts = array("q", [0])
    for ids in sentences:
        if eos_id in ids:
            raise ValueError(
                f"EncodedSentences: sentence {len(starts) - 1} must not contain </s> "
                f"(id {eos_id}), which is added automatically"
            )
        stream.extend(ids)
        stream.append(eos_id)
        starts.append(len(stream) - 1)
    return stream, starts
