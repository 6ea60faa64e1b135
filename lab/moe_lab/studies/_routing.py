"""What the studies of routers and of balancing losses share: their runs and their plot."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moe_lab.experiments.results import BALANCE_BATCHES, train_and_test
from moe_lab.experiments.stored import (
    Report,
    Run,
    Stored,
    changed_options,
    commands_of,
    record_of,
    report_stored,
    results_of,
    run_missing,
    shared_settings,
)
from moe_lab.experiments.study import Results, config_of_run, study_parser
from moe_lab.training.config import Config, read_config
from moe_lab.training.device import set_up_for
from moe_lab.training.logging import read_metrics
from moe_lab.training.metrics import perplexity
from moe_lab.training.text import load_text

__all__ = ["perplexity_over_balance", "run_study_of_routing"]

_SETTINGS = (
    "num_threads=1",
    "steps=1200",
    "data.vocab_size=10000",
    "model.num_sampled=1024",
    "optimizer.learning_rate=8e-3",
    "log.eval_every=0",
    "log.save_every=400",
    f"log.log_every={BALANCE_BATCHES}",
    "log.tensorboard=false",
)


def run_study_of_routing(
    name: str,
    description: str | None,
    arms: Mapping[str, Sequence[str]],
    usual: Sequence[str],
    report_of: Callable[[Stored, str], Report | None],
    arguments: Sequence[str] | None,
) -> Results:
    """Trains small/moe-32 with several options of its MoE layer, and reports.

    Args:
        name: the name of the study and of its files.
        description: the docstring of the study.
        arms: the overrides of each arm.
        usual: the arms without --arms, the first of which has options that all runs share.
        report_of: function from the stored runs and the commands to the report; None if there is
            nothing to report yet.
        arguments: the arguments of the command; None: those of the process.

    Returns:
        The finished runs by arm and seed.
    """
    parser = study_parser(description, name, [*arms])
    parser.set_defaults(arms=[*usual])
    options = parser.parse_intermixed_args(arguments)
    path = options.output / f"{name}.json"

    def config_of(arm: str, seed: int, overrides: Sequence[str]) -> Config:
        config = read_config("small/moe-32", [*_SETTINGS, *overrides, *arms[arm]], Config)
        return config_of_run(config, options.runs, arm, seed)

    if not options.report:
        config = config_of(usual[0], 0, options.overrides)
        set_up_for(config)
        text = load_text(config.data)

        def run(arm: str, seed: int) -> Run:
            result = train_and_test(config_of(arm, seed, options.overrides), text)
            (load,) = read_metrics(result.run, "train")[-1]["load"]  # of the only MoE layer
            return record_of(result) | {"load": load}

        run_missing(
            [(arm, seed) for seed in options.seeds for arm in options.arms],
            run,
            path,
            {"train_tokens": text.train.num_tokens, **shared_settings(config, text)},
            [*arms],
            Path(options.runs),
        )

    def report(stored: Stored) -> Report | None:
        changed = changed_options(stored.settings, config_of(usual[0], 0, []))
        command = ["moe-lab", "study", name, "data.corpus=CORPUS", *changed]
        return report_of(stored, commands_of(command, stored.runs, usual))

    return results_of(report_stored(path, report), arms)


def perplexity_over_balance(
    runs: Sequence[Run], arms: Iterable[str], balance: Callable[[Run], float]
) -> tuple[Figure, Axes]:
    """Plots the test perplexity of each run over a number that describes its balance."""
    figure = Figure(figsize=(7, 4.2), layout="constrained", dpi=150)
    axes = figure.subplots()
    for arm in arms:
        of_arm = [run for run in runs if run["arm"] == arm]
        axes.plot(
            [balance(run) for run in of_arm],
            [perplexity(run["test_nll"]) for run in of_arm],
            "o",
            label=arm,
        )
    axes.set(ylabel="test perplexity")
    return figure, axes
