"""Compares values of w_importance and w_load, at small scale (Table 6).

    moe-lab study losses data.corpus=CORPUS
    moe-lab study losses data.corpus=CORPUS --seeds 1 2 --arms 0,0 0.1,0.1
    moe-lab study losses --report

Trains configs/small/moe-32.toml on 3.1 million words for each seed and for six settings of
w_importance,w_load. The page has the perplexity, and the experts' load balance over the last 50
training batches.

The file OUTPUT/losses.json (default: runs/results) keeps every finished run. A run that is
interrupted continues from its checkpoint in RUNS. To share the runs, start the command several
times. A run takes 3 minutes on one processor. The script also writes losses.md and .png; --report
writes them without training and without the corpus.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from moe_lab.experiments.report import markdown_table
from moe_lab.experiments.results import BALANCE_BATCHES
from moe_lab.experiments.statistics import PairedDifference
from moe_lab.experiments.stored import Report, Run, Stored, core_hours, results_of
from moe_lab.experiments.study import (
    HOW_COMPARED,
    Results,
    as_change,
    claims_data,
    difference,
    mean_perplexity,
    paired,
    verdict,
)
from moe_lab.studies._routing import perplexity_over_balance, run_study_of_routing

# The overrides of each arm. An arm is named by its w_importance,w_load.
ARMS = {
    f"{w_importance},{w_load}": (
        f"model.moe.w_importance={w_importance}",
        f"model.moe.w_load={w_load}",
    )
    for w_importance, w_load in (
        ("0", "0"), ("0.2", "0"), ("0", "0.2"), ("0.1", "0.1"), ("0.01", "0.01"), ("1", "1"),
    )
}  # fmt: skip
NONE, USUAL = "0,0", "0.1,0.1"
MARGIN = math.log(1.005)  # of "very similar quality" in ln ppl, set before the runs
COLUMNS = {
    "cv_importance": "CV(Importance)",
    "cv_load": "CV(Load)",
    "max_over_mean_load": "max/mean Load",
    "cv_tokens": "CV(tokens)",
}


class Comparison(NamedTuple):
    """A claim of the paper and the result of the study.

    Attributes:
        claim: the claim in words.
        compared: the compared settings.
        difference: the difference in ln ppl or in max/mean Load.
        shown: the difference as text.
        verdict: the verdict on the claim.
    """

    claim: str
    compared: str
    difference: PairedDifference | None
    shown: str
    verdict: str


def comparisons(results: Results) -> list[Comparison]:
    """Returns the paper's claims, but not those about models without runs, and their verdicts."""
    gap = difference(results[USUAL], results[NONE])
    claim, what = "the balancing losses lower the perplexity", f"{USUAL} against {NONE}"
    rows = [Comparison(claim, what, gap, as_change(gap), verdict(gap))]
    claim = "all nonzero settings give a similar perplexity"
    for name in ARMS:
        if name not in (NONE, USUAL):
            gap = difference(results[name], results[USUAL])
            what, judged = f"{name} against {USUAL}, within 0.5%", verdict(gap, -MARGIN, MARGIN)
            rows.append(Comparison(claim, what, gap, as_change(gap), judged))
    for claim, less, more in (
        ("a larger w_load lowers max/mean Load", NONE, "0,0.2"),
        ("larger weights lower max/mean Load", "0.01,0.01", USUAL),
        ("larger weights lower max/mean Load", USUAL, "1,1"),
        ("w_load lowers max/mean Load more than w_importance", "0.2,0", "0,0.2"),
    ):
        gap = paired(
            results[more], results[less], lambda result: result.balance["max_over_mean_load"]
        )
        shown = f"{gap:+.3f}" if gap else ""
        rows.append(Comparison(claim, f"{more} against {less}", gap, shown, verdict(gap)))
    return [row for row in rows if row.difference]


def as_markdown(stored: Stored, compared: Sequence[Comparison], command: str) -> str:
    """Formats the Markdown page: plot, Table 6 for the finished runs, verdicts, command."""
    results, settings = results_of(stored.runs, ARMS), stored.settings
    rows = []
    for name, runs in results.items():
        if not runs:
            continue
        gap = "" if name == USUAL else as_change(difference(runs, results[USUAL]))
        balance = [
            f"{statistics.fmean(r.balance[key] for r in runs.values()):.3f}" for key in COLUMNS
        ]
        ppl = f"{mean_perplexity(runs):.2f}"
        rows.append([*name.split(","), len(runs), ppl, gap, *balance])
    table = markdown_table(
        [
            "w_importance", "w_load", "seeds", "test ppl", f"change from {USUAL}, 95%",
            *COLUMNS.values(),
        ],
        rows,
    )  # fmt: skip
    n, k = settings["model.moe.num_experts"], settings["model.moe.k"]
    steps, batch = settings["steps"], settings["data.tokens_per_batch"]
    floor, ceiling = math.sqrt((1 - k / n) / (batch * k / n)), math.sqrt(n / k - 1)
    verdicts = markdown_table(
        ["claim", "compared", "difference, 95%", "verdict"],
        [[each.claim, each.compared, each.shown, each.verdict] for each in compared],
    )
    return (
        "# The weights of the balancing losses\n\n"
        "The paper finds that all nonzero weights balance the load, with almost equal perplexity. "
        "Without the losses, a few experts get nearly all words, and the perplexity is higher "
        f"(Table 6). Here a token has {k} of {n} experts.\n\n"
        "![perplexity and balance](losses.png)\n\n"
        f"{table}\n"
        f"A run has {steps:,} steps of {batch:,} tokens (words and ends of sentences); the "
        f"training part has {settings['train_tokens']:,} tokens. The last four columns are means "
        f"over the last {min(BALANCE_BATCHES, steps)} training batches, as in the paper. "
        "CV(tokens) is the coefficient of variation of the experts' token counts. Uniform random "
        f"routing gives a CV(tokens) of {floor:.3f}. Routing every token to the same {k} experts "
        f"gives a CV(tokens) of {ceiling:.2f} and a max/mean of {n / k:.0f}. {HOW_COMPARED}\n\n"
        "A claim that a value is lower is supported if the whole interval of the difference lies "
        "below zero. A claim of similar perplexity is supported if the whole interval lies within "
        "±0.5%. A claim is contradicted if the whole interval lies outside that range, and "
        f"otherwise not decided.\n\n{verdicts}\n"
        f"{core_hours(stored.runs)}\n\n"
        f"```\n{command}\n```\n"
    )


def plot(runs: Sequence[Run]) -> Figure:
    """Plots the test perplexity of each run over its max/mean Load."""
    figure, axes = perplexity_over_balance(
        runs, ARMS, lambda run: run["balance"]["max_over_mean_load"]
    )
    axes.set_xscale("log")
    axes.set(xlabel="max(Load) / mean(Load)")
    axes.legend(title="w_importance,w_load")
    return figure


def main(arguments: Sequence[str] | None = None) -> Results:
    """Runs the study and returns the finished runs."""

    def report(stored: Stored, command: str) -> Report | None:
        results = results_of(stored.runs, ARMS)
        if not results[USUAL]:
            return None
        compared = comparisons(results)
        page = as_markdown(stored, compared, command)
        return Report(page, claims_data(compared), plot(stored.runs))

    return run_study_of_routing("losses", __doc__, ARMS, [*ARMS], report, arguments)
