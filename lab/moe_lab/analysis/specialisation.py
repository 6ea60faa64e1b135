"""Measures how much experts specialise, by purity and mutual information (Table 9).

A label is an integer for each of N positions: the word, the previous word or the word class. The
values for shuffled labels are those that chance gives. Shuffling keeps each expert's gates and the
frequency of each label.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ext.checks import require_sizes
from moe_lab.analysis.routed_text import NEIGHBOURS, RoutedText
from moe_lab.data import AnyVocabulary, Vocabulary, Wordpieces
from moe_lab.progress import progress

PURITY_POSITIONS = 50
_SUFFIXES = ("ing", "ed", "ly", "tion", "ment", "ness", "ity", "ous", "ful", "able", "est", "er")
WORD_CLASSES = (
    *(Vocabulary.UNK, Vocabulary.EOS, "number", "punctuation", "capitalised"),
    "up to 3 letters",
    *(f"-{suffix}" for suffix in (*_SUFFIXES, "s")),
    "other",
    *("inside a word", "target token"),  # wordpieces only
)


def word_class(word: str) -> str:
    """Returns the class of an English word, one of ``WORD_CLASSES``, from its form."""
    if word in (Vocabulary.UNK, Vocabulary.EOS):
        return word
    if re.search(r"\d", word):
        return "number"
    if not any(map(str.isalpha, word)):
        return "punctuation"
    if word[0].isupper():
        return "capitalised"
    if len(word) <= 3:
        return "up to 3 letters"
    endings = (suffix for suffix in (*_SUFFIXES, "s") if word.endswith(suffix))
    return next((f"-{suffix}" for suffix in endings), "other")


def piece_class(piece: str) -> str:
    """Classifies a wordpiece; a wordpiece that begins a word ("▁") counts as a whole word."""
    if re.fullmatch(r"<2.+>", piece):
        return "target token"
    word = piece.removeprefix("▁")
    known = word_class(word)
    form = known not in (Vocabulary.UNK, Vocabulary.EOS, "number", "punctuation")
    return "inside a word" if form and word == piece else known


def labels_of(routed: RoutedText, vocabulary: AnyVocabulary) -> dict[str, Tensor]:
    """Returns the labels [N] by name: "current word", "previous word" and "word class".

    A text with two or more language pairs also has the label "language pair".
    """
    class_of = piece_class if isinstance(vocabulary, Wordpieces) else word_class
    classes = torch.tensor([WORD_CLASSES.index(class_of(word)) for word in vocabulary.words])
    words = routed.words
    previous = routed.windows[:, NEIGHBOURS - 1]
    labels = {"current word": words, "previous word": previous + 1, "word class": classes[words]}
    return labels if routed.pair is None else {**labels, "language pair": routed.pair}


def purity(labels: Tensor, positions: Tensor) -> Tensor:
    """Computes the share of the most frequent label in each row of positions, NaN if it is empty.

    labels: [N] int64, at least 0. positions: [E, K] int64; a short row is padded with -1.
    """
    number = positions.shape[1]
    # Padding gets distinct negative values, so each of them occurs only once.
    values = torch.where(positions < 0, -1 - torch.arange(number), labels[positions])
    values = values.sort().values
    place = torch.arange(number).expand_as(values)
    changes = values.diff(prepend=values[:, :1] - 1) != 0
    begin = torch.where(changes, place, 0).cummax(1).values
    most = (place - begin + 1).amax(1)
    filled = (positions >= 0).sum(1)
    return torch.where(filled > 0, most.double() / filled, torch.nan)


def entropy(values: Tensor) -> float:
    """Computes -sum_v p(v) ln p(v) of the frequencies of non-negative integers, in nats."""
    counts = torch.bincount(values)
    share = counts[counts > 0].double() / len(values)
    return float(-(share * share.log()).sum())


def mutual_information(a: Tensor, b: Tensor) -> float:
    """Computes sum p(a, b) ln(p(a, b) / (p(a) p(b))) of the frequencies of pairs, in nats.

    The estimate from n pairs is too high by about (A - 1)(B - 1) / (2n), where a has A distinct
    values and b has B.
    """
    pairs = a * (int(b.max()) + 1) + b
    return entropy(a) + entropy(b) - entropy(pairs)


@dataclass(frozen=True)
class Specialisation:
    """The dependence of experts on a label, and its values for P permutations of the labels."""

    purity: Tensor  # [E'], of an expert's 50 highest gates, for the E' experts with tokens
    permuted_purity: Tensor  # [P, E']
    information: float  # I, of the label and the expert with the highest gate, in nats
    permuted_information: Tensor  # [P]
    entropy: float  # H, of the expert with the highest gate, in nats

    @property
    def share(self) -> float:
        """(I - mean I with shuffled labels) / H: 0 for independence, 1 if the label decides."""
        excess = self.information - float(self.permuted_information.mean())
        return excess / self.entropy if self.entropy > 0 else 0.0

    @property
    def p_purity(self) -> float:
        """The p-value: the share of permutations, true labels included, that reach the purity."""
        return _p_value(float(self.purity.mean()), self.permuted_purity.mean(1))

    @property
    def p_information(self) -> float:
        """The p-value: the share of permutations, true labels included, that reach I."""
        return _p_value(self.information, self.permuted_information)

    def summary(self) -> dict[str, Any]:
        """Summarizes the numbers, ready for JSON; the experts' purities are in descending order."""
        single = self.permuted_purity.flatten()
        # torch.quantile limits the size of its input; kthvalue does not.
        high = single.kthvalue(max(1, round(0.975 * len(single)))).values
        return {
            "purity": float(self.purity.mean()),
            "permuted_purity": float(self.permuted_purity.mean()),
            "p_purity": self.p_purity,
            "expert_purity": self.purity.sort(descending=True).values.tolist(),
            "permuted_expert_purity_97.5%": float(high),
            "information": self.information,
            "permuted_information": float(self.permuted_information.mean()),
            "p_information": self.p_information,
            "entropy": self.entropy,
            "share": self.share,
        }


