"""Batches of whole sentences of similar length (App. C.1).

A sentence w1..wn gives n + 1 predictions, the last of them of its end:

    inputs   </s>  w1  w2 ... wn
    targets  w1    w2  ... wn </s>

so `</s>` is also the symbol before the first word, and nothing else is ever predicted or counted.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Generic, Self, TypeVar

import torch
from torch import Tensor

from moe_ext.checks import require, require_at_least
from moe_ext.distributed import blocks
from moe_ext.lab.data.encoded import EncodedSentences
from moe_ext.lab.data.workers import in_workers


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
    sentence_index: Tensor

    @property
    def num_tokens(self) -> int:
        """The number of predictions that count (waits for the device the mask is on)."""
        return int(self.mask.sum())

    def part(self, index: int, number: int) -> Self:
        """The rows for one of several processes: blocks of rows side by side, maybe without any."""

        def block(tensor: Tensor) -> Tensor:
            rows = blocks(range(len(tensor)), number)[index]
            return tensor[rows.start : rows.stop]

        return self._map(block)

    def to(self, device: torch.device | str) -> Self:
        """The same rows on another device."""
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(*(function(getattr(self, field.name)) for field in fields(self)))


B = TypeVar("B", bound=Batch)


class SortedBatches(Generic[B]):
    """Batches that are cut from rows in order of length; `SentenceBatches` and `PairBatches`.

    Args:
        batch_end: [batches] int64, the number of sorted rows up to the end of each batch.
        shuffle, seed: see there.

    Attributes:
        num_batches: of an epoch, the same for all.
    """

    def __init__(self, batch_end: Tensor, shuffle: bool, seed: int) -> None:
        self.shuffle = shuffle
        self.seed = seed
        self.num_batches = len(batch_end)
        self._batch_end = batch_end

    def epoch(self, epoch: int, start: int = 0, num_workers: int = 0) -> Iterator[B]:
        """The batches of an epoch from batch `start` on, the same as without an interruption.

        Args:
            epoch: the number of times all sentences were seen before.
            start: the number of batches to leave out.
            num_workers: processes that make the batches ahead of their use, two each; 0 is this
                one. They end with the iterator.
        """
        name = f"{type(self).__name__}.epoch: start"
        require(0 <= start <= self.num_batches, name, f"be in [0, {self.num_batches}]", start)
        return in_workers(self._batch, self._rows_of_batches(epoch, start), num_workers)

    def _rows_of_batches(self, epoch: int, start: int) -> Iterator[list[int]]:
        if self.shuffle:
            generator = epoch_generator(self.seed, epoch)
            rows = self._sorted_rows(generator)
            batch_order = torch.randperm(self.num_batches, generator=generator, device="cpu")
        else:
            rows, batch_order = self._sorted_rows(None), arange(self.num_batches)
        for index in batch_order[start:].tolist():
            begin = int(self._batch_end[index - 1]) if index else 0
            yield rows[begin : int(self._batch_end[index])].tolist()

    def _sorted_rows(self, generator: torch.Generator | None) -> Tensor:
        """The rows of an epoch by length, those of equal length in the order that is drawn."""
        raise NotImplementedError

    def _batch(self, batch_rows: list[int]) -> B:
        raise NotImplementedError


class SentenceBatches(SortedBatches[Batch]):
    """Cuts sentences, sorted by length, into batches of about `tokens_per_batch` predictions.

    Sorting puts sentences of nearly equal length together: little is padding (`padding_share`), and
    the number of batches is the same in every epoch. Either way of going through them, an epoch has
    each sentence exactly once.

    Beside the sentences themselves, which may be mapped from files, this takes 4 bytes a sentence
    (with max_length, 16 a row), 4 more during an epoch and 32 for a moment at its beginning: 230
    MiB for the 30,301,028 sentences of the 1-billion-word benchmark, and 920 MiB in the few
    seconds of their shuffle.

    Args:
        sentences: from `encode_sentences` or `encode_to_files`.
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
        padding_share: padded positions as a share of all positions of an epoch.

    Raises:
        ValueError: an argument is out of range, or there is no sentence.
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
        require_at_least(1, name, tokens_per_batch=tokens_per_batch, max_length=max_length)
        number = len(sentences)
        require(number >= 1, f"{name}: sentences", "hold at least one sentence", number)
        self.num_sentences = len(sentences)
        self.num_tokens = sentences.num_tokens
        self._sentences = sentences

        # Row r covers the inputs stream[row_start[r] : row_start[r] + row_length[r]]: a sentence,
        # or with max_length a piece of sentence row_sentence[r].
        self._row_length = sentences.lengths.int()
        self._row_start: Tensor | None = None
        self._row_sentence: Tensor | None = None
        if max_length is not None:
            pieces = (self._row_length.long() + max_length - 1) // max_length
            sentence = arange(len(sentences)).repeat_interleave(pieces)
            first_row = (pieces.cumsum(0) - pieces)[sentence]
            skipped = (arange(len(sentence)) - first_row) * max_length
            self._row_start = sentences.starts[sentence] + skipped
            self._row_sentence = sentence
            self._row_length = (self._row_length[sentence] - skipped).clamp(max=max_length).int()

        # The sorted lengths alone decide where the batches end: the same in every epoch.
        rows_of_length = self._row_length.bincount()
        batch_end = shares(
            rows_of_length, torch.arange(len(rows_of_length), device="cpu"), tokens_per_batch
        )
        super().__init__(batch_end, shuffle, seed)
        longest = torch.searchsorted(rows_of_length.cumsum(0), batch_end)
        rows_per_batch = batch_end.diff(prepend=batch_end.new_zeros(1))
        self.padding_share = 1 - self.num_tokens / int((rows_per_batch * longest).sum())

    def _sorted_rows(self, generator: torch.Generator | None) -> Tensor:
        rows = drawn_order(len(self._row_length), generator)
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
    """Cuts sorted rows into equal shares of all their tokens, so that no batch is a small rest.

    A row belongs to the share its first token falls in; a long row may span several shares.

    Args:
        num_rows: [runs] int64, of rows of equal length that follow one another.
        length: [runs] int64, of the rows of each.
        tokens_per_batch: in a share, roughly.

    Returns:
        [batches] int64, the number of rows up to the end of each batch.
    """
    rows_to, tokens_to = num_rows.cumsum(0), (num_rows * length).cumsum(0)
    num_tokens = int(tokens_to[-1])
    num_shares = max(1, round(num_tokens / tokens_per_batch))
    share_end = torch.arange(1, num_shares + 1, device="cpu") * num_tokens
    share_end = (share_end + num_shares - 1) // num_shares  # the first token after each
    run = torch.searchsorted(tokens_to, share_end)  # that holds the token before
    rows_before = rows_to[run] - num_rows[run]
    tokens_before = tokens_to[run] - num_rows[run] * length[run]
    # Of the rows of a run the j-th begins at token `tokens_before + length * j`.
    batch_end = rows_before + (share_end - tokens_before + length[run] - 1) // length[run]
    return batch_end.unique_consecutive()


