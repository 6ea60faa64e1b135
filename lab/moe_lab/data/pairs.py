"""Sentence pairs as ids, and batches of them (App. E).

A source x1..xm and its target y1..yn give m + 1 source tokens and n + 1 predictions::

    source   x1  x2 ... xm </s>
    inputs   </s> y1 ... yn
    targets  y1  y2 ... yn </s>

For a model of several languages, x1 is the token ``<2xx>``, which requests the target language
(Johnson et al., 2016).
"""

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from moe_ext.checks import given, is_whole, require, require_at_least, require_sizes
from moe_lab.data.batches import (
    Batch,
    SentenceBatches,
    SortedBatches,
    epoch_generator,
    row_order,
    shares,
    side_by_side,
)
from moe_lab.data.encoded import (
    AGAIN,
    Block,
    EncodedSentences,
    SentencesWriter,
    flatten,
    made_once,
    tensors_of,
)
from moe_lab.data.parallel import KEPT, Pair, ParallelText, describe
from moe_lab.data.sentences import CorpusError
from moe_lab.data.wordpieces import Wordpieces
from moe_lab.data.workers import in_workers
from moe_lab.files import read_json, write_json
from moe_lab.progress import progress

PAIRS_AT_A_TIME = 4096
_ABOUT = "about.json"


class EncodedPairs:
    """Stores N sentence pairs of one or several language pairs as ids.

    The arguments are also attributes.

    Args:
        source, target: the N sentences of each side, with the same id ``eos_id`` of ``</s>``.
        pair: [N] int64, index of each sentence pair's language pair; None if there is only one.
        names: names of the language pairs, such as "en-fr".
        counts: counts of lines for each language pair, from `ParallelText.read`.
    """

    def __init__(
        self,
        source: EncodedSentences,
        target: EncodedSentences,
        pair: Tensor | None = None,
        names: Sequence[str] = ("",),
        counts: Sequence[Counter[str]] = (),
    ) -> None:
        number, eos_id = len(source), source.eos_id
        rule = f"have {number} sentences like source"
        require(len(target) == number, "EncodedPairs: target", rule, len(target))
        rule = f"have eos_id = {eos_id} like source"
        require(target.eos_id == eos_id, "EncodedPairs: target", rule, target.eos_id)
        if pair is None:
            pair = torch.zeros(number, dtype=torch.int64, device="cpu")
        require(len(pair) == number, "EncodedPairs: pair", f"have {number} rows", len(pair))
        known = number == 0 or 0 <= int(pair.min()) <= int(pair.max()) < len(names)
        require(known, "EncodedPairs: pair", f"be in [0, len(names) = {len(names)})", pair)
        self.source, self.target, self.eos_id = source, target, eos_id
        self.pair, self.names, self.counts = pair, tuple(names), tuple(counts)

    @classmethod
    def open(cls, folder: str | Path, num_ids: int | None = None) -> Self:
        """Maps the files written by `encode_pairs` into memory; see `EncodedSentences.open`."""
        folder = Path(folder)
        source, target = (
            EncodedSentences.open(folder / side, num_ids) for side in ("source", "target")
        )
        try:
            names, counts = _names_and_counts(read_json(folder / _ABOUT))
            kept = sum(count[KEPT] for count in counts)
            require(kept == len(source), "counts", f"keep {len(source)} lines", kept)
            return cls(source, target, _pair_index(counts), names, counts)
        except (OSError, ValueError) as error:
            raise CorpusError(
                f"{folder} must hold encoded pairs, got an error: {error}; {AGAIN}"
            ) from error

    @property
    def num_tokens(self) -> int:
        """The number of predictions: target wordpieces, plus one ``</s>`` for each sentence."""
        return self.target.num_tokens

    @property
    def lengths(self) -> Tensor:
        """The number of predictions of each sentence pair, [N] int64."""
        return self.target.lengths

    def first(self, number: int) -> "EncodedPairs":
        """Returns at most the first `number` sentence pairs of each language pair."""
        rows = [(self.pair == index).nonzero()[:number, 0] for index in range(len(self.names))]
        kept = torch.cat(rows)
        source, target = (
            EncodedSentences((side[row] for row in kept.tolist()), self.eos_id)
            for side in (self.source, self.target)
        )
        return EncodedPairs(source, target, self.pair[kept], self.names)

    def report(self) -> str:
        """Describes, for each language pair, how many lines were kept or skipped, and why.

        The report is empty without `counts`, for example after `first`.
        """
        counted = zip(self.names, self.counts, strict=False)
        return "\n".join(f"{name}: {describe(counts)}" for name, counts in counted)

    def fingerprint(self) -> str:
        """Returns the fingerprints of source and target; see `EncodedSentences.fingerprint`."""
        return f"{self.source.fingerprint()} {self.target.fingerprint()}"

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[list[int], list[int]]:
        """Returns the ids of source and target of pair `index`, without ``</s>``."""
        return self.source[index], self.target[index]


