"""Measures what experts specialise in, and shows the contexts of some experts (Table 9).

    moe-lab study specialisation runs/moe-64-seed*
    moe-lab study specialisation runs/moe-64 --positions 50000 --permutations 200
    moe-lab study specialisation --report

The arguments are finished runs of one model that differ only in their seeds. The study runs
sentences of the training text through each model, once with the trained gate and once with a random
gate. A position in the text has these labels: its word, the previous word, the word class and, for
several language pairs, the pair. The study measures for each label:

- purity: the share of the most frequent label among the 50 positions with an expert's highest gates
- mutual information of the label and the expert with the highest gate

Shuffled labels show the values that chance gives.

The file OUTPUT/specialisation.json keeps the numbers of each run, so the same command continues
after an interruption. One run takes 3 minutes on one processor. The command also writes the page
and its plot; --report writes them from the file, without the runs.
"""

import argparse
import html
import math
import random
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from moe_lab.analysis.experts import ExpertReport, by_specialisation, expert_reports
from moe_lab.analysis.routed_text import (
    NEIGHBOURS,
    RoutedText,
    find_moe_layer,
    route_text,
    untrained_gates,
)
from moe_lab.analysis.specialisation import labels_of, measure_specialisation
from moe_lab.data import AnyText
from moe_lab.errors import ConfigError
from moe_lab.experiments.arms import Arm
from moe_lab.experiments.claims import Claim, claims_of
from moe_lab.experiments.page import Command, Page, Plot, new_axes
from moe_lab.experiments.runs import Run, mean_difference
from moe_lab.experiments.store import Stored
from moe_lab.experiments.study import Study
from moe_lab.markdown import markdown_table
from moe_lab.studies.entries import usual_options
from moe_lab.training.checkpoint import TrainedModel, load_run
from moe_lab.training.config import config_differences
from moe_lab.training.device import set_up_torch
from moe_lab.training.text import load_part

_SHOWN_EXPERTS = 3  # of the most specialised experts, and of the others, as in Table 9
MODEL = "trained"  # the only arm
GATES = ("trained", "untrained")


class SpecialisationStudy(Study):
    name = "specialisation"
    own = usual_options("specialisation", "part", "positions", "permutations", "layer")
    models = usual = (MODEL,)

    def __init__(self, options: argparse.Namespace) -> None:
        options.runs = options.output  # of the lock files
        super().__init__(options)

    def settings(self) -> dict[str, Any]:
        """Loads the models and the texts."""
        options = self.options
        set_up_torch("cpu", options.threads)
        trained = [load_run(folder) for folder in options.folders]
        config, vocabulary = trained[0].config, trained[0].vocabulary
        for folder, model in zip(options.folders, trained, strict=True):
            changed = [key for key in config_differences(config, model.config) if key != "seed"]
            if changed:
                raise ConfigError(
                    f"{folder} must differ from the first run only in its seed, but {changed} "
                    "differ"
                )
        seeds = [model.config.seed for model in trained]
        if len(set(seeds)) != len(seeds):
            raise ConfigError(f"specialisation: the runs must have distinct seeds, got {seeds}")
        self.trained = dict(zip(seeds, zip(options.folders, trained, strict=True), strict=True))
        self.text = load_part(config.data, vocabulary, options.part)
        return {
            **self.own_settings(),
            "k": config.model.moe.experts_per_token,
            "steps": trained[0].step,
            "texts": [self.text.fingerprint()],
        }

    def planned(self) -> Iterator[tuple[Arm, int]]:
        return ((Arm(MODEL), seed) for seed in self.trained)

    def run(self, arm: Arm, seed: int) -> Run:
        folder, trained = self.trained[seed]
        print(f"measuring {folder}", flush=True)
        try:
            measured = measure(trained, vars(self.options), self.text)
        except ValueError as error:
            raise ConfigError(f"{folder}: {error}") from error
        return {"run": str(folder), **measured}

    def commands(self, stored: Stored) -> Command:
        command = self.command(stored.settings)
        command[3:3] = [run["run"] for run in stored.runs]
        return Command(shlex.join(command))

    def page(self, stored: Stored) -> Page | None:
        runs = stored.runs
        first = runs[0]
        rows = []
        for label in first["trained"]:
            columns = [(gate, key) for key in ("purity", "share") for gate in GATES]
            columns.insert(2, ("trained", "permuted_purity"))
            rows.append(
                [label, *(_over_runs(values(runs, gate, label, key)) for gate, key in columns)]
            )
        header = [
            "label", "purity, trained gate", "purity, random W_g", "purity, labels shuffled",
            "I / H, trained gate", "I / H, random W_g",
        ]  # fmt: skip
        worst = max(
            result[p] for run in runs for result in run["trained"].values()
            for p in ("p_purity", "p_information")
        )  # fmt: skip
        trained, untrained = (
            _over_runs(values(runs, gate, "current word", "entropy")) for gate in GATES
        )
        tables = []
        for how in dict.fromkeys(expert["how"] for expert in first["table"]):
            table = _contexts_table([e for e in first["table"] if e["how"] == how])
            tables.append(f"{how.capitalize()}:\n\n{table}")
        return self.filled(
            stored,
            first=first,
            plot=plot(runs),
            number=f"{len(runs)} run{'s' * (len(runs) > 1)}",
            trained=trained,
            untrained=untrained,
            worst=worst,
            labels=markdown_table(header, rows),
            claims=claims_of(
                claims(runs),
                "difference, 95%",
                lambda gap: f"{gap:+.3f}" if gap else "",
                low=0,
                high=math.inf,
            ),
            contexts="\n".join(tables),
        )


