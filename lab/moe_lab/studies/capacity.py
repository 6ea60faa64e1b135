"""Compares models with 4 to 256 experts at equal operations (Figs. 2 and 3, Table 7).

    moe-lab study capacity
    moe-lab study capacity --seeds 4 --arms "moe-64 x4" "4xlstm x4 rate 0.016"
    moe-lab study capacity --text prose data.corpus=CORPUS
    moe-lab study capacity --report

The models are those of configs/small, with a width of 96, without dropout, on wordpieces with the
full softmax. The text has Python code, C++ headers and documentation. With --text prose,
data.corpus has English prose.

The models with " x4" in their names train for four times the steps. Those with " rate" or
" dropout" have other options; "experts 0.008" is the learning rate of the experts. --arms selects
such models. The page compares each model at the options with the lowest dev perplexity. A run takes
3 to 30 minutes on an idle processor.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

from moe_lab.data import Wordpieces
from moe_lab.errors import ConfigError
from moe_lab.experiments.arms import Arm
from moe_lab.experiments.claims import Claim, as_change, claims_of, percent
from moe_lab.experiments.page import Page, Plot, new_axes
from moe_lab.experiments.runs import (
    ArmRuns,
    PairedDifference,
    Runs,
    dev_nll,
    mean_difference,
    nll_after,
    test_nll,
)
from moe_lab.experiments.store import Stored
from moe_lab.experiments.study import TrainedStudy
from moe_lab.experiments.trials import trials_table, tried, usual_as_text
from moe_lab.markdown import markdown_table
from moe_lab.training.config import Config, read_config
from moe_lab.training.metrics import bytes_of, perplexity
from moe_lab.training.text import SentenceText

MIXTURES = {"moe-4": 4, "moe-16": 16, "moe-64": 64, "moe-256-h": 256}  # numbers of experts
DENSE = ("moe-1-wide", "moe-1-deep", "4xlstm", "lstm-384-96")  # of equal operations
LARGE, LARGE_BASE = "moe-64-2x", "moe-64"  # a mixture of twice the operations
MODELS = (*MIXTURES, *DENSE, LARGE)
FIRST = "moe-4"
BASES = (FIRST, "moe-1-wide", "4xlstm")  # of the changes in the table
MORE_TEXT = "more training text increases the advantage of more experts"
QUARTER = 0.25

_FILES = {"lstm-384-96": "lstm-512-128"}  # models with a configuration of another name
SETTINGS = (
    "num_threads=1",
    "steps=1500",
    "data.corpus=sources",
    "data.kind=bpe",
    "data.vocab_size=2000",
    "model.d_model=96",
    "model.dropout=0.0",
    "optimizer.learning_rate=8e-3",
    "log.eval_every=300",
    "log.save_every=50",
    "log.tensorboard=false",
)
# Four experts of a mixture, and the layer of MoE-1-Wide, have 768 hidden units.
_MODEL_OPTIONS = dict.fromkeys(MIXTURES, ["model.moe.hidden_sizes=[192]"]) | {
    "moe-1-wide": ["model.ffn.hidden_sizes=[768]"],
    "moe-1-deep": ["model.ffn.hidden_sizes=[192, 192, 192, 192]"],
    "4xlstm": [],
    "lstm-384-96": ["model.lstm_units=384"],
    LARGE: ["model.lstm_units=192", "model.moe.hidden_sizes=[384]"],
}


TEXTS = {  # the title of a page, and what its text contains
    "sources": ("code and documentation", "Python code, C++ headers and documentation"),
    "prose": ("English prose", "English prose that [is not public](../lab/studies.md)"),
}


class Capacity(TrainedStudy):
    models = usual = MODELS
    arm_settings = ("times", "rate", "expert_rate", "dropout")
    text: SentenceText
    shares = (QUARTER,)

    def __init__(self, options: argparse.Namespace) -> None:
        self.name = f"capacity_{options.text}"
        corpus = [] if options.text == "sources" else ["data.corpus=CORPUS"]
        self.given = ["--text", options.text, *corpus]
        super().__init__(options, options.text)

    def config(self, arm: Arm, overrides: Sequence[str]) -> Config:
        encoded = f"data.encoded={self.runs_folder / 'encoded'}"
        options = [encoded, *SETTINGS, *_MODEL_OPTIONS[arm.model], *overrides, *arm.overrides]
        config = read_config(f"small/{_FILES.get(arm.model, arm.model)}", options, Config)
        return replace(config, steps=round(config.steps * arm.times))

    def settings(self) -> dict[str, Any]:
        corpus = self.config(self.first, self.options.overrides).data.corpus
        if self.options.text != "sources" and corpus == "sources":
            text = self.options.text
            raise ConfigError(f"data.corpus must be given for --text {text}, got sources")
        return super().settings()

    def settings_of(self, config: Any) -> dict[str, Any]:
        test, wordpieces = self.text.test, self.text.vocabulary
        if not isinstance(wordpieces, Wordpieces):
            rule = 'be "bpe" or "unigram" for this study'
            raise ConfigError(f'data.kind must {rule}, got "words"')
        return {
            "text": self.options.text,
            "train_tokens": self.text.train.num_tokens,
            "test_tokens": test.num_tokens,
            "test_bytes": bytes_of(test, wordpieces),
        } | super().settings_of(config)

    def page(self, stored: Stored) -> Page | None:
        runs = stored.by_arm()
        best = best_arms(runs)
        results = Runs({model: runs[arm] for model, arm in best.items()})
        if not lengths_of(results):
            return None
        settings, lengths = stored.settings, lengths_of(results)
        title, contents = TEXTS[settings["text"]]
        mixture, tried_options = best_mixture(results), search(settings, runs)
        seen = settings["steps"] * settings["data.tokens_per_batch"]
        longer = "".join(f", with x{times:g} {times * seen:,.0f}" for times in lengths[1:])
        epochs = lengths[-1] * seen / settings["train_tokens"]
        return self.filled(
            stored,
            title=title,
            contents=contents,
            plot=plot(settings, results),
            best=mixture,
            changes=changes_of(mixture, results),
            results=results_table(settings, results, best),
            seen=seen,
            longer=longer,
            epochs=epochs,
            spread=spread(results),
            usual=usual_as_text(settings),
            claims=claims_of(claims(results, runs)),
            search=tried_options,
            unsearched=not tried_options,
        )


def best_arms(runs: Runs) -> dict[Arm, Arm]:
    """Returns the arm of each model and length whose settings have the lowest dev perplexity.

    The settings are compared on the seeds that all of them have.
    """
    best = {}
    for model, (_, nll) in tried(runs, dict.fromkeys(arm.usual for arm in runs)).items():
        lowest = min(nll, key=nll.__getitem__)
        best[model] = next(arm for arm in runs if arm.usual == model and arm.trial == lowest)
    return best


def runs_of_length(results: Runs, times: float) -> dict[str, ArmRuns]:
    """Returns the runs with one number of training steps, by model."""
    return {model: results[Arm(model, times=times)] for model in MODELS}


def all_lengths(results: Runs) -> list[float]:
    """Returns the factors of the number of training steps, in order."""
    return sorted({arm.times for arm in results if results[arm]})


def lengths_of(results: Runs) -> list[float]:
    """Returns the factors with which a mixture and another model have runs."""
    lengths = []
    for times in all_lengths(results):
        same = runs_of_length(results, times)
        if any(same[mixture] for mixture in MIXTURES) and sum(map(bool, same.values())) > 1:
            lengths.append(times)
    return lengths


def slope(same: Mapping[str, ArmRuns]) -> PairedDifference | None:
    """Fits ln(perplexity) linearly to log2(experts), for each seed that all mixtures have."""
    seeds = set.intersection(*(set(same[model]) for model in MIXTURES))
    doublings = [number.bit_length() - 1 for number in MIXTURES.values()]

    def fitted(seed: int) -> float:
        nll = [test_nll(same[model][seed]) for model in MIXTURES]
        return statistics.linear_regression(doublings, nll).slope

    return mean_difference(list(map(fitted, sorted(seeds))))


def gain(results: Runs, model: str, short: float, long: float) -> PairedDifference | None:
    """Computes how the difference between a model and FIRST changes with more training steps.

    Negative: the longer training increases the advantage of the model over FIRST. The unit is
    ln(ppl), paired over the seeds that all four runs have.
    """
    runs = [results[Arm(name, times=times)] for times in (long, short) for name in (model, FIRST)]
    seeds = set.intersection(*map(set, runs))
    values = [[test_nll(arm_runs[seed]) for arm_runs in runs] for seed in sorted(seeds)]
    return mean_difference([(a - b) - (c - d) for a, b, c, d in values])


def claims(results: Runs, usual: Runs) -> list[Claim]:
    """Returns the paper's claims; a negative difference in ln(perplexity) supports a claim.

    Claims about models without runs are left out. Each claim compares models at the greatest number
    of training steps for which it has an interval. Without an interval, it compares them at the
    greatest for which it has runs. `results` are those of `best_arms`. The claims about more text
    compare the runs with the usual settings, because a learning rate changes the beginning of the
    training more than its end.
    """
    lengths = reversed(lengths_of(results))
    claims_of_lengths = [claims_of_length(results, usual, times) for times in lengths]
    rows = [
        max(rows, key=lambda row: (is_interval(row.difference), row.difference is not None))
        for rows in zip(*claims_of_lengths, strict=True)
    ]
    for model in [*MIXTURES][1:]:
        lengths_of_text = [
            times
            for times in all_lengths(usual)
            if usual[Arm(model, times=times)].keys() & usual[Arm(FIRST, times=times)].keys()
        ]
        rows += [
            Claim(
                MORE_TEXT,
                f"{model} against {FIRST}: difference with x{long:g} minus difference "
                + (f"with x{short:g}" if short != 1 else "without it"),
                gain(usual, model, short, long),
            )
            for short, long in pairwise(lengths_of_text)
        ]
    return [row for row in rows if row.difference is not None]


def is_interval(difference: PairedDifference | None) -> bool:
    return difference is not None and difference.low is not None


def claims_of_length(results: Runs, usual: Runs, times: float) -> list[Claim]:
    """Returns the claims about models with the same number of training steps, see `claims`."""
    same, same_usual = runs_of_length(results, times), runs_of_length(usual, times)
    names = {model: str(Arm(model, times=times)) for model in MODELS}

    def row(claim: str, a: str, b: str) -> Claim:
        return Claim(claim, f"{names[a]} against {names[b]}", same[a].minus(same[b]))

    more = [*MIXTURES][1:]
    rows = [row("more experts lower the perplexity at equal operations", a, FIRST) for a in more]
    stepwise = "each increase in the number of experts lowers the perplexity"
    rows += [row(stepwise, a, b) for b, a in pairwise(more)]
    what = f"{names[FIRST]} to {names[more[-1]]}: change for each doubling of the experts"
    rows.append(Claim("the perplexity falls with the number of experts", what, slope(same)))
    claim = "a mixture has a lower perplexity than an equally costly dense model"
    rows += [row(claim, a, dense) for dense in DENSE for a in more]
    rows.append(row("more operations lower the perplexity of a large mixture", LARGE, LARGE_BASE))
    rows += [
        Claim(
            MORE_TEXT,
            f"{names[a]} against {names[FIRST]}: difference after all steps minus difference "
            "after 25%",
            same_usual[a].widening(same_usual[FIRST], QUARTER),
        )
        for a in more
    ]
    return rows


def spread(results: Runs) -> list[float]:
    """Returns the spread over the seeds of a model, on the test part and on the dev part.

    It is the root of the mean variance over the models with two seeds or more; [] without any.
    """
    some = [arm_runs.values() for arm_runs in results.values() if len(arm_runs) > 1]
    return [
        statistics.fmean(statistics.variance(map(nll, arm_runs)) for arm_runs in some) ** 0.5
        for nll in (test_nll, dev_nll)
        if some
    ]


def best_mixture(results: Runs) -> Arm:
    """Returns the mixture with the lowest dev perplexity."""
    arms = [Arm(mixture, times=times) for times in lengths_of(results) for mixture in MIXTURES]
    arms = [arm for arm in arms if results[arm]]
    seeds = set.intersection(*(set(results[arm]) for arm in arms))

    def dev_perplexity(arm: Arm) -> float:
        runs = results[arm]
        return runs.on(seeds or runs).perplexity(dev_nll)

    return min(arms, key=dev_perplexity)


def changes_of(best: Arm, results: Runs) -> str:
    """Compares a mixture with other models on the test part."""
    gaps = [
        f"{as_change(gap)} from {base}"
        for base in (replace(best, model=model) for model in (FIRST, *DENSE))
        if base != best and (gap := results[best].minus(results[base]))
    ]
    return "; ".join(gaps)


def search(settings: Mapping[str, Any], runs: Runs) -> str:
    """Shows the learning rates and dropouts of which each model has the best; "" for only one."""
    lengths = all_lengths(runs)
    compared = tried(runs, [Arm(m, times=times) for m, times in product(MODELS, lengths)])
    if all(len(tried.nll) < 2 for tried in compared.values()):
        return ""
    return trials_table(compared, usual_as_text(settings))


def results_table(settings: Mapping[str, Any], results: Runs, best: Mapping[Arm, Arm]) -> str:
    per_byte = settings["test_tokens"] / settings["test_bytes"]
    rows = []
    for times, model in product(lengths_of(results), MODELS):
        same = runs_of_length(results, times)
        if not (arm_runs := same[model]):
            continue
        arm = Arm(model, times=times)
        changes = [as_change(arm_runs.minus(same[b])) if b != model else "" for b in BASES]
        rows.append(
            [
                arm,
                best[arm].trial or usual_as_text(settings),
                *arm_runs.size_cells(),
                len(arm_runs),
                f"{arm_runs.perplexity(nll_after(QUARTER)):.2f}",
                f"{arm_runs.perplexity():.2f}",
                f"{perplexity(arm_runs.mean(test_nll) * per_byte):.4f}",
                *changes,
            ]
        )
    header = [
        "model", "options", "ops/timestep", "parameters", "seeds", "test ppl after 25%",
        "test ppl", "ppl per byte", *(f"change from {base}, 95%" for base in BASES),
    ]  # fmt: skip
    return markdown_table(header, rows)


def plot(settings: Mapping[str, Any], results: Runs) -> Plot:
    """Plots the mean learning curves of the longest runs, and the perplexity with more experts."""
    lengths = lengths_of(results)
    figure, (learning, capacity) = new_axes(10, 4.2, columns=2)
    for model, arm_runs in runs_of_length(results, lengths[-1]).items():
        if points := [(tokens / 1e6, ppl) for tokens, ppl in arm_runs.curve()]:
            learning.plot(*zip(*points, strict=True), marker=".", label=model)
    learning.set(xlabel="training wordpieces (millions)", ylabel="dev perplexity", yscale="log")
    learning.yaxis.set_minor_formatter("{x:g}")
    learning.legend()
    with_first = [times for times in lengths if results[Arm(FIRST, times=times)]]
    for times in with_first:
        seen = settings["steps"] * settings["data.tokens_per_batch"] * times
        same = runs_of_length(results, times)
        gaps = [(n, same[model].minus(same[FIRST])) for model, n in MIXTURES.items()]
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
    for times, (place, dense) in product(with_first[-1:], enumerate(DENSE)):
        same = runs_of_length(results, times)
        if gap := same[dense].minus(same[FIRST]):
            level = percent(gap.mean)
            capacity.axhline(level, lw=0.8, ls="--", color="grey")
            at = (0.02 + 0.2 * place, level)  # side by side, because levels can be equal
            name = str(Arm(dense, times=times))
            capacity.annotate(name, at, xycoords=where, fontsize=7, va="bottom")
    capacity.set_xscale("log", base=4)
    capacity.set_xticks([*MIXTURES.values()], [*map(str, MIXTURES.values())])
    capacity.set(
        xlabel="experts, at equal operations",
        ylabel=f"change of the test perplexity from {FIRST} (%)",
    )
    capacity.legend()
    return Plot("learning curves, and perplexity with more experts", figure)


run = Capacity.start