def side_by_side(
    sentences: EncodedSentences, starts: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and mask of rows of a stream, [rows, longest] each; see `Batch`.

    Args:
        sentences: whose stream it is.
        starts: [rows], where the inputs of each begin in it.
        lengths: [rows], the number of predictions.
    """
    positions = torch.arange(int(lengths.max()), device="cpu")
    mask = positions < lengths[:, None]
    where = torch.where(mask, starts[:, None] + positions, 0)
    inputs = sentences.stream[where].long().masked_fill_(~mask, sentences.eos_id)
    targets = sentences.stream[where + 1].long().masked_fill_(~mask, sentences.eos_id)
    return inputs, targets, mask


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """What the order of an epoch is drawn from: a function of the two numbers alone."""
    return torch.Generator("cpu").manual_seed(mixed_seed(seed, epoch))


def mixed_seed(*what: object) -> int:
    """A generator's seed: those of neighbouring numbers, say, have nothing in common."""
    text = " ".join(map(str, what))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _index_type(size: int) -> torch.dtype:
    """The narrower type that can hold indices below `size`."""
    return torch.int32 if size < 2**31 else torch.int64


def drawn_order(size: int, generator: torch.Generator | None) -> Tensor:
    """[0, size) in an order drawn by the generator; without one as it is."""
    if generator is None:
        return arange(size)
    return torch.randperm(size, generator=generator, dtype=_index_type(size), device="cpu")


def arange(size: int) -> Tensor:
    """[0, size) in the narrower type that can hold it."""
    return torch.arange(size, dtype=_index_type(size), device="cpu")
