"""Studies: several models over paired seeds, and what their differences say about a claim.

Runs of one seed share the order of the data, the classes drawn for the softmax, the initial weights
of the layers they have in common, and, with as many layers, the dropout masks; a difference between
two models is a mean over such pairs. The unit of analysis is the test log-perplexity of a run after
a number of steps set in advance.
"""

import argparse
import math
import shlex
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from moe_ext.lab.analysis import Cost
from moe_ext.lab.files import Locked, file_lock, write_text
from moe_ext.lab.training.command import add_overrides, at_least, make_parser
from moe_ext.lab.training.config import AnyConfig
from moe_ext.lab.training.metrics import perplexity
from moe_ext.lab.training.report import markdown_table
from moe_ext.lab.training.results import Result, finished, train_and_test
from moe_ext.lab.training.statistics import PairedDifference, mean_difference
from moe_ext.lab.training.text import Text

Results = dict[str, dict[int, Result]]  # by arm and seed

_SEEDS = [1, 2, 3]  # of a study, if not given

# Of the studies of configs/small: more words than there, and fewer classes in training.
SMALL = ("num_threads=1", "data.vocab_size=10000", "model.num_sampled=1024")

SUPPORTED, CONTRADICTED, NOT_DECIDED = "supported", "contradicted", "not decided"  # verdicts

# Sentences of the studies' pages.
HOW_COMPARED = (
    "The perplexity over several seeds is exp of the mean of ln ppl. A difference is the mean over "
    "pairs of runs with the same seed. With three seeds or more, its 95% t interval follows in "
    "brackets."
)
HOW_DECIDED = (
    "A claim is supported if the whole interval lies below zero, contradicted if it lies above "
    "zero, and otherwise not decided."
)

_DIVERGED = "diverged.txt"  # in the folder of a run

# What the help of a study says at its end.
_ENDING = """
Ctrl-C or SIGTERM saves the run in progress and ends the script with status 130; the same command
goes on. Status 1: training diverged; 2: an option, file or folder that can't be used, in one
sentence.
"""


def run_folder(runs: str | Path, arm: str, seed: int) -> Path:
    """Where `run_study` has the run of an arm with a seed."""
    return Path(runs) / f"{arm}-seed{seed}"


def has_diverged(run: Path) -> bool:
    """Whether `run_study` has found a run's loss to be infinite or NaN."""
    return (run / _DIVERGED).is_file()


def study_parser(
    description: str | None, name: str, arms: Sequence[str]
) -> argparse.ArgumentParser:
    """The options that studies have in common; read them with `parse_intermixed_args`.

    Args:
        description: the script's docstring; the help goes on with how a study ends.
        name: of the study.
        arms: the names of its models.
    """
    parser = make_parser((description or "") + _ENDING)
    add_overrides(parser)
    parser.add_argument("--seeds", type=at_least(0), nargs="+", default=_SEEDS)
    parser.add_argument("--arms", nargs="+", choices=arms, default=arms, help="train only these")
    parser.add_argument("--runs", default=f"runs/{name}", help="folder of the runs")
    parser.add_argument("--output", default="docs/results", help="folder of the report")
    parser.add_argument("--report", action="store_true", help="train nothing")
    return parser


def command_of(name: str, options: argparse.Namespace) -> str:
    """The command of a study, as its page quotes it: without what cannot change the results."""
    changes = [o for o in options.overrides if not o.startswith(("log.", "data.encoded="))]
    seeds = [] if options.seeds == _SEEDS else ["--seeds", *map(str, options.seeds)]
    return shlex.join(["python", f"scripts/studies/{name}.py", *changes, *seeds])


def run_study(
    arms: Mapping[str, AnyConfig],
    seeds: Sequence[int],
    text: Text,
    runs: str | Path,
    shares: Sequence[float] = (),
    train: Collection[str] | None = None,
    then: Callable[[Path], object] | None = None,
) -> Results:
    """Train and test every arm with every seed, in RUNS/ARM-seedN, seed after seed.

    Finished runs are not repeated, interrupted ones go on. Several processes that are started with
    the same folder share the work: each takes a run that no other one is at. A run that diverges
    says so in a file of its folder, stops no other one, and is left as it is from then on.

    Args:
        arms: the models by name; their `data` must be the text's.
        seeds: of the runs.
        text: the corpus.
        runs: the folder of the runs' folders.
        shares: see `train_and_test`.
        train: the arms to train; of the others only what is there is collected. None is all.
        then: what else is to be made of a finished run, given its folder.

    Returns:
        The finished runs; what other processes are at is not among them.

    Raises:
        ConfigError: a folder holds something else.
        FloatingPointError: runs diverged; called again, this goes on without them.
        KeyboardInterrupt: a signal stopped a run, which is saved.
    """
    diverged = []
    planned = {
        (name, seed): replace(config, seed=seed, output=str(run_folder(runs, name, seed)))
        for seed in seeds
        for name, config in arms.items()
    }
    for (name, _), config in planned.items():
        if train is not None and name not in train:
            continue
        folder = Path(config.output)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with file_lock(folder / ".lock", wait=False):
                if has_diverged(folder):
                    continue
                train_and_test(config, text, shares)
                if then is not None:
                    then(folder)
        except FloatingPointError as error:
            write_text(folder / _DIVERGED, f"{error}\n")
            diverged.append(f"{folder}: {error}")
        except Locked:
            continue
    if diverged:
        raise FloatingPointError("; ".join([*diverged, "started again, the study goes on without"]))
    results: Results = {name: {} for name in arms}
    for (name, seed), config in planned.items():
        result = finished(config, text)
        if result is not None:
            results[name][seed] = result
    return results


