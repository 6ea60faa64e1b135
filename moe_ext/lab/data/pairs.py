"""Pairs of sentences as ids, and batches of them (App. E).

A source x1..xm and its target y1..yn are the rows

    source   x1  x2 ... xm </s>
    inputs   </s> y1 ... yn
    targets  y1  y2 ... yn </s>

of m + 1 source tokens and n + 1 predictions. For a model of several languages x1 is the token
`<2xx>` that asks for the target's (Johnson et al., 2016).
"""

import json
import math
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor

from moe_ext.checks import require, require_at_least
from moe_ext.lab.data.batches import (
    Batch,
    SentenceBatches,
    SortedBatches,
    arange,
    drawn_order,
    epoch_generator,
    shares,
    side_by_side,
)
from moe_ext.lab.data.corpora import CorpusError
from moe_ext.lab.data.encoded import EncodedSentences, SentencesWriter, flatten, made_once
from moe_ext.lab.data.parallel import KEPT, LengthFilter, Pair, ParallelText, describe
from moe_ext.lab.data.wordpieces import Wordpieces
from moe_ext.lab.data.workers import in_workers
from moe_ext.lab.files import write_json
from moe_ext.lab.progress import progress

PAIRS_AT_A_TIME = 4096
_ABOUT = "about.json"


class EncodedPairs:
    """Pairs of sentences as ids, of one or several language pairs.

    Args:
        source, target: the sentences, as many of one as of the other, with the same `</s>`.
        pair: [N] int64, which language pair each is of; None if there is only one.
        names: of the language pairs, such as "en-fr".
        counts: of each language pair, the lines it was read from (`ParallelText.read`).

    Attributes:
        source, target, pair, names, counts: as given.
        eos_id: the id of `</s>`.

    Raises:
        ValueError: they do not fit together.
    """

    def __init__(
        self,
        source: EncodedSentences,
        target: EncodedSentences,
        pair: Tensor | None = None,
        names: Sequence[str] = ("",),
        counts: Sequence[Counter[str]] = (),
    ) -> None:
        number = len(source)
        require(len(target) == number, "EncodedPairs: target", f"have {number} rows", len(target))
        require(
            target.eos_id == source.eos_id,
            "EncodedPairs: target",
            f"have the source's </s>, {source.eos_id}",
            target.eos_id,
        )
        if pair is None:
            pair = torch.zeros(number, dtype=torch.int64, device="cpu")
        require(len(pair) == number, "EncodedPairs: pair", f"have {number} rows", len(pair))
        require(
            number == 0 or 0 <= int(pair.min()) <= int(pair.max()) < len(names),
            "EncodedPairs: pair",
            f"be in [0, {len(names)}), the number of names",
            pair,
        )
        self.source = source
        self.target = target
        self.pair = pair
        self.names = tuple(names)
        self.counts = tuple(counts)
        self.eos_id = source.eos_id

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """What `encode_pairs` has written into a folder, mapped (see `EncodedSentences.open`).

        Raises:
            CorpusError: a file is missing or not of its size.
        """
        folder = Path(folder)
        source, target = (EncodedSentences.open(folder / side) for side in ("source", "target"))
        try:
            about = json.loads((folder / _ABOUT).read_text("utf-8"))
            counts = [Counter(count) for count in about["counts"]]
            names = about["names"]
        except (OSError, ValueError, KeyError) as error:
            raise CorpusError(
                f"{folder} must hold encoded pairs, got {error}; delete it to encode the text again"
            ) from error
        return cls(source, target, _pair_index(counts), names, counts)

    @property
    def num_tokens(self) -> int:
        """The number of predictions: the pieces of the targets plus one end each."""
        return self.target.num_tokens

    @property
    def lengths(self) -> Tensor:
        """[N] int64, the predictions of each pair."""
        return self.target.lengths

    @property
    def num_source_tokens(self) -> int:
        """The pieces of the sources, target tokens included, plus one end each."""
        return self.source.num_tokens

    def first(self, number: int) -> "EncodedPairs":
        """The first pairs of each language pair, or all if there are fewer."""
        rows = [(self.pair == index).nonzero()[:number, 0] for index in range(len(self.names))]
        kept = torch.cat(rows)
        source, target = (
            EncodedSentences((side[row] for row in kept.tolist()), self.eos_id)
            for side in (self.source, self.target)
        )
        return EncodedPairs(source, target, self.pair[kept], self.names)

    def report(self) -> str:
        """A line on each language pair: how many lines were kept, and what was skipped and why;
        nothing of pairs that were made without `counts`, as those of `first`."""
        return "\n".join(
            f"{name}: {describe(counts)}"
            for name, counts in zip(self.names, self.counts, strict=False)
        )

    def fingerprint(self) -> str:
        """Of the ids, as that of `EncodedSentences`."""
        return f"{self.source.fingerprint()} {self.target.fingerprint()}"

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[list[int], list[int]]:
        """The pieces of one source and its target as ids, without `</s>`."""
        return self.source[index], self.target[index]