def _p_value(measured: float, shuffled: Tensor) -> float:
    return (1 + int((shuffled >= measured).sum())) / (1 + len(shuffled))


def measure_specialisation(
    routed: RoutedText,
    labels: Mapping[str, Tensor],
    *,
    num_permutations: int = 1_000,
    seed: int = 0,
) -> dict[str, Specialisation]:
    """Measures the specialisation of the experts for each label and for shuffled labels.

    A label is [N] int64, at least 0, for the N routed positions. All labels share the permutations.
    """
    require_sizes("specialisation", num_permutations=num_permutations)
    highest = routed.highest(PURITY_POSITIONS)
    highest = highest[highest[:, 0] >= 0]
    position, expert = routed.first_choice()
    # Renumber the labels that occur from 0, which keeps the tables small.
    compact = {name: label.unique(return_inverse=True)[1] for name, label in labels.items()}
    purities: dict[str, list[Tensor]] = {name: [] for name in labels}
    mutual: dict[str, list[float]] = {name: [] for name in labels}

    generator = torch.Generator().manual_seed(seed)
    identity = torch.arange(len(routed.windows))
    for number in progress(range(num_permutations + 1), "shuffling labels", "times"):
        order = identity  # the true labels first
        if number:
            order = torch.randperm(len(identity), generator=generator)
        for name, label in compact.items():
            shuffled = label[order]
            purities[name].append(purity(shuffled, highest))
            mutual[name].append(mutual_information(expert, shuffled[position]))
    return {
        name: Specialisation(
            purities[name][0],
            torch.stack(purities[name][1:]),
            mutual[name][0],
            torch.tensor(mutual[name][1:], dtype=torch.float64),
            entropy(expert),
        )
        for name in labels
    }