class Claim(NamedTuple):
    """What a study is to decide.

    Attributes:
        claim: the paper's, in words.
        compared: the models.
        difference: what was found, in ln ppl: below zero if the claim holds.
    """

    claim: str
    compared: str
    difference: PairedDifference | None


def claims_table(claims: Iterable[Claim]) -> str:
    """The claims with their verdicts."""
    rows = [[claim, what, as_change(gap), verdict(gap)] for claim, what, gap in claims]
    return markdown_table(["claim", "compared", "perplexity, 95%", "verdict"], rows)


def claims_data(claims: Iterable[Claim]) -> list[dict[str, Any]]:
    """The claims, ready for JSON."""
    return [{**c._asdict(), "difference": c.difference and asdict(c.difference)} for c in claims]


def mean_perplexity(runs: Mapping[int, Result], share: float = 1.0) -> float:
    """exp of the mean over seeds of ln ppl after a share of the steps."""
    return perplexity(statistics.fmean(result.nll_at(share) for result in runs.values()))


def size_cells(cost: Cost) -> list[str]:
    """Operations and parameters of a model, for a table."""
    return [f"{cost.ops_per_timestep / 1e6:.3f}M", f"{cost.parameters / 1e6:.2f}M"]


def paired(
    a: Mapping[Any, Result], b: Mapping[Any, Result], value: Callable[[Result], float]
) -> PairedDifference | None:
    """Compute the mean of value(a) - value(b) over the keys, such as seeds, that both have."""
    keys = sorted(a.keys() & b.keys())
    num_seeds = len({a[key].seed for key in keys})
    return mean_difference([value(a[key]) - value(b[key]) for key in keys], num_seeds)


def difference(
    a: Mapping[Any, Result], b: Mapping[Any, Result], share: float = 1.0
) -> PairedDifference | None:
    """Compute ln ppl(a) - ln ppl(b) after a share of the steps, see `paired`."""
    return paired(a, b, lambda result: result.nll_at(share))


def widening(
    a: Mapping[int, Result], b: Mapping[int, Result], share: float
) -> PairedDifference | None:
    """Compute `difference` after all steps minus `difference` after a share of the steps."""
    return paired(a, b, lambda result: result.test_nll - result.nll_at(share))


def verdict(difference: PairedDifference | None, low: float = -math.inf, high: float = 0.0) -> str:
    """Judge the claim that a difference lies between low and high (default: that it is below zero).

    The claim is supported if the whole interval lies between them, and contradicted if the whole
    interval lies outside. Otherwise, and without an interval, it is not decided.
    """
    if difference is None or difference.low is None or difference.high is None:
        return NOT_DECIDED
    if low < difference.low and difference.high < high:
        return SUPPORTED
    return CONTRADICTED if difference.low > high or difference.high < low else NOT_DECIDED


def as_change(difference: PairedDifference | None) -> str:
    """Format a difference of ln ppl as a change of the perplexity in per cent, with its interval.

    With fewer than three seeds, that number of seeds stands in place of the interval.
    """
    if difference is None:
        return ""
    return difference.text(lambda value: f"{100 * (perplexity(value) - 1):+.2f}", "%")


def as_data(results: Results) -> dict[str, Any]:
    """The finished runs, ready for JSON."""
    return {
        name: {
            "cost": asdict(next(iter(runs.values())).cost),
            "runs": [
                {
                    "seed": seed,
                    "test_nll": result.test_nll,
                    "earlier_nll": result.earlier_nll,
                    "words_per_second": result.words_per_second,
                    "balance": result.balance,
                }
                for seed, result in runs.items()
            ],
        }
        for name, runs in results.items()
        if runs
    }