def encode_pairs(
    texts: ParallelText | Sequence[ParallelText],
    wordpieces: Wordpieces,
    *,
    target_tokens: bool = False,
    max_pieces: int | None = None,
    max_ratio: float | None = None,
    folder: str | Path | None = None,
    name: str = "pairs",
    num_workers: int = 0,
) -> EncodedPairs:
    """Parallel text as ids; that of several language pairs one after the other.

    Args:
        texts: each of another language pair; read once.
        wordpieces: of all their languages.
        target_tokens: whether each source begins with the token `<2xx>` of its target's language.
        max_pieces: of either side, `<2xx>` and `</s>` aside; longer pairs are left out.
        max_ratio: of the pieces of the longer side to those of the shorter one.
        folder: where the ids are kept in files, from which they are mapped: once, whatever the
            number of processes, and as long as text, wordpieces and options stay (see
            `encode_to_files`). None keeps them in memory.
        name: of the files, for the eye.
        num_workers: processes that encode; 0 is this one.

    Raises:
        CorpusError: the text cannot be read, or changes while it is read.
        ValueError: an argument is out of range, or the wordpieces lack a target token.
    """
    if isinstance(texts, ParallelText):
        texts = [texts]
    names = [f"{text.source}-{text.target}" for text in texts]
    require(len(names) >= 1, "encode_pairs: texts", "be at least one", names)
    require(
        len(set(names)) == len(names), "encode_pairs: texts", "be of distinct language pairs", names
    )
    require_at_least(1, "encode_pairs", max_pieces=max_pieces, max_ratio=max_ratio)
    if target_tokens:
        for text in texts:
            wordpieces.target_token_id(text.target)
    encoding = _Encoding(wordpieces, LengthFilter(max_pieces, max_ratio))
    counts = [Counter[str]() for _ in texts]
    chunks = (
        _Chunk(index, text.target if target_tokens else None, pairs)
        for index, text in enumerate(texts)
        for pairs in _chunks(text.read(counts[index]))
    )

    def encoded() -> Iterator[tuple[_Side, _Side]]:
        results = in_workers(encoding, chunks, num_workers)
        for index, source, target, skipped in progress(results, f"encoding {name}", "chunks"):
            counts[index].update(skipped)
            counts[index][KEPT] -= skipped.total()
            yield source, target

    if folder is None:
        source, target = _in_memory(encoded(), wordpieces.eos_id)
        return EncodedPairs(source, target, _pair_index(counts), names, counts)

    def fingerprint() -> str:
        return "\n".join(text.fingerprint() for text in texts)

    def make(made: Path) -> None:
        _into_files(made, encoded(), wordpieces.eos_id)
        about = {
            "names": names,
            "counts": counts,
            "wordpieces": wordpieces.fingerprint(),
            "text": fingerprint().splitlines(),
        }
        write_json(made / _ABOUT, about)

    options = (target_tokens, max_pieces, max_ratio)
    recipe = f"pairs 1 {sys.byteorder} {wordpieces.fingerprint()} {options}"
    return EncodedPairs.open(made_once(Path(folder), name, recipe, fingerprint, make))


_Side = tuple[array, array]  # stream and starts


def _in_memory(
    encoded: Iterable[tuple[_Side, _Side]], eos_id: int
) -> tuple[EncodedSentences, EncodedSentences]:
    sides = flatten([], eos_id), flatten([], eos_id)
    for both in encoded:
        for (stream, starts), (more_stream, more_starts) in zip(sides, both, strict=True):
            end = starts[-1]
            stream.extend(more_stream[1:])
            starts.extend(end + start for start in more_starts[1:])
    source, target = (
        EncodedSentences.of_tensors(
            torch.frombuffer(stream, dtype=torch.int32),
            torch.frombuffer(starts, dtype=torch.int64),
            eos_id,
        )
        for stream, starts in sides
    )
    return source, target


