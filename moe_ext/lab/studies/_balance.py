"""What the studies of routers and of balancing losses report alike."""

from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moe_ext.lab.experiments.results import Result
from moe_ext.lab.experiments.study import Results
from moe_ext.lab.training.config import Config

__all__ = ["facts_of", "perplexity_over_balance"]


def facts_of(config: Config) -> dict[str, Any]:
    """Returns what the page says about the runs of a study, by name."""
    return {
        "corpus": config.data.corpus,
        "steps": config.steps,
        "tokens_per_batch": config.data.tokens_per_batch,
        "num_experts": config.model.moe.num_experts,
        "k": config.model.moe.experts_per_token,
    }


def perplexity_over_balance(
    results: Results, balance: Callable[[Result], float]
) -> tuple[Figure, Axes]:
    """Plots each run's test perplexity over a number that describes its balance."""
    figure = Figure(figsize=(7, 4.2), layout="constrained", dpi=150)
    axes = figure.subplots()
    for name, runs in results.items():
        values = [balance(run) for run in runs.values()]
        axes.plot(values, [run.perplexity for run in runs.values()], "o", label=name)
    axes.set(ylabel="test perplexity")
    return figure, axes
