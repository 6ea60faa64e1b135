"""Batches of whole sentences of similar length (App. C.1).

A sentence w1..wn gives n + 1 predictions, the last of them of its end:

    inputs   </s>  w1  w2 ... wn
    targets  w1    w2  ... wn </s>

so `</s>` is also the symbol before the first word, and nothing else is ever predicted or counted.
"""

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from moe_ext.data.vocabulary import Vocabulary
from moe_ext.processes import blocks


@dataclass(frozen=True)
class Batch:
    """B sentences side by side, padded to the longest, S predictions each.

    Attributes:
        inputs, targets: [B, S] int64, ids.
        mask: [B, S] bool, True where a prediction counts; elsewhere both ids are `</s>` and mean
            nothing.
        sentence_index: [B] int64, where each row stands in the sentences the batches were made of,
            for results by sentence.
    """

    inputs: Tensor
    targets: Tensor
    mask: Tensor
    sentence_index: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """The number of predictions that count (waits for the device the mask is on)."""
        return int(self.mask.sum())

    def part(self, index: int, number: int) -> Self:
        """The rows for one of several processes: blocks of rows side by side, maybe without any."""
        rows = blocks(range(len(self.inputs)), number)[index]
        some = slice(rows.start, rows.stop)
        sentence_index = None if self.sentence_index is None else self.sentence_index[some]
        return type(self)(self.inputs[some], self.targets[some], self.mask[some], sentence_index)

    def to(self, device: torch.device | str) -> Self:
        """The same batch on another device."""
        index = None if self.sentence_index is None else self.sentence_index.to(device)
        return type(self)(
            self.inputs.to(device), self.targets.to(device), self.mask.to(device), index
        )


