"""Sentences as ids, in memory or in files that are mapped into it."""

import hashlib
import json
import os
import shutil
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from moe_ext.lab.data.corpora import CorpusError, Sentences, Shard
from moe_ext.lab.data.vocabulary import Vocabulary
from moe_ext.lab.data.workers import in_workers
from moe_ext.lab.files import file_lock, sync_folder, write_json
from moe_ext.lab.progress import progress

_STREAM, _STARTS, _ABOUT = "stream.int32", "starts.int64", "about.json"


class EncodedSentences:
    """Sentences as ids in two tensors: 4 bytes a word and 12 a sentence, whatever its length.

    Args:
        sentences: the words of each as ids, without `</s>`; read once, in order.
        eos_id: the id of `</s>`.

    Attributes:
        stream: [1 + words + sentences] int32, all sentences one after the other with `</s>` before
            the first and after each, so that a sentence's inputs are a slice of it and its targets
            the slice one further.
        starts: [sentences + 1] int64, where the inputs of each sentence begin in it.

    Raises:
        ValueError: a sentence holds `</s>`.
    """

    def __init__(self, sentences: Iterable[Sequence[int]], eos_id: int) -> None:
        stream, starts = flatten(sentences, eos_id)
        self.eos_id = eos_id
        self.stream = torch.frombuffer(stream, dtype=torch.int32)
        self.starts = torch.frombuffer(starts, dtype=torch.int64)
        self._folder: Path | None = None

    @classmethod
    def of_tensors(cls, stream: Tensor, starts: Tensor, eos_id: int) -> Self:
        """Sentences from the two tensors that hold them; nothing is copied."""
        self = cls.__new__(cls)
        self.stream, self.starts, self.eos_id, self._folder = stream, starts, eos_id, None
        return self

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """What `encode_to_files` has written, mapped: the system reads what is used, as it is used,
        and keeps as much of it as the memory that is free allows.

        Raises:
            CorpusError: a file is missing or not of its size.
        """
        folder = Path(folder)
        try:
            about = json.loads((folder / _ABOUT).read_text("utf-8"))
            sizes = {
                _STREAM: 4 * (about["num_tokens"] + 1),
                _STARTS: 8 * (about["num_sentences"] + 1),
            }
            found = {name: (folder / name).stat().st_size for name in sizes}
        except (OSError, ValueError, KeyError) as error:
            raise CorpusError(
                f"{folder} must hold encoded sentences, got {error}; delete it to encode the text "
                "again"
            ) from error
        for name, size in sizes.items():
            if found[name] != size:
                raise CorpusError(
                    f"{folder / name} must have {size} bytes, got {found[name]}; delete {folder} "
                    "to encode the text again"
                )
        stream, starts = (
            torch.from_file(str(folder / name), size=sizes[name] // dtype.itemsize, dtype=dtype)
            for name, dtype in ((_STREAM, torch.int32), (_STARTS, torch.int64))
        )
        self = cls.of_tensors(stream, starts, about["eos_id"])
        self._folder = folder
        return self

    def __reduce__(self) -> Any:
        """Mapped sentences go to other processes by name."""
        return super().__reduce__() if self._folder is None else (self.open, (self._folder,))

    @property
    def num_tokens(self) -> int:
        """The number of predictions: words plus one end a sentence."""
        return len(self.stream) - 1

    @property
    def lengths(self) -> Tensor:
        """[N] int64, the predictions of each sentence."""
        return self.starts.diff()

    def __len__(self) -> int:
        return len(self.starts) - 1

    def fingerprint(self) -> str:
        """SHA-256 (hex) of the ids: equal for equal sentences, on every machine. Of more than four
        million, that of 1,024 places all over them: another order, or other sentences, show."""
        place, places = 4096, 1024
        found = hashlib.sha256(f"{len(self)} {self.num_tokens}".encode())
        if len(self.stream) <= place * places:
            starts = [0]
            place = len(self.stream)
        else:
            starts = torch.linspace(0, len(self.stream) - place, places).long().tolist()
        for start in starts:
            found.update(self.stream[start : start + place].numpy().tobytes())
        return found.hexdigest()

    def first(self, number: int) -> "EncodedSentences":
        """The first sentences, or all if there are fewer; nothing is copied."""
        starts = self.starts[: number + 1]
        return self.of_tensors(self.stream[: int(starts[-1]) + 1], starts, self.eos_id)

    def __getitem__(self, index: int) -> list[int]:
        """The words of one sentence as ids, without `</s>`."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"EncodedSentences: index must be in [0, {len(self)}), got {index}")
        index %= len(self)
        return self.stream[self.starts[index] + 1 : self.starts[index + 1]].tolist()


def encode_sentences(
    sentences: Iterable[Sequence[str]], vocabulary: Vocabulary
) -> EncodedSentences:
    """The words of each sentence as ids of `vocabulary`, held compactly; read once, in order."""
    return EncodedSentences(map(vocabulary.encode, sentences), vocabulary.eos_id)


def encode_to_files(
    sentences: Sentences,
    vocabulary: Vocabulary,
    folder: str | Path,
    *,
    name: str,
    num_workers: int = 0,
) -> EncodedSentences:
    """The words of each sentence as ids in files, from which they are mapped: never in memory.

    The files are those of this text and vocabulary: others, also those of the text before it was
    changed (name, size or time of one of its files), stay beside them until they are deleted. They
    are there whole or not at all. Of several processes that want the same ones the first makes
    them, the others wait for it.

    A piece of the text at a time is in memory: 16 MiB of a file, or a whole compressed one.

    Args:
        sentences: the part of a corpus.
        vocabulary: its ids.
        folder: of all encoded texts; made if it is not there.
        name: of the part, for the eye.
        num_workers: processes that read and encode; 0 is this one.

    Raises:
        CorpusError: the text cannot be read, holds `</s>`, or changes while it is read.
    """

    def make(made: Path) -> None:
        _encode_into(made, sentences, vocabulary, num_workers)

    recipe = f"1 {sys.byteorder} {vocabulary.fingerprint()}"
    return EncodedSentences.open(made_once(Path(folder), name, recipe, sentences.fingerprint, make))


def made_once(
    folder: Path, name: str, recipe: str, text: Callable[[], str], make: Callable[[Path], None]
) -> Path:
    """A folder of files that is there whole or not at all; only the first who wants it makes it.

    Args:
        folder: where it is to be.
        name: what it is to be called, beside a hash of the recipe and the text.
        recipe: what else decides what is in the files.
        text: fingerprint of what they are made of.
        make: reads the text and writes them, into a folder that is there.

    Raises:
        CorpusError: the text changes while it is read.
    """
    before = text()
    made = folder / f"{name}-{hashlib.sha256(f'{recipe} {before}'.encode()).hexdigest()[:16]}"
    if not made.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(folder / ".lock", wait=True):
            if not made.is_dir():
                for left in folder.glob(".encoding-*"):  # of a process that was killed
                    shutil.rmtree(left)
                with tempfile.TemporaryDirectory(prefix=".encoding-", dir=folder) as temporary:
                    result = Path(temporary) / name
                    result.mkdir()
                    make(result)
                    if text() != before:
                        raise CorpusError(
                            f"the text that {name} is made of changed meanwhile; try again"
                        )
                    result.rename(made)
                sync_folder(folder)
    return made


class SentencesWriter:
    """Writes the files that `EncodedSentences.open` maps, piece by piece.

    Args:
        folder: of the files, which is there.
        eos_id: the id of `</s>`.
        about: what else is to be known about them, as JSON.
    """

    def __init__(self, folder: Path, eos_id: int, **about: Any) -> None:
        self._folder = folder
        self._about = {"num_sentences": 0, "num_tokens": 0, "eos_id": eos_id, **about}
        self._stream, self._starts = (folder / _STREAM).open("wb"), (folder / _STARTS).open("wb")
        array("i", [eos_id]).tofile(self._stream)
        array("q", [0]).tofile(self._starts)

    def write(self, stream: array, starts: array) -> None:
        """Add the sentences of a piece, from `flatten`."""
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
    folder: Path, sentences: Sentences, vocabulary: Vocabulary, num_workers: int
) -> None:
    pieces = in_workers(partial(_encode_piece, vocabulary), sentences.pieces, num_workers)
    text = sentences.fingerprint().splitlines()
    with SentencesWriter(
        folder, vocabulary.eos_id, vocabulary=vocabulary.fingerprint(), text=text
    ) as writer:
        for stream, starts in progress(
            pieces, f"encoding {folder.name}", "pieces", len(sentences.pieces)
        ):
            writer.write(stream, starts)


def _encode_piece(vocabulary: Vocabulary, piece: Shard) -> tuple[array, array]:
    try:
        return flatten(map(vocabulary.encode, piece), vocabulary.eos_id)
    except CorpusError:
        raise
    except ValueError as error:
        raise CorpusError(f"{piece}: {error}") from error


def flatten(sentences: Iterable[Sequence[int]], eos_id: int) -> tuple[array, array]:
    """`stream` and `starts` of `EncodedSentences`."""
    stream = array("i", [eos_id])
    starts = array("q", [0])
    for ids in sentences:
        if eos_id in ids:
            raise ValueError(
                f"EncodedSentences: sentence {len(starts) - 1} must not contain </s> "
                f"(id {eos_id}): the end of a sentence is added here"
            )
        stream.extend(ids)
        stream.append(eos_id)
        starts.append(len(stream) - 1)
    return stream, starts
