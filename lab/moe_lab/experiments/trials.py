"""Other learning rates and dropouts of the models of a study, compared on the dev part."""

import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from moe_lab.experiments.arms import Arm, by_settings
from moe_lab.experiments.runs import Runs, dev_nll
from moe_lab.markdown import markdown_table
from moe_lab.training.metrics import perplexity


class Tried(NamedTuple):
    """The dev results of a model with each of its settings."""

    num_seeds: int  # with which the model has run with all of these settings
    nll: dict[str, float]  # the mean ln ppl on the dev part over these seeds, by `Arm.trial`


def tried(runs: Runs, models: Iterable[Arm]) -> dict[Arm, Tried]:
    """Compares the settings of each model on the dev part, over the seeds that all of them have.

    If they have no common seed, the settings with the fewest seeds are left out. The models are
    arms with the usual settings.
    """
    compared = {}
    for model in models:
        same = sorted((arm for arm in runs if arm.usual == model), key=by_settings([model.base]))
        by_trial = {arm.trial: runs[arm] for arm in same}
        while by_trial and not (seeds := set.intersection(*map(set, by_trial.values()))):
            del by_trial[min(reversed(by_trial), key=lambda trial: len(by_trial[trial]))]
        nll = {
            trial: statistics.fmean(dev_nll(arm_runs[seed]) for seed in seeds)
            for trial, arm_runs in by_trial.items()
        }
        compared[model] = Tried(len(seeds) if nll else 0, nll)
    return compared


def trials_table(compared: Mapping[Arm, Tried], usual: str) -> str:
    """Formats the dev perplexities as a Markdown table; `usual` names the usual settings."""
    endings = dict.fromkeys(trial for _, nll in compared.values() for trial in nll)
    rows = [
        [model, seeds, *(f"{perplexity(nll[end]):.2f}" if end in nll else "" for end in endings)]
        for model, (seeds, nll) in compared.items()
        if nll
    ]
    return markdown_table(["model", "seeds", *(end or usual for end in endings)], rows)


def usual_as_text(settings: Mapping[str, Any]) -> str:
    """Names the learning rate and the dropout that the runs of the models share."""
    return f"rate {settings['optimizer.learning_rate']:g}, dropout {settings['model.dropout']:g}"


def trials(settings: Mapping[str, Any], runs: Runs, models: Iterable[str]) -> str:
    """Compares learning rates and dropouts on the dev part; "" if no model has run with another.

    A row is over the seeds with which a model has run with all settings that were tried with it.
    """
    usual = usual_as_text(settings)
    compared = {
        model: result
        for model, result in tried(runs, map(Arm, models)).items()
        if result.nll.keys() - {""}
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
        f"All runs outside this table have {usual}.{above if excess else ''}"
    )
