"""Compares the routers of the paper and of later papers, at small scale and equal operations.

    moe-lab study routers data.corpus=CORPUS
    moe-lab study routers data.corpus=CORPUS --seeds 1 --arms "noisy rate 0.004"
    moe-lab study routers --report

Trains configs/small/moe-32.toml on 3.1 million words with five routers:

- noisy: noisy top-k gating with the paper's two losses (Sec. 2.1 and 4).
- switch: softmax, top k without noise, and the switch loss (arXiv 2101.03961).
- bias: sigmoid, top k and a selection bias instead of a loss (arXiv 2408.15664).
- balanced: strictly balanced gating (App. F).
- expert_choice: each expert selects its words (arXiv 2202.09368). It is not causal: the experts of
  a word depend on later words. So its perplexity is not that of a language model.

The file OUTPUT/routers.json (default: runs/results) keeps every finished run. A run that is
interrupted continues from its checkpoint in RUNS. To share the runs, start the command several
times. A run takes 3 minutes on one processor. An arm such as "noisy rate 0.004" has another peak
learning rate; --arms selects such arms. The script also writes routers.md and .png; --report writes
them without training and without the corpus.
"""

import statistics
from collections.abc import Sequence

from matplotlib.figure import Figure

from moe_lab.experiments.report import markdown_table
from moe_lab.experiments.results import BALANCE_BATCHES
from moe_lab.experiments.stored import Report, Run, Stored, core_hours, results_of
from moe_lab.experiments.study import (
    HOW_COMPARED,
    HOW_DECIDED,
    Claim,
    Results,
    as_change,
    claims_data,
    claims_table,
    difference,
    mean_perplexity,
    size_cells,
    trials,
)
from moe_lab.studies._routing import perplexity_over_balance, run_study_of_routing

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
RATES = {  # the endings of the arms with another peak learning rate
    " rate 0.004": "optimizer.learning_rate=4e-3",
    " rate 0.016": "optimizer.learning_rate=16e-3",
}
ARMS: dict[str, tuple[str, ...]] = ROUTERS | {
    name + suffix: (*changes, rate)
    for suffix, rate in RATES.items()
    for name, changes in ROUTERS.items()
}


def claims(results: Results) -> list[Claim]:
    """Returns the claims that other routers have a lower perplexity than the paper's router.

    Claims about routers without runs are left out.
    """
    claim = "{} has a lower perplexity than the paper's router"
    gaps = {name: difference(results[name], results[PAPER]) for name in ROUTERS}
    return [
        Claim(claim.format(name), f"{name} against {PAPER}", gap)
        for name, gap in gaps.items()
        if gap and name not in (PAPER, NOT_CAUSAL)
    ]


def busiest(run: Run) -> float:
    """Returns the tokens of the busiest expert divided by the mean of all experts.

    The tokens are those of the last training batches together.
    """
    return float(max(run["load"]) / statistics.fmean(run["load"]))


def as_markdown(stored: Stored, compared: Sequence[Claim], command: str) -> str:
    """Formats the Markdown page: plot, quality and balance of each router, verdicts, command."""
    results, settings = results_of(stored.runs, ARMS), stored.settings
    rows = []
    for name in ROUTERS:
        if not (runs := results[name]):
            continue
        gap = "" if name == PAPER else as_change(difference(runs, results[PAPER]))
        operations, _ = size_cells(next(iter(runs.values())).cost)
        shown = f"{name} (not causal)" if name == NOT_CAUSAL else name
        cv = statistics.fmean(run.balance["cv_tokens"] for run in runs.values())
        most = statistics.fmean(busiest(run) for run in stored.runs if run["arm"] == name)
        rows.append(
            [
                shown,
                operations,
                len(runs),
                f"{mean_perplexity(runs):.2f}",
                gap,
                f"{cv:.3f}",
                f"{most:.2f}",
            ]
        )
    table = markdown_table(
        [
            "router", "ops/timestep", "seeds", "test ppl", f"change from {PAPER}, 95%",
            "CV(tokens)", "max/mean tokens",
        ],
        rows,
    )  # fmt: skip
    options = markdown_table(
        ["router", "options"],
        [[name, " ".join(f"`{each}`" for each in ROUTERS[name])] for name in ROUTERS],
    )
    on_dev = results_of(stored.runs, ARMS, "dev")
    return (
        "# Routers at equal operations\n\n"
        "Later papers route without the noise and the two losses of the paper. Here five routers "
        f"select {settings['model.moe.k']} of {settings['model.moe.num_experts']} experts for each "
        "token, on average.\n\n"
        f"![perplexity and balance](routers.png)\n\n{table}\n"
        f"A run has {settings['steps']:,} steps of {settings['data.tokens_per_batch']:,} tokens "
        f"(words and ends of sentences); the training part has {settings['train_tokens']:,} "
        f"tokens. The last two columns cover the last {BALANCE_BATCHES} training batches. "
        "CV(tokens) is the coefficient of variation of the experts' token counts in a batch. "
        "max/mean tokens counts all of these batches together. "
        f"{HOW_COMPARED}\n\n"
        "With expert choice, the experts of a word depend on later words of the batch, also in the "
        "test. Its perplexity is therefore not that of a language model, and no claim is made.\n\n"
        f"{HOW_DECIDED}\n\n"
        f"{claims_table(compared)}\n"
        "The options of each router, in addition to configs/small/moe-32.toml:\n\n"
        f"{options}\n"
        f"{trials(settings, on_dev, ROUTERS, RATES)}"
        f"{core_hours(stored.runs)}\n\n"
        f"```\n{command}\n```\n"
    )


def plot(runs: Sequence[Run]) -> Figure:
    """Plots the test perplexity of each run over its max/mean tokens."""
    figure, axes = perplexity_over_balance(runs, ROUTERS, busiest)
    axes.set(xlabel="tokens of the busiest expert / mean")
    axes.legend()
    return figure


def main(arguments: Sequence[str] | None = None) -> Results:
    """Runs the study and returns the finished runs."""

    def report(stored: Stored, command: str) -> Report | None:
        results = results_of(stored.runs, ARMS)
        if not results[PAPER]:
            return None
        compared = claims(results)
        page = as_markdown(stored, compared, command)
        return Report(page, claims_data(compared), plot(stored.runs))

    return run_study_of_routing("routers", __doc__, ARMS, [*ROUTERS], report, arguments)
