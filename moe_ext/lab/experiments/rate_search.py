"""Searches the peak learning rate of each model of a study.

Every model trains with every rate for the first seed. The other seeds use the rate with the lowest
dev perplexity, so all models have the same search.
"""

import argparse
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from moe_ext.lab.experiments.report import markdown_table
from moe_ext.lab.experiments.study import (
    Results,
    command_of,
    config_of_run,
    has_diverged,
    run_study,
)
from moe_ext.lab.training.config import AnyConfig
from moe_ext.lab.training.logging import read_metrics
from moe_ext.lab.training.metrics import perplexity
from moe_ext.lab.training.text import Text

RATES = [4e-3, 8e-3, 1.6e-2]  # peak learning rates to try

Model: TypeAlias = tuple[str, float]  # a name and the peak learning rate


def parse_with_rates(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Parses the arguments of a study with the further option --rates.

    Ends the script with an error if an override sets the learning rate.

    Args:
        parser: the parser of `moe_ext.lab.experiments.study.study_parser`.
        arguments: the arguments of the script; None: those of the process.
    """
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        choices=RATES,
        default=RATES,
        help="peak learning rates to try",
    )
    options = parser.parse_intermixed_args(arguments)
    if any(change.startswith("optimizer.learning_rate=") for change in options.overrides):
        parser.error("optimizer.learning_rate must be omitted; give --rates instead")
    return options


def command_with_rates(name: str, options: argparse.Namespace) -> str:
    """Formats the command of a study as `study.command_of`, and adds --rates."""
    rates = "" if options.rates == RATES else f" --rates {' '.join(map(str, options.rates))}"
    return command_of(name, options) + rates


def rates_table(dev_nll: Mapping[str, Mapping[float, float]]) -> str:
    """Formats the dev perplexities of `runs_at_best_rates` as a Markdown table."""
    rows = [
        [name, *(f"{perplexity(nll[rate]):.2f}" if rate in nll else "" for rate in RATES)]
        for name, nll in dev_nll.items()
        if nll
    ]
    return markdown_table(["model", *(f"{rate:g}" for rate in RATES)], rows)


def runs_at_best_rates(
    configs: Mapping[Model, AnyConfig],
    options: argparse.Namespace,
    text: Text,
    shares: Sequence[float] = (),
) -> tuple[Results, dict[str, dict[float, float]]]:
    """Trains the models, and selects the best learning rate of each.

    Args:
        configs: the configuration of each model at each of `RATES`.
        options: the arguments of the study, from `parse_with_rates`.
        text: the encoded corpus.
        shares: see `moe_ext.lab.experiments.study.run_study`.

    Returns:
        Each model's finished runs at its best rate, and its dev nats per token by rate.
    """
    asked = [] if options.report else options.arms
    models = list(dict.fromkeys(name for name, _ in configs))

    def runs_of(chosen: Iterable[Model], seeds: Sequence[int], train: Iterable[Model]) -> Results:
        arms = {_at_rate(*model): configs[model] for model in chosen}
        names = [_at_rate(*model) for model in train]
        return run_study(arms, seeds, text, options.runs, shares, names)

    trials = itertools.product(asked, options.rates)
    first_runs = runs_of(configs, options.seeds[:1], trials)
    dev_nll = {
        name: {
            rate: read_metrics(run.run, "dev")[-1]["nll"]
            for rate in RATES
            for run in first_runs[_at_rate(name, rate)].values()
        }
        for name in models
    }

    def tried(name: str, rate: float) -> bool:
        config, arm = configs[name, rate], _at_rate(name, rate)
        run = config_of_run(config, options.runs, arm, options.seeds[0])
        return rate in dev_nll[name] or has_diverged(run)

    best = {name: min(nll, key=nll.__getitem__) for name, nll in dev_nll.items() if nll}
    # Another instance of this command may still try a rate. That instance then trains the other
    # seeds of the model too.
    train = [
        (name, best[name])
        for name in asked
        if name in best and all(tried(name, rate) for rate in options.rates)
    ]
    runs = runs_of(best.items(), options.seeds, train)
    results = {name: runs[_at_rate(name, best[name])] if name in best else {} for name in models}
    return results, dev_nll


def _at_rate(name: str, rate: float) -> str:
    """Returns the name of the runs of a model with the peak learning rate `rate`."""
    return f"{name}-{rate:g}"
