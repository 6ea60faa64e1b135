"""The page of the study of one model for several language pairs: tables, verdicts and plot."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from moe_lab.experiments.report import markdown_table
from moe_lab.experiments.statistics import PairedDifference, mean_difference
from moe_lab.experiments.stored import Run, core_hours, results_of
from moe_lab.experiments.study import size_cells, trials
from moe_lab.studies._translation_page import (
    BLEU,
    CLAIM_HEADER,
    DECIDED,
    TRIALS,
    claim_cells,
    convergence,
    paragraph,
)
from moe_lab.training.metrics import perplexity

__all__ = [
    "DENSE",
    "MIXTURE",
    "MODELS",
    "OVERSAMPLED",
    "SHORT",
    "SINGLE",
    "TRIED",
    "arms_of",
    "as_markdown",
    "comparisons",
    "least_text",
    "model_of",
    "of_models",
    "plot",
]

MIXTURE, DENSE, OVERSAMPLED = "moe", "dense", "moe-oversampled"
SINGLE, SHORT = "single", "single-short"  # a model of each language pair
MODELS = (MIXTURE, DENSE, SINGLE, SHORT, OVERSAMPLED)
ATTENDS = " attends language"
_ENDINGS = {  # the options of arms whose names end so
    **TRIALS,
    ATTENDS: "model.attend_language=true",
    f"{ATTENDS}, rate 0.002": "model.attend_language=true optimizer.learning_rate=2e-3",
    f"{ATTENDS}, rate 0.008": "model.attend_language=true optimizer.learning_rate=8e-3",
}
TRIED = {  # the model and the options of these arms
    model + ending: (model, *settings.split())
    for ending, settings in _ENDINGS.items()
    for model in (MIXTURE, DENSE)
}


class Figures(NamedTuple):
    """The results of a run on the test part of one language pair.

    Attributes:
        nll: nats per target piece.
        bleu: sacreBLEU's score.
    """

    nll: float
    bleu: float


OfPairs = Mapping[str, Mapping[int, Figures]]  # of a model, by language pair and seed


class Comparison(NamedTuple):
    """A claim about two models, with the differences between them over the language pairs.

    Attributes:
        claim: the claim in words.
        compared: the two models.
        difference: the difference in ln(perplexity), mean over num_pairs, paired over the seeds;
            None if no seed has all language pairs; negative if the claim holds.
        bleu: the difference in BLEU likewise; positive if the claim holds.
        num_pairs: the number of language pairs that both models have.
        lower_perplexity: the number of language pairs with a lower perplexity of the first model.
        higher_bleu: the number of language pairs with a higher BLEU of the first model.
    """

    claim: str
    compared: str
    difference: PairedDifference | None
    bleu: PairedDifference | None
    num_pairs: int
    lower_perplexity: int
    higher_bleu: int


def arms_of(models: Iterable[str], pairs: Sequence[str]) -> list[str]:
    """Returns the arms of the models; a separate model of each language pair is an arm."""
    return [
        arm
        for model in models
        for arm in (
            [f"{model} {languages}" for languages in pairs] if model in (SINGLE, SHORT) else [model]
        )
    ]


def of_models(runs: Sequence[Run]) -> list[Run]:
    """Leaves out the runs with other options."""
    return [run for run in runs if run["arm"] not in TRIED]


def model_of(arm: str) -> str:
    """Returns the arm of a run, without the language pair if the model is of a single one."""
    model, _, _ = arm.partition(" ")
    return model if model in (SINGLE, SHORT) else arm


def least_text(train_pairs: Mapping[str, int]) -> list[str]:
    """Returns the two language pairs with the fewest training sentences."""
    return sorted(train_pairs, key=lambda languages: train_pairs[languages])[:2]


def attention_table(runs: Sequence[Run]) -> str:
    """Compares the attention on ``<2xx>`` with the dev perplexity; "" if no run attends to it."""
    cells: dict[str, dict[int, str]] = defaultdict(dict)
    for run in runs:
        if model_of(run["arm"]) not in (SINGLE, SHORT):
            weight = run.get("weight_of_language")
            shown = "not measured" if weight is None else f"{weight:.2f}"
            dev = perplexity(run["dev"][-1][1])
            cells[run["arm"]][run["seed"]] = f"{dev:.2f} ({shown})"
    if not any(ATTENDS in arm for arm in cells):
        return ""
    seeds = sorted(set().union(*cells.values()))
    rows = [[arm, *(of_seed.get(seed, "") for seed in seeds)] for arm, of_seed in cells.items()]
    table = markdown_table(["model", *(f"seed {seed}" for seed in seeds)], rows)
    return (
        "In a model of several languages, each source begins with the token `<2xx>` of its target "
        "language. Where the attention sees this token, it can get stuck on it, and the perplexity "
        "then varies more between seeds than between models. No claim is made about these runs. "
        "This table shows the dev perplexity at the end, and in parentheses the mean attention "
        "weight of `<2xx>`:\n\n"
        f"{table}\n"
    )


def figures(runs: Sequence[Run]) -> dict[str, dict[str, dict[int, Figures]]]:
    """Collects the results of finished runs by model, language pair and seed."""
    found: dict[str, dict[str, dict[int, Figures]]] = defaultdict(dict)
    for run in runs:
        of_model = found[model_of(run["arm"])]
        for languages, values in run["pairs"].items():
            of_model.setdefault(languages, {})[run["seed"]] = Figures(**values)
    return found


def means(of_seeds: Mapping[int, Figures]) -> Figures:
    """Returns the means over the seeds."""
    return Figures(*map(statistics.fmean, zip(*of_seeds.values(), strict=True)))


_CLAIMS = (  # in the mean over the language pairs
    (MIXTURE, DENSE, "one mixture translates better than one dense model"),
    (MIXTURE, SINGLE, "one mixture translates better than a dense model for each language pair"),
    (MIXTURE, SHORT, "the same, for as much text of each language pair"),
    (OVERSAMPLED, MIXTURE, "oversampling improves the mixture"),
)


def comparison(
    found: Mapping[str, OfPairs], model: str, other: str, claim: str
) -> Comparison | None:
    """Compares two models over the language pairs and seeds that both have; None without any."""
    both = []  # the results of the two models for a language pair and the same seeds
    for languages, ours in found[model].items():
        theirs = found[other].get(languages, {})
        if seeds := sorted(ours.keys() & theirs.keys()):
            both.append([{seed: each[seed] for seed in seeds} for each in (ours, theirs)])
    if not both:
        return None
    of_all_pairs = sorted(set.intersection(*(set(ours) for ours, _ in both)))
    compared = [(means(ours), means(theirs)) for ours, theirs in both]

    def mean_over_pairs(value: Callable[[Figures], float]) -> PairedDifference | None:
        return mean_difference(
            [
                statistics.fmean(value(ours[seed]) - value(theirs[seed]) for ours, theirs in both)
                for seed in of_all_pairs
            ]
        )

    return Comparison(
        claim,
        f"{model} against {other}",
        mean_over_pairs(lambda each: each.nll),
        mean_over_pairs(lambda each: each.bleu),
        len(both),
        sum(ours.nll < theirs.nll for ours, theirs in compared),
        sum(ours.bleu > theirs.bleu for ours, theirs in compared),
    )


def comparisons(runs: Sequence[Run]) -> list[Comparison]:
    """Tests the claims about arms that both have runs."""
    found = figures(runs)
    compared = (comparison(found, *claim) for claim in _CLAIMS)
    return [each for each in compared if each is not None]


def comparisons_table(compared: Iterable[Comparison]) -> str:
    """Formats the claims, and the language pairs in which the first model is better."""
    rows = [
        [
            *claim_cells(each.claim, each.compared, each.difference, each.bleu),
            f"{each.lower_perplexity} of {each.num_pairs}",
            f"{each.higher_bleu} of {each.num_pairs}",
        ]
        for each in compared
    ]
    if not rows:
        return ""
    header = [*CLAIM_HEADER, "lower perplexity", "higher BLEU"]
    return (
        f"{DECIDED} The claims are about the mean over the language pairs. The last two columns "
        f"count the pairs in which the first model is better.\n\n{markdown_table(header, rows)}\n"
    )


def table(train_pairs: Mapping[str, int], runs: Sequence[Run]) -> str:
    """Formats perplexity and BLEU of each model, one row for each language pair."""
    found = figures(runs)
    models = [model for model in MODELS if found[model]]
    rows = []
    for languages, size in train_pairs.items():
        cells = [languages, f"{size:,}"]
        for model in models:
            if of_seeds := found[model].get(languages):
                mean = means(of_seeds)
                cells += [f"{perplexity(mean.nll):.2f}", f"{mean.bleu:.1f}"]
            else:
                cells += ["", ""]
        rows.append(cells)
    header = ["languages", "training pairs"]
    for model in models:
        header += [f"{model}: ppl", "BLEU"]
    return markdown_table(header, rows)


def sizes_of_models(runs: Sequence[Run], arms: Sequence[str]) -> str:
    """Formats the size and the training of the models, one row for each kind of model."""
    results = results_of(runs, arms)
    rows = {}
    for run in runs:
        model = model_of(run["arm"])
        rows[model] = [
            model,
            *size_cells(results[run["arm"]][run["seed"]].cost),
            f"{run['steps']:,}",
            f"{run['learning_rate']:g}",
            len({each["seed"] for each in runs if model_of(each["arm"]) == model}),
        ]
    header = ["model", "ops/timestep", "parameters", "steps", "peak learning rate", "seeds"]
    return markdown_table(header, [*rows.values()])


def as_markdown(
    name: str,
    contents: str,
    settings: Mapping[str, Any],
    runs: Sequence[Run],
    compared: Sequence[Comparison],
    command: str,
) -> str:
    """Formats the page: plot, tables, verdicts, cost, command."""
    signatures = sorted({f"`{each}`" for run in runs for each in run["signatures"]})
    signature = f"Signature of sacreBLEU: {signatures[0]}"
    if len(signatures) > 1:
        signature = f"Signatures of sacreBLEU: {', '.join(signatures)}; tok:char is for Japanese"
    arms = arms_of((*MODELS, *TRIED), [*settings["train_pairs"]])
    results = results_of(runs, arms, "dev")
    all_runs, runs = runs, of_models(runs)
    models = {model_of(run["arm"]) for run in runs}
    training = [
        f"- Training: steps of about {settings['data.tokens_per_batch']:,} source and target "
        f"wordpieces, with dropout {settings['model.dropout']:g}."
    ]
    if SINGLE in models:
        training.append(
            f"`{SINGLE}` stands for dense models of one language pair each. They read about twice "
            f"as much text of their pair as `{MIXTURE}`."
        )
    if SHORT in models:
        training.append(f"`{SHORT}` reads about as much text of its pair.")
    if OVERSAMPLED in models:
        training.append(
            f"`{OVERSAMPLED}` sees all language pairs equally often, `{MIXTURE}` in their natural "
            "proportions."
        )
    training.append(convergence(runs, [MIXTURE, DENSE]))
    return (
        "# One model for all language pairs\n\n"
        f"![dev perplexity against steps]({name}.png)\n\n"
        "In the paper, one mixture for twelve language pairs has a higher BLEU than one model "
        "without experts in 11 of 12 pairs. Models of a single language pair see more text of "
        "their pair. Against these, the mixture has a higher BLEU in 8 of 12 pairs (Table 5).\n\n"
        f"{sizes_of_models(runs, arms)}\n{table(settings['train_pairs'], runs)}\n"
        f"{comparisons_table(compared)}"
        f"- Corpus: {contents}. All languages share one vocabulary of {settings['pieces']:,} "
        "wordpieces.\n"
        f"{paragraph(*training)}\n"
        "- Perplexity is per target wordpiece of the test part, and exp of the mean of "
        "ln(perplexity) over seeds. A difference is the mean over the language pairs, and over "
        "pairs of runs with the same seed. With three seeds or more, its 95% t interval over the "
        "seeds follows in brackets.\n"
        f"- {BLEU} {signature}.\n"
        "- Operations include the softmax; parameters include neither embedding nor softmax.\n\n"
        f"{trials(settings, results, (MIXTURE, DENSE), TRIALS)}"
        f"{attention_table(all_runs)}"
        f"{core_hours(all_runs)}\n\n"
        f"```\n{command}\n```\n"
    )


def plot(settings: Mapping[str, Any], runs: Sequence[Run]) -> Figure:
    """Plots dev perplexity against steps for the two language pairs with the least text."""
    panels = least_text(settings["train_pairs"])
    figure = Figure(figsize=(12, 4.2), layout="constrained", dpi=150)
    axes = figure.subplots(1, len(panels), squeeze=False)
    for panel, languages in zip(axes[0], panels, strict=True):
        # The first seed of each model.
        curves = {
            model_of(run["arm"]): run["perplexity"][languages]
            for run in reversed(runs)
            if languages in run["perplexity"]
        }
        for model in (model for model in MODELS if model in curves):
            panel.plot(*zip(*curves[model], strict=True), label=model, lw=1.2)
        panel.set(xlabel="steps", ylabel="dev perplexity", title=languages, yscale="log")
        panel.legend()
    return figure
