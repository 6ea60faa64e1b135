"""The page of the study of the number of experts: tables, verdicts, sentences and plot."""

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from moe_lab.experiments.report import markdown_table
from moe_lab.experiments.statistics import PairedDifference, mean_difference
from moe_lab.experiments.stored import Run, core_hours, mean_curve, results_of
from moe_lab.experiments.study import (
    HOW_COMPARED,
    HOW_DECIDED,
    Claim,
    Results,
    as_change,
    claims_table,
    difference,
    mean_perplexity,
    size_cells,
    trials_table,
    tried,
    usual_options,
    widening,
)
from moe_lab.training.metrics import perplexity

__all__ = [
    "ARMS",
    "FIRST",
    "LARGE",
    "MIXTURES",
    "MODELS",
    "QUARTER",
    "TEXTS",
    "as_markdown",
    "at_best",
    "best_arms",
    "claims",
    "lengths_of",
    "plot",
]

MIXTURES = {"moe-4": 4, "moe-16": 16, "moe-64": 64, "moe-256-h": 256}  # numbers of experts
DENSE = ("moe-1-wide", "moe-1-deep", "4xlstm", "lstm-384-96")  # of equal operations
LARGE, LARGE_BASE = "moe-64-2x", "moe-64"  # a mixture of twice the operations
MODELS = (*MIXTURES, *DENSE, LARGE)
# Suffixes of the names of models that train longer, and of models with another rate or dropout.
LENGTHS = {"": 1, " x4": 4, " x8": 8}
TRIALS = {
    " rate 0.004": ["optimizer.learning_rate=4e-3"],
    " rate 0.016": ["optimizer.learning_rate=16e-3"],
    " rate 0.016 experts 0.008": [
        "optimizer.learning_rate=16e-3",
        "optimizer.expert_learning_rate=8e-3",
    ],
    " rate 0.016 experts 0.004": [
        "optimizer.learning_rate=16e-3",
        "optimizer.expert_learning_rate=4e-3",
    ],
    " rate 0.032": ["optimizer.learning_rate=32e-3"],
    " dropout 0.1": ["model.dropout=0.1"],
}
# The model, the factor of the number of steps, and the settings of each arm.
ARMS: dict[str, tuple[str, int, list[str]]] = {
    model + length + trial: (model, factor, settings)
    for trial, settings in {"": [], **TRIALS}.items()
    for length, factor in LENGTHS.items()
    for model in MODELS
}
FIRST = "moe-4"
BASES = (FIRST, "moe-1-wide", "4xlstm")  # of the changes in the table
MORE_TEXT = "more training text increases the advantage of more experts"
QUARTER = 0.25


class Kind(NamedTuple):
    """A kind of text.

    Attributes:
        title: the title of the page.
        contents: what the text contains.
    """

    title: str
    contents: str


TEXTS = {
    "sources": Kind("code and documentation", "Python code, C++ headers and documentation"),
    "prose": Kind("English prose", "English prose"),
    "languages": Kind("seven languages", "sentences of English and six other languages"),
}


def best_arms(runs: Sequence[Run]) -> dict[str, str]:
    """Returns the arm of each model and length whose settings have the lowest dev perplexity.

    The settings are compared on the seeds that all of them have. Without runs, the arm is that of
    the usual settings.
    """
    on_dev = results_of(runs, ARMS, "dev")
    names = [model + length for length, model in product(LENGTHS, MODELS)]
    return {
        name: name + min(nll, key=nll.__getitem__, default="")
        for name, (_, nll) in tried(on_dev, names, TRIALS).items()
    }


def at_best(runs: Sequence[Run], part: str = "test") -> Results:
    """Returns the runs of each model and length with its best settings, see `best_arms`."""
    results = results_of(runs, ARMS, part)
    return {name: results[arm] for name, arm in best_arms(runs).items()}


def of_length(results: Results, suffix: str) -> Results:
    """Returns the runs with one number of training steps, by model."""
    return {model: results[model + suffix] for model in MODELS}


def lengths_of(results: Results) -> list[str]:
    """Returns the suffixes of the numbers of training steps with which models can be compared.

    A mixture and another model have runs with each of them.
    """
    return [
        suffix
        for suffix in LENGTHS
        if any(results[mixture + suffix] for mixture in MIXTURES)
        and sum(bool(results[model + suffix]) for model in MODELS) > 1
    ]