def encode_pairs(
    texts: ParallelText | Sequence[ParallelText],
    wordpieces: Wordpieces,
    *,
    target_tokens: bool = False,
    max_ratio: float | None = None,
    folder: str | Path | None = None,
    name: str = "pairs",
    num_workers: int = 0,
) -> EncodedPairs:
    """Encodes the parallel text of one or several language pairs, in memory or in files.

    Args:
        texts: one text for each language pair; read once, in order.
        wordpieces: the wordpieces of all languages.
        target_tokens: whether to begin each source with the token ``<2xx>`` of its target language.
        max_ratio: maximum ratio of the wordpieces of the longer side to those of the shorter side,
            without ``<2xx>`` and ``</s>``; other pairs are skipped. None is no limit.
        folder, name, num_workers: see `encode_to_files`. Other wordpieces and options write new
            files. folder=None keeps the ids in memory.
    """
    if isinstance(texts, ParallelText):
        texts = [texts]
    names = [f"{text.source}-{text.target}" for text in texts]
    distinct = len(set(names)) == len(names)
    require(len(names) >= 1, "encode_pairs: texts", "contain at least one text", names)
    require(distinct, "encode_pairs: texts", "have distinct language pairs", names)
    require_at_least(1, "encode_pairs", **given(max_ratio=max_ratio))
    encode = partial(_encode_chunk, wordpieces, max_ratio)
    before = [[wordpieces.target_token_id(t.target)] if target_tokens else [] for t in texts]
    counts = [Counter[str]() for _ in texts]
    chunks = (
        _Chunk(index, before[index], pairs)
        for index, text in enumerate(texts)
        for pairs in _chunks(text.read(counts[index]))
    )

    def encoded() -> Iterator[tuple[Block, Block]]:
        results = in_workers(encode, chunks, num_workers)
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
        eos_id = wordpieces.eos_id
        with (
            SentencesWriter(made / "source", eos_id) as sources,
            SentencesWriter(made / "target", eos_id) as targets,
        ):
            for source, target in encoded():
                sources.write(*source)
                targets.write(*target)
        about = {
            "names": names,
            "counts": counts,
            "wordpieces": wordpieces.fingerprint(),
            "text": fingerprint().splitlines(),
        }
        write_json(made / _ABOUT, about)

    options = (target_tokens, max_ratio)
    recipe = f"pairs 1 {sys.byteorder} {wordpieces.fingerprint()} {options}"
    made = made_once(Path(folder), name, recipe, fingerprint, make)
    return EncodedPairs.open(made, len(wordpieces))


def _in_memory(
    encoded: Iterable[tuple[Block, Block]], eos_id: int
) -> tuple[EncodedSentences, EncodedSentences]:
    sides = flatten([], eos_id), flatten([], eos_id)
    for chunk in encoded:
        for (stream, starts), (more_stream, more_starts) in zip(sides, chunk, strict=True):
            end = starts[-1]
            stream.extend(more_stream[1:])
            starts.extend(end + start for start in more_starts[1:])
    source, target = (EncodedSentences.from_tensors(*tensors_of(side), eos_id) for side in sides)
    return source, target


class _Chunk(NamedTuple):
    text: int  # index of the text
    before: list[int]  # ids in front of each source
    pairs: list[Pair]


def _encode_chunk(
    wordpieces: Wordpieces, max_ratio: float | None, chunk: _Chunk
) -> tuple[int, Block, Block, Counter[str]]:
    """Encodes a chunk in a worker; returns the ids of both sides and counts the skipped pairs."""
    sources, targets = [], []
    skipped: Counter[str] = Counter()
    for source, target in (map(wordpieces.encode, pair) for pair in chunk.pairs):
        shorter, longer = sorted((len(source), len(target)))
        if max_ratio is not None and longer > max_ratio * shorter:
            skipped["length ratio"] += 1
            continue
        sources.append(chunk.before + source)
        targets.append(target)
    eos_id = wordpieces.eos_id
    return chunk.text, flatten(sources, eos_id), flatten(targets, eos_id), skipped


def _chunks(pairs: Iterator[Pair]) -> Iterator[list[Pair]]:
    while chunk := list(islice(pairs, PAIRS_AT_A_TIME)):
        yield chunk


def _names_and_counts(about: Any) -> tuple[list[str], list[Counter[str]]]:
    """Returns names and counts of about.json; raises ValueError unless they have their types."""
    about = about if isinstance(about, dict) else {}
    names: Any = about.get("names")
    counts: Any = about.get("counts")
    is_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
    require(is_names, "names", "be a list of texts", names)
    is_counts = isinstance(counts, list) and all(
        isinstance(count, dict) and all(is_whole(n) and n >= 0 for n in count.values())
        for count in counts
    )
    require(is_counts and len(counts) == len(names), "counts", f"be counts of {names}", counts)
    return names, [Counter(count) for count in counts]


