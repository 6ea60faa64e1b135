"""Batches of whole sentences of similar length (App. C.1).

A sentence w1..wn gives n + 1 predictions, the last of them of its end:

    inputs   </s>  w1  w2 ... wn
    targets  w1    w2  ... wn </s>

so `</s>` is also the symbol before the first word, and nothing else is ever predicted or counted.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from moe_ext.data.encoded import EncodedSentences
from moe_ext.data.workers import in_workers
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


class SentenceBatches:
    """Cuts sentences, sorted by length, into batches of about `tokens_per_batch` predictions.

    Sorting puts sentences of nearly equal length together: little is padding (`padding_share`), and
    the number of batches is the same in every epoch. Either way of going through them, an epoch has
    each sentence exactly once.

    Beside the sentences themselves, which may be mapped from files, this takes 4 bytes a sentence
    (with max_length, 16 a row), 4 more during an epoch and 32 for a moment at its beginning: 230
    MiB for the 30,301,028 sentences of the 1-billion-word benchmark, and 920 MiB in the few
    seconds of their shuffle.

    Args:
        sentences: from `encode_sentences` or `encode_to_files`, or any iterable of lists of ids.
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
        self._sentences = sentences

        # Row r covers the inputs stream[row_start[r] : row_start[r] + row_length[r]]: a sentence,
        # or with max_length a piece of sentence row_sentence[r].
        self._row_length = sentences.starts.diff().int()
        self._row_start: Tensor | None = None
        self._row_sentence: Tensor | None = None
        if max_length is not None:
            pieces = (self._row_length.long() + max_length - 1) // max_length
            sentence = _arange(len(sentences)).repeat_interleave(pieces)
            first_row = (pieces.cumsum(0) - pieces)[sentence]
            skipped = (_arange(len(sentence)) - first_row) * max_length
            self._row_start = sentences.starts[sentence] + skipped
            self._row_sentence = sentence
            self._row_length = (self._row_length[sentence] - skipped).clamp(max=max_length).int()

        # Equal shares of all tokens, so that no batch is a small rest: a row belongs to the share
        # its first token falls in. The sorted lengths alone decide: the same in every epoch. Of
        # the rows of length l the j-th begins at token `before + l * j`.
        num_shares = max(1, round(self.num_tokens / tokens_per_batch))
        rows_of_length = self._row_length.bincount()
        lengths = torch.arange(len(rows_of_length), device="cpu")
        rows_to, tokens_to = rows_of_length.cumsum(0), (rows_of_length * lengths).cumsum(0)
        share_end = torch.arange(1, num_shares + 1, device="cpu") * self.num_tokens
        share_end = (share_end + num_shares - 1) // num_shares  # the first token after each
        length = torch.searchsorted(tokens_to, share_end)  # of the row that holds the token before
        rows_before = rows_to[length] - rows_of_length[length]
        tokens_before = tokens_to[length] - rows_of_length[length] * length
        batch_end = rows_before + (share_end - tokens_before + length - 1) // length
        self._batch_end = batch_end.unique_consecutive()  # a long row may span several shares
        self.num_batches = len(self._batch_end)
        longest = torch.searchsorted(rows_to, self._batch_end)
        rows_per_batch = self._batch_end.diff(prepend=self._batch_end.new_zeros(1))
        self._num_positions = int((rows_per_batch * longest).sum())

    @property
    def padding_share(self) -> float:
        """Padded positions as a share of all positions of an epoch."""
        return 1 - self.num_tokens / self._num_positions

    def epoch(self, epoch: int, start: int = 0, num_workers: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from batch `start` on, the same as without an interruption.

        Args:
            epoch: the number of times all sentences were seen before.
            start: the number of batches to leave out.
            num_workers: processes that make the batches ahead of their use, two each; 0 is this
                one. They end with the iterator.
        """
        if not 0 <= start <= self.num_batches:
            raise ValueError(
                f"SentenceBatches.epoch: start must be in [0, {self.num_batches}], got {start}"
            )
        return in_workers(self._batch, self._rows_of_batches(epoch, start), num_workers)

    def _rows_of_batches(self, epoch: int, start: int) -> Iterator[list[int]]:
        num_rows = len(self._row_length)
        if self.shuffle:
            generator = torch.Generator("cpu").manual_seed(mixed_seed(self.seed, epoch))
            rows = torch.randperm(
                num_rows, generator=generator, dtype=_index_type(num_rows), device="cpu"
            )
            batch_order = torch.randperm(self.num_batches, generator=generator, device="cpu")
        else:
            rows, batch_order = _arange(num_rows), _arange(self.num_batches)
        # Stable, so that rows of equal length keep their (random) order.
        rows = rows[self._row_length[rows].sort(stable=True).indices]
        for index in batch_order[start:].tolist():
            begin = int(self._batch_end[index - 1]) if index else 0
            yield rows[begin : int(self._batch_end[index])].tolist()

    def _batch(self, batch_rows: list[int]) -> Batch:
        rows = torch.tensor(batch_rows, device="cpu")
        lengths = self._row_length[rows, None]
        if self._row_sentence is None or self._row_start is None:
            sentence, starts = rows, self._sentences.starts[rows, None]
        else:
            sentence, starts = self._row_sentence[rows].long(), self._row_start[rows, None]
        positions = torch.arange(int(lengths.max()), device="cpu")
        mask = positions < lengths
        where = torch.where(mask, starts + positions, 0)
        stream = self._sentences.stream
        inputs = stream[where].long().masked_fill_(~mask, self.eos_id)
        targets = stream[where + 1].long().masked_fill_(~mask, self.eos_id)
        return Batch(inputs, targets, mask, sentence)


def mixed_seed(*what: object) -> int:
    """A generator's seed: those of neighbouring numbers, say, have nothing in common."""
    text = " ".join(map(str, what))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _index_type(size: int) -> torch.dtype:
    """The narrower type that can hold indices below `size`."""
    return torch.int32 if size < 2**31 else torch.int64


def _arange(size: int) -> Tensor:
    return torch.arange(size, dtype=_index_type(size), device="cpu")
