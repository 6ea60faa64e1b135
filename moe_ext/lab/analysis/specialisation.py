"""How far experts specialise, in numbers: purity and mutual information, beside chance (Table 9).

A label is a whole number at each of N positions: the word there, the one before it, its class, the
kind of text. Where experts and labels have nothing to do with each other, neither changes when the
labels are shuffled, which leaves each expert's gates and each label's number as they are.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ext.checks import require_sizes
from moe_ext.lab.analysis.routed_text import NEIGHBOURS, RoutedText
from moe_ext.lab.data import AnyVocabulary, Vocabulary, Wordpieces
from moe_ext.lab.progress import progress

PURITY_POSITIONS = 50
_SUFFIXES = ("ing", "ed", "ly", "tion", "ment", "ness", "ity", "ous", "ful", "able", "est", "er")
WORD_CLASSES = (
    *(Vocabulary.UNK, Vocabulary.EOS, "number", "punctuation", "capitalised"),
    "up to 3 letters",
    *(f"-{suffix}" for suffix in (*_SUFFIXES, "s")),
    "other",
    *("inside a word", "target token"),  # of wordpieces
)


def word_class(word: str) -> str:
    """A coarse class of an English word by its form, one of WORD_CLASSES."""
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
    """The class of a wordpiece: of one that begins a word ("▁"), as if it were the whole word."""
    if re.fullmatch(r"<2.+>", piece):
        return "target token"
    word = piece.removeprefix("▁")
    known = word_class(word)
    form = known not in (Vocabulary.UNK, Vocabulary.EOS, "number", "punctuation")
    return "inside a word" if form and word == piece else known


def labels_of(routed: RoutedText, vocabulary: AnyVocabulary) -> dict[str, Tensor]:
    """The label of each position by name: the current word, the previous one, the word's class,
    and of several language pairs which one."""
    class_of = piece_class if isinstance(vocabulary, Wordpieces) else word_class
    classes = torch.tensor([WORD_CLASSES.index(class_of(word)) for word in vocabulary.words])
    words = routed.words
    previous = routed.windows[:, NEIGHBOURS - 1]
    labels = {"current word": words, "previous word": previous + 1, "word class": classes[words]}
    return labels if routed.pair is None else {**labels, "language pair": routed.pair}


def purity(labels: Tensor, positions: Tensor) -> Tensor:
    """The share of the most frequent label in each row of positions; NaN of an empty row.

    Args:
        labels: [N] int64, from 0 on.
        positions: [E, K], -1 where a row has fewer.

    Returns:
        [E] float64.
    """
    number = positions.shape[1]
    # Distinct values in the place of none, which so come once at most.
    values = torch.where(positions < 0, -1 - torch.arange(number), labels[positions])
    values = values.sort().values
    place = torch.arange(number).expand_as(values)
    changes = values.diff(prepend=values[:, :1] - 1) != 0
    begin = torch.where(changes, place, 0).cummax(1).values
    most = (place - begin + 1).amax(1)
    filled = (positions >= 0).sum(1)
    return torch.where(filled > 0, most.double() / filled, torch.nan)


def entropy(values: Tensor) -> float:
    """-sum_v p(v) ln p(v) of the shares of whole numbers from 0 on, in nats."""
    counts = torch.bincount(values)
    share = counts[counts > 0].double() / len(values)
    return float(-(share * share.log()).sum())


def mutual_information(a: Tensor, b: Tensor) -> float:
    """sum p(a, b) ln (p(a, b) / p(a) p(b)) of the shares of pairs, in nats.

    Of few pairs it is too high, by about (values of a - 1) (values of b - 1) / 2 pairs.
    """
    pairs = a * (int(b.max()) + 1) + b
    return entropy(a) + entropy(b) - entropy(pairs)


@dataclass(frozen=True)
class Specialisation:
    """What an expert tells of a label.

    Attributes:
        purity: [E'], share of the most frequent label among an expert's 50 highest gates, of the
            experts that have any.
        permuted_purity: [P, E'], the same with shuffled labels.
        information: I(expert with the highest gate; label) in nats.
        permuted_information: [P], the same with shuffled labels.
        entropy: H(expert with the highest gate) in nats.
    """

    purity: Tensor
    permuted_purity: Tensor
    information: float
    permuted_information: Tensor
    entropy: float

    @property
    def share(self) -> float:
        """(I - its mean with shuffled labels) / H: 1 if the label decides, 0 if it says nothing."""
        excess = self.information - float(self.permuted_information.mean())
        return excess / self.entropy if self.entropy > 0 else 0.0

    @property
    def p_purity(self) -> float:
        """How often shuffled labels have as high a mean purity, counting the true ones as one."""
        return _p_value(float(self.purity.mean()), self.permuted_purity.mean(1))

    @property
    def p_information(self) -> float:
        """How often shuffled labels have as much information, counting the true ones as one."""
        return _p_value(self.information, self.permuted_information)

    def summary(self) -> dict[str, Any]:
        """The numbers, ready for JSON; the purities of the experts in descending order."""
        single = self.permuted_purity.flatten()
        # kthvalue, as quantile is limited in size.
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


def _p_value(found: float, shuffled: Tensor) -> float:
    return (1 + int((shuffled >= found).sum())) / (1 + len(shuffled))


def measure_specialisation(
    routed: RoutedText,
    labels: Mapping[str, Tensor],
    *,
    num_permutations: int = 1_000,
    seed: int = 0,
) -> dict[str, Specialisation]:
    """What the experts tell of each label, beside shuffled labels.

    Args:
        routed: N positions.
        labels: [N] int64 each, from 0 on.
        num_permutations: P, at least 1.
        seed: of the permutations, the same for all labels.

    Raises:
        ValueError: there is no permutation.
    """
    require_sizes("specialisation", num_permutations=num_permutations)
    highest = routed.highest(PURITY_POSITIONS)
    highest = highest[highest[:, 0] >= 0]
    position, expert = routed.first_choice()
    # Small numbers, for short tables: those of the labels that occur.
    compact = {name: label.unique(return_inverse=True)[1] for name, label in labels.items()}
    purities: dict[str, list[Tensor]] = {name: [] for name in labels}
    informations: dict[str, list[float]] = {name: [] for name in labels}

    generator = torch.Generator().manual_seed(seed)
    identity = torch.arange(len(routed.windows))
    for number in progress(range(num_permutations + 1), "shuffling labels", "times"):
        order = identity  # the true labels first
        if number:
            order = torch.randperm(len(identity), generator=generator)
        for name, label in compact.items():
            shuffled = label[order]
            purities[name].append(purity(shuffled, highest))
            informations[name].append(mutual_information(expert, shuffled[position]))
    return {
        name: Specialisation(
            purities[name][0],
            torch.stack(purities[name][1:]),
            informations[name][0],
            torch.tensor(informations[name][1:], dtype=torch.float64),
            entropy(expert),
        )
        for name in labels
    }