def slope(results: Results) -> PairedDifference | None:
    """Fits ln(perplexity) linearly to log2(experts), for each seed that all mixtures have."""
    seeds = set.intersection(*(set(results[arm]) for arm in MIXTURES))
    doublings = [number.bit_length() - 1 for number in MIXTURES.values()]
    return mean_difference(
        [
            statistics.linear_regression(
                doublings, [results[arm][seed].test_nll for arm in MIXTURES]
            ).slope
            for seed in sorted(seeds)
        ]
    )


def gain(results: Results, arm: str, short: str, long: str) -> PairedDifference | None:
    """Computes how the difference between `arm` and FIRST changes with more training steps.

    Negative: the longer training increases the advantage of `arm` over FIRST. The unit is ln(ppl),
    paired over the seeds that all four runs have.
    """
    runs = [results[model + suffix] for suffix in (long, short) for model in (arm, FIRST)]
    seeds = set.intersection(*map(set, runs))
    values = [[each[seed].test_nll for each in runs] for seed in sorted(seeds)]
    return mean_difference([(a - b) - (c - d) for a, b, c, d in values])


def claims(results: Results, usual: Results) -> list[Claim]:
    """Returns the paper's claims; a negative difference in ln(perplexity) supports a claim.

    Claims about models without runs are left out. Each claim compares models at the greatest number
    of training steps for which it has an interval. Without an interval, it compares them at the
    greatest for which it has runs.

    Args:
        results: the runs of each model and length with its best settings, see `at_best`.
        usual: the runs with the usual settings. The claims about more text compare them, because a
            learning rate changes the beginning of the training more than its end.
    """
    lengths = reversed(lengths_of(results))
    of_lengths = [claims_of_length(results, usual, suffix) for suffix in lengths]
    rows = [
        max(rows, key=lambda row: (is_interval(row.difference), row.difference is not None))
        for rows in zip(*of_lengths, strict=True)
    ]
    for arm in [*MIXTURES][1:]:
        both = [s for s in LENGTHS if usual[arm + s].keys() & usual[FIRST + s].keys()]
        rows += [
            Claim(
                MORE_TEXT,
                f"{arm} against {FIRST}: difference with{long} minus difference {without(short)}",
                gain(usual, arm, short, long),
            )
            for short, long in pairwise(both)
        ]
    return [row for row in rows if row.difference is not None]


def is_interval(difference: PairedDifference | None) -> bool:
    """Returns whether a difference has enough seeds for an interval."""
    return difference is not None and difference.low is not None


def without(suffix: str) -> str:
    """Names the shorter training in a comparison."""
    return f"with{suffix}" if suffix else "without it"


def claims_of_length(results: Results, usual: Results, suffix: str) -> list[Claim]:
    """Returns the claims about models with the same number of training steps, see `claims`."""
    same = of_length(results, suffix)

    def row(claim: str, a: str, b: str) -> Claim:
        return Claim(claim, f"{a}{suffix} against {b}{suffix}", difference(same[a], same[b]))

    more = [*MIXTURES][1:]
    rows = [row("more experts lower the perplexity at equal operations", a, FIRST) for a in more]
    each = "each increase in the number of experts lowers the perplexity"
    rows += [row(each, a, b) for b, a in pairwise(more)]
    what = f"{FIRST}{suffix} to {more[-1]}{suffix}: change for each doubling of the experts"
    rows.append(Claim("the perplexity falls with the number of experts", what, slope(same)))
    claim = "a mixture has a lower perplexity than an equally costly dense model"
    rows += [row(claim, a, dense) for dense in DENSE for a in more]
    rows.append(row("more operations lower the perplexity of a large mixture", LARGE, LARGE_BASE))
    rows += [
        Claim(
            MORE_TEXT,
            f"{a}{suffix} against {FIRST}{suffix}: difference after all steps minus difference "
            "after 25%",
            widening(usual[a + suffix], usual[FIRST + suffix], QUARTER),
        )
        for a in more
    ]
    return rows


def changes(results: Results, model: str) -> list[str]:
    """Formats the changes of the perplexity from the models in `BASES`."""
    return [
        as_change(difference(results[model], results[base])) if base != model else ""
        for base in BASES
    ]


