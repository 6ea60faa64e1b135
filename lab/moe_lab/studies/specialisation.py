"""Measures what experts specialise in, and shows the contexts of some experts (Table 9).

    moe-lab study specialisation runs/moe-64-seed*
    moe-lab study specialisation runs/moe-64 --positions 50000 --permutations 200
    moe-lab study specialisation runs/moe-64 --domains prose=text/a technical=text/b
    moe-lab study specialisation --report

The arguments are finished runs of one model that differ only in their seeds. The script runs
sentences of the training text through each model, once with the trained gate and once with a random
gate. A position in the text has these labels: its word, the previous word, the word class and the
domain. The script measures for each label:

- purity: the share of the most frequent label among the 50 positions with an expert's highest gates
- mutual information of the label and the expert with the highest gate

Shuffled labels show the values that chance gives. --domains names two or more corpora as
NAME=CORPUS, and an equal number of words of each is labelled with the domain NAME. All corpora are
encoded with the vocabulary of the run.

The script writes specialisation.md, .json and .png to the folder OUTPUT (default: runs/results). It
reuses the numbers of each run from RUN/specialisation.json, so the same command continues after an
interruption. One run takes 3 minutes on one processor. --report writes the page and the plot again,
from specialisation.json.
"""

import argparse
import html
import math
import random
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from moe_lab.analysis import (
    ExpertReport,
    RoutedText,
    by_specialisation,
    expert_reports,
    find_moe_layer,
    joined,
    labels_of,
    measure_specialisation,
    route_text,
    untrained_gates,
)
from moe_lab.analysis.routed_text import NEIGHBOURS
from moe_lab.cli import add_output, add_threads, at_least, make_parser
from moe_lab.data import AnyText
from moe_lab.errors import ConfigError
from moe_lab.experiments.report import markdown_table, write_report
from moe_lab.experiments.statistics import mean_difference
from moe_lab.experiments.study import Claim, claims_data, verdict
from moe_lab.files import read_json, write_json
from moe_lab.names import PARTS_AND_ALL
from moe_lab.training.checkpoint import TrainedModel, load_run
from moe_lab.training.config import config_differences
from moe_lab.training.device import set_up_torch
from moe_lab.training.text import load_part

_SHOWN_EXPERTS = 3  # of the most specialised experts, and of the others, as in Table 9
GATES = ("trained", "untrained")
_FORMAT = 2  # the version of RUN/specialisation.json


