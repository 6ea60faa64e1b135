"""Sentences as ids, in memory or in files that are mapped into it."""

import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from moe_ext.data.corpora import CorpusError, Sentences, Shard
from moe_ext.data.files import atomic_file, sync_folder
from moe_ext.data.vocabulary import Vocabulary
from moe_ext.data.workers import in_workers
from moe_ext.progress import progress

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
        stream, starts = _flatten(sentences, eos_id)
        self.eos_id = eos_id
        self.stream = torch.frombuffer(stream, dtype=torch.int32)
        self.starts = torch.frombuffer(starts, dtype=torch.int64)
        self._folder: Path | None = None

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
            for name, size in sizes.items():
                found = (folder / name).stat().st_size
                if found != size:
                    raise CorpusError(
                        f"{folder / name} must have {size} bytes, got {found}; delete {folder} "
                        "to encode the text again"
                    )
        except (OSError, ValueError, KeyError) as error:
            if isinstance(error, CorpusError):
                raise
            raise CorpusError(
                f"{folder} must hold encoded sentences, got {error}; delete it to encode the text "
                "again"
            ) from error
        self = cls.__new__(cls)
        self.eos_id = about["eos_id"]
        self._folder = folder
        self.stream, self.starts = (
            torch.from_file(str(folder / name), size=sizes[name] // dtype.itemsize, dtype=dtype)
            for name, dtype in ((_STREAM, torch.int32), (_STARTS, torch.int64))
        )
        return self

    def __reduce__(self) -> Any:
        """Mapped sentences go to other processes by name."""
        return super().__reduce__() if self._folder is None else (self.open, (self._folder,))

    @property
    def num_tokens(self) -> int:
        """The number of predictions: words plus one end a sentence."""
        return len(self.stream) - 1

    def __len__(self) -> int:
        return len(self.starts) - 1

    def first(self, number: int) -> "EncodedSentences":
        """The first sentences, or all if there are fewer; nothing is copied."""
        part = EncodedSentences.__new__(EncodedSentences)
        part.eos_id, part._folder = self.eos_id, None
        part.starts = self.starts[: number + 1]
        part.stream = self.stream[: int(part.starts[-1]) + 1]
        return part

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
    folder = Path(folder)
    text = sentences.fingerprint()
    key = hashlib.sha256(f"1 {sys.byteorder} {vocabulary.fingerprint()} {text}".encode())
    made = folder / f"{name}-{key.hexdigest()[:16]}"
    if not made.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock"):
            if not made.is_dir():
                for left in folder.glob(".encoding-*"):  # of a process that was killed
                    shutil.rmtree(left)
                with tempfile.TemporaryDirectory(prefix=".encoding-", dir=folder) as temporary:
                    result = Path(temporary) / name
                    result.mkdir()
                    _encode_into(result, sentences, vocabulary, num_workers)
                    if sentences.fingerprint() != text:
                        raise CorpusError(f"the {name} part changed while it was read; try again")
                    result.rename(made)
                sync_folder(folder)
    return EncodedSentences.open(made)


def _encode_into(
    folder: Path, sentences: Sentences, vocabulary: Vocabulary, num_workers: int
) -> None:
    num_tokens = num_sentences = 0
    pieces = in_workers(partial(_encode_piece, vocabulary), sentences.pieces, num_workers)
    with (folder / _STREAM).open("wb") as stream_file, (folder / _STARTS).open("wb") as starts_file:
        array("i", [vocabulary.eos_id]).tofile(stream_file)
        array("q", [0]).tofile(starts_file)
        for stream, starts in progress(
            pieces, f"encoding {folder.name}", "pieces", len(sentences.pieces)
        ):
            torch.frombuffer(starts, dtype=torch.int64).add_(num_tokens)
            stream_file.write(memoryview(stream)[1:])
            starts_file.write(memoryview(starts)[1:])
            num_tokens += len(stream) - 1
            num_sentences += len(starts) - 1
        for written in (stream_file, starts_file):
            written.flush()
            os.fsync(written.fileno())
    about = {
        "num_sentences": num_sentences,
        "num_tokens": num_tokens,
        "eos_id": vocabulary.eos_id,
        "vocabulary": vocabulary.fingerprint(),
        "text": sentences.fingerprint().splitlines(),
    }
    with atomic_file(folder / _ABOUT) as file:
        file.write(json.dumps(about, indent=1).encode())


def _encode_piece(vocabulary: Vocabulary, piece: Shard) -> tuple[array, array]:
    try:
        return _flatten(map(vocabulary.encode, piece), vocabulary.eos_id)
    except CorpusError:
        raise
    except ValueError as error:
        raise CorpusError(f"{piece}: {error}") from error


def _flatten(sentences: Iterable[Sequence[int]], eos_id: int) -> tuple[array, array]:
    """`stream` and `starts` of EncodedSentences."""
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


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Only one process at a time, until it leaves the block or ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
