"""Translation of text."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from moe_ext.checks import require, require_sizes
from moe_lab.data import EncodedPairs, EncodedSentences, PairBatch, PairBatches, Wordpieces
from moe_lab.decoding.beam_search import BeamSearch
from moe_lab.models import TranslationModel, evaluating
from moe_lab.progress import progress


@dataclass(frozen=True)
class Translation:
    """A translation Y of a sentence X."""

    text: str  # the text of Y
    score: float  # s(Y, X), see `BeamSearch`
    log_prob: float  # log P(Y|X), nats
    source: list[str]  # wordpieces of X as the model reads them, with <2xx> and </s>
    pieces: list[str]  # wordpieces of Y; the last wordpiece is </s>
    attention: Tensor  # [|Y|, |X|], on the CPU; row j has the attention weights of wordpiece j


# The translation of an empty line, with probability 1.
_NOTHING = Translation("", 0.0, 0.0, [], [], torch.zeros(0, 0))


class Translator:
    """Translates lines of text, one sentence per line, in batches.

    A call reads `lines_at_a_time` lines and makes batches of lines of similar length. Results come
    in the order of the lines, as early as possible. A line without text has an empty translation. A
    line is truncated to `max_pieces` wordpieces, which bounds the memory.

    The composition of the batches affects a translation only if two scores are so close that
    rounding in the model decides.

    Args:
        model: a model on any device. Its training mode is restored.
        wordpieces: the wordpieces of the model.
        search: the beam search, which also sets the number of results; None is ``BeamSearch()``.
        into: target language, one of `languages`; None if these are empty.
        languages: target languages that the model knows as tokens ``<2xx>``.
        tokens_per_batch: approximate number of source tokens in a batch.
        lines_at_a_time: number of lines that are read before the first translation.
        max_pieces: maximum number of wordpieces of a line, without ``<2xx>`` and ``</s>``. The
            attribute `num_cut` is the number of lines that were truncated to it.

    Example:
        >>> translator = Translator(model, wordpieces)  # doctest: +SKIP
        >>> for best, *_ in translator(["A sentence .", "Another one ."]):  # doctest: +SKIP
        ...     print(best.text, best.score)
    """

    def __init__(
        self,
        model: TranslationModel,
        wordpieces: Wordpieces,
        search: BeamSearch | None = None,
        *,
        into: str | None = None,
        languages: Sequence[str] = (),
        tokens_per_batch: int = 2_560,
        lines_at_a_time: int = 4_096,
        max_pieces: int = 500,
    ) -> None:
        sizes = {"lines_at_a_time": lines_at_a_time, "max_pieces": max_pieces}
        require_sizes("Translator", tokens_per_batch=tokens_per_batch, **sizes)
        rule = "be None for a model that translates into one language"
        if languages:
            rule = f"be one of {', '.join(languages)}"
        require(into in (languages or (None,)), "Translator: into", rule, into)
        self.model, self.wordpieces, self.search = model, wordpieces, search or BeamSearch()
        self.tokens_per_batch, self.lines_at_a_time = tokens_per_batch, lines_at_a_time
        self.max_pieces, self.num_cut = max_pieces, 0
        self._before = [] if into is None else [wordpieces.target_token_id(into)]

    def __call__(
        self, lines: Iterable[str], *, title: str | None = "translating"
    ) -> Iterator[list[Translation]]:
        """Yields 1 to search.num_best translations of each line, best first."""
        rule = "be a list of lines, not a string"
        require(not isinstance(lines, str), "Translator: lines", rule, lines)
        return self._in_order(lines, title)

    def _in_order(self, lines: Iterable[str], title: str | None) -> Iterator[list[Translation]]:
        total = len(lines) if isinstance(lines, Sequence) else None
        translated = progress(self._as_they_come(lines), title, "sentences", total)
        waiting = {}
        following = 0
        for number, translations in translated:
            waiting[number] = translations
            while following in waiting:
                yield waiting.pop(following)
                following += 1

    def _as_they_come(self, lines: Iterable[str]) -> Iterator[tuple[int, list[Translation]]]:
        """Yields the number and the translations of each line, in the order of the batches."""
        numbered = enumerate(lines)
        while chunk := list(islice(numbered, self.lines_at_a_time)):
            numbers, sources = [], []
            for number, line in chunk:
                if pieces := self.wordpieces.encode(line):
                    self.num_cut += len(pieces) > self.max_pieces
                    numbers.append(number)
                    sources.append(self._before + pieces[: self.max_pieces])
                else:
                    yield number, [_NOTHING]
            for batch in self._batches(sources):
                results = self._translate(batch)
                for index, translations in zip(batch.sentence_index.tolist(), results, strict=True):
                    yield numbers[index], translations

    def _batches(self, sources: Sequence[list[int]]) -> Iterator[PairBatch]:
        if not sources:
            return iter(())
        eos_id = self.wordpieces.eos_id
        empty = EncodedSentences([[]] * len(sources), eos_id)
        pairs = EncodedPairs(EncodedSentences(sources, eos_id), empty)
        # tokens_per_batch also counts one end of the empty target for each sentence.
        batches = PairBatches(pairs, tokens_per_batch=self.tokens_per_batch, shuffle=False)
        return batches.epoch(0)

    def _translate(self, batch: PairBatch) -> list[list[Translation]]:
        model, wordpieces = self.model, self.wordpieces
        batch = batch.to(next(model.parameters()).device)
        with evaluating(model):
            encoded = model.encode(batch.source, batch.source_mask)
            beams = self.search(
                model, model.start(encoded), batch.source_mask, wordpieces.eos_id, encoded.mask
            )
        results = []
        for hypotheses, ids, mask in zip(beams, batch.source, batch.source_mask, strict=True):
            source = wordpieces.pieces(ids[mask].tolist())
            translations = []
            for y in hypotheses:
                text, pieces = wordpieces.decode(y.tokens), wordpieces.pieces(y.tokens)
                best = Translation(text, y.score, y.log_prob, source, pieces, y.attention)
                translations.append(best)
            results.append(translations)
        return results
