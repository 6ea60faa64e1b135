"""The stored runs of a study: means, paired differences, learning curves, sizes and commands.

Runs with the same seed share the data order, the sampled softmax classes, and the initial weights
of their common layers. With the same number of layers, they also share the dropout masks. The
difference between two models is the mean over pairs of runs with the same seed. The unit of
analysis is the test log-perplexity of a run after a fixed number of steps.
"""

import math
import shlex
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moe_lab.cli import DEFAULT_SEEDS
from moe_lab.experiments.arms import Arm
from moe_lab.training.metrics import perplexity

CONFIDENCE = 0.95  # confidence level of the intervals
_MIN_SEEDS = 3  # the fewest for an interval over seeds
Run = dict[str, Any]  # the numbers of a finished run, with the name of its "arm" and its "seed"
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


class ArmRuns(dict[int, Run]):
    """The finished runs of an arm, by seed."""

    def mean(self, value: Value) -> float:
        return statistics.fmean(map(value, self.values()))

    def perplexity(self, nll: Value = test_nll) -> float:
        """Computes exp of the mean ln ppl over seeds."""
        return perplexity(self.mean(nll))

    def minus(self, baseline: "ArmRuns", value: Value = test_nll) -> PairedDifference | None:
        """Computes the mean difference of a number, by default of ln ppl, over the common seeds."""
        seeds = sorted(self.keys() & baseline.keys())
        return mean_difference([value(self[seed]) - value(baseline[seed]) for seed in seeds])

    def gap(self, a: Value, b: Value) -> PairedDifference | None:
        """Computes the mean difference of two numbers of each run."""
        return mean_difference([a(run) - b(run) for run in self.values()])

    def widening(self, baseline: "ArmRuns", share: float) -> PairedDifference | None:
        """Computes the difference at the end minus the one after a fraction of the training."""
        earlier = nll_after(share)
        return self.minus(baseline, lambda run: test_nll(run) - earlier(run))

    def size_cells(self) -> list[str]:
        """Formats operations and parameters for a table."""
        cost = next(iter(self.values()))["cost"]
        return [f"{cost['ops_per_timestep'] / 1e6:.3f}M", f"{cost['parameters'] / 1e6:.2f}M"]

    def curve(self) -> list[tuple[float, float]]:
        """Returns the learning curve: tokens of training, and exp of the mean ln ppl of dev."""
        steps = zip(*(run["dev"] for run in self.values()), strict=True)
        return [(step[0][0], perplexity(statistics.fmean(n for _, n in step))) for step in steps]

    def on(self, seeds: Iterable[int]) -> "ArmRuns":
        return ArmRuns({seed: self[seed] for seed in seeds})


class Runs(dict[Arm, ArmRuns]):
    """The finished runs by arm and seed; an arm without runs has {}."""

    def __missing__(self, arm: Arm) -> ArmRuns:
        return ArmRuns()

    def select(self, models: Iterable[str]) -> list[tuple[str, ArmRuns]]:
        """Returns the runs of each model that has any, with its usual options."""
        return [(model, self[Arm(model)]) for model in models if self[Arm(model)]]


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
