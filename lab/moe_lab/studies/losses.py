"""Compares values of w_importance and w_load, at small scale (Table 6).

    moe-lab study losses data.corpus=CORPUS
    moe-lab study losses data.corpus=CORPUS --seeds 1 2 --arms 0,0 0.1,0.1
    moe-lab study losses --report

Trains configs/small/moe-32.toml on 3.1 million words for each seed and for six settings of
w_importance,w_load. The page has the perplexity, and the experts' load balance over the last 50
training batches. A run takes 3 minutes on one processor.
"""

import math
from typing import ClassVar

from moe_lab.experiments.arms import Arm
from moe_lab.experiments.claims import Judged, as_change, judged, verdict
from moe_lab.experiments.page import Page
from moe_lab.experiments.runs import Runs, number_of
from moe_lab.experiments.single_run import BALANCE_BATCHES
from moe_lab.experiments.store import Stored
from moe_lab.markdown import markdown_table
from moe_lab.studies.routing import RoutingStudy, plot

NONE, USUAL = "0,0", "0.1,0.1"  # w_importance,w_load
WEIGHTS = (NONE, "0.2,0", "0,0.2", USUAL, "0.01,0.01", "1,1")
max_over_mean_load = number_of("balance", "max_over_mean_load")
MARGIN = math.log(1.005)  # of "very similar quality" in ln ppl, set before the runs
COLUMNS = {
    "cv_importance": "CV(Importance)",
    "cv_load": "CV(Load)",
    "max_over_mean_load": "max/mean Load",
    "cv_tokens": "CV(tokens)",
}


class Losses(RoutingStudy):
    name = "losses"
    models = usual = WEIGHTS
    overrides: ClassVar = {
        weights: [
            f"model.moe.w_importance={weights.partition(',')[0]}",
            f"model.moe.w_load={weights.partition(',')[2]}",
        ]
        for weights in WEIGHTS
    }

    def page(self, stored: Stored) -> Page | None:
        runs, settings = stored.by_arm(), stored.settings
        usual = runs[Arm(USUAL)]
        if not usual:
            return None
        rows = []
        for name, arm_runs in runs.select(WEIGHTS):
            gap = "" if name == USUAL else as_change(arm_runs.minus(usual))
            balance = [f"{arm_runs.mean(number_of('balance', key)):.3f}" for key in COLUMNS]
            ppl = f"{arm_runs.perplexity():.2f}"
            rows.append([*name.split(","), len(arm_runs), ppl, gap, *balance])
        header = ["w_importance", "w_load", "seeds", "test ppl", f"change from {USUAL}, 95%"]
        n, k = settings["model.moe.num_experts"], settings["model.moe.k"]
        axis = {"xlabel": "max(Load) / mean(Load)", "xscale": "log"}
        return self.filled(
            stored,
            plot=plot(runs, WEIGHTS, max_over_mean_load, "w_importance,w_load", **axis),
            weights=markdown_table([*header, *COLUMNS.values()], rows),
            batches=min(BALANCE_BATCHES, settings["steps"]),
            floor=math.sqrt((1 - k / n) / (settings["data.tokens_per_batch"] * k / n)),
            ceiling=math.sqrt(n / k - 1),
            ratio=n / k,
            claims=judged(claims(runs)),
        )


def claims(runs: Runs) -> list[Judged]:
    """Returns the paper's claims, but not those about models without runs, and their verdicts."""
    rows = []

    def compare_quality(claim: str, a: str, b: str, within: str = "", **limits: float) -> None:
        gap = runs[Arm(a)].minus(runs[Arm(b)])
        decided = verdict(gap, **limits)
        rows.append(Judged(claim, f"{a} against {b}{within}", gap, as_change(gap), decided))

    compare_quality("the balancing losses lower the perplexity", USUAL, NONE)
    for name in WEIGHTS:
        if name not in (NONE, USUAL):
            claim = "all nonzero settings give a similar perplexity"
            compare_quality(claim, name, USUAL, ", within 0.5%", low=-MARGIN, high=MARGIN)
    for claim, less, more in (
        ("a larger w_load lowers max/mean Load", NONE, "0,0.2"),
        ("larger weights lower max/mean Load", "0.01,0.01", USUAL),
        ("larger weights lower max/mean Load", USUAL, "1,1"),
        ("w_load lowers max/mean Load more than w_importance", "0.2,0", "0,0.2"),
    ):
        gap = runs[Arm(more)].minus(runs[Arm(less)], max_over_mean_load)
        shown = f"{gap:+.3f}" if gap else ""
        rows.append(Judged(claim, f"{more} against {less}", gap, shown, verdict(gap)))
    return [row for row in rows if row.difference]


run = Losses.start
