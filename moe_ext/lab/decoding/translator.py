"""From sentences to their translations, as text."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from moe_ext.checks import require, require_sizes
from moe_ext.lab.data import EncodedPairs, EncodedSentences, PairBatch, PairBatches, Wordpieces
from moe_ext.lab.decoding.beam_search import BeamSearch
from moe_ext.lab.models import TranslationModel, evaluating
from moe_ext.lab.progress import progress


@dataclass(frozen=True)
class Translation:
    """A translation Y of a sentence X.

    Attributes:
        text: of Y.
        score: s(Y, X), see `BeamSearch`.
        log_prob: log P(Y|X), nats.
        source: the pieces of X as the model has read them, `<2xx>` and `</s>` too.
        pieces: those of Y, of which the last is `</s>`.
        attention: [|Y|, |X|], row j the weights of the source's pieces in the step that gave piece
            j. On the CPU.
    """

    text: str
    score: float
    log_prob: float
    source: list[str]
    pieces: list[str]
    attention: Tensor


# Of a line without any text: nothing is as sure.
_NOTHING = Translation("", 0.0, 0.0, [], [], torch.zeros(0, 0))


class Translator:
    """Translates lines of text, a sentence each, many at a time.

    Of `lines_at_a_time` lines those of similar length make a batch. Translations come in the order
    of the lines, each as soon as those before it are there, one for each line: of a line without
    text it is empty. Of a line of more than `max_pieces` pieces only the first ones are translated,
    which bounds the memory and is counted in `num_cut`. Which lines are translated together changes
    no translation, but for those so close in score that the rounding of the model's sums decides.

    Args:
        model: on any device; its mode is left as it was.
        wordpieces: those it was trained with.
        search: how translations are searched for, and how many of each sentence there are to be.
        into: the language to translate into, of a model that is asked for one.
        languages: those that the model can be asked for by a token `<2xx>`; none of a model that
            knows a single one.
        tokens_per_batch: pieces of the sentences in a batch, ends of sentences included, roughly.
        lines_at_a_time: that are read before the first is translated.
        max_pieces: of a line, `<2xx>` and `</s>` aside.

    Attributes:
        num_cut: the lines that were longer than `max_pieces`.

    Raises:
        ValueError: an argument is out of range, `into` is none of the languages, or the wordpieces
            have no entry for it.

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
        require_sizes(
            "Translator",
            tokens_per_batch=tokens_per_batch,
            lines_at_a_time=lines_at_a_time,
            max_pieces=max_pieces,
        )
        rule = "be None, as the model translates into one language"
        if languages:
            rule = f"be one of {', '.join(languages)}"
        require(into in (languages or (None,)), "Translator: into", rule, into)
        self.model = model
        self.wordpieces = wordpieces
        self.search = search or BeamSearch()
        self.tokens_per_batch = tokens_per_batch
        self.lines_at_a_time = lines_at_a_time
        self.max_pieces = max_pieces
        self.num_cut = 0
        self._before = [] if into is None else [wordpieces.target_token_id(into)]

    def __call__(
        self, lines: Iterable[str], *, title: str | None = "translating"
    ) -> Iterator[list[Translation]]:
        """For each line from 1 to `search.num_best` translations, the best first.

        Args:
            lines: read as they are needed.
            title: of the progress bar; None is no bar.

        Raises:
            ValueError: `lines` is a single one.
        """
        require(not isinstance(lines, str), "Translator: lines", "be several, not one", lines)
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
        """The number of each line and its translations, lines of a batch together."""
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
        # A batch counts the ends of its targets, one a sentence.
        batches = PairBatches(pairs, tokens_per_batch=self.tokens_per_batch, shuffle=False)
        return batches.epoch(0)

    def _translate(self, batch: PairBatch) -> list[list[Translation]]:
        model, wordpieces = self.model, self.wordpieces
        batch = batch.to(next(model.parameters()).device)
        with evaluating(model):
            state = model.start(model.encode(batch.source, batch.source_mask))
            found = self.search(model, state, batch.source_mask, wordpieces.eos_id)
        results = []
        for hypotheses, ids, mask in zip(found, batch.source, batch.source_mask, strict=True):
            source = wordpieces.pieces(ids[mask].tolist())
            results.append(
                [
                    Translation(
                        wordpieces.decode(y.tokens),
                        y.score,
                        y.log_prob,
                        source,
                        wordpieces.pieces(y.tokens),
                        y.attention,
                    )
                    for y in hypotheses
                ]
            )
        return results
