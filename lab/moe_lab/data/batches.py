"""Batches of whole sentences of similar length (App. C.1).

A sentence w1..wn gives n + 1 predictions; the last prediction is the end of the sentence::

    inputs   </s>  w1  w2 ... wn
    targets  w1    w2  ... wn </s>

``</s>`` is also the input before the first word. Padding is neither predicted nor counted.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Generic, Self, TypeVar

import torch
from torch import Tensor

from moe_ext.checks import given, require, require_sizes
from moe_lab.data.encoded import EncodedSentences
from moe_lab.data.workers import in_workers


@dataclass(frozen=True)
class Batch:
    """A batch of B sentences, padded to the S predictions of the longest sentence."""

    inputs: Tensor  # [B, S] int64, word ids
    targets: Tensor  # [B, S] int64, word ids
    mask: Tensor  # [B, S] bool, False at padding, where inputs and targets are </s>
    sentence_index: Tensor  # [B] int64, index of each row's sentence in the text

    @property
    def num_tokens(self) -> int:
        """The number of predictions without padding; synchronizes with the device of the mask."""
        return int(self.mask.sum())

    def part(self, index: int, number: int) -> Self:
        """Returns the contiguous rows of rank `index` of `number` ranks; there may be no rows."""
        return self._map(lambda tensor: tensor.tensor_split(number)[index])

    def to(self, device: torch.device | str) -> Self:
        """Returns the batch with its tensors on `device`."""
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(*(function(getattr(self, field.name)) for field in fields(self)))


B = TypeVar("B", bound=Batch)


class SortedBatches(Generic[B]):
    """Splits rows, sorted by length, into batches; base of SentenceBatches and PairBatches.

    `batch_end` [batches] is the number of sorted rows up to the end of each batch.
    """

    def __init__(self, batch_end: Tensor, shuffle: bool, seed: int) -> None:
        self.num_batches = len(batch_end)
        self._batch_end, self._shuffle, self._seed = batch_end, shuffle, seed

    def epoch(self, epoch: int, start: int = 0, num_workers: int = 0) -> Iterator[B]:
        """Iterates over the batches of an epoch, from 0 on, without the first `start` batches.

        Each worker process prepares two batches in advance.
        """
        name, rule = type(self).__name__, f"be in [0, num_batches = {self.num_batches}]"
        require(0 <= start <= self.num_batches, f"{name}.epoch: start", rule, start)
        return in_workers(self._batch, self._rows_of_batches(epoch, start), num_workers)

    def _rows_of_batches(self, epoch: int, start: int) -> Iterator[list[int]]:
        generator = epoch_generator(self._seed, epoch) if self._shuffle else None
        rows = self._sorted_rows(generator)
        batch_order = row_order(self.num_batches, generator)
        for index in batch_order[start:].tolist():
            begin = int(self._batch_end[index - 1]) if index else 0
            yield rows[begin : int(self._batch_end[index])].tolist()

    def _sorted_rows(self, generator: torch.Generator | None) -> Tensor:
        """Sorts the rows of an epoch by length; generator shuffles rows of similar length."""
        raise NotImplementedError(f"{type(self).__name__} must implement _sorted_rows(generator)")

    def _batch(self, batch_rows: list[int]) -> B:
        raise NotImplementedError(f"{type(self).__name__} must implement _batch(batch_rows)")


class SentenceBatches(SortedBatches[Batch]):
    """Groups sentences of similar length into batches of about `tokens_per_batch` predictions.

    A batch has little padding. An epoch contains each sentence exactly once.

    For the 30,301,028 sentences of the 1-billion-word benchmark, the object needs 230 MiB during an
    epoch, in addition to the sentences. For the few seconds of a shuffle, it needs 920 MiB.

    Args:
        sentences: the sentences, from `encode_sentences` or `encode_to_files`.
        tokens_per_batch: approximate number of predictions in a batch.
        max_length: maximum number of predictions in a row, to bound the memory of training. A
            longer sentence is split into several rows. Each row starts from a zero state, with the
            previous word as first input. Leave max_length None in evaluation.
        shuffle: whether each epoch reshuffles the sentences of equal length and the order of the
            batches. The result depends only on seed and epoch; torch's global generator is not
            used. If False, batches go from short to long sentences.
        seed: seed of the shuffle.

    Attributes:
        num_tokens, num_batches: number of predictions and of batches in every epoch.
    """

    def __init__(
        self,
        sentences: EncodedSentences,
        *,
        tokens_per_batch: int,
        max_length: int | None = None,
        shuffle: bool,
        seed: int = 0,
    ) -> None:
        name = "SentenceBatches"
        require_sizes(name, tokens_per_batch=tokens_per_batch, **given(max_length=max_length))
        number = len(sentences)
        require(number >= 1, f"{name}: sentences", "hold at least one sentence", number)
        self.num_tokens = sentences.num_tokens
        self._sentences = sentences

        # Row r has the inputs stream[row_start[r] : row_start[r] + row_length[r]]. It is a sentence
        # or, with max_length, a part of sentence row_sentence[r].
        self._row_length = sentences.lengths.int()
        self._row_start: Tensor | None = None
        self._row_sentence: Tensor | None = None
        if max_length is not None:
            pieces = (self._row_length.long() + max_length - 1) // max_length
            sentence = row_order(len(sentences)).repeat_interleave(pieces)
            first_row = (pieces.cumsum(0) - pieces)[sentence]
            skipped = (row_order(len(sentence)) - first_row) * max_length
            self._row_start = sentences.starts[sentence] + skipped
            self._row_sentence = sentence
            self._row_length = (self._row_length[sentence] - skipped).clamp(max=max_length).int()

        # Batch ends depend only on the sorted lengths, so all epochs share them.
        rows_of_length = self._row_length.bincount()
        lengths = torch.arange(len(rows_of_length), device="cpu")
        super().__init__(shares(rows_of_length, lengths, tokens_per_batch), shuffle, seed)

    def _sorted_rows(self, generator: torch.Generator | None) -> Tensor:
        rows = row_order(len(self._row_length), generator)
        return rows[self._row_length[rows].sort(stable=True).indices]

    def _batch(self, batch_rows: list[int]) -> Batch:
        rows = torch.tensor(batch_rows, device="cpu")
        lengths = self._row_length[rows]
        if self._row_sentence is None or self._row_start is None:
            sentence, starts = rows, self._sentences.starts[rows]
        else:
            sentence, starts = self._row_sentence[rows].long(), self._row_start[rows]
        return Batch(*side_by_side(self._sentences, starts, lengths), sentence)


def shares(num_rows: Tensor, length: Tensor, tokens_per_batch: int) -> Tensor:
    """Splits sorted rows into batches of nearly equal numbers of tokens, the last batch included.

    The tokens of all rows are split into intervals of equal size, one for each batch. A row belongs
    to the interval of its first token. A long row may span several intervals.

    A run has num_rows rows of equal length; both arguments are int64 [runs]. Returns the number of
    rows up to the end of each batch, int64 [batches].
    """
    rows_to, tokens_to = num_rows.cumsum(0), (num_rows * length).cumsum(0)
    num_tokens = int(tokens_to[-1])
    num_shares = max(1, round(num_tokens / tokens_per_batch))
    share_end = torch.arange(1, num_shares + 1, device="cpu") * num_tokens
    share_end = (share_end + num_shares - 1) // num_shares  # the first token after each share
    run = torch.searchsorted(tokens_to, share_end)  # the run with the last token of each share
    rows_before = rows_to[run] - num_rows[run]
    tokens_before = tokens_to[run] - num_rows[run] * length[run]
    # Row j of a run begins at token `tokens_before + length * j`.
    batch_end = rows_before + (share_end - tokens_before + length[run] - 1) // length[run]
    return batch_end.unique_consecutive()


def side_by_side(
    sentences: EncodedSentences, starts: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gathers rows of sentences into padded inputs, targets and mask, [rows, longest] each.

    A row begins at an index of ``sentences.stream`` and has a number of predictions.
    """
    positions = torch.arange(int(lengths.max()), device="cpu")
    mask = positions < lengths[:, None]
    where = torch.where(mask, starts[:, None] + positions, 0)
    inputs = sentences.stream[where].long().masked_fill_(~mask, sentences.eos_id)
    targets = sentences.stream[where + 1].long().masked_fill_(~mask, sentences.eos_id)
    return inputs, targets, mask


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Returns the random generator of an epoch's shuffle, seeded with seed and epoch only."""
    return torch.Generator("cpu").manual_seed(mixed_seed(seed, epoch))


def mixed_seed(*what: object) -> int:
    """Hashes the arguments to a seed, so that similar arguments give unrelated seeds."""
    text = " ".join(map(str, what))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def row_order(size: int, generator: torch.Generator | None = None) -> Tensor:
    """Returns a random permutation of [0, size), or [0, size) in order if generator is None.

    The dtype is int32 if it can hold the indices, otherwise int64.
    """
    dtype = torch.int32 if size < 2**31 else torch.int64
    if generator is None:
        return torch.arange(size, dtype=dtype, device="cpu")
    return torch.randperm(size, generator=generator, dtype=dtype, device="cpu")
