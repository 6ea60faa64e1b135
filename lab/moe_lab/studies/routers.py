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

from moe_lab.experiments.arms import Arm
from moe_lab.experiments.claims import Claim, as_change, claims_of
from moe_lab.experiments.report import Page
from moe_lab.experiments.results import BALANCE_BATCHES
from moe_lab.experiments.runs import (
    difference,
    mean_of,
    mean_perplexity,
    number_of,
    size_cells,
)
from moe_lab.experiments.store import Run, Runs, Stored
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
    """The study of routers."""

    name = "routers"
    models = usual = tuple(ROUTERS)
    arm_settings = ("rate",)
    overrides = ROUTERS

    def page(self, stored: Stored) -> Page | None:
        runs, settings = stored.by_arm(), stored.settings
        paper = runs[Arm(PAPER)]
        if not paper:
            return None
        rows = []
        for name in ROUTERS:
            if not (arm_runs := runs[Arm(name)]):
                continue
            rows.append(
                [
                    f"{name} (not causal)" if name == NOT_CAUSAL else name,
                    size_cells(arm_runs)[0],
                    len(arm_runs),
                    f"{mean_perplexity(arm_runs):.2f}",
                    "" if name == PAPER else as_change(difference(arm_runs, paper)),
                    f"{mean_of(arm_runs, number_of('balance', 'cv_tokens')):.3f}",
                    f"{mean_of(arm_runs, busiest):.2f}",
                ]
            )
        header = [
            "router", "ops/timestep", "seeds", "test ppl", f"change from {PAPER}, 95%",
            "CV(tokens)", "max/mean tokens",
        ]  # fmt: skip
        options = [[name, " ".join(f"`{option}`" for option in ROUTERS[name])] for name in ROUTERS]
        return self.filled(
            stored,
            plot=plot(runs, [*ROUTERS], busiest, xlabel="tokens of the busiest expert / mean"),
            routers=markdown_table(header, rows),
            batches=BALANCE_BATCHES,
            claims=claims_of(router_claims(runs)),
            options=markdown_table(["router", "options"], options),
            trials=trials(settings, runs, ROUTERS),
        )


def router_claims(runs: Runs) -> list[Claim]:
    """Returns the claims that other routers have a lower perplexity than the paper's router.

    Claims about routers without runs are left out.
    """
    gaps = {name: difference(runs[Arm(name)], runs[Arm(PAPER)]) for name in ROUTERS}
    return [
        Claim(
            f"{name} has a lower perplexity than the paper's router", f"{name} against {PAPER}", gap
        )
        for name, gap in gaps.items()
        if gap and name not in (PAPER, NOT_CAUSAL)
    ]


def busiest(run: Run) -> float:
    """Returns the tokens of the busiest expert divided by the mean of all experts.

    The tokens are those of the last training batches together.
    """
    return float(max(run["load"]) / statistics.fmean(run["load"]))


run = Routers.start
