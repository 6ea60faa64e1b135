"""The page of the study of translation: tables, verdicts, sentences and plot."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from moe_lab.experiments.report import markdown_table
from moe_lab.experiments.statistics import PairedDifference, mean_difference
from moe_lab.experiments.stored import Run, core_hours, mean_curve, results_of
from moe_lab.experiments.study import (
    HOW_COMPARED,
    HOW_DECIDED,
    as_change,
    difference,
    mean_perplexity,
    size_cells,
    trials,
    verdict,
)
from moe_lab.training.metrics import perplexity

__all__ = [
    "ARMS",
    "BLEU",
    "CLAIM_HEADER",
    "DECIDED",
    "MIXTURE",
    "MODELS",
    "NEAR",
    "TRIALS",
    "as_markdown",
    "claim_cells",
    "comparisons",
    "convergence",
    "paragraph",
    "plot",
]

MIXTURE, BALANCED, DENSE, NONE = "moe-32", "moe-32-balanced", "dense", "none"
MODELS = (MIXTURE, BALANCED, DENSE, NONE)
TRIALS = {  # suffixes of the names of models with another learning rate or dropout
    " rate 0.002": "optimizer.learning_rate=2e-3",
    " rate 0.008": "optimizer.learning_rate=8e-3",
    " dropout 0.1": "model.dropout=0.1",
    " dropout 0.3": "model.dropout=0.3",
}
# The model and the settings of each arm.
ARMS: dict[str, tuple[str, list[str]]] = {model: (model, []) for model in MODELS}
ARMS |= {m + suffix: (m, [setting]) for suffix, setting in TRIALS.items() for m in MODELS}
# A test sentence is a near duplicate if it has more than this share of word trigrams in common.
NEAR = 0.8
# BLEU of Transformer-Tiny in Wu et al. (2021, arXiv 2105.14462), by the name of the page.
_PUBLISHED = {"translation_captions_en-de": 41.02, "translation_captions_en-fr": 61.80}

# Sentences and table of the pages of both studies of translation.
BLEU = "BLEU is sacreBLEU's score of a beam search with the penalties of Wu et al. (2016)."
DECIDED = f"{HOW_DECIDED} For BLEU, above and below are exchanged."
CLAIM_HEADER = ["claim", "compared", "perplexity, 95%", "verdict", "BLEU, 95%", "verdict"]


class Comparison(NamedTuple):
    """A claim about two models, with the differences between them over paired seeds.

    Attributes:
        claim: the claim in words.
        compared: the two models.
        difference: the difference in ln(perplexity); negative if the claim holds.
        bleu: the difference in BLEU; positive if the claim holds.
    """

    claim: str
    compared: str
    difference: PairedDifference | None
    bleu: PairedDifference | None


def comparisons(runs: Sequence[Run]) -> list[Comparison]:
    """Tests the claims of the paper for both gates."""
    results = results_of(runs, ARMS)
    bleu: dict[str, dict[int, float]] = {arm: {} for arm in ARMS}
    for run in runs:
        bleu[run["arm"]][run["seed"]] = run["bleu"]
    return [
        Comparison(
            claim,
            f"{arm} against {other}",
            difference(results[arm], results[other]),
            mean_difference(
                [bleu[arm][seed] - bleu[other][seed] for seed in bleu[arm] if seed in bleu[other]]
            ),
        )
        for claim, other in (
            ("mixtures translate better than a model without them", NONE),
            ("mixtures translate better than dense layers with equal operations", DENSE),
        )
        for arm in (MIXTURE, BALANCED)
    ]


def claim_cells(
    claim: str, compared: str, difference: PairedDifference | None, bleu: PairedDifference | None
) -> list[str]:
    """Formats a claim with its verdicts by perplexity and by BLEU, for a table."""
    return [
        claim,
        compared,
        as_change(difference),
        verdict(difference),
        "" if bleu is None else f"{bleu:+.2f}",
        verdict(bleu, 0.0, math.inf),
    ]


def comparisons_table(compared: Iterable[Comparison]) -> str:
    """Formats the claims about models that have runs."""
    rows = [claim_cells(*each) for each in compared if each.difference is not None]
    return f"{DECIDED}\n\n{markdown_table(CLAIM_HEADER, rows)}" if rows else ""


def table(settings: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """Formats size, perplexity and BLEU of the models, with one row per model.

    There is a BLEU without near duplicates if these are at least 1% of the test sentences.
    """
    results = results_of(runs, ARMS)
    scores = {"bleu": "BLEU", "lowercased_bleu": "BLEU, lowercased"}
    if len(settings["near_duplicates"]) >= 0.01 * settings["test_pairs"]:
        scores["distinct_bleu"] = "BLEU without near duplicates"
    rows = []
    for name in MODELS:
        if not (of_arm := results[name]):
            continue
        bleu = [[run[key] for run in runs if run["arm"] == name] for key in scores]
        rows.append(
            [
                name,
                *size_cells(next(iter(of_arm.values())).cost),
                len(of_arm),
                f"{mean_perplexity(of_arm):.3f}",
                as_change(difference(of_arm, results[NONE])) if name != NONE else "",
                *("" if None in values else f"{statistics.fmean(values):.2f}" for values in bleu),
            ]
        )
    header = [
        "model", "ops/timestep", "parameters", "seeds", "test ppl",
        "change from none, 95%", *scores.values(),
    ]  # fmt: skip
    return markdown_table(header, rows)


def published(name: str) -> str:
    """States the BLEU of another model on the same test part; "" if none is known."""
    if name not in _PUBLISHED:
        return ""
    return (
        f"On test_2016_flickr of Multi30k, Transformer-Tiny has BLEU {_PUBLISHED[name]:.2f} "
        "without images (Wu et al. 2021, arXiv 2105.14462). Its text was prepared in another way, "
        "so a comparison, best with the lowercased BLEU, is rough."
    )


def balance(runs: Sequence[Run]) -> str:
    """Describes the masks of the strictly balanced gates; "" without a run of them."""
    strict = [run for run in runs if run["arm"] == BALANCED]
    if not strict:
        return ""

    def mean(key: str) -> str:
        values = (
            100 * statistics.fmean(run["masks"][key][layer] for run in strict) for layer in (0, 1)
        )
        return " and ".join(f"{value:.1f}%" for value in values)

    by_batch = statistics.fmean(run["masks"]["nll_batchwise"] for run in strict)
    by_threshold = statistics.fmean(run["dev"][-1][1] for run in strict)
    return (
        f"The gates of {BALANCED} are strictly balanced. The final dev perplexity was "
        f"{perplexity(by_threshold):.3f} with the threshold mask and {perplexity(by_batch):.3f} "
        "with the batchwise mask. In the last training batches, the two masks differed in "
        f"{mean('mask_disagreement')} of the assignments in encoder and decoder. The "
        f"batchwise mask gave no expert to {mean('share_without_expert')} of the tokens.\n"
    )


def convergence(runs: Sequence[Run], models: Iterable[str]) -> str:
    """Compares the dev perplexity at the end with that after about 90% of the training.

    All runs of the models are evaluated after the same steps, with nearly equal numbers of tokens.
    """
    share, changes = 0.0, []
    for name in models:
        curve = mean_curve(runs, name)
        earlier = [(tokens, ppl) for tokens, ppl in curve if tokens <= 0.905 * curve[-1][0]]
        if earlier:
            (before, then), (end, now) = earlier[-1], curve[-1]
            share = (end - before) / end
            changes.append(f"{name} {100 * (now / then - 1):+.1f}%")
    if not changes:
        return ""
    return (
        f"Change of the dev perplexity in the last {share:.0%} of the training: "
        f"{', '.join(changes)}."
    )


def crossover(settings: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """Says from which epoch on a mixture has a lower dev perplexity than the dense layers.

    The curves are means over the seeds that both models have.
    """
    seeds = {
        name: {run["seed"] for run in runs if run["arm"] == name}
        for name in (MIXTURE, BALANCED, DENSE)
    }
    found = []
    for name in (MIXTURE, BALANCED):
        if not (both := seeds[name] & seeds[DENSE]):
            continue
        curves = (mean_curve([r for r in runs if r["seed"] in both], n) for n in (name, DENSE))
        first = None  # tokens of training at the first evaluation after which the mixture is ahead
        for (tokens, ours), (_, theirs) in zip(*curves, strict=True):
            if ours >= theirs:
                first = None
            elif first is None:
                first = tokens
        found.append(
            f"At the end, {name} does not have a lower dev perplexity than {DENSE}."
            if first is None
            else f"From epoch {first / settings['train_tokens']:.1f} on, {name} has a lower dev "
            f"perplexity than {DENSE}."
        )
    return " ".join(found)


def shown(settings: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """Formats ten evenly spaced sentences of the test part and their translations."""
    first = {run["arm"]: run["shown"] for run in reversed(runs)}  # runs are in the order of seeds
    names = [name for name in MODELS if name in first]
    width = max(map(len, ["reference", *names]))
    lines = []
    for number, (source, reference) in enumerate(settings["shown"]):
        all_of_it = {"source": source, "reference": reference}
        all_of_it |= {name: first[name][number] for name in names}
        lines += [f"    {name:<{width}}  {sentence}" for name, sentence in all_of_it.items()]
        lines.append("")
    return "\n".join(lines)


def paragraph(*sentences: str) -> str:
    """Joins sentences and leaves out empty ones."""
    return " ".join(filter(None, sentences))


def as_markdown(
    name: str,
    contents: str,
    settings: Mapping[str, Any],
    runs: Sequence[Run],
    compared: Sequence[Comparison],
    command: str,
) -> str:
    """Formats the page: plot, table, verdicts, translations, cost, command."""
    signatures = ", ".join(sorted({f"`{run['signature']}`" for run in runs}))
    lines = [
        f"# Mixtures of experts in translation, {settings['data.pairs'][0]}\n",
        f"![dev perplexity against source words]({name}.png)\n",
        "In the paper, a mixture of 2,048 experts has BLEU 40.35 from English to French and 26.03 "
        "to German. GNMT, a model without experts that needs more operations, has BLEU 39.22 and "
        "24.91 (Tables 2 and 3).\n",
        table(settings, runs),
        comparisons_table(compared),
        f"- Corpus: {contents}. "
        f"The training part has {settings['train_pairs']:,} sentence pairs "
        f"({settings['source_words']:,} source words, {settings['train_tokens']:,} target "
        f"wordpieces). The test part has {settings['test_pairs']:,} pairs; "
        f"{len(settings['near_duplicates']):,} of them are near duplicates. A test sentence is a "
        f"near duplicate if at least {NEAR:.0%} of the word trigrams of its source occur in one "
        f"source of the training part. Both languages share one vocabulary of "
        f"{settings['pieces']:,} wordpieces.",
        paragraph(
            f"- Training: {settings['steps']:,} steps of about "
            f"{settings['data.tokens_per_batch']:,} source and target wordpieces, with the "
            f"learning rate {settings['optimizer.learning_rate']:g} and dropout "
            f"{settings['model.dropout']:g}.",
            convergence(runs, MODELS),
            crossover(settings, runs),
        ),
        f"- Perplexity is per target wordpiece of the test part. {HOW_COMPARED}",
        paragraph(
            f"- {BLEU}",
            published(name),
            f"Signature of sacreBLEU: {signatures}.",
        ),
        "- Operations include the softmax; parameters include neither embedding nor softmax.\n",
        trials(settings, results_of(runs, ARMS, "dev"), MODELS, TRIALS).removesuffix("\n"),
        balance(runs),
        "These are ten evenly spaced sentences of the test part, and their translations by the "
        "first run of each model:\n",
        shown(settings, runs),
        f"{core_hours(runs)}\n",
        f"```\n{command}\n```\n",
    ]
    return "\n".join(line for line in lines if line)


def plot(settings: Mapping[str, Any], runs: Sequence[Run]) -> Figure:
    """Plots dev perplexity against source words processed, one curve for each model (Fig. 4)."""
    figure = Figure(figsize=(6, 4.2), layout="constrained", dpi=150)
    axes = figure.subplots()
    words_per_piece = settings["source_words"] / settings["train_tokens"]
    for name in MODELS:
        points = [(tokens * words_per_piece / 1e6, ppl) for tokens, ppl in mean_curve(runs, name)]
        if points:
            axes.plot(*zip(*points, strict=True), label=name, lw=1.2)
    axes.set(xlabel="source words processed, millions", ylabel="dev perplexity", yscale="log")
    axes.legend()
    return figure