def measured(run: str, trained: TrainedModel, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Measures a run with the options `asked`, or reads its results for the same options and texts.

    Raises:
        ConfigError: the model has no MoE layer with the index of --layer, or gates with thresholds.
    """
    data = trained.config.data
    sentences, *texts = (
        load_part(each, trained.vocabulary, asked["part"])
        for each in (
            data,
            *(replace(data, corpus=c, encoded="") for c in asked["domains"].values()),
        )
    )
    asked = {
        "format": _FORMAT,
        "step": trained.step,
        **asked,
        "texts": [text.fingerprint() for text in (sentences, *texts)],
    }
    path = Path(run) / "specialisation.json"
    try:
        known = read_json(path) if path.is_file() else None
        if not isinstance(known, dict) or known.get("asked") != asked:
            found = measure(trained, asked, sentences, texts)
            write_json(path, {"asked": asked, "seed": trained.config.seed, **found})
        return read_json(path)
    except ValueError as error:
        raise ConfigError(f"{run}: {error}") from error


def measure(
    trained: TrainedModel, asked: Mapping[str, Any], sentences: AnyText, texts: Sequence[AnyText]
) -> dict[str, Any]:
    """Measures a model with a trained and a random gate, and collects contexts, as JSON values.

    Args:
        trained: the model.
        asked: the options of the measurement.
        sentences: the text of the run.
        texts: the texts of the domains.
    """
    model, seed = trained.model, trained.config.seed
    layer, positions, permutations = asked["layer"], asked["positions"], asked["permutations"]

    def route(text: AnyText, number: int) -> RoutedText:
        return route_text(model, text, num_positions=number, layer=layer)

    def numbers(routed: RoutedText) -> dict[str, Any]:
        found = measure_specialisation(
            routed,
            labels_of(routed, trained.vocabulary),
            num_permutations=permutations,
            seed=seed,
        )
        if texts:
            parts = [route(text, positions // len(texts)) for text in texts]
            label = {"domain": _domain_labels(parts)}
            found |= measure_specialisation(
                joined(parts), label, num_permutations=permutations, seed=seed
            )
        return {name: result.summary() for name, result in found.items()}

    routed = route(sentences, positions)
    result: dict[str, Any] = {
        "positions": len(routed.windows),
        "num_experts": routed.num_experts,
        "table": _table_9(expert_reports(routed, trained.vocabulary), seed),
        "trained": numbers(routed),
    }
    with untrained_gates(find_moe_layer(model, layer), seed):
        result["untrained"] = numbers(route(sentences, positions))
    return result


def _domain_labels(parts: Sequence[RoutedText]) -> Tensor:
    """Returns for each position the index of the text that contains the position."""
    sizes = torch.tensor([len(routed.windows) for routed in parts])
    return torch.arange(len(parts)).repeat_interleave(sizes)


def _table_9(reports: Sequence[ExpertReport], seed: int) -> list[dict[str, Any]]:
    """Picks the three most specialised and three other random experts, as JSON values."""
    ranked = by_specialisation(reports)
    chosen, others = ranked[:_SHOWN_EXPERTS], ranked[_SHOWN_EXPERTS:]
    drawn = random.Random(seed).sample(others, min(_SHOWN_EXPERTS, len(others)))
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
    """Returns the number `key` of each run, for a gate ("trained" or "untrained") and a label."""
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
            row(
                "experts specialise",
                f"{name} of the {label}, against shuffled labels",
                trained,
                permuted,
            )
            row(
                "a trained gate specialises more than a random gate",
                f"{name} of the {label}, against a random W_g",
                trained,
                untrained,
            )
    return sorted(rows, key=lambda r: r[0], reverse=True)


def as_markdown(report: Mapping[str, Any]) -> str:
    """Formats the Markdown page: numbers, verdicts on the claims, Table 9 for the first run."""
    runs = report["runs"]
    first = runs[0]
    rows = [
        [
            label,
            _over_runs(values(runs, "trained", label, "purity")),
            _over_runs(values(runs, "untrained", label, "purity")),
            _over_runs(values(runs, "trained", label, "permuted_purity")),
            _over_runs(values(runs, "trained", label, "share")),
            _over_runs(values(runs, "untrained", label, "share")),
        ]
        for label in first["trained"]
    ]
    numbers = markdown_table(
        [
            "label", "purity, trained gate", "purity, random W_g", "purity, labels shuffled",
            "I / H, trained gate", "I / H, random W_g",
        ],
        rows,
    )  # fmt: skip
    verdicts = markdown_table(
        ["claim", "compared", "difference, 95%", "verdict"],
        [
            [claim, what, f"{gap:+.3f}" if gap else "", verdict(gap, 0, math.inf)]
            for claim, what, gap in claims(runs)
        ],
    )
    worst = max(
        result[p] for run in runs for result in run["trained"].values()
        for p in ("p_purity", "p_information")
    )  # fmt: skip
    entropies = {gate: _over_runs(values(runs, gate, "current word", "entropy")) for gate in GATES}
    domains = f" The domains have equal numbers of words: {', '.join(report['domains'])}."
    tables = "\n".join(
        f"{how.capitalize()}:\n\n{_contexts_table([e for e in first['table'] if e['how'] == how])}"
        for how in dict.fromkeys(expert["how"] for expert in first["table"])
    )
    return (
        "# What the experts specialise in\n\n"
        "![purity by label and by expert](specialisation.png)\n\n"
        "The paper shows that experts specialise in words and their contexts (Table 9). The page "
        f"covers {len(runs)} run{'s' * (len(runs) > 1)} of a model with {report['k']} of "
        f"{first['num_experts']} experts per token after {report['steps']:,} steps. The models "
        f"ran on {first['positions']:,} positions of the {report['part']} part, without gate noise."
        f"{domains if report['domains'] else ''} The numbers are means over the runs. With three "
        "runs or more, a 95% t interval follows in brackets.\n\n"
        "Purity is the share of the most frequent label among the 50 positions with an expert's "
        "highest gates, averaged over experts. I is the mutual information of the label and the "
        "expert with the highest gate, minus its mean with shuffled labels. H is the entropy of "
        f"the index of that expert: {entropies['trained']} nats with the trained gate and "
        f"{entropies['untrained']} nats with a random W_g. Labels were shuffled "
        f"{report['permutations']:,} times; p ≤ {worst:.2g} for every purity and every mutual "
        "information of the trained gates. A random W_g has normal entries with the root mean "
        "square of the trained W_g; all other weights are the trained ones. The class of a word "
        "follows from its form and its suffix.\n\n"
        f"{numbers}\n"
        "A claim is supported if the whole interval lies above zero, contradicted if the whole "
        f"interval lies below zero, and otherwise not decided.\n\n{verdicts}\n"
        "## Contexts\n\n"
        "These are tables like Table 9 of the paper, for the first run. A column lists the "
        "distinct contexts with an expert's highest gates. The experts are the three most "
        f"specialised ones and three random other ones.\n\n{tables}\n"
        f"```\nmoe-lab study specialisation {report['command']}\n```\n"
    )


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


def plot(runs: Sequence[Mapping[str, Any]]) -> Figure:
    """Plots purity by label on the left and by expert on the right."""
    figure = Figure(figsize=(12, 4.5), layout="constrained", dpi=120)
    left, right = figure.subplots(1, 2)
    labels = list(runs[0]["trained"])
    bars = (
        ("trained", "purity", "trained gate"),
        ("untrained", "purity", "random W_g"),
        ("trained", "permuted_purity", "labels shuffled"),
    )
    for number, (gate, key, title) in enumerate(bars):
        found = [values(runs, gate, label, key) for label in labels]
        place = [index + 0.27 * (number - 1) for index in range(len(labels))]
        left.bar(place, [sum(v) / len(v) for v in found], width=0.25, label=title)
        for x, v in zip(place, found, strict=True):
            left.plot([x] * len(v), v, ".", color="black", markersize=4)
    left.set_xticks(range(len(labels)), labels)
    left.set(ylabel="purity, mean over experts", ylim=(0, 1.12), title="each dot is a run")
    left.legend(loc="upper center", ncols=len(bars))

    label = "current word"
    for gate, colour in (("trained", "C0"), ("untrained", "C1")):
        for run in runs:
            found = run[gate][label]["expert_purity"]
            right.plot(range(1, len(found) + 1), found, color=colour, linewidth=1)
    chance = max(run["trained"][label]["permuted_expert_purity_97.5%"] for run in runs)
    right.axhline(chance, color="C2", linestyle="--", linewidth=1)
    right.set(xlabel="experts, sorted by purity", ylabel=f"purity of the {label}", ylim=(0, 1.02))
    right.set_title("dashed line: 97.5th percentile with shuffled labels")
    right.grid(alpha=0.3)
    return figure


def _named_corpora(options: Iterable[str]) -> dict[str, str]:
    """Parses the arguments NAME=CORPUS.

    Raises:
        ConfigError: an argument has another form, a name occurs twice, or only one is given.
    """
    options = list(options)
    pairs = [option.partition("=") for option in options]
    domains = {name: corpus for name, _, corpus in pairs}
    if not all(map(all, pairs)) or len(domains) != len(options) or len(domains) == 1:
        raise ConfigError(f"--domains must be two or more distinct NAME=CORPUS, got {options}")
    return domains


def measured_runs(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measures the runs of the arguments, and returns the report as data for JSON.

    Raises:
        ConfigError: the runs differ in more than their seeds, or in less.
    """
    domains = _named_corpora(options.domains) if options.domains else {}
    models = [load_run(run) for run in options.runs]
    config = models[0].config
    for run, trained in zip(options.runs, models, strict=True):
        changed = [key for key in config_differences(config, trained.config) if key != "seed"]
        if changed:
            raise ConfigError(
                f"{run} must differ from the first run only in its seed, but {changed} differ"
            )
    seeds = [trained.config.seed for trained in models]
    if len(set(seeds)) != len(seeds):
        raise ConfigError(f"specialisation: the runs must have distinct seeds, got {seeds}")
    asked = {key: getattr(options, key) for key in ("part", "positions", "permutations", "layer")}
    asked["domains"] = domains
    runs = []
    for run, trained in zip(options.runs, models, strict=True):
        print(f"measuring {run}", flush=True)
        runs.append(measured(run, trained, asked))
    return {
        "command": command,
        **asked,
        "k": config.model.moe.experts_per_token,
        "steps": runs[0]["asked"]["step"],
        "claims": claims_data(claims(runs)),
        "runs": runs,
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs the study and returns its report."""
    parser = make_parser(__doc__)
    parser.add_argument("runs", nargs="*", help="the folders of training runs")
    parser.add_argument(
        "--part", choices=PARTS_AND_ALL, default="train", help="part of the corpus (%(default)s)"
    )
    parser.add_argument(
        "--positions", type=at_least(1), default=200_000, help="number of words (%(default)s)"
    )
    parser.add_argument(
        "--permutations",
        type=at_least(2),
        default=1_000,
        help="shuffles of the labels (%(default)s)",
    )
    parser.add_argument("--layer", type=int, default=0, help="index among the MoE layers")
    parser.add_argument(
        "--domains", nargs="+", default=[], metavar="NAME=CORPUS", help="two or more corpora"
    )
    add_output(parser)
    parser.add_argument("--report", action="store_true", help="write the page without measuring")
    add_threads(parser)
    options = parser.parse_args(arguments)
    if options.report == bool(options.runs):
        parser.error("runs must be given, or --report instead")
    set_up_torch("cpu", options.threads)
    if options.report:
        report = read_json(options.output / "specialisation.json")
    else:
        command = shlex.join(arguments if arguments is not None else sys.argv[1:])
        report = measured_runs(options, command)
    runs = report["runs"]
    write_report(options.output, "specialisation", as_markdown(report), report, plot(runs))
    return report
