"""Studies: train several models over paired seeds and test a claim on their differences.

Runs with the same seed share the data order, the sampled softmax classes, and the initial weights
of their common layers. With the same number of layers, they also share the dropout masks. The
difference between two models is the mean over pairs of runs with the same seed. The unit of
analysis is the test log-perplexity of a run after a fixed number of steps.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moe_lab.analysis import Cost
from moe_lab.cli import add_output, add_overrides, add_seeds, make_parser
from moe_lab.errors import ConfigError
from moe_lab.experiments.at_once import run_at_once
from moe_lab.experiments.report import markdown_table
from moe_lab.experiments.results import Result, finished, run_unlocked, train_and_test
from moe_lab.experiments.statistics import PairedDifference, mean_difference
from moe_lab.files import write_text
from moe_lab.training.config import AnyConfig, C, config_differences, read_config, to_toml
from moe_lab.training.device import set_up_for
from moe_lab.training.metrics import perplexity
from moe_lab.training.text import Text, load_text

Results = dict[str, dict[int, Result]]  # by arm and seed

SUPPORTED, CONTRADICTED, NOT_DECIDED = "supported", "contradicted", "not decided"  # verdicts

# Sentences of the studies' pages.
HOW_COMPARED = (
    "The perplexity over several seeds is exp of the mean of ln ppl. A difference is the mean over "
    "the seeds that both models have. With three seeds or more, its 95% t interval follows in "
    "brackets."
)
HOW_DECIDED = (
    "A claim is supported if the whole interval lies below zero, contradicted if it lies above "
    "zero, and otherwise not decided."
)

_DIVERGED = "diverged.toml"  # the configuration of a diverged run, in the folder of the run

# The end of a study's help.
_ENDING = """
Ctrl-C or SIGTERM saves the current run and ends the script with status 130. The same command
continues the run. Status 1 means that training diverged. Status 2 means that an option, file or
folder cannot be used; the error message names it.
"""


def config_of_run(config: C, runs: str | Path, arm: str, seed: int) -> C:
    """Returns the configuration of the model `arm` with a seed and its folder RUNS/ARM-seedN."""
    folder = Path(runs) / f"{arm.replace(' ', '-')}-seed{seed}"
    return replace(config, seed=seed, output=str(folder))


def has_diverged(config: AnyConfig) -> bool:
    """Returns whether a run of `run_study` ended with an infinite or NaN loss.

    Raises:
        ConfigError: the folder contains another run that diverged.
    """
    path = Path(config.output) / _DIVERGED
    if not path.is_file():
        return False
    if changed := config_differences(read_config(path), config):
        raise ConfigError(
            f"{', '.join(changed)} must be as in the diverged run {config.output}; "
            "restore the value, delete the folder, or give another output folder"
        )
    return True


def study_parser(
    description: str | None, name: str, arms: Sequence[str]
) -> argparse.ArgumentParser:
    """Creates a parser for the common options of studies; call ``parse_intermixed_args`` to parse.

    Args:
        description: the script's docstring; the help appends the exit statuses.
        name: name of the study.
        arms: names of the study's models.
    """
    parser = make_parser((description or "") + _ENDING)
    add_overrides(parser)
    add_seeds(parser)
    parser.add_argument(
        "--arms", nargs="+", choices=arms, default=arms, help="train only these models"
    )
    parser.add_argument("--runs", default=f"runs/{name}", help="folder of the runs")
    add_output(parser)
    parser.add_argument(
        "--report", action="store_true", help="write the report of finished runs, without training"
    )
    return parser


def runs_at_once(arms: Mapping[str, C], wanted: int) -> tuple[dict[str, C], int]:
    """Chooses the number of runs to train at the same time, and the threads of each run.

    Call this function before torch's number of threads changes.

    Args:
        arms: configurations of the models by name.
        wanted: the maximum number of runs.

    Returns:
        The configurations and the number of runs. The number is less than `wanted` if the runs
        would need more threads than torch uses, and 1 on a GPU. If the number is greater than 1,
        each configuration whose num_threads is 0 gets an equal share of torch's threads.
    """
    threads = torch.get_num_threads()
    most = max(1, *(config.num_threads for config in arms.values()))
    number = min(wanted, threads // most)
    if number <= 1 or any(config.device != "cpu" for config in arms.values()):
        return dict(arms), 1
    share = threads // number
    return {
        name: replace(config, num_threads=config.num_threads or share)
        for name, config in arms.items()
    }, number


def run_study(
    arms: Mapping[str, AnyConfig],
    seeds: Sequence[int],
    text: Text,
    runs: str | Path,
    at_once: int = 1,
) -> Results:
    """Trains and tests every arm with every seed, in the folders RUNS/ARM-seedN.

    Finished runs are not repeated; interrupted runs are resumed. You can start the same study
    several times with the same folder: each process skips runs that another process is training. A
    diverged run is marked by a file in its folder and not repeated; the other runs continue.

    Args:
        arms: configurations of the models by name; their `data` must match the text.
        seeds: the seeds of the runs.
        text: the encoded corpus.
        runs: the parent of the runs' folders.
        at_once: the number of runs to train at the same time, each in its own process. Each process
            reads the text again. A run that fails or diverges stops the other runs, which save a
            checkpoint.

    Returns:
        The finished runs by arm and seed.

    Raises:
        ConfigError: a run's folder contains another run.
        FloatingPointError: runs diverged; the next call continues without these runs.
        KeyboardInterrupt: SIGINT or SIGTERM stopped a run after saving a checkpoint.
    """
    planned = {
        (name, seed): config_of_run(config, runs, name, seed)
        for seed in seeds
        for name, config in arms.items()
    }
    missing = sum(finished(config, text) is None for config in planned.values())
    if min(at_once, missing) > 1:
        share = partial(_share_of_study, dict(arms), seeds, runs)
        run_at_once([share] * min(at_once, missing))
    run_unlocked(
        (
            (config.output, Path(config.output) / ".lock", partial(_run, config, text))
            for config in planned.values()
        ),
        "run the command again to continue the study without diverged runs",
    )
    results: Results = {name: {} for name in arms}
    for (name, seed), config in planned.items():
        result = finished(config, text)
        if result is not None:
            results[name][seed] = result
    return results


def _run(config: AnyConfig, text: Text) -> None:
    """Trains and tests a run of a study, unless it has diverged."""
    if has_diverged(config):
        return
    try:
        train_and_test(config, text)
    except FloatingPointError:
        write_text(Path(config.output) / _DIVERGED, to_toml(config))
        raise


def _share_of_study(
    arms: Mapping[str, AnyConfig],
    seeds: Sequence[int],
    runs: str | Path,
) -> None:
    """Calls `run_study` in a child process, until no run is left to train."""
    config = next(iter(arms.values()))
    set_up_for(config)
    run_study(arms, seeds, load_text(config.data), runs)


class Claim(NamedTuple):
    """A claim of the paper and the result of the study.

    Attributes:
        claim: the claim in words.
        compared: the compared models.
        difference: the difference in ln ppl; negative if the claim holds.
    """

    claim: str
    compared: str
    difference: PairedDifference | None


def claims_table(claims: Iterable[Claim]) -> str:
    """Formats claims and verdicts as a Markdown table."""
    rows = [[claim, what, as_change(gap), verdict(gap)] for claim, what, gap in claims]
    return markdown_table(["claim", "compared", "perplexity, 95%", "verdict"], rows)


def claims_data(claims: Iterable[NamedTuple]) -> list[dict[str, Any]]:
    """Converts claims, or other tuples with differences, to data for JSON."""
    return [
        {
            name: asdict(value) if isinstance(value, PairedDifference) else value
            for name, value in claim._asdict().items()
        }
        for claim in claims
    ]


def mean_perplexity(runs: Mapping[int, Result], share: float = 1.0) -> float:
    """Computes exp of the mean ln ppl over seeds, at the fraction `share` of the training steps."""
    return perplexity(statistics.fmean(result.nll_at(share) for result in runs.values()))


def size_cells(cost: Cost) -> list[str]:
    """Formats operations and parameters of a model for a table."""
    return [f"{cost.ops_per_timestep / 1e6:.3f}M", f"{cost.parameters / 1e6:.2f}M"]


def paired(
    a: Mapping[int, Result], b: Mapping[int, Result], value: Callable[[Result], float]
) -> PairedDifference | None:
    """Computes the mean of value(a) - value(b) over the seeds of both a and b."""
    return mean_difference(
        [value(a[seed]) - value(b[seed]) for seed in sorted(a.keys() & b.keys())]
    )


def difference(
    a: Mapping[int, Result], b: Mapping[int, Result], share: float = 1.0
) -> PairedDifference | None:
    """Computes the mean of ln ppl(a) - ln ppl(b) at the fraction `share` of the training steps."""
    return paired(a, b, lambda result: result.nll_at(share))


def widening(
    a: Mapping[int, Result], b: Mapping[int, Result], share: float
) -> PairedDifference | None:
    """Computes `difference` at the end minus `difference` at the fraction `share` of training."""
    return paired(a, b, lambda result: result.test_nll - result.nll_at(share))


def verdict(difference: PairedDifference | None, low: float = -math.inf, high: float = 0.0) -> str:
    """Judges the claim that a difference is between low and high, by default below zero.

    The claim is supported if the confidence interval of the difference lies inside (low, high), and
    contradicted if the interval lies outside. Otherwise, or without an interval, the claim is not
    decided.
    """
    if difference is None or difference.low is None or difference.high is None:
        return NOT_DECIDED
    if low < difference.low and difference.high < high:
        return SUPPORTED
    return CONTRADICTED if difference.low > high or difference.high < low else NOT_DECIDED


def as_change(difference: PairedDifference | None) -> str:
    """Formats a difference of ln ppl as a change of the perplexity in per cent, with its interval.

    With fewer than three seeds, the text has the number of seeds instead of the interval.
    """
    if difference is None:
        return ""
    return difference.text(lambda value: f"{100 * (perplexity(value) - 1):+.2f}", "%")


class Tried(NamedTuple):
    """The dev results of a model with each of its settings.

    Attributes:
        num_seeds: the number of seeds with which the model has run with all of these settings.
        nll: the mean ln ppl on the dev part over these seeds, by the ending of the model's name;
            "" has the usual settings.
    """

    num_seeds: int
    nll: dict[str, float]


def tried(on_dev: Results, models: Iterable[str], suffixes: Iterable[str]) -> dict[str, Tried]:
    """Compares the settings of each model on the dev part, over the seeds that all of them have.

    If they have no common seed, the settings with the fewest seeds are left out.

    Args:
        on_dev: the runs by arm and seed, with the results on the dev part.
        models: the names of the models with the usual settings.
        suffixes: the endings of the names of the models with other settings, such as " rate 0.004".
    """
    compared = {}
    for model in models:
        arms = {end: runs for end in ("", *suffixes) if (runs := on_dev.get(model + end))}
        while arms and not (seeds := set.intersection(*map(set, arms.values()))):
            del arms[min(reversed(arms), key=lambda end: len(arms[end]))]
        nll = {
            end: statistics.fmean(runs[seed].test_nll for seed in seeds)
            for end, runs in arms.items()
        }
        compared[model] = Tried(len(seeds) if nll else 0, nll)
    return compared


def trials_table(compared: Mapping[str, Tried], usual: str) -> str:
    """Formats the dev perplexities as a Markdown table; `usual` names the usual settings."""
    endings = dict.fromkeys(end for _, nll in compared.values() for end in nll)
    rows = [
        [
            model,
            num_seeds,
            *(f"{perplexity(nll[end]):.2f}" if end in nll else "" for end in endings),
        ]
        for model, (num_seeds, nll) in compared.items()
        if nll
    ]
    return markdown_table(["model", "seeds", *(end.strip() or usual for end in endings)], rows)


def usual_options(settings: Mapping[str, Any]) -> str:
    """Names the learning rate and the dropout that the runs of the models share."""
    return f"rate {settings['optimizer.learning_rate']:g}, dropout {settings['model.dropout']:g}"


def trials(
    settings: Mapping[str, Any], on_dev: Results, models: Iterable[str], suffixes: Iterable[str]
) -> str:
    """Compares learning rates and dropouts on the dev part; "" if no model has run with another.

    A row is over the seeds with which a model has run with all settings that were tried with it.

    Args:
        settings: the options that the runs of the models share.
        on_dev: see `tried`.
        models: see `tried`.
        suffixes: see `tried`.
    """
    usual = usual_options(settings)
    compared = {
        model: of_model
        for model, of_model in tried(on_dev, models, suffixes).items()
        if of_model.nll.keys() - {""}
    }
    if not compared:
        return ""
    excess = [
        f"{perplexity(nll[''] - min(nll.values())) * 100 - 100:.2f}% ({model})"
        for model, (_, nll) in compared.items()
        if "" in nll
    ]
    above = f" The perplexity with {usual} is above the lowest of its row by {', '.join(excess)}."
    return (
        f"The dev perplexity after {settings['steps']:,} steps, with other learning rates and "
        f"dropouts:\n\n{trials_table(compared, usual)}\n"
        f"All runs outside this table have {usual}.{above if excess else ''}\n\n"
    )