class EncodedSentences:
    """Sentences as ids in two tensors: 4 bytes a word and 8 a sentence, whatever the corpus's size.

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
        self.eos_id = eos_id
        self.stream = torch.frombuffer(stream, dtype=torch.int32)
        self.starts = torch.frombuffer(starts, dtype=torch.int64)

    @property
    def num_tokens(self) -> int:
        """The number of predictions: words plus one end a sentence."""
        return len(self.stream) - 1

    def __len__(self) -> int:
        return len(self.starts) - 1

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


class SentenceBatches:
    """Cuts sentences, sorted by length, into batches of about `tokens_per_batch` predictions.

    Sorting puts sentences of nearly equal length together: little is padding (`padding_share`), and
    the number of batches is the same in every epoch. Either way of going through them, an epoch has
    each sentence exactly once.

    Args:
        sentences: from `encode_sentences`, or any iterable of lists of ids.
        eos_id: the id of `</s>`.
        tokens_per_batch: predictions in a batch, roughly.
        max_length: the largest number of predictions in a row, to bound the memory of training. A
            longer sentence is cut into several rows, each to start from a zero state with the true
            word before it as first input: every word is still predicted once, but some with less
            context. Leave it None in evaluation, for the perplexity of whole sentences.
        shuffle: whether each epoch draws anew which sentences of equal length meet in a batch, and
            the order of the batches. Both are functions of (seed, epoch) alone, torch's global
            generator is neither used nor moved. Otherwise the batches go from short sentences to
            long.
        seed: of the order.

    Attributes:
        num_sentences, num_tokens: of an epoch; tokens are predictions, ends of sentences included.
        num_batches: of an epoch, the same for all.

    Raises:
        ValueError: an argument is out of range, or there is no sentence.
    """

    def __init__(
        self,
        sentences: EncodedSentences | Iterable[Sequence[int]],
        *,
        eos_id: int,
        tokens_per_batch: int,
        max_length: int | None = None,
        shuffle: bool,
        seed: int = 0,
    ) -> None:
        if not isinstance(sentences, EncodedSentences):
            sentences = EncodedSentences(sentences, eos_id)
        if sentences.eos_id != eos_id:
            raise ValueError(
                f"SentenceBatches: eos_id must be that of the sentences, {sentences.eos_id}, "
                f"got {eos_id}"
            )
        if len(sentences) == 0:
            raise ValueError("SentenceBatches: sentences must hold at least one sentence, got none")
        if tokens_per_batch < 1:
            raise ValueError(
                f"SentenceBatches: tokens_per_batch must be at least 1, got {tokens_per_batch}"
            )
        if max_length is not None and max_length < 1:
            raise ValueError(f"SentenceBatches: max_length must be at least 1, got {max_length}")
        self.eos_id = eos_id
        self.shuffle = shuffle
        self.seed = seed
        self.num_sentences = len(sentences)
        self.num_tokens = sentences.num_tokens
        self._stream = sentences.stream

        # Row r covers the inputs stream[row_start : row_start + row_length].
        self._row_start, self._row_length = sentences.starts[:-1], sentences.starts.diff()
        self._row_sentence = torch.arange(len(sentences), device="cpu")
        if max_length is not None:
            pieces = (self._row_length + max_length - 1) // max_length
            self._row_sentence = self._row_sentence.repeat_interleave(pieces)
            first_row = (pieces.cumsum(0) - pieces)[self._row_sentence]
            skipped = (torch.arange(len(first_row), device="cpu") - first_row) * max_length
            self._row_start = self._row_start[self._row_sentence] + skipped
            self._row_length = (self._row_length[self._row_sentence] - skipped).clamp(
                max=max_length
            )

        # Equal shares of all tokens, so that no batch is a small rest: a row belongs to the share
        # its first token falls in. The sorted lengths alone decide: the same in every epoch.
        lengths = self._row_length.sort().values
        num_shares = max(1, round(self.num_tokens / tokens_per_batch))
        share = (lengths.cumsum(0) - lengths) * num_shares // self.num_tokens
        rows_per_batch = share.bincount()
        rows_per_batch = rows_per_batch[rows_per_batch > 0]  # a long row may span several shares
        self._batch_end = rows_per_batch.cumsum(0)
        self.num_batches = len(self._batch_end)
        longest = lengths[self._batch_end - 1]
        self._num_positions = int((rows_per_batch * longest).sum())

    @property
    def padding_share(self) -> float:
        """Padded positions as a share of all positions of an epoch."""
        return 1 - self.num_tokens / self._num_positions

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from batch `start` on, the same as without an interruption."""
        if not 0 <= start <= self.num_batches:
            raise ValueError(
                f"SentenceBatches.epoch: start must be in [0, {self.num_batches}], got {start}"
            )
        return self._batches(epoch, start)

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        num_rows = len(self._row_length)
        rows = torch.arange(num_rows, device="cpu")
        batch_order = torch.arange(self.num_batches, device="cpu")
        if self.shuffle:
            generator = torch.Generator("cpu").manual_seed(mixed_seed(self.seed, epoch))
            rows = torch.randperm(num_rows, generator=generator, device="cpu")
            batch_order = torch.randperm(self.num_batches, generator=generator, device="cpu")
        # Stable, so that rows of equal length keep their (random) order.
        rows = rows[self._row_length[rows].sort(stable=True).indices]
        for index in batch_order[start:].tolist():
            begin = int(self._batch_end[index - 1]) if index else 0
            yield self._batch(rows[begin : int(self._batch_end[index])])

    def _batch(self, rows: Tensor) -> Batch:
        lengths = self._row_length[rows, None]
        positions = torch.arange(int(lengths.max()), device="cpu")
        mask = positions < lengths
        where = torch.where(mask, self._row_start[rows, None] + positions, 0)
        inputs = self._stream[where].long().masked_fill_(~mask, self.eos_id)
        targets = self._stream[where + 1].long().masked_fill_(~mask, self.eos_id)
        return Batch(inputs, targets, mask, self._row_sentence[rows])


def mixed_seed(*what: object) -> int:
    """A generator's seed: those of neighbouring numbers, say, have nothing in common."""
    text = " ".join(map(str, what))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