def _into_files(folder: Path, encoded: Iterable[tuple[_Side, _Side]], eos_id: int) -> None:
    for side in ("source", "target"):
        (folder / side).mkdir()
    with (
        SentencesWriter(folder / "source", eos_id) as sources,
        SentencesWriter(folder / "target", eos_id) as targets,
    ):
        for source, target in encoded:
            sources.write(*source)
            targets.write(*target)


class _Chunk(NamedTuple):
    text: int  # the number of it
    into: str | None  # the language of the target token
    pairs: list[Pair]


@dataclass(frozen=True)
class _Encoding:
    """What workers do with a chunk: the ids of both sides, and how many pairs are left out."""

    wordpieces: Wordpieces
    lengths: LengthFilter

    def __call__(self, chunk: _Chunk) -> tuple[int, _Side, _Side, Counter[str]]:
        sources, targets = [], []
        skipped: Counter[str] = Counter()
        before = [] if chunk.into is None else [self.wordpieces.target_token_id(chunk.into)]
        for source_text, target_text in chunk.pairs:
            source, target = map(self.wordpieces.encode, (source_text, target_text))
            if (reason := self.lengths.reason(len(source), len(target))) is not None:
                skipped[reason] += 1
                continue
            sources.append(before + source)
            targets.append(target)
        eos_id = self.wordpieces.eos_id
        return chunk.text, flatten(sources, eos_id), flatten(targets, eos_id), skipped


def _chunks(pairs: Iterator[Pair]) -> Iterator[list[Pair]]:
    while chunk := list(islice(pairs, PAIRS_AT_A_TIME)):
        yield chunk


def _pair_index(counts: Iterable[Counter[str]]) -> Tensor:
    """The language pair of each pair of sentences; these stand one language pair after another."""
    sizes = torch.tensor([count[KEPT] for count in counts], device="cpu")
    return torch.arange(len(sizes), device="cpu").repeat_interleave(sizes)


@dataclass(frozen=True)
class PairBatch(Batch):
    """B pairs of sentences, each side padded to its longest: S source tokens, T predictions.

    Attributes:
        inputs, targets, mask: those of `Batch`, of the targets: [B, T].
        sentence_index: [B] int64, where each row stands in the pairs the batches were made of.
        source: [B, S] int64, ids, `</s>` last.
        source_mask: [B, S] bool, True at source tokens; elsewhere the id is `</s>` and means
            nothing.
    """

    source: Tensor
    source_mask: Tensor

    @property
    def num_source_tokens(self) -> int:
        """The number of source tokens (waits for the device the mask is on)."""
        return int(self.source_mask.sum())