def measure(trained: TrainedModel, asked: Mapping[str, Any], text: AnyText) -> dict[str, Any]:
    """Measures a model with a trained and a random gate, and collects contexts, as JSON values."""
    model, seed, layer = trained.model, trained.config.seed, asked["layer"]

    def route() -> RoutedText:
        return route_text(model, text, num_positions=asked["positions"], layer=layer)

    def numbers(routed: RoutedText) -> dict[str, Any]:
        results = measure_specialisation(
            routed,
            labels_of(routed, trained.vocabulary),
            num_permutations=asked["permutations"],
            seed=seed,
        )
        return {name: result.summary() for name, result in results.items()}

    routed = route()
    result: dict[str, Any] = {
        "positions": len(routed.windows),
        "num_experts": routed.num_experts,
        "table": _table_9(expert_reports(routed, trained.vocabulary.words), seed),
        "trained": numbers(routed),
    }
    with untrained_gates(find_moe_layer(model, layer), seed):
        result["untrained"] = numbers(route())
    return result


def _table_9(reports: Sequence[ExpertReport], seed: int) -> list[dict[str, Any]]:
    """Picks the three most specialised and three other random experts, as JSON values."""
    ranked = by_specialisation(reports)
    chosen, remaining = ranked[:_SHOWN_EXPERTS], ranked[_SHOWN_EXPERTS:]
    drawn = random.Random(seed).sample(remaining, min(_SHOWN_EXPERTS, len(remaining)))
    return [
        {"how": how, **asdict(report)}
        for how, some in (("most specialised", chosen), ("drawn at random", drawn))
        for report in some
    ]


def _over_runs(values: Sequence[float]) -> str:
    """Formats the mean over runs, with its t interval for three runs or more."""
    mean = mean_difference(values)
    assert mean is not None
    return f"{mean.mean:.3f}" if mean.low is None else f"{mean:.3f}"


def values(runs: Sequence[Mapping[str, Any]], gate: str, label: str, key: str) -> list[float]:
    """Returns the number `key` of each run, for one of `GATES` and a label."""
    return [run[gate][label][key] for run in runs]


def claims(runs: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Returns the paper's claims; a positive difference supports a claim."""
    rows = []

    def row(claim: str, what: str, a: Sequence[float], b: Sequence[float]) -> None:
        pairs = zip(a, b, strict=True)
        rows.append(Claim(claim, what, mean_difference([x - y for x, y in pairs])))

    for label in runs[0]["trained"]:
        for key, chance, name in (("purity", "permuted_purity", "purity"), ("share", "", "I / H")):
            trained, untrained = (values(runs, gate, label, key) for gate in GATES)
            permuted = values(runs, "trained", label, chance) if chance else [0.0] * len(runs)
            what = f"{name} of the {label}, against"
            row("experts specialise", f"{what} shuffled labels", trained, permuted)
            claim = "a trained gate specialises more than a random gate"
            row(claim, f"{what} a random W_g", trained, untrained)
    return sorted(rows, key=lambda r: r[0], reverse=True)


def _contexts_table(experts: Sequence[Mapping[str, Any]]) -> str:
    """Formats contexts: one column for each expert, the highest gate in the first row."""
    header = [
        f"expert {e['expert']}: {100 * e['share']:.1f}% of the words, purity {e['purity']:.2f}"
        for e in experts
    ]
    length = max(len(e["contexts"]) for e in experts)
    columns = [
        [in_place(words) for _, words in e["contexts"]] + [""] * (length - len(e["contexts"]))
        for e in experts
    ]
    return markdown_table(header, zip(*columns, strict=True))


def in_place(words: Sequence[str]) -> str:
    """Formats `words` with the middle word in bold, and with Markdown and HTML escaped."""
    shown = [re.sub(r"([\\`*_|\[\]~$])", r"\\\1", html.escape(word, quote=False)) for word in words]
    shown[NEIGHBOURS] = f"**{shown[NEIGHBOURS]}**"
    return " ".join(filter(None, shown))


def plot(runs: Sequence[Mapping[str, Any]]) -> Plot:
    """Plots purity by label on the left and by expert on the right."""
    figure, (left, right) = new_axes(12, 4.5, columns=2, dpi=120)
    labels = list(runs[0]["trained"])
    bars = (
        ("trained", "purity", "trained gate"),
        ("untrained", "purity", "random W_g"),
        ("trained", "permuted_purity", "labels shuffled"),
    )
    for number, (gate, key, title) in enumerate(bars):
        purities = [values(runs, gate, label, key) for label in labels]
        place = [index + 0.27 * (number - 1) for index in range(len(labels))]
        left.bar(place, [sum(v) / len(v) for v in purities], width=0.25, label=title)
        for x, v in zip(place, purities, strict=True):
            left.plot([x] * len(v), v, ".", color="black", markersize=4)
    left.set_xticks(range(len(labels)), labels)
    left.set(ylabel="purity, mean over experts", ylim=(0, 1.12), title="each dot is a run")
    left.legend(loc="upper center", ncols=len(bars))

    label = "current word"
    for gate, colour in (("trained", "C0"), ("untrained", "C1")):
        for run in runs:
            purities = run[gate][label]["expert_purity"]
            right.plot(range(1, len(purities) + 1), purities, color=colour, linewidth=1)
    chance = max(run["trained"][label]["permuted_expert_purity_97.5%"] for run in runs)
    right.axhline(chance, color="C2", linestyle="--", linewidth=1)
    right.set(xlabel="experts, sorted by purity", ylabel=f"purity of the {label}", ylim=(0, 1.02))
    right.set_title("dashed line: 97.5th percentile with shuffled labels")
    right.grid(alpha=0.3)
    return Plot("purity by label and by expert", figure)


run = SpecialisationStudy.start
