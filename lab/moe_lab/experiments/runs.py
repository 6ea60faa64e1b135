"""What the pages say about stored runs: means, paired differences, curves, costs and commands.

Runs with the same seed share the data order, the sampled softmax classes, and the initial weights
of their common layers. With the same number of layers, they also share the dropout masks. The
difference between two models is the mean over pairs of runs with the same seed. The unit of
analysis is the test log-perplexity of a run after a fixed number of steps.
"""

import math
import shlex
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_lab.cli import DEFAULT_SEEDS
from moe_lab.experiments.arms import Arm
from moe_lab.experiments.store import Run, Runs
from moe_lab.training.metrics import perplexity

CONFIDENCE = 0.95  # confidence level of the intervals
_MIN_SEEDS = 3  # the fewest for an interval over seeds
Value = Callable[[Run], float]  # a number of a run


def number_of(*keys: str | int) -> Value:
    """Returns the function from a run to one of its numbers, by the keys of the number."""

    def value(run: Run) -> float:
        entry: Any = run
        for key in keys:
            entry = entry[key]
        return float(entry)

    return value


test_nll = number_of("test_nll")  # nats per token of the test part after the last step
dev_nll = number_of("dev", -1, 1)


def nll_after(share: float) -> Value:
    return number_of("earlier_nll", str(share))


def mean_of(runs: Mapping[int, Run], value: Value) -> float:
    return statistics.fmean(map(value, runs.values()))


def mean_perplexity(runs: Mapping[int, Run], nll: Value = test_nll) -> float:
    """Computes exp of the mean ln ppl over seeds."""
    return perplexity(mean_of(runs, nll))


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
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, num_seeds - 1)) * error
    return PairedDifference(mean, num_seeds, mean - half, mean + half)


def difference(
    a: Mapping[int, Run], b: Mapping[int, Run], value: Value = test_nll
) -> PairedDifference | None:
    """Computes the mean of value(a) - value(b), by default of ln ppl, over the seeds of both."""
    seeds = sorted(a.keys() & b.keys())
    return mean_difference([value(a[seed]) - value(b[seed]) for seed in seeds])


def widening(a: Mapping[int, Run], b: Mapping[int, Run], share: float) -> PairedDifference | None:
    """Computes `difference` at the end minus `difference` at the fraction `share` of training."""
    earlier = nll_after(share)
    return difference(a, b, lambda run: test_nll(run) - earlier(run))


def size_cells(runs: Mapping[int, Run]) -> list[str]:
    cost = next(iter(runs.values()))["cost"]
    return [f"{cost['ops_per_timestep'] / 1e6:.3f}M", f"{cost['parameters'] / 1e6:.2f}M"]


def runs_of(models: Iterable[str], runs: Runs) -> list[tuple[str, dict[int, Run]]]:
    """Returns the runs of each model that has any, with its usual options."""
    return [(model, runs[Arm(model)]) for model in models if runs[Arm(model)]]


def mean_curve(runs: Mapping[int, Run]) -> list[tuple[float, float]]:
    """Returns the learning curve of the runs of a model: tokens of training, and dev perplexity.

    The perplexity is exp of the mean ln(perplexity) of the runs.
    """
    steps = zip(*(run["dev"] for run in runs.values()), strict=True)
    return [(step[0][0], perplexity(statistics.fmean(nll for _, nll in step))) for step in steps]


def core_hours(runs: Sequence[Run]) -> str:
    """Says how long the runs took; "" if an old run does not have its time."""
    if not all("seconds" in run for run in runs):
        return ""
    hours = sum(run["seconds"] for run in runs) / 3600
    return (
        f"All runs took at least {hours:.2f} core-hours. "
        "A run that was interrupted counts from its last start."
    )


def commands_of(command: Sequence[str], runs: Sequence[Run], usual: Collection[str]) -> str:
    """Formats the commands of stored runs, one on each line.

    The first command is that of the arms in `usual` with the usual seeds, if an arm has these.
    Other seeds of these arms follow, then the other arms; each command has the arms with the same
    seeds.
    """
    seeds_of: dict[str, set[int]] = {}
    for run in runs:
        seeds_of.setdefault(run["arm"], set()).add(run["seed"])
    default = {*DEFAULT_SEEDS}
    same: dict[tuple[bool, tuple[int, ...]], list[str]] = {}  # arms by the seeds of a command
    for arm, seeds in seeds_of.items():
        is_other = arm not in usual
        further = seeds if is_other or not default <= seeds else seeds - default
        same.setdefault((is_other, tuple(sorted(further))), []).append(arm)
    lines = [
        [*command, "--seeds", *map(str, seeds), *([] if {*arms} == {*usual} else ["--arms", *arms])]
        for (_, seeds), arms in sorted(same.items(), key=lambda item: item[0][0])
        if seeds
    ]
    if any(arm in usual and default <= seeds for arm, seeds in seeds_of.items()):
        lines.insert(0, [*command])
    return "\n".join(map(shlex.join, lines))
