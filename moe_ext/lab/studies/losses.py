"""Compares values of w_importance and w_load, at small scale (Table 6).

    python scripts/studies/losses.py data.corpus=path/to/text
    python scripts/studies/losses.py data.corpus=path/to/text --seeds 1 2 --arms 0,0 0.1,0.1
    python scripts/studies/losses.py --report data.corpus=path/to/text

Trains configs/small/moe-32.toml on 3.1 million words for each seed and for six settings of
w_importance,w_load. Writes losses.md, .json and .png to the folder OUTPUT (default: docs/results),
with perplexity, and with the experts' load balance over the last 50 training batches.

A run takes 3 minutes on one processor. To share the runs, start the same command several times with
the same --runs. --report writes the page without training.
"""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from moe_ext.lab.experiments.report import markdown_table, write_report
from moe_ext.lab.experiments.results import BALANCE_BATCHES
from moe_ext.lab.experiments.study import (
    HOW_COMPARED,
    SMALL,
    Results,
    as_change,
    as_data,
    command_of,
    difference,
    mean_perplexity,
    paired,
    run_study,
    study_parser,
    verdict,
)
from moe_ext.lab.studies._balance import facts_of, perplexity_over_balance
from moe_ext.lab.training.config import Config, read_config
from moe_ext.lab.training.device import set_up_for
from moe_ext.lab.training.text import load_text

ARMS = ("0,0", "0.2,0", "0,0.2", "0.1,0.1", "0.01,0.01", "1,1")  # w_importance,w_load
NONE, USUAL = "0,0", "0.1,0.1"
SETTINGS = (*SMALL, "steps=1200", "log.eval_every=0", "log.save_every=400")
MARGIN = math.log(1.005)  # of "very similar quality" in ln ppl, set before the runs
COLUMNS = {
    "cv_importance": "CV(Importance)",
    "cv_load": "CV(Load)",
    "max_over_mean_load": "max/mean Load",
    "cv_tokens": "CV(tokens)",
}


def claims(results: Results) -> list[tuple[str, str, str, str]]:
    """Returns the rows of the table of claims: claim, settings, difference, verdict."""
    gap = difference(results[USUAL], results[NONE])
    claim, what = "the balancing losses lower the perplexity", f"{USUAL} against {NONE}"
    table = [(claim, what, as_change(gap), verdict(gap))]
    for name in ARMS:
        if name not in (NONE, USUAL):
            gap = difference(results[name], results[USUAL])
            what = f"{name} against {USUAL}, within 0.5%"
            claim = "all nonzero settings give a similar perplexity"
            table.append((claim, what, as_change(gap), verdict(gap, -MARGIN, MARGIN)))
    for less, more in (("0.01,0.01", USUAL), (USUAL, "1,1"), ("0.2,0", "0,0.2")):
        change = paired(
            results[more], results[less], lambda result: result.balance["max_over_mean_load"]
        )
        shown = f"{change:+.3f}" if change else ""
        claim = "a larger w_load lowers max/mean Load"
        table.append((claim, f"{more} against {less}", shown, verdict(change)))
    return table


def as_markdown(results: Results, facts: dict[str, Any], command: str) -> str:
    """Formats the Markdown page: Table 6 for the finished runs, and verdicts on the claims."""
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
    n, k, batch = facts["num_experts"], facts["k"], facts["tokens_per_batch"]
    floor, ceiling = math.sqrt((1 - k / n) / (batch * k / n)), math.sqrt(n / k - 1)
    verdicts = markdown_table(["claim", "compared", "difference, 95%", "verdict"], claims(results))
    return (
        "# The weights of the balancing losses\n\n"
        f"```\n{command}\n```\n\n"
        f"This is Table 6 of the paper for {k} of {n} experts per token, after {facts['steps']:,} "
        f"steps of {batch:,} tokens (words and ends of sentences). The last four columns are means "
        f"over the last {min(BALANCE_BATCHES, facts['steps'])} training batches, as in the paper. "
        "CV(tokens) is the coefficient of variation of the experts' token counts. Uniform random "
        f"routing gives a CV(tokens) of {floor:.3f}. Routing every token to the same {k} experts "
        f"gives a CV(tokens) of {ceiling:.2f} and a max/mean of {n / k:.0f}. {HOW_COMPARED}\n\n"
        f"{table}\n![perplexity and balance](losses.png)\n\n"
        "A claim that a value is lower is supported if the whole interval of the difference lies "
        "below zero. A claim of similar perplexity is supported if the whole interval lies within "
        "±0.5%. A claim is contradicted if the whole interval lies outside that range, and "
        "otherwise not decided."
        f"\n\n{verdicts}"
    )


def plot(results: Results) -> Figure:
    """Plots each run's test perplexity over its max/mean Load."""
    figure, axes = perplexity_over_balance(results, lambda run: run.balance["max_over_mean_load"])
    axes.set_xscale("log")
    axes.set(xlabel="max(Load) / mean(Load)")
    axes.legend(title="w_importance,w_load")
    return figure


def main(arguments: Sequence[str] | None = None, root: Path = Path()) -> Results:
    """Runs the study and returns the finished runs."""
    parser = study_parser(__doc__, "losses", ARMS)
    options = parser.parse_intermixed_args(arguments)

    configs = {}
    for name in ARMS:
        w_importance, w_load = name.split(",")
        weights = [f"model.moe.w_importance={w_importance}", f"model.moe.w_load={w_load}"]
        configs[name] = read_config(
            root / "configs" / "small" / "moe-32.toml",
            [*SETTINGS, *options.overrides, *weights],
            Config,
        )
    config = configs[USUAL]
    set_up_for(config)
    train = () if options.report else options.arms
    text = load_text(config.data)
    results = run_study(configs, options.seeds, text, options.runs, train=train)
    if not all(results.values()):
        print("nothing to report yet: some settings have no finished run")
        return results
    facts = facts_of(config)
    page = as_markdown(results, facts, command_of("losses", options))
    write_report(
        options.output, "losses", page, {**facts, "models": as_data(results)}, plot(results)
    )
    return results
