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
    """The mean of paired differences, and its 95% t interval.

    With fewer than three seeds, the interval would not be informative; its ends are None.
    """

    mean: float
    num_seeds: int
    low: float | None
    high: float | None

    def text(self, shown: Callable[[float], str], unit: str = "") -> str:
        """Formats the mean, a unit and the interval, or the reason why there is no interval."""
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
    seeds. a and b [N] are the nats of each sentence under two models, lengths [N] their tokens.
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
