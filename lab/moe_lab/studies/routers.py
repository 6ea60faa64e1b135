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

An arm such as "noisy rate 0.004" has another peak learning rate; --arms selects such arms. A run
takes 3 minutes on one processor.
"""

import statistics
from collections.abc import Callable

from moe_lab.experiments.arms import Arm
from moe_lab.experiments.claims import Claim, as_change, claims_of
from moe_lab.experiments.page import Page, table_of
from moe_lab.experiments.runs import ArmRuns, Run, Runs, number_of
from moe_lab.experiments.single_run import BALANCE_BATCHES
from moe_lab.experiments.store import Stored
from moe_lab.experiments.trials import trials
from moe_lab.markdown import markdown_table
from moe_lab.studies.routing import RoutingStudy, plot

PAPER, NOT_CAUSAL = "noisy", "expert_choice"
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
    NOT_CAUSAL: (*_WITHOUT_LOSSES, "model.moe.gate=expert_choice"),
}


class Routers(RoutingStudy):
    name = "routers"
    models = usual = tuple(ROUTERS)
    arm_settings = ("rate",)
    overrides = ROUTERS

    def page(self, stored: Stored) -> Page | None:
        runs, settings = stored.by_arm(), stored.settings
        paper = runs[Arm(PAPER)]
        if not paper:
            return None
        columns: dict[str, Callable[[str, ArmRuns], object]] = {
            "router": lambda name, _: f"{name} (not causal)" if name == NOT_CAUSAL else name,
            "ops/timestep": lambda _, own: own.size_cells()[0],
            "seeds": lambda _, own: len(own),
            "test ppl": lambda _, own: f"{own.perplexity():.2f}",
            f"change from {PAPER}, 95%": lambda name, own: (
                "" if name == PAPER else as_change(own.minus(paper))
            ),
            "CV(tokens)": lambda _, own: f"{own.mean(number_of('balance', 'cv_tokens')):.3f}",
            "max/mean tokens": lambda _, own: f"{own.mean(busiest):.2f}",
        }
        options = [[name, " ".join(f"`{option}`" for option in ROUTERS[name])] for name in ROUTERS]
        return self.filled(
            stored,
            plot=plot(runs, [*ROUTERS], busiest, xlabel="tokens of the busiest expert / mean"),
            routers=table_of(columns, runs.select(ROUTERS)),
            batches=BALANCE_BATCHES,
            claims=claims_of(router_claims(runs)),
            options=markdown_table(["router", "options"], options),
            trials=trials(settings, runs, ROUTERS),
        )


def router_claims(runs: Runs) -> list[Claim]:
    """Claims a lower perplexity than the paper's router for each causal router that has runs."""
    claim = "{} has a lower perplexity than the paper's router"
    gaps = {name: runs[Arm(name)].minus(runs[Arm(PAPER)]) for name in ROUTERS}
    return [
        Claim(claim.format(name), f"{name} against {PAPER}", gap)
        for name, gap in gaps.items()
        if gap and name not in (PAPER, NOT_CAUSAL)
    ]


def busiest(run: Run) -> float:
    """Returns the tokens of the busiest expert in the last batches, divided by the mean."""
    return float(max(run["load"]) / statistics.fmean(run["load"]))


run = Routers.start