def spread(results: Results) -> float:
    """Returns the standard deviation of ln(perplexity) over the seeds of a model, or NaN.

    It is the root of the mean variance over the models with two seeds or more.
    """
    runs = [[run.test_nll for run in of_arm.values()] for of_arm in results.values()]
    variances = [statistics.variance(each) for each in runs if len(each) > 1]
    return statistics.fmean(variances) ** 0.5 if variances else math.nan


def spread_sentence(results: Results, on_dev: Results) -> str:
    """Compares the spread over the seeds on the test part and on the dev part."""
    if math.isnan(spread(results)):
        return ""
    return (
        "Over the seeds of a model, ln ppl has a standard deviation of "
        f"{spread(results):.3f} on the test part and {spread(on_dev):.3f} on the dev part."
    )


def found(results: Results, on_dev: Results) -> str:
    """Names the mixture with the lowest dev perplexity, and compares it on the test part."""
    names = [mixture + suffix for suffix in lengths_of(results) for mixture in MIXTURES]
    arms = [name for name in names if on_dev[name]]
    seeds = set.intersection(*(set(on_dev[arm]) for arm in arms))
    best = min(
        arms,
        key=lambda arm: mean_perplexity({seed: on_dev[arm][seed] for seed in seeds or on_dev[arm]}),
    )
    model, *_ = ARMS[best]
    suffix = best.removeprefix(model)
    gaps = [
        f"{as_change(gap)} from {base}{suffix}"
        for base in (FIRST, *DENSE)
        if base != model and (gap := difference(results[best], results[base + suffix]))
    ]
    text = f"The mixture with the lowest dev perplexity is {best}."
    return text + (f" The change of its test perplexity is {'; '.join(gaps)}." if gaps else "")


def options_of(settings: Mapping[str, Any], trial: str) -> str:
    """Names the learning rate and the dropout of a key of TRIALS, or of "", the usual settings."""
    return trial.strip() or usual_options(settings)