def _pair_index(counts: Iterable[Counter[str]]) -> Tensor:
    """Returns the index of the language pair of each sentence pair, in order of language pairs."""
    sizes = torch.tensor([count[KEPT] for count in counts], device="cpu")
    return torch.arange(len(sizes), device="cpu").repeat_interleave(sizes)


@dataclass(frozen=True)
class PairBatch(Batch):
    """A batch of B sentence pairs, padded to S source tokens and T predictions.

    Inputs, targets and mask, [B, T], are those of the target sentences.
    """

    source: Tensor  # [B, S] int64, source ids, ending with </s>; padded with </s>
    source_mask: Tensor  # [B, S] bool, False at padding of the source sentences


class PairBatches(SortedBatches[PairBatch]):
    """Groups pairs of similar lengths into batches of about `tokens_per_batch` tokens.

    To limit padding on both sides, the pairs are sorted into narrow bands by the length of the
    longer side. Within a band, the pairs are sorted by the length of the source. An epoch contains
    each pair exactly once, unless `oversample` is True.

    In addition to the pairs, the object needs about 20 bytes of memory per pair, and 100 bytes
    during a shuffle of a few seconds. For the 36 million pairs of WMT'14 English to French, a
    shuffle needs 3.6 GB.

    Args:
        pairs: the sentence pairs, from `encode_pairs`.
        tokens_per_batch: approximate number of source tokens plus predictions in a batch, without
            padding.
        max_length: maximum number of source tokens and of predictions of a pair, to bound the
            memory of training. Longer pairs are skipped. Leave max_length None in evaluation.
        oversample: whether each language pair has as many sentence pairs in an epoch as the largest
            language pair (Johnson et al., 2016). All pairs of a language pair are repeated equally
            often; a new random sample in each epoch fills the remainder.
        shuffle, seed: see `SentenceBatches`.

    Attributes:
        num_pairs, num_batches: number of sentence pairs and of batches in every epoch.
        num_tokens: number of predictions in an epoch; with oversample=True, in epoch 0.
        num_left_out: number of pairs skipped by max_length.
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
        name = "PairBatches"
        require_sizes(name, tokens_per_batch=tokens_per_batch, **given(max_length=max_length))
        self._pairs = pairs
        self._source_length = pairs.source.lengths.int()
        self._target_length = pairs.target.lengths.int()
        self._longer = torch.maximum(self._source_length, self._target_length)
        rows = row_order(len(pairs))
        if max_length is not None:
            rows = rows[self._longer <= max_length]
        self.num_left_out = len(pairs) - len(rows)
        limit = f" of at most {max_length} tokens per side" if max_length else ""
        require(len(rows) >= 1, f"{name}: pairs", f"hold at least one pair{limit}", len(rows))
        self._groups = [rows]
        if oversample:
            language_pair = pairs.pair[rows]
            self._groups = [rows[language_pair == index] for index in language_pair.unique()]

        # Bands hold equal shares of the tokens. For independent lengths of the two sides, the right
        # number is the square root of the number of batches. Lengths in real text are correlated;
        # four times as many bands give less padding.
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
        self.num_tokens = int(target.sum())

    def _drawn_rows(self, generator: torch.Generator | None) -> Tensor:
        """Returns the rows of an epoch in random order, or in order if generator is None."""
        largest = max(map(len, self._groups))
        drawn = []
        for rows in self._groups:
            rows = rows[row_order(len(rows), generator)]
            drawn.append(rows.repeat(-(-largest // len(rows)))[:largest])
        rows = torch.cat(drawn)
        return rows if len(drawn) == 1 else rows[row_order(len(rows), generator)]

    def _sorted(self, rows: Tensor) -> Tensor:
        """Sorts rows by band, then by source length, ascending and descending in turn.

        The turns give similar source lengths to a batch that spans two bands.
        """
        band, source = self._band[self._longer[rows]].long(), self._source_length[rows]
        in_band = torch.where(band % 2 == 0, source, source.max() - source)
        key = band * int(source.max() + 1) + in_band
        return rows[key.sort(stable=True).indices]

    def _sorted_rows(self, generator: torch.Generator | None) -> Tensor:
        return self._sorted(self._drawn_rows(generator))

    def _batch(self, batch_rows: list[int]) -> PairBatch:
        rows = torch.tensor(batch_rows, device="cpu")
        (_, source, source_mask), target = (
            side_by_side(side, side.starts[rows], side.starts[rows + 1] - side.starts[rows])
            for side in (self._pairs.source, self._pairs.target)
        )
        return PairBatch(*target, rows, source, source_mask)


def batches_of(
    text: EncodedSentences | EncodedPairs, **options: Any
) -> SentenceBatches | PairBatches:
    """Creates `PairBatches` for pairs, or `SentenceBatches` for sentences."""
    if isinstance(text, EncodedPairs):
        return PairBatches(text, **options)
    return SentenceBatches(text, **options)
