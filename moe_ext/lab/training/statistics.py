"""Confidence intervals of differences, over paired seeds and over test sentences."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_CONFIDENCE = 0.95  # of the intervals
_BOOTSTRAP_SAMPLES = 2_000  # how often sentences are drawn anew


@dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval [low, high]."""

    mean: float
    low: float
    high: float

    def __format__(self, form: str) -> str:
        return f"{self.mean:{form}} [{self.low:{form}}, {self.high:{form}}]"


def mean_difference(differences: Sequence[float]) -> Interval | None:
    """Mean of paired differences with its t interval; None for fewer than two."""
    if len(differences) < 2:
        return None
    from scipy import stats  # type: ignore[import-untyped]

    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    half = float(stats.t.ppf((1 + _CONFIDENCE) / 2, len(differences) - 1)) * error
    return Interval(mean, mean - half, mean + half)


def bootstrap_difference(a: Tensor, b: Tensor, lengths: Tensor) -> Interval:
    """Computes (sum a - sum b) / tokens with a 95% percentile interval over test sentences.

    The interval covers the choice of test sentences for these two runs. It does not cover the
    choice of seeds.

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
    return Interval(float(difference.sum() / lengths.sum()), low, high)
