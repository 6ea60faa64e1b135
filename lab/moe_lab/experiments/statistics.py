"""Confidence intervals of differences, over paired seeds and over test sentences."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_CONFIDENCE = 0.95  # confidence level of the intervals
_MIN_SEEDS = 3  # the fewest for an interval over seeds
_BOOTSTRAP_SAMPLES = 2_000  # number of random samples of the test sentences


@dataclass(frozen=True)
class PairedDifference:
    """The mean of paired differences and, with three seeds or more, its t interval.

    Attributes:
        mean: the mean of the differences.
        num_seeds: the number of paired seeds.
        low: lower end of the 95% t interval of the mean; None with fewer than three seeds, because
            the interval would not be informative.
        high: upper end of the 95% t interval of the mean, or None.
    """

    mean: float
    num_seeds: int
    low: float | None
    high: float | None

    def text(self, shown: Callable[[float], str], unit: str = "") -> str:
        """Formats the mean with its interval, or with the reason why there is no interval.

        Args:
            shown: function that formats a number.
            unit: text after the mean, such as "%".
        """
        if self.low is None or self.high is None:
            number = "one seed" if self.num_seeds == 1 else "two seeds"
            return f"{shown(self.mean)}{unit} ({number}, not decided)"
        return f"{shown(self.mean)}{unit} [{shown(self.low)}, {shown(self.high)}]"

    def __format__(self, form: str) -> str:
        return self.text(lambda value: format(value, form))


def mean_difference(differences: Sequence[float]) -> PairedDifference | None:
    """Computes the mean of the differences of pairs of runs with equal seeds; None without any."""
    if not differences:
        return None
    num_seeds = len(differences)
    mean = statistics.fmean(differences)
    if num_seeds < _MIN_SEEDS:
        return PairedDifference(mean, num_seeds, None, None)
    from scipy import stats  # type: ignore[import-untyped]

    error = statistics.stdev(differences) / math.sqrt(num_seeds)
    half = float(stats.t.ppf((1 + _CONFIDENCE) / 2, num_seeds - 1)) * error
    return PairedDifference(mean, num_seeds, mean - half, mean + half)


def bootstrap_difference(a: Tensor, b: Tensor, lengths: Tensor) -> tuple[float, float]:
    """Computes a 95% bootstrap interval of (sum(a) - sum(b)) / sum(lengths) over sentences.

    The percentile interval covers the choice of test sentences for two runs, not the choice of
    seeds.

    Args:
        a: [N], nats of each sentence under the first model.
        b: [N], nats of each sentence under the second model.
        lengths: [N] int64, number of tokens of each sentence.
    """
    generator = torch.Generator().manual_seed(0)
    difference = (a - b).double()
    means = []
    for _ in range(_BOOTSTRAP_SAMPLES):
        drawn = torch.randint(len(a), (len(a),), generator=generator)
        means.append(float(difference[drawn].sum() / lengths[drawn].sum()))
    tails = torch.tensor([(1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2], dtype=torch.float64)
    low, high = torch.tensor(means, dtype=torch.float64).quantile(tails).tolist()
    return low, high