def search(settings: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """Shows the learning rates and dropouts of which each model has the best."""
    on_dev = results_of(runs, ARMS, "dev")
    names = [model + suffix for model, suffix in product(MODELS, LENGTHS)]
    compared = tried(on_dev, names, TRIALS)
    usual = usual_options(settings)
    if all(len(of_model.nll) < 2 for of_model in compared.values()):
        return f"Every run has {usual}; nothing was selected by the dev part.\n\n"
    return (
        "The options of each model, and of each number of steps, are those with the lowest dev "
        "perplexity in this table. A cell is the mean over the seeds of its row, and empty without "
        f"a run. A column that names no dropout has dropout {settings['model.dropout']:g}.\n\n"
        f"{trials_table(compared, usual)}\n"
    )


def as_markdown(
    name: str,
    settings: Mapping[str, Any],
    runs: Sequence[Run],
    compared: Sequence[Claim],
    command: str,
) -> str:
    """Formats the page: plot, table, verdicts, cost, command."""
    results, on_dev, best = at_best(runs), at_best(runs, "dev"), best_arms(runs)
    lengths = lengths_of(results)
    kind = TEXTS[settings["text"]]
    per_byte = settings["test_tokens"] / settings["test_bytes"]
    rows = []
    for suffix, model in product(lengths, MODELS):
        of_arm = results[model + suffix]
        if not of_arm:
            continue
        mean = statistics.fmean(run.test_nll for run in of_arm.values())
        rows.append(
            [
                model + suffix,
                options_of(settings, best[model + suffix].removeprefix(model + suffix)),
                *size_cells(next(iter(of_arm.values())).cost),
                len(of_arm),
                f"{mean_perplexity(of_arm, QUARTER):.2f}",
                f"{mean_perplexity(of_arm):.2f}",
                f"{perplexity(mean * per_byte):.4f}",
                *changes(of_length(results, suffix), model),
            ]
        )
    table = markdown_table(
        [
            "model", "options", "ops/timestep", "parameters", "seeds", "test ppl after 25%",
            "test ppl", "ppl per byte", *(f"change from {base}, 95%" for base in BASES),
        ],
        rows,
    )  # fmt: skip
    seen = settings["steps"] * settings["data.tokens_per_batch"]
    longer = "".join(f", with{suffix} {LENGTHS[suffix] * seen:,}" for suffix in lengths if suffix)
    epochs = LENGTHS[lengths[-1]] * seen / settings["train_tokens"]
    return (
        f"# More experts: {kind.title}\n\n"
        f"![learning curves, and perplexity with more experts]({name}.png)\n\n"
        "The paper finds that more experts lower the perplexity at equal operations (Figs. 2 and "
        f"3). Here the text is {kind.contents}. "
        f"{found(results, on_dev)} "
        "In the plot, a band is the 95% interval of a change, and a dashed line is a dense "
        "model.\n\n"
        f"{table}\n"
        f"The training part has {settings['train_tokens']:,} wordpieces and ends of sentences, of "
        f"a vocabulary of {settings['pieces']:,}. A run reads about {seen:,} of them{longer}. The "
        f"longest run of the table is {epochs:.2f} epochs. The test part has "
        f"{settings['test_tokens']:,} wordpieces. Operations and parameters do not "
        "include embedding and softmax. "
        f"{HOW_COMPARED} {spread_sentence(results, on_dev)}\n\n"
        f"{HOW_DECIDED} The claims about more training text compare runs with "
        f"{usual_options(settings)}.\n\n{claims_table(compared)}\n"
        f"{search(settings, runs)}"
        f"{core_hours(runs)}\n\n"
        f"```\n{command}\n```\n"
    )


def percent(difference: float) -> float:
    """Converts a difference of ln(perplexity) to a change of the perplexity in percent."""
    return 100 * math.expm1(difference)


def plot(settings: Mapping[str, Any], runs: Sequence[Run]) -> Figure:
    """Plots the mean learning curves of the longest runs, and the perplexity with more experts."""
    results, best = at_best(runs), best_arms(runs)
    lengths = lengths_of(results)
    longest = of_length(results, lengths[-1])
    figure = Figure(figsize=(10, 4.2), layout="constrained", dpi=150)
    learning, capacity = figure.subplots(1, 2)
    for model in (model for model in MODELS if longest[model]):
        points = mean_curve(runs, best[model + lengths[-1]])
        points = [(tokens / 1e6, ppl) for tokens, ppl in points]
        learning.plot(*zip(*points, strict=True), marker=".", label=model)
    learning.set(xlabel="training wordpieces (millions)", ylabel="dev perplexity", yscale="log")
    learning.yaxis.set_minor_formatter("{x:g}")
    learning.legend()
    with_first = [suffix for suffix in lengths if results[FIRST + suffix]]
    for suffix in with_first:
        seen = settings["steps"] * settings["data.tokens_per_batch"] * LENGTHS[suffix]
        same = of_length(results, suffix)
        gaps = [(n, difference(same[model], same[FIRST])) for model, n in MIXTURES.items()]
        known = [(n, gap) for n, gap in gaps if gap]
        means = [percent(gap.mean) for _, gap in known]
        label = f"after {seen / 1e6:.1f} million wordpieces"
        (line,) = capacity.plot([n for n, _ in known], means, "o-", label=label)
        ends = [
            (n, percent(gap.low), percent(gap.high))
            for n, gap in known
            if gap.low is not None and gap.high is not None
        ]
        if ends:
            capacity.fill_between(*zip(*ends, strict=True), color=line.get_color(), alpha=0.2, lw=0)
    where = capacity.get_yaxis_transform()
    for suffix, (place, dense) in product(with_first[-1:], enumerate(DENSE)):
        if gap := difference(results[dense + suffix], results[FIRST + suffix]):
            level = percent(gap.mean)
            capacity.axhline(level, lw=0.8, ls="--", color="grey")
            at = (0.02 + 0.2 * place, level)  # side by side, because levels can be equal
            capacity.annotate(dense + suffix, at, xycoords=where, fontsize=7, va="bottom")
    capacity.set_xscale("log", base=4)
    capacity.set_xticks([*MIXTURES.values()], [*map(str, MIXTURES.values())])
    capacity.set(
        xlabel="experts, at equal operations",
        ylabel=f"change of the test perplexity from {FIRST} (%)",
    )
    capacity.legend()
    return figure
