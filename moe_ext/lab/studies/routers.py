"""Compares the routers of the paper and of later papers, at small scale and equal operations.

    python scripts/studies/routers.py data.corpus=path/to/text
    python scripts/studies/routers.py data.corpus=path/to/text --seeds 1 2 --arms noisy switch
    python scripts/studies/routers.py --report data.corpus=path/to/text

Trains configs/small/moe-32.toml on 3.1 million words with five routers:

- noisy: noisy top-k gating with the paper's two losses (Sec. 2.1 and 4).
- switch: softmax, top k without noise, and the switch loss (arXiv 2101.03961).
- bias: sigmoid, top k and a selection bias instead of a loss (arXiv 2408.15664).
- balanced: strictly balanced gating (App. F).
- expert_choice: each expert selects its words (arXiv 2202.09368). It is not causal: the experts of
  a word depend on later words. So its perplexity is not that of a language model.

The first seed trains with every peak learning rate. The other seeds use the rate with the lowest
dev perplexity. The script writes routers.md, .json and .png to the folder OUTPUT (default:
docs/results). The page has the perplexity and the number of words of each expert.

The study has 25 runs of 3 minutes each on one processor. --arms and --rates select some of the
runs; the page shows all finished runs. To share the runs, start the same command several times with
the same --runs. --report writes the page without training.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from moe_ext.lab.experiments.rate_search import (
    RATES,
    command_with_rates,
    parse_with_rates,
    rates_table,
    runs_at_best_rates,
)
from moe_ext.lab.experiments.report import markdown_table, write_report
from moe_ext.lab.experiments.results import BALANCE_BATCHES, Result
from moe_ext.lab.experiments.study import (
    HOW_COMPARED,
    HOW_DECIDED,
    SMALL,
    Claim,
    Results,
    as_change,
    as_data,
    claims_data,
    claims_table,
    difference,
    mean_perplexity,
    size_cells,
    study_parser,
)
from moe_ext.lab.studies._balance import facts_of, perplexity_over_balance
from moe_ext.lab.training.config import Config, read_config
from moe_ext.lab.training.device import set_up_for
from moe_ext.lab.training.logging import read_metrics
from moe_ext.lab.training.text import load_text

PAPER = "noisy"
_WITHOUT_LOSSES = ("model.moe.w_importance=0", "model.moe.w_load=0")
ROUTERS: dict[str, tuple[str, ...]] = {  # the overrides of each router
    PAPER: (),
    "switch": (*_WITHOUT_LOSSES, "model.moe.gate=topk", "model.moe.w_switch=0.01"),
    "bias": (
        *_WITHOUT_LOSSES,
        "model.moe.gate=topk",
        "model.moe.score=sigmoid",
        "model.moe.bias_update_rate=1e-3",
    ),
    "balanced": (
        "model.moe.gate=balanced",
        "model.moe.w_load=0",
        "optimizer.threshold_learning_rate=1e-3",
    ),
    "expert_choice": (*_WITHOUT_LOSSES, "model.moe.gate=expert_choice"),
}
NOT_CAUSAL = "expert_choice"
SETTINGS = (
    *SMALL,
    "steps=1200",
    "log.eval_every=0",
    "log.save_every=400",
    f"log.log_every={BALANCE_BATCHES}",
)
IDLE = 0.1  # an expert with a smaller fraction of the mean number of words is idle


def words_per_expert(run: Result) -> list[float]:
    """Returns the words of each expert over the last training batches, divided by their mean."""
    (load,) = read_metrics(run.run, "train")[-1]["load"]  # of the only MoE layer
    return list(load)


def claims(results: Results) -> list[Claim]:
    """Returns the claims that other routers have a lower perplexity than the paper's router."""
    return [
        Claim(
            f"{name} has a lower perplexity than the paper's router",
            f"{name} against {PAPER}",
            difference(results[name], results[PAPER]),
        )
        for name in ROUTERS
        if name not in (PAPER, NOT_CAUSAL)
    ]


