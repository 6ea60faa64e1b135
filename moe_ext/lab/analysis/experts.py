"""What each expert of a trained model sees (Table 9)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ext.lab.analysis.routed_text import NEIGHBOURS, NO_WORD, RoutedText
from moe_ext.lab.analysis.specialisation import PURITY_POSITIONS, purity
from moe_ext.lab.data import AnyVocabulary


class Context(NamedTuple):
    """A word that an expert got, in its place.

    Attributes:
        gate: the expert's weight at the word.
        words: the word in the middle of its neighbours, "" beyond the ends of the sentence.
    """

    gate: float
    words: tuple[str, ...]

    @property
    def before(self) -> str:
        """The neighbours before the word."""
        return " ".join(self.words[:NEIGHBOURS]).strip()

    @property
    def word(self) -> str:
        return self.words[NEIGHBOURS]

    @property
    def after(self) -> str:
        """The neighbours after the word."""
        return " ".join(self.words[NEIGHBOURS + 1 :]).strip()


class Word(NamedTuple):
    """A word that sets an expert apart.

    Attributes:
        word: the word.
        times: how often the expert got it.
        share: of all its occurrences.
    """

    word: str
    times: int
    share: float


class PairShare(NamedTuple):
    """How much of an expert's work is for a language pair.

    Attributes:
        name: of the language pair, such as "en-fr".
        share: of the expert's tokens.
        expected: the language pair's share of the tokens of all experts.
    """

    name: str
    share: float
    expected: float


@dataclass(frozen=True)
class ExpertReport:
    """What one expert does.

    Attributes:
        expert: its index.
        share: of all tokens, how many go through it (an even share is k / E).
        information: how much its current word tells it apart, sum_w p(w|e) ln(p(w|e) / p(w)) in
            nats, less what is left of it when words and experts are paired at random.
        purity: share of the most frequent word among the 50 highest gates.
        words: the ones that contribute most to the information, most first.
        contexts: the distinct ones with the highest gates, highest first.
        pairs: where there are several language pairs, the expert's tokens of each.
    """

    expert: int
    share: float
    information: float
    purity: float
    words: list[Word]
    contexts: list[Context]
    pairs: Sequence[PairShare] = ()

    @property
    def pair_information(self) -> float:
        """How much the language pair tells its tokens apart, sum_l p(l|e) ln(p(l|e) / p(l)), nats.

        Its mean over all experts' tokens is the mutual information of expert and language pair.
        """
        return sum(p.share * math.log(p.share / p.expected) for p in self.pairs if p.share > 0)


def by_specialisation(reports: Sequence[ExpertReport]) -> list[ExpertReport]:
    """Most information first.

    Experts that get less than half of an even share come last: few tokens always look special.
    """
    half = sum(report.share for report in reports) / len(reports) / 2
    return sorted(reports, key=lambda r: (r.share >= half, r.information), reverse=True)


def expert_reports(
    routed: RoutedText,
    vocabulary: AnyVocabulary,
    *,
    num_contexts: int = 10,
    num_words: int = 10,
) -> list[ExpertReport]:
    """One report for each expert, in their order; one that got no word has empty lists.

    Args:
        routed: of randomly chosen sentences, from `route_text`.
        vocabulary: the model's.
        num_contexts, num_words: how many to report of each expert.
    """
    num_experts, experts = routed.num_experts, routed.expert
    spelling = vocabulary.words
    word_at = routed.words
    words = word_at[routed.position]
    order, load = routed.slots_by_gate()
    ends = load.cumsum(0).tolist()
    pair_shares = _pair_shares(routed)
    purities = purity(word_at, routed.highest(PURITY_POSITIONS)).nan_to_num().tolist()

    contribution, key_expert, key_word, count = _information(experts, words, load, len(vocabulary))
    information = torch.zeros(num_experts, dtype=torch.float64)
    information.index_add_(0, key_expert, contribution)
    shuffled = words[torch.randperm(len(words), generator=torch.Generator().manual_seed(0))]
    chance, chance_expert, _, _ = _information(experts, shuffled, load, len(vocabulary))
    information.index_add_(0, chance_expert, -chance)

    occurrences = torch.bincount(word_at, minlength=len(vocabulary))
    by_contribution = contribution.argsort(descending=True)
    by_contribution = by_contribution[key_expert[by_contribution].argsort(stable=True)]
    key_ends = torch.bincount(key_expert, minlength=num_experts).cumsum(0).tolist()

    reports = []
    for expert in range(num_experts):
        begin, end = (ends[expert - 1] if expert else 0), ends[expert]
        slots = order[begin:end]
        keys = by_contribution[(key_ends[expert - 1] if expert else 0) : key_ends[expert]]
        reports.append(
            ExpertReport(
                expert=expert,
                share=len(slots) / len(word_at),
                information=float(information[expert]),
                purity=purities[expert],
                words=[
                    Word(
                        spelling[word],
                        int(count[key]),
                        float(count[key] / occurrences[word]),
                    )
                    for key in keys[:num_words].tolist()
                    for word in [int(key_word[key])]
                ],
                contexts=_contexts(routed, slots, spelling, num_contexts),
                pairs=pair_shares[expert],
            )
        )
    return reports


def _information(
    experts: Tensor, words: Tensor, load: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each (expert, word) that occurs: p(w|e) ln(p(w|e) / p(w)), expert, word, count."""
    keys, count = torch.unique(experts * vocab_size + words, return_counts=True)
    expert, word = keys // vocab_size, keys % vocab_size
    p_word = torch.bincount(words, minlength=vocab_size).double() / len(words)
    p_given_expert = count.double() / load[expert]
    return p_given_expert * (p_given_expert / p_word[word]).log(), expert, word, count


def _contexts(
    routed: RoutedText, slots: Tensor, spelling: Sequence[str], num_contexts: int
) -> list[Context]:
    """The distinct contexts of the first slots, which are in order of decreasing gate."""
    contexts: dict[tuple[int, ...], float] = {}
    for slot in slots[: 10 * num_contexts].tolist():
        window = tuple(routed.windows[routed.position[slot]].tolist())
        contexts.setdefault(window, float(routed.gate[slot]))
        if len(contexts) == num_contexts:
            break
    return [
        Context(gate, tuple("" if w == NO_WORD else spelling[w] for w in window))
        for window, gate in contexts.items()
    ]


def _pair_shares(routed: RoutedText) -> list[list[PairShare]]:
    """Those of each expert that has any."""
    num_experts, num_pairs = routed.num_experts, len(routed.pair_names)
    if routed.pair is None:
        return [[] for _ in range(num_experts)]
    keys = routed.expert * num_pairs + routed.pair[routed.position]
    number = torch.bincount(keys, minlength=num_experts * num_pairs).view(num_experts, num_pairs)
    expected = (number.sum(0).double() / number.sum()).tolist()
    return [
        list(map(PairShare, routed.pair_names, (mine / mine.sum()).tolist(), expected))
        if mine.any()
        else []
        for mine in number.double()
    ]
