"""What experts specialise in, in contexts and in numbers (Table 9 of the paper).

    python scripts/studies/specialisation.py runs/capacity/moe-64-0.008-seed*
    python scripts/studies/specialisation.py runs/moe-64 --positions 50000 --permutations 200
    python scripts/studies/specialisation.py runs/moe-64 --domains prose=text/a technical=text/b

Takes finished runs of one model that differ in their seeds. Each run's model reads sentences of its
training text once with its own gate and once with a random one in its place. Measured are purity
(the share of the most frequent word, previous word, class of word or domain among the 50 positions
with an expert's highest gates) and mutual information of these and the expert with the highest
gate, each beside its values with shuffled labels. With --domains the sentences for the domain are
as many words of each of several corpora, named, in the words of the run.

Writes OUTPUT/specialisation.md, .json and .png (OUTPUT is docs/results if not given). What was
measured of a run is kept in RUN/specialisation.json and used again: an interrupted script goes on.
A run takes 3 minutes on one processor.
"""

import html
import json
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

from moe_ext.lab.analysis import (
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
from moe_ext.lab.analysis.routed_text import NEIGHBOURS
from moe_ext.lab.data import AnyText
from moe_ext.lab.data.corpora import PARTS_AND_ALL
from moe_ext.lab.files import write_json
from moe_ext.lab.training.checkpoint import TrainedModel, load_run
from moe_ext.lab.training.command import add_threads, at_least, make_parser
from moe_ext.lab.training.config import ConfigError, config_differences
from moe_ext.lab.training.device import set_up_torch
from moe_ext.lab.training.report import markdown_table, write_report
from moe_ext.lab.training.statistics import mean_difference
from moe_ext.lab.training.study import Claim, claims_data, verdict
from moe_ext.lab.training.text import load_part

_SHOWN_EXPERTS = 3  # of either kind, as in the paper's table
GATES = ("trained", "untrained")
_FORMAT = 1  # of RUN/specialisation.json


def measured(run: str, trained: TrainedModel, asked: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of a run: read if it was measured as asked, else measured and written."""
    asked = {"format": _FORMAT, "step": trained.step, **asked}
    path = Path(run) / "specialisation.json"
    if not path.is_file() or json.loads(path.read_text("utf-8"))["asked"] != asked:
        try:
            found = measure(trained, asked)
        except ValueError as error:
            raise ConfigError(f"{run}: {error}") from error
        known = {"asked": asked, "seed": trained.config.seed, **found}
        write_json(path, known)
    return json.loads(path.read_text("utf-8"))


def measure(trained: TrainedModel, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of both gates, and some experts' contexts, ready for JSON."""
    model, data, seed = trained.model, trained.config.data, trained.config.seed
    layer, positions, permutations = asked["layer"], asked["positions"], asked["permutations"]
    sentences = load_part(data, trained.vocabulary, asked["part"])
    texts = [
        load_part(replace(data, corpus=corpus, encoded=""), trained.vocabulary, asked["part"])
        for corpus in asked["domains"].values()
    ]

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
    """The number of its text for each position."""
    sizes = torch.tensor([len(routed.windows) for routed in parts])
    return torch.arange(len(parts)).repeat_interleave(sizes)


def _table_9(reports: Sequence[ExpertReport], seed: int) -> list[dict[str, Any]]:
    """Three most specialised experts and three drawn from the others, ready for JSON."""
    ranked = by_specialisation(reports)
    chosen, others = ranked[:_SHOWN_EXPERTS], ranked[_SHOWN_EXPERTS:]
    drawn = random.Random(seed).sample(others, min(_SHOWN_EXPERTS, len(others)))
    return [
        {"how": how, **asdict(report)}
        for how, some in (("most specialised", chosen), ("drawn at random", drawn))
        for report in some
    ]


def _over_runs(values: Sequence[float]) -> str:
    """Format the mean over runs, with its t interval for three runs or more."""
    mean = mean_difference(values)
    assert mean is not None
    return f"{mean.mean:.3f}" if mean.low is None else f"{mean:.3f}"


def values(runs: Sequence[Mapping[str, Any]], gate: str, label: str, key: str) -> list[float]:
    """A number of each run."""
    return [run[gate][label][key] for run in runs]


def claims(runs: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """The paper's claim, what is compared, and the difference: above zero if so."""
    rows = []

    def row(claim: str, what: str, a: Sequence[float], b: Sequence[float]) -> None:
        pairs = zip(a, b, strict=True)
        rows.append(Claim(claim, what, mean_difference([x - y for x, y in pairs])))

    for label in runs[0]["trained"]:
        for key, chance, name in (("purity", "permuted_purity", "purity"), ("share", "", "I / H")):
            trained, untrained = (values(runs, gate, label, key) for gate in GATES)
            permuted = values(runs, "trained", label, chance) if chance else [0.0] * len(runs)
            row(
                "M7: experts specialise",
                f"{name} of the {label}, beside shuffled labels",
                trained,
                permuted,
            )
            row(
                "and the gate has learned it",
                f"{name} of the {label}, beside a random W_g",
                trained,
                untrained,
            )
    return sorted(rows, key=lambda r: r[0], reverse=True)


def as_markdown(runs: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    """The page: numbers, claims, and Table 9 of the first run."""
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
    domains = f" Domains: as many words each of {', '.join(facts['domains'])}."
    tables = "\n".join(
        f"{how.capitalize()}:\n\n{_contexts_table([e for e in first['table'] if e['how'] == how])}"
        for how in dict.fromkeys(expert["how"] for expert in first["table"])
    )
    return (
        "# What the experts specialise in\n\n"
        f"```\npython scripts/studies/specialisation.py {facts['command']}\n```\n\n"
        f"{len(runs)} run{'s' * (len(runs) > 1)} of a model with {facts['k']} of "
        f"{first['num_experts']} experts, {facts['steps']:,} steps, on "
        f"{first['positions']:,} positions of the {facts['part']} part, without noise."
        f"{domains if facts['domains'] else ''} Means over the runs, with 95% t intervals where "
        "there are several.\n\n"
        "Purity: the share of the most frequent label among the 50 positions with an expert's "
        "highest gates, mean over experts. I / H: mutual information of the label and the expert "
        "with the highest gate, less its mean with shuffled labels, of that expert's entropy "
        f"({entropies['trained']} nats; with a random W_g {entropies['untrained']}). Labels were "
        f"shuffled {facts['permutations']:,} times; p ≤ {worst:.2g} for all purities and "
        "informations of the trained gates. A random W_g is normal with the root mean square of "
        "the trained one, before the same experts, behind the same trained layers. The classes of "
        "words are their shapes and suffixes.\n\n"
        f"{numbers}\n![purity by label and by expert](specialisation.png)\n\n"
        "A claim is reproduced where the interval lies above zero, reversed where below, else not "
        f"seen.\n\n{verdicts}\n"
        "## Contexts\n\n"
        "Table 9 of the paper for the first run: the distinct contexts with the highest gates, of "
        "the three experts that their words set apart most, and of three that were drawn at random "
        f"from the others.\n\n{tables}"
    )


def _contexts_table(experts: Sequence[Mapping[str, Any]]) -> str:
    """A column for each expert, a row for each rank."""
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
    """A word between its neighbours, as Markdown."""
    shown = [re.sub(r"([\\`*_|\[\]~$])", r"\\\1", html.escape(word, quote=False)) for word in words]
    shown[NEIGHBOURS] = f"**{shown[NEIGHBOURS]}**"
    return " ".join(filter(None, shown))


def plot(runs: Sequence[Mapping[str, Any]]) -> Figure:
    """Purity by label on the left, by expert on the right."""
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
    left.set(ylabel="purity, mean over experts", ylim=(0, 1.12), title="dots: runs")
    left.legend(loc="upper center", ncols=len(bars))

    label = "current word"
    for gate, colour in (("trained", "C0"), ("untrained", "C1")):
        for run in runs:
            found = run[gate][label]["expert_purity"]
            right.plot(range(1, len(found) + 1), found, color=colour, linewidth=1)
    chance = max(run["trained"][label]["permuted_expert_purity_97.5%"] for run in runs)
    right.axhline(chance, color="C2", linestyle="--", linewidth=1)
    right.set(xlabel="rank of the expert", ylabel=f"purity of the {label}", ylim=(0, 1.02))
    right.set_title("97.5% of experts with shuffled labels: below the dashes")
    right.grid(alpha=0.3)
    return figure


def _named_corpora(options: Iterable[str]) -> dict[str, str]:
    """The corpora of NAME=CORPUS by name."""
    options = list(options)
    pairs = [option.partition("=") for option in options]
    domains = {name: corpus for name, _, corpus in pairs}
    if not all(map(all, pairs)) or len(domains) != len(options) or len(domains) == 1:
        raise ConfigError(f"--domains must be two or more distinct NAME=CORPUS, got {options}")
    return domains


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = make_parser(__doc__)
    parser.add_argument("runs", nargs="+", help="the folders of training runs")
    parser.add_argument("--part", choices=PARTS_AND_ALL, default="train")
    parser.add_argument(
        "--positions", type=at_least(1), default=200_000, help="how many words to look at"
    )
    parser.add_argument("--permutations", type=at_least(2), default=1_000)
    parser.add_argument("--layer", type=int, default=0, help="which of the model's MoE layers")
    parser.add_argument("--domains", nargs="+", default=[], metavar="NAME=CORPUS")
    parser.add_argument("--output", default="docs/results", help="folder of the report")
    add_threads(parser)
    options = parser.parse_args(arguments)
    set_up_torch("cpu", options.threads)
    domains = _named_corpora(options.domains) if options.domains else {}

    models = [load_run(run) for run in options.runs]
    config = models[0].config
    for run, trained in zip(options.runs, models, strict=True):
        changed = [key for key in config_differences(config, trained.config) if key != "seed"]
        if changed:
            raise ConfigError(
                f"{run} must differ from the first run in its seed alone, but {changed} differ"
            )
    seeds = [trained.config.seed for trained in models]
    if len(set(seeds)) != len(seeds):
        raise ConfigError(f"the runs must have distinct seeds, got {seeds}")
    asked = {key: getattr(options, key) for key in ("part", "positions", "permutations", "layer")}
    asked["domains"] = domains
    runs = []
    for run, trained in zip(options.runs, models, strict=True):
        print(f"measuring {run}", flush=True)
        runs.append(measured(run, trained, asked))
    facts = {
        "command": shlex.join(arguments if arguments is not None else sys.argv[1:]),
        **asked,
        "k": config.model.moe.experts_per_token,
        "steps": runs[0]["asked"]["step"],
    }
    page = as_markdown(runs, facts)
    report = {
        **facts,
        "claims": claims_data(claims(runs)),
        "runs": runs,
    }
    write_report(options.output, "specialisation", page, report, plot(runs))
    return report