def _balance_cells(runs: Mapping[int, Result]) -> list[str]:
    words = [words_per_expert(run) for run in runs.values()]
    idle = statistics.fmean(sum(share < IDLE for share in run) for run in words)
    cv = statistics.fmean(run.balance["cv_tokens"] for run in runs.values())
    return [f"{cv:.3f}", f"{statistics.fmean(map(max, words)):.2f}", f"{idle:.1f}"]


def as_markdown(results: Results, facts: dict[str, Any], command: str) -> str:
    """Formats the Markdown page: quality and balance of each router, learning rates, verdicts."""
    rows = []
    for name, runs in results.items():
        if not runs:
            continue
        gap = "" if name == PAPER else as_change(difference(runs, results[PAPER]))
        operations, _ = size_cells(next(iter(runs.values())).cost)
        shown = f"{name} (not causal)" if name == NOT_CAUSAL else name
        ppl = f"{mean_perplexity(runs):.2f}"
        rows.append([shown, operations, len(runs), ppl, gap, *_balance_cells(runs)])
    table = markdown_table(
        [
            "router", "ops/timestep", "seeds", "test ppl", f"change from {PAPER}, 95%",
            "CV(tokens)", "max/mean tokens", "idle experts",
        ],
        rows,
    )  # fmt: skip
    options = markdown_table(
        ["router", "options"],
        [[name, " ".join(f"`{each}`" for each in ROUTERS[name])] for name in ROUTERS],
    )
    return (
        "# Routers at equal operations\n\n"
        f"```\n{command}\n```\n\n"
        f"Five routers select {facts['k']} of {facts['num_experts']} experts for each token, on "
        f"average. A run has {facts['steps']:,} steps of {facts['tokens_per_batch']:,} tokens "
        "(words and ends of sentences). The last three columns cover the last "
        f"{BALANCE_BATCHES} training batches. CV(tokens) is the coefficient of variation of the "
        "experts' token counts in a batch. max/mean tokens and idle experts count all of these "
        f"batches together. An expert is idle if it gets less than {100 * IDLE:.0f}% of the mean. "
        f"{HOW_COMPARED}\n\n"
        f"{table}\n"
        "With expert choice, the experts of a word depend on later words of the batch, also in the "
        "test. Its perplexity is therefore not that of a language model, and no claim is made.\n\n"
        f"![perplexity and balance](routers.png)\n\n{HOW_DECIDED}\n\n"
        f"{claims_table(claims(results))}\n"
        "The options of each router, in addition to configs/small/moe-32.toml:\n\n"
        f"{options}\n"
        "The dev perplexity of the first seed at each peak learning rate:\n\n"
        f"{rates_table(facts['dev_nll'])}"
    )


def plot(results: Results) -> Figure:
    """Plots each run's test perplexity over its max/mean tokens."""
    figure, axes = perplexity_over_balance(results, lambda run: max(words_per_expert(run)))
    axes.set(xlabel="tokens of the busiest expert / mean")
    axes.legend()
    return figure


def main(arguments: Sequence[str] | None = None, root: Path = Path()) -> Results:
    """Runs the study and returns the finished runs."""
    parser = study_parser(__doc__, "routers", tuple(ROUTERS))
    options = parse_with_rates(parser, arguments)

    configs = {
        (name, rate): read_config(
            root / "configs" / "small" / "moe-32.toml",
            [*SETTINGS, *changes, *options.overrides, f"optimizer.learning_rate={rate}"],
            Config,
        )
        for name, changes in ROUTERS.items()
        for rate in RATES
    }
    config = next(iter(configs.values()))
    set_up_for(config)
    text = load_text(config.data)
    results, dev_nll = runs_at_best_rates(configs, options, text)
    if not results[PAPER]:
        print(f"nothing to report yet: no run of {PAPER} is finished")
        return results
    facts = facts_of(config) | {"dev_nll": dev_nll}
    page = as_markdown(results, facts, command_with_rates("routers", options))
    data = {**facts, "models": as_data(results), "claims": claims_data(claims(results))}
    write_report(options.output, "routers", page, data, plot(results))
    return results
