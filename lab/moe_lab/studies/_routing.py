"""The runs and the pages of the studies of routers and of balancing losses."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from moe_lab.experiments.arms import Arm
from moe_lab.experiments.claims import (
    HOW_COMPARED,
    HOW_DECIDED,
    Claim,
    as_change,
    claims_data,
    claims_of,
    verdict,
)
from moe_lab.experiments.report import Claims, Page, Plot, markdown_table, new_figure
from moe_lab.experiments.results import BALANCE_BATCHES, Result
from moe_lab.experiments.runs import (
    Value,
    core_hours,
    difference,
    mean_of,
    mean_perplexity,
    number_of,
    size_cells,
    test_nll,
)
from moe_lab.experiments.statistics import PairedDifference
from moe_lab.experiments.store import Run, Runs, Stored
from moe_lab.experiments.study import TrainedStudy
from moe_lab.experiments.trials import trials
from moe_lab.studies.losses import NONE, USUAL, WEIGHTS
from moe_lab.studies.routers import NOT_CAUSAL, PAPER, ROUTERS
from moe_lab.training.config import Config, read_config
from moe_lab.training.logging import read_metrics
from moe_lab.training.metrics import perplexity

_SETTINGS = (
    "num_threads=1",
    "steps=1200",
    "data.vocab_size=10000",
    "model.num_sampled=1024",
    "optimizer.learning_rate=8e-3",
    "log.eval_every=0",
    "log.save_every=400",
    f"log.log_every={BALANCE_BATCHES}",
    "log.tensorboard=false",
)
max_over_mean_load = number_of("balance", "max_over_mean_load")
MARGIN = math.log(1.005)  # of "very similar quality" in ln ppl, set before the runs
COLUMNS = {
    "cv_importance": "CV(Importance)",
    "cv_load": "CV(Load)",
    "max_over_mean_load": "max/mean Load",
    "cv_tokens": "CV(tokens)",
}


class RoutingStudy(TrainedStudy):
    """Trains small/moe-32 with several options of its MoE layer.

    Attributes:
        overrides: the options of each model.
    """

    overrides: ClassVar[Mapping[str, Sequence[str]]]

    def config(self, arm: Arm, overrides: Sequence[str]) -> Config:
        options = [*_SETTINGS, *overrides, *self.overrides[arm.model], *arm.overrides]
        return read_config("small/moe-32", options, Config)

    def measured(self, arm: Arm, result: Result) -> dict[str, Any]:
        (load,) = read_metrics(result.run, "train")[-1]["load"]  # of the only MoE layer
        return {"load": load}

    def program(self) -> list[str]:
        return ["moe-lab", "study", self.name, "data.corpus=CORPUS"]


class Routers(RoutingStudy):
    """The study of routers."""

    name = "routers"
    models = usual = tuple(ROUTERS)
    overrides = ROUTERS

    def page(self, stored: Stored) -> Page | None:
        runs, settings = stored.by_arm(), stored.settings
        paper = runs[Arm(PAPER)]
        if not paper:
            return None
        rows = []
        for name in ROUTERS:
            if not (of_arm := runs[Arm(name)]):
                continue
            rows.append(
                [
                    f"{name} (not causal)" if name == NOT_CAUSAL else name,
                    size_cells(of_arm)[0],
                    len(of_arm),
                    f"{mean_perplexity(of_arm):.2f}",
                    "" if name == PAPER else as_change(difference(of_arm, paper)),
                    f"{mean_of(of_arm, number_of('balance', 'cv_tokens')):.3f}",
                    f"{mean_of(of_arm, busiest):.2f}",
                ]
            )
        header = [
            "router", "ops/timestep", "seeds", "test ppl", f"change from {PAPER}, 95%",
            "CV(tokens)", "max/mean tokens",
        ]  # fmt: skip
        options = [[name, " ".join(f"`{each}`" for each in ROUTERS[name])] for name in ROUTERS]
        return Page(
            "Routers at equal operations",
            [
                "Later papers route without the noise and the two losses of the paper. Here five "
                f"routers select {settings['model.moe.k']} of {settings['model.moe.num_experts']} "
                "experts for each token, on average.",
                plot(runs, [*ROUTERS], busiest, xlabel="tokens of the busiest expert / mean"),
                markdown_table(header, rows),
                f"{size_of_run(settings)} The last two columns cover the last {BALANCE_BATCHES} "
                "training batches. CV(tokens) is the coefficient of variation of the experts' "
                "token counts in a batch. max/mean tokens counts all of these batches together. "
                f"{HOW_COMPARED}",
                "With expert choice, the experts of a word depend on later words of the batch, "
                "also in the test. Its perplexity is therefore not that of a language model, and "
                "no claim is made.",
                HOW_DECIDED,
                claims_of(router_claims(runs)),
                "The options of each router, in addition to configs/small/moe-32.toml:",
                markdown_table(["router", "options"], options),
                trials(settings, runs, ROUTERS),
                core_hours(stored.runs),
                self.commands(stored),
            ],
        )


def size_of_run(settings: Mapping[str, Any]) -> str:
    """Says how much text a run reads."""
    return (
        f"A run has {settings['steps']:,} steps of {settings['data.tokens_per_batch']:,} tokens "
        f"(words and ends of sentences); the training part has {settings['train_tokens']:,} tokens."
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


class Losses(RoutingStudy):
    """The study of balancing losses."""

    name = "losses"
    models = usual = WEIGHTS
    overrides: ClassVar = {
        each: [
            f"model.moe.w_importance={each.partition(',')[0]}",
            f"model.moe.w_load={each.partition(',')[2]}",
        ]
        for each in WEIGHTS
    }

    def page(self, stored: Stored) -> Page | None:
        runs, settings = stored.by_arm(), stored.settings
        usual = runs[Arm(USUAL)]
        if not usual:
            return None
        rows = []
        for name in WEIGHTS:
            if not (of_arm := runs[Arm(name)]):
                continue
            gap = "" if name == USUAL else as_change(difference(of_arm, usual))
            balance = [f"{mean_of(of_arm, number_of('balance', key)):.3f}" for key in COLUMNS]
            ppl = f"{mean_perplexity(of_arm):.2f}"
            rows.append([*name.split(","), len(of_arm), ppl, gap, *balance])
        header = ["w_importance", "w_load", "seeds", "test ppl", f"change from {USUAL}, 95%"]
        n, k = settings["model.moe.num_experts"], settings["model.moe.k"]
        steps, batch = settings["steps"], settings["data.tokens_per_batch"]
        floor, ceiling = math.sqrt((1 - k / n) / (batch * k / n)), math.sqrt(n / k - 1)
        axis = {"xlabel": "max(Load) / mean(Load)", "xscale": "log"}
        return Page(
            "The weights of the balancing losses",
            [
                "The paper finds that all nonzero weights balance the load, with almost equal "
                "perplexity. Without the losses, a few experts get nearly all words, and the "
                f"perplexity is higher (Table 6). Here a token has {k} of {n} experts.",
                plot(runs, WEIGHTS, max_over_mean_load, "w_importance,w_load", **axis),
                markdown_table([*header, *COLUMNS.values()], rows),
                f"{size_of_run(settings)} The last four columns are means over the last "
                f"{min(BALANCE_BATCHES, steps)} training batches, as in the paper. CV(tokens) is "
                "the coefficient of variation of the experts' token counts. Uniform random routing "
                f"gives a CV(tokens) of {floor:.3f}. Routing every token to the same {k} experts "
                f"gives a CV(tokens) of {ceiling:.2f} and a max/mean of {n / k:.0f}. "
                f"{HOW_COMPARED}",
                "A claim that a value is lower is supported if the whole interval of the "
                "difference lies below zero. A claim of similar perplexity is supported if the "
                "whole interval lies within ±0.5%. A claim is contradicted if the whole interval "
                "lies outside that range, and otherwise not decided.",
                loss_claims(runs),
                core_hours(stored.runs),
                self.commands(stored),
            ],
        )


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


def comparisons(runs: Runs) -> list[Comparison]:
    """Returns the paper's claims, but not those about models without runs, and their verdicts."""
    rows = []

    def of_quality(claim: str, a: str, b: str, within: str = "", **limits: float) -> None:
        gap = difference(runs[Arm(a)], runs[Arm(b)])
        judged = verdict(gap, **limits)
        rows.append(Comparison(claim, f"{a} against {b}{within}", gap, as_change(gap), judged))

    of_quality("the balancing losses lower the perplexity", USUAL, NONE)
    for name in WEIGHTS:
        if name not in (NONE, USUAL):
            claim = "all nonzero settings give a similar perplexity"
            of_quality(claim, name, USUAL, ", within 0.5%", low=-MARGIN, high=MARGIN)
    for claim, less, more in (
        ("a larger w_load lowers max/mean Load", NONE, "0,0.2"),
        ("larger weights lower max/mean Load", "0.01,0.01", USUAL),
        ("larger weights lower max/mean Load", USUAL, "1,1"),
        ("w_load lowers max/mean Load more than w_importance", "0.2,0", "0,0.2"),
    ):
        gap = difference(runs[Arm(more)], runs[Arm(less)], max_over_mean_load)
        shown = f"{gap:+.3f}" if gap else ""
        rows.append(Comparison(claim, f"{more} against {less}", gap, shown, verdict(gap)))
    return [row for row in rows if row.difference]


def loss_claims(runs: Runs) -> Claims:
    """Makes the part of the page with the paper's claims."""
    found = comparisons(runs)
    rows = [[each.claim, each.compared, each.shown, each.verdict] for each in found]
    header = ["claim", "compared", "difference, 95%", "verdict"]
    return Claims(markdown_table(header, rows), claims_data(found))


def plot(
    runs: Runs, models: Sequence[str], balance: Value, title: str | None = None, **axis: str
) -> Plot:
    """Plots the test perplexity of each run over a number that describes its balance.

    Args:
        runs: the finished runs.
        models: the models.
        balance: the number.
        title: the title of the legend.
        axis: the label and the scale of the axis of the number.
    """
    figure = new_figure(7, 4.2)
    axes = figure.subplots()
    for model in models:
        of_arm = runs[Arm(model)].values()
        ppl = [perplexity(test_nll(run)) for run in of_arm]
        axes.plot([*map(balance, of_arm)], ppl, "o", label=model)
    axes.set(ylabel="test perplexity", **axis)
    axes.legend(title=title)
    return Plot("perplexity and balance", figure)