class PairBatches(SortedBatches[PairBatch]):
    """Cuts pairs into batches of about `tokens_per_batch` source tokens and predictions together.

    So that neither side is padded much, the pairs are sorted into narrow bands by the length of
    their longer side, and in a band by the length of the source. An epoch has each pair exactly
    once, unless it oversamples.

    Beside the pairs themselves this takes some 20 bytes a pair, and 100 in the few seconds of their
    shuffle: 3.6 GB for the 36 million of WMT'14 English to French.

    Args:
        pairs: from `encode_pairs`.
        tokens_per_batch: in a batch, roughly: source tokens and predictions, not padding.
        max_length: pairs with more source tokens or predictions are left out, to bound the memory
            of training. Leave it None in evaluation.
        oversample: every language pair has as many pairs in an epoch as the largest (Johnson et
            al., 2016): all its own equally often, and then of them a random choice that each epoch
            draws anew. Otherwise the language pairs are mixed as they are.
        shuffle: whether each epoch draws anew which pairs of similar length meet in a batch, and
            the order of the batches. Both are functions of (seed, epoch) alone, torch's global
            generator is neither used nor moved. Otherwise the batches go from short pairs to long.
        seed: of the order.

    Attributes:
        num_pairs, num_tokens, num_source_tokens: of an epoch; tokens are predictions. With
            `oversample` the tokens are those of epoch 0: others differ by the random choice.
        num_left_out: pairs that are longer than `max_length`.
        num_batches: of an epoch, the same for all.
        padding_share: padded positions as a share of all positions, on both sides, of epoch 0.

    Raises:
        ValueError: an argument is out of range, or there is no pair.
    """

    def __init__(
        self,
        pairs: EncodedPairs,
        *,
        tokens_per_batch: int,
        max_length: int | None = None,
        oversample: bool = False,
        shuffle: bool,
        seed: int = 0,
    ) -> None:
        require_at_least(1, "PairBatches", tokens_per_batch=tokens_per_batch, max_length=max_length)
        self._pairs = pairs
        self._source_length = pairs.source.lengths.int()
        self._target_length = pairs.target.lengths.int()
        self._longer = torch.maximum(self._source_length, self._target_length)
        rows = arange(len(pairs))
        if max_length is not None:
            rows = rows[self._longer <= max_length]
        self.num_left_out = len(pairs) - len(rows)
        require(
            len(rows) >= 1,
            "PairBatches: pairs",
            "hold at least one pair" + (f" of at most {max_length} tokens" if max_length else ""),
            len(rows),
        )
        groups = [rows]
        if oversample:
            language_pair = pairs.pair[rows]
            groups = [rows[language_pair == index] for index in language_pair.unique()]
        self._groups = groups

        # Bands of equal shares of the tokens. As many as there are batches in each would suit sides
        # of independent lengths; those of real text go together, and four times as many pad less.
        rows = self._drawn_rows(epoch_generator(seed, 0) if shuffle else None)
        lengths = self._source_length[rows].long() + self._target_length[rows]
        num_tokens = int(lengths.sum())
        num_bands = max(1, round(4 * math.sqrt(num_tokens / tokens_per_batch)))
        tokens_of_length = self._longer[rows].bincount(lengths.double()).long()
        tokens_before = tokens_of_length.cumsum(0) - tokens_of_length
        self._band = (tokens_before * num_bands // num_tokens).int()

        rows = self._sorted(rows)
        source, target = self._source_length[rows].long(), self._target_length[rows].long()
        batch_end = shares(torch.ones_like(source), source + target, tokens_per_batch)
        super().__init__(batch_end, shuffle, seed)
        self.num_pairs = len(rows)
        self.num_tokens, self.num_source_tokens = int(target.sum()), int(source.sum())
        rows_per_batch = batch_end.diff(prepend=batch_end.new_zeros(1))
        batch_of_row = torch.arange(len(batch_end), device="cpu").repeat_interleave(rows_per_batch)
        longest = (
            torch.zeros_like(batch_end).scatter_reduce_(0, batch_of_row, length, "amax")
            for length in (source, target)
        )
        self.padding_share = 1 - num_tokens / int((rows_per_batch * sum(longest)).sum())

    def _drawn_rows(self, generator: torch.Generator | None) -> Tensor:
        """The rows of an epoch in the order that is drawn."""
        largest = max(map(len, self._groups))
        drawn = []
        for rows in self._groups:
            rows = rows[drawn_order(len(rows), generator)]
            drawn.append(rows.repeat(-(-largest // len(rows)))[:largest])
        rows = torch.cat(drawn)
        return rows if len(drawn) == 1 else rows[drawn_order(len(rows), generator)]

    def _sorted(self, rows: Tensor) -> Tensor:
        """By band and, in it, by length of the source: upwards and downwards by turns, so that a
        batch across two bands has similar sources too."""
        band, source = self._band[self._longer[rows]].long(), self._source_length[rows]
        key = band * int(source.max() + 1) + torch.where(
            band % 2 == 0, source, source.max() - source
        )
        return rows[key.sort(stable=True).indices]

    def _sorted_rows(self, generator: torch.Generator | None) -> Tensor:
        return self._sorted(self._drawn_rows(generator))

    def _batch(self, batch_rows: list[int]) -> PairBatch:
        rows = torch.tensor(batch_rows, device="cpu")
        (_, source, source_mask), target = (
            side_by_side(side, side.starts[rows], length[rows])
            for side, length in (
                (self._pairs.source, self._source_length),
                (self._pairs.target, self._target_length),
            )
        )
        return PairBatch(*target, rows, source, source_mask)


def batches_of(
    text: EncodedSentences | EncodedPairs, *, tokens_per_batch: int, shuffle: bool
) -> SentenceBatches | PairBatches:
    """Batches of all sentences, or of all pairs of them; see there."""
    if isinstance(text, EncodedPairs):
        return PairBatches(text, tokens_per_batch=tokens_per_batch, shuffle=shuffle)
    return SentenceBatches(text, tokens_per_batch=tokens_per_batch, shuffle=shuffle)
