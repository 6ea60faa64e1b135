"""Measures of specialisation: purity and mutual information, compared with chance (Table 9).

A label is an integer at each of N positions: the word, the previous word, the class of the word or
the domain of the text. Shuffling the labels changes neither the gates of the experts nor the number
of positions with each label. If experts and labels are independent, it does not change the measures
either.
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
    """Return the coarse class of an English word by its form, one of WORD_CLASSES."""
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
    """Return the class of a wordpiece. A piece that begins a word ("▁") counts as the word."""
    if re.fullmatch(r"<2.+>", piece):
        return "target token"
    word = piece.removeprefix("▁")
    known = word_class(word)
    form = known not in (Vocabulary.UNK, Vocabulary.EOS, "number", "punctuation")
    return "inside a word" if form and word == piece else known


def labels_of(routed: RoutedText, vocabulary: AnyVocabulary) -> dict[str, Tensor]:
    """Label each position by the current word, the previous word and the word class.

    With several language pairs, the pair is a label too.
    """
    class_of = piece_class if isinstance(vocabulary, Wordpieces) else word_class
    classes = torch.tensor([WORD_CLASSES.index(class_of(word)) for word in vocabulary.words])
    words = routed.words
    previous = routed.windows[:, NEIGHBOURS - 1]
    labels = {"current word": words, "previous word": previous + 1, "word class": classes[words]}
    return labels if routed.pair is None else {**labels, "language pair": routed.pair}


def purity(labels: Tensor, positions: Tensor) -> Tensor:
    """Return the share of the most frequent label in each row; NaN for an empty row.

    Args:
        labels: [N] int64, at least 0.
        positions: [E, K], padded with -1.

    Returns:
        [E] float64.
    """
    number = positions.shape[1]
    # Padding gets distinct values, so that none of them is the most frequent.
    values = torch.where(positions < 0, -1 - torch.arange(number), labels[positions])
    values = values.sort().values
    place = torch.arange(number).expand_as(values)
    changes = values.diff(prepend=values[:, :1] - 1) != 0
    begin = torch.where(changes, place, 0).cummax(1).values
    most = (place - begin + 1).amax(1)
    filled = (positions >= 0).sum(1)
    return torch.where(filled > 0, most.double() / filled, torch.nan)


def entropy(values: Tensor) -> float:
    """Return -sum_v p(v) ln p(v) in nats; p(v) is the share of the integer v >= 0."""
    counts = torch.bincount(values)
    share = counts[counts > 0].double() / len(values)
    return float(-(share * share.log()).sum())


def mutual_information(a: Tensor, b: Tensor) -> float:
    """Return sum p(a, b) ln (p(a, b) / p(a) p(b)) of the shares of pairs, in nats.

    The estimate is biased by about (A - 1) (B - 1) / 2N for N pairs, A values of a and B of b.
    """
    pairs = a * (int(b.max()) + 1) + b
    return entropy(a) + entropy(b) - entropy(pairs)


@dataclass(frozen=True)
class Specialisation:
    """Purity and mutual information of the experts and a label, and their values by chance.

    Attributes:
        purity: [E'], share of the most frequent label among the 50 highest gates of an expert. E'
            counts the experts with at least one token.
        permuted_purity: [P, E'], the purity with shuffled labels.
        information: I(expert with the highest gate; label) in nats.
        permuted_information: [P], the information with shuffled labels.
        entropy: H(expert with the highest gate) in nats.
    """

    purity: Tensor
    permuted_purity: Tensor
    information: float
    permuted_information: Tensor
    entropy: float

    @property
    def share(self) -> float:
        """(I - its mean with shuffled labels) / H: 1 if the label determines the expert, 0 if the
        two are independent."""
        excess = self.information - float(self.permuted_information.mean())
        return excess / self.entropy if self.entropy > 0 else 0.0

    @property
    def p_purity(self) -> float:
        """p-value of the mean purity under shuffled labels, with the true labels as one shuffle."""
        return _p_value(float(self.purity.mean()), self.permuted_purity.mean(1))

    @property
    def p_information(self) -> float:
        """p-value of the information under shuffled labels, with the true labels as one shuffle."""
        return _p_value(self.information, self.permuted_information)

    def summary(self) -> dict[str, Any]:
        """Return the numbers for JSON; the purities of the experts are in descending order."""
        single = self.permuted_purity.flatten()
        # torch.quantile is limited to 16 million values; kthvalue is not.
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
    """Measure the specialisation of the experts by each label, and with shuffled labels.

    Args:
        routed: the routing of N positions.
        labels: labels by name, each [N] int64 and at least 0.
        num_permutations: P, the number of shuffles, at least 1.
        seed: seed of the shuffles, which are the same for all labels.

    Raises:
        ValueError: num_permutations is less than 1.
    """
    require_sizes("specialisation", num_permutations=num_permutations)
    highest = routed.highest(PURITY_POSITIONS)
    highest = highest[highest[:, 0] >= 0]
    position, expert = routed.first_choice()
    # Renumber the labels that occur, for small tables of counts.
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
