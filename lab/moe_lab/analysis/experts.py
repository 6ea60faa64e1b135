"""Reports the words and contexts that each expert of a trained model gets (Table 9)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe_lab.analysis.routed_text import NEIGHBOURS, NO_WORD, RoutedText
from moe_lab.analysis.specialisation import PURITY_POSITIONS, purity


class Context(NamedTuple):
    """A word that is routed to an expert, with its neighbours."""

    gate: float  # of the expert at the word
    words: tuple[str, ...]  # the word in the middle; "" beyond the ends of the sentence

    @property
    def before(self) -> str:
        return " ".join(self.words[:NEIGHBOURS]).strip()

    @property
    def word(self) -> str:
        return self.words[NEIGHBOURS]

    @property
    def after(self) -> str:
        return " ".join(self.words[NEIGHBOURS + 1 :]).strip()


class Word(NamedTuple):
    """A word that distinguishes an expert from the others."""

    word: str  # the spelling of the word
    times: int  # how often the word is routed to the expert
    share: float  # the share of all occurrences of the word that is routed to the expert


class PairShare(NamedTuple):
    """The share of a language pair in an expert's tokens."""

    name: str  # the language pair, such as "en-fr"
    share: float  # the language pair's share of the expert's tokens
    expected: float  # the language pair's share of the tokens of all experts


@dataclass(frozen=True)
class ExpertReport:
    expert: int
    share: float  # of all tokens; k / E if the load is even
    # sum_w p(w|e) ln(p(w|e) / p(w)) over the words w of the expert e, in nats, minus the same sum
    # for shuffled words. A high value means unusual words.
    information: float
    purity: float  # share of the most frequent word at the 50 positions with the highest gates
    words: list[Word]  # those that contribute most to the information, largest contribution first
    contexts: list[Context]  # distinct ones with the highest gates, highest gate first
    pairs: Sequence[PairShare] = ()  # if the text has two or more language pairs

    @property
    def pair_information(self) -> float:
        """sum_l p(l|e) ln(p(l|e) / p(l)) over the language pairs l, in nats.

        The mean of this value over the tokens of all experts is the mutual information of expert
        and language pair.
        """
        return sum(p.share * math.log(p.share / p.expected) for p in self.pairs if p.share > 0)


def by_specialisation(reports: Sequence[ExpertReport]) -> list[ExpertReport]:
    """Sorts reports by information, highest first.

    Experts with less than half of the mean share come last, because a few tokens always look
    specialised.
    """
    half = sum(report.share for report in reports) / len(reports) / 2
    return sorted(reports, key=lambda r: (r.share >= half, r.information), reverse=True)


def expert_reports(
    routed: RoutedText, spelling: Sequence[str], *, num_contexts: int = 10, num_words: int = 10
) -> list[ExpertReport]:
    """Makes one report for each expert, in the order of the experts; `spelling` is by word id.

    The report of an expert without tokens has empty lists.
    """
    num_experts, experts, vocab_size = routed.num_experts, routed.expert, len(spelling)
    word_at = routed.words
    words = word_at[routed.position]
    order, load = routed.slots_by_gate()
    pair_shares = _pair_shares(routed)
    purities = purity(word_at, routed.highest(PURITY_POSITIONS)).nan_to_num().tolist()

    contribution, key_expert, key_word, count = _information(experts, words, load, vocab_size)
    information = torch.zeros(num_experts, dtype=torch.float64)
    information.index_add_(0, key_expert, contribution)
    shuffled = words[torch.randperm(len(words), generator=torch.Generator().manual_seed(0))]
    chance, chance_expert, _, _ = _information(experts, shuffled, load, vocab_size)
    information.index_add_(0, chance_expert, -chance)

    occurrences = torch.bincount(word_at, minlength=vocab_size)
    by_contribution = contribution.argsort(descending=True)
    by_contribution = by_contribution[key_expert[by_contribution].argsort(stable=True)]
    slots_of = order.split(load.tolist())
    keys_of = by_contribution.split(torch.bincount(key_expert, minlength=num_experts).tolist())

    return [
        ExpertReport(
            expert=expert,
            share=len(slots) / len(word_at),
            information=float(information[expert]),
            purity=purities[expert],
            words=[
                Word(spelling[word], int(count[key]), float(count[key] / occurrences[word]))
                for key in keys[:num_words].tolist()
                for word in [int(key_word[key])]
            ],
            contexts=_contexts(routed, slots, spelling, num_contexts),
            pairs=pair_shares[expert],
        )
        for expert, (slots, keys) in enumerate(zip(slots_of, keys_of, strict=True))
    ]


def _information(
    experts: Tensor, words: Tensor, load: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns p(w|e) ln(p(w|e) / p(w)), e, w and count of each (expert e, word w) that occurs."""
    keys, count = torch.unique(experts * vocab_size + words, return_counts=True)
    expert, word = keys // vocab_size, keys % vocab_size
    p_word = torch.bincount(words, minlength=vocab_size).double() / len(words)
    p_given_expert = count.double() / load[expert]
    return p_given_expert * (p_given_expert / p_word[word]).log(), expert, word, count


def _contexts(
    routed: RoutedText, slots: Tensor, spelling: Sequence[str], num_contexts: int
) -> list[Context]:
    """Collects the first distinct contexts of `slots`, which are sorted by decreasing gate."""
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
    """Returns the shares of the language pairs by expert; [] for an expert without tokens."""
    num_experts, num_pairs = routed.num_experts, len(routed.pair_names)
    if routed.pair is None:
        return [[] for _ in range(num_experts)]
    keys = routed.expert * num_pairs + routed.pair[routed.position]
    number = torch.bincount(keys, minlength=num_experts * num_pairs).view(num_experts, num_pairs)
    expected = (number.sum(0).double() / number.sum()).tolist()
    return [
        list(map(PairShare, routed.pair_names, (row / row.sum()).tolist(), expected))
        if row.any()
        else []
        for row in number.double()
    ]
