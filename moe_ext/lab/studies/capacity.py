"""Compares models with 4 to 256 experts at equal operations (Figs. 2 and 3, Table 7).

    python scripts/studies/capacity.py
    python scripts/studies/capacity.py --seeds 4 --arms "moe-64 x2" "moe-4 x2"
    python scripts/studies/capacity.py --text prose data.corpus=CORPUS
    python scripts/studies/capacity.py --text languages data.corpus=CORPUS
    python scripts/studies/capacity.py --report

The models are those of configs/small, with a width of 96, without dropout, on wordpieces with the
full softmax. The text has Python code, C++ headers and documentation. With --text prose,
data.corpus has English prose. With --text languages, it is that of `prepare_data.py languages`,
which has English and six other languages.

The models whose names end in " x2" and " x4" train for two and four times the steps; those with
" rate" and " dropout" have other settings. --arms selects such models.

The file OUTPUT/capacity_TEXT.json (default: runs/results) keeps every finished run, so the study
can grow over many occasions and machines. A run that is interrupted continues from its checkpoint
in RUNS. To share the runs, start the command several times. A run takes 3 to 30 minutes on an idle
processor. The script also writes capacity_TEXT.md and .png; --report writes them without training
and without the corpus.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from moe_ext.lab.data import Wordpieces
from moe_ext.lab.experiments.report import markdown_table
from moe_ext.lab.experiments.results import train_and_test
from moe_ext.lab.experiments.statistics import PairedDifference, mean_difference
from moe_ext.lab.experiments.stored import (
    Report,
    Run,
    Stored,
    changed_options,
    commands_of,
    core_hours,
    mean_curve,
    record_of,
    report_stored,
    results_of,
    run_missing,
    shared_settings,
)
from moe_ext.lab.experiments.study import (
    HOW_COMPARED,
    HOW_DECIDED,
    Claim,
    Results,
    as_change,
    claims_data,
    claims_table,
    config_of_run,
    difference,
    mean_perplexity,
    size_cells,
    study_parser,
    trials,
    widening,
)
from moe_ext.lab.training.config import Config, ConfigError, read_config
from moe_ext.lab.training.device import set_up_for
from moe_ext.lab.training.metrics import bytes_of, perplexity
from moe_ext.lab.training.text import SentenceText, load_text

MIXTURES = {"moe-4": 4, "moe-16": 16, "moe-64": 64, "moe-256-h": 256}  # numbers of experts
DENSE = ("moe-1-wide", "moe-1-deep", "4xlstm", "lstm-384-96")  # of equal operations
LARGE, LARGE_BASE = "moe-64-2x", "moe-64"  # a mixture of twice the operations
MODELS = (*MIXTURES, *DENSE, LARGE)
_FILES = {"lstm-384-96": "lstm-512-128"}  # models with a configuration of another name
# Suffixes of the names of models that train longer, and of models with another rate or dropout.
LENGTHS = {"": 1, " x2": 2, " x4": 4}
TRIALS = {
    " rate 0.004": "optimizer.learning_rate=4e-3",
    " rate 0.016": "optimizer.learning_rate=16e-3",
    " dropout 0.1": "model.dropout=0.1",
}
# The model, the factor of the number of steps, and the settings of each arm.
ARMS: dict[str, tuple[str, int, list[str]]]
ARMS = {m + suffix: (m, factor, []) for suffix, factor in LENGTHS.items() for m in MODELS}
ARMS |= {m + suffix: (m, 1, [setting]) for suffix, setting in TRIALS.items() for m in MODELS}
FIRST = "moe-4"
BASES = (FIRST, "moe-1-wide", "4xlstm")  # of the changes in the table
MORE_TEXT = "more training text increases the advantage of more experts"
QUARTER = 0.25
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
_OF_MODEL = dict.fromkeys(MIXTURES, ["model.moe.hidden_sizes=[192]"]) | {
    "moe-1-wide": ["model.ffn.hidden_sizes=[768]"],
    "moe-1-deep": ["model.ffn.hidden_sizes=[192, 192, 192, 192]"],
    "4xlstm": [],
    "lstm-384-96": ["model.lstm_units=384"],
    LARGE: ["model.lstm_units=192", "model.moe.hidden_sizes=[384]"],
}


class Kind(NamedTuple):
    """A kind of text.

    Attributes:
        title: the title of the page.
        contents: what the text contains.
    """

    title: str
    contents: str


TEXTS = {
    "sources": Kind("code and documentation", "Python code, C++ headers and documentation"),
    "prose": Kind("English prose", "English prose"),
    "languages": Kind("seven languages", "sentences of English and six other languages"),
}


def settings_of(config: Config, text: SentenceText, corpus: str) -> dict[str, Any]:
    """Returns what all runs of the study share: text, sizes and options of training."""
    if not isinstance(text.vocabulary, Wordpieces):
        raise ConfigError('data.kind must be "bpe" or "unigram" for this study, got "words"')
    return {
        "text": corpus,
        "train_tokens": text.train.num_tokens,
        "test_tokens": text.test.num_tokens,
        "test_bytes": bytes_of(text.test, text.vocabulary),
        **shared_settings(config, text),
    }


def of_length(results: Results, suffix: str) -> Results:
    """Returns the runs with one number of training steps, by model."""
    return {model: results[model + suffix] for model in MODELS}


def lengths_of(results: Results) -> list[str]:
    """Returns the suffixes of the numbers of training steps for which a mixture has a run."""
    return [s for s in LENGTHS if any(results[mixture + s] for mixture in MIXTURES)]


def slope(results: Results) -> PairedDifference | None:
    """Fits ln(perplexity) linearly to log2(experts), for each seed that all mixtures have."""
    seeds = set.intersection(*(set(results[arm]) for arm in MIXTURES))
    doublings = [number.bit_length() - 1 for number in MIXTURES.values()]
    return mean_difference(
        [
            statistics.linear_regression(
                doublings, [results[arm][seed].test_nll for arm in MIXTURES]
            ).slope
            for seed in sorted(seeds)
        ]
    )


def gain(results: Results, arm: str, short: str, long: str) -> PairedDifference | None:
    """Computes how the difference between `arm` and FIRST changes with more training steps.

    Negative: the longer training increases the advantage of `arm` over FIRST. The unit is ln(ppl),
    paired over the seeds that all four runs have.
    """
    runs = [results[model + suffix] for suffix in (long, short) for model in (arm, FIRST)]
    seeds = set.intersection(*map(set, runs))
    values = [[each[seed].test_nll for each in runs] for seed in sorted(seeds)]
    return mean_difference([(a - b) - (c - d) for a, b, c, d in values])


def claims(results: Results) -> list[Claim]:
    """Returns the paper's claims; a negative difference in ln(perplexity) supports a claim.

    Claims about models without runs are left out. Each claim compares models at the greatest number
    of training steps for which it has an interval. Without an interval, it compares them at the
    greatest for which it has runs.
    """
    of_lengths = [claims_of_length(results, suffix) for suffix in reversed(lengths_of(results))]
    rows = [
        max(rows, key=lambda row: (is_interval(row.difference), row.difference is not None))
        for rows in zip(*of_lengths, strict=True)
    ]
    for arm in [*MIXTURES][1:]:
        both = [s for s in LENGTHS if results[arm + s].keys() & results[FIRST + s].keys()]
        rows += [
            Claim(
                MORE_TEXT,
                f"{arm} against {FIRST}: difference with{long} minus difference {without(short)}",
                gain(results, arm, short, long),
            )
            for short, long in pairwise(both)
        ]
    return [row for row in rows if row.difference is not None]


def is_interval(difference: PairedDifference | None) -> bool:
    """Returns whether a difference has enough seeds for an interval."""
    return difference is not None and difference.low is not None


def without(suffix: str) -> str:
    """Names the shorter training in a comparison."""
    return f"with{suffix}" if suffix else "without it"


def claims_of_length(results: Results, suffix: str) -> list[Claim]:
    """Returns the claims about models with the same number of training steps."""
    same = of_length(results, suffix)

    def row(claim: str, a: str, b: str) -> Claim:
        return Claim(claim, f"{a}{suffix} against {b}{suffix}", difference(same[a], same[b]))

    more = [*MIXTURES][1:]
    rows = [row("more experts lower the perplexity at equal operations", a, FIRST) for a in more]
    each = "each increase in the number of experts lowers the perplexity"
    rows += [row(each, a, b) for b, a in pairwise(more)]
    what = f"{FIRST}{suffix} to {more[-1]}{suffix}: change for each doubling of the experts"
    rows.append(Claim("the perplexity falls with the number of experts", what, slope(same)))
    claim = "a mixture has a lower perplexity than an equally costly dense model"
    rows += [row(claim, a, dense) for dense in DENSE for a in more]
    rows.append(row("more operations lower the perplexity of a large mixture", LARGE, LARGE_BASE))
    rows += [
        Claim(
            MORE_TEXT,
            f"{a}{suffix} against {FIRST}{suffix}: difference after all steps minus difference "
            "after 25%",
            widening(same[a], same[FIRST], QUARTER),
        )
        for a in more
    ]
    return rows


def changes(results: Results, model: str) -> list[str]:
    """Formats the changes of the perplexity from the models in `BASES`."""
    return [
        as_change(difference(results[model], results[base])) if base != model else ""
        for base in BASES
    ]


def spread(results: Results) -> float:
    """Returns the standard deviation of ln(perplexity) over the seeds of a model, or NaN.

    It is the root of the mean variance over the models with two seeds or more.
    """
    runs = [[run.test_nll for run in of_arm.values()] for of_arm in results.values()]
    variances = [statistics.variance(each) for each in runs if len(each) > 1]
    return statistics.fmean(variances) ** 0.5 if variances else math.nan


def spread_sentence(results: Results, on_dev: Results) -> str:
    """Compares the spread over the seeds on the test part and on the dev part."""
    if math.isnan(spread(results)):
        return ""
    return (
        "Over the seeds of a model, ln ppl has a standard deviation of "
        f"{spread(results):.3f} on the test part and {spread(on_dev):.3f} on the dev part."
    )


def found(results: Results, on_dev: Results) -> str:
    """Names the mixture with the lowest dev perplexity, and compares it on the test part."""
    arms = [mixture + suffix for suffix in LENGTHS for mixture in MIXTURES]
    best = min((arm for arm in arms if on_dev[arm]), key=lambda arm: mean_perplexity(on_dev[arm]))
    model, *_ = ARMS[best]
    suffix = best.removeprefix(model)
    gaps = [
        f"{as_change(gap)} from {base}{suffix}"
        for base in (FIRST, *DENSE)
        if base != model and (gap := difference(results[best], results[base + suffix]))
    ]
    text = f"The mixture with the lowest dev perplexity is {best}."
    return text + (f" The change of its test perplexity is {'; '.join(gaps)}." if gaps else "")


def as_markdown(
    name: str,
    settings: Mapping[str, Any],
    runs: Sequence[Run],
    compared: Sequence[Claim],
    command: str,
) -> str:
    """Formats the page: plot, table, verdicts, cost, command."""
    results, on_dev = results_of(runs, ARMS), results_of(runs, ARMS, "dev")
    lengths = lengths_of(results)
    kind = TEXTS[settings["text"]]
    per_byte = settings["test_tokens"] / settings["test_bytes"]
    rows = []
    for suffix, model in product(lengths, MODELS):
        of_arm = results[model + suffix]
        if not of_arm:
            continue
        mean = statistics.fmean(run.test_nll for run in of_arm.values())
        rows.append(
            [
                model + suffix,
                *size_cells(next(iter(of_arm.values())).cost),
                len(of_arm),
                f"{mean_perplexity(of_arm, QUARTER):.2f}",
                f"{mean_perplexity(of_arm):.2f}",
                f"{perplexity(mean * per_byte):.4f}",
                *changes(of_length(results, suffix), model),
            ]
        )
    table = markdown_table(
        [
            "model", "ops/timestep", "parameters", "seeds", "test ppl after 25%", "test ppl",
            "ppl per byte", *(f"change from {base}, 95%" for base in BASES),
        ],
        rows,
    )  # fmt: skip
    seen = settings["steps"] * settings["data.tokens_per_batch"]
    longer = "".join(f", with{suffix} {LENGTHS[suffix] * seen:,}" for suffix in lengths if suffix)
    epochs = LENGTHS[lengths[-1]] * seen / settings["train_tokens"]
    return (
        f"# More experts: {kind.title}\n\n"
        f"![learning curves, and perplexity with more experts]({name}.png)\n\n"
        "The paper finds that more experts lower the perplexity at equal operations (Figs. 2 and "
        f"3). Here the text is {kind.contents}. "
        f"{found(results, on_dev)} "
        "In the plot, a band is the 95% interval of a change, and a dashed line is a dense "
        "model.\n\n"
        f"{table}\n"
        f"The training part has {settings['train_tokens']:,} wordpieces and ends of sentences, of "
        f"a vocabulary of {settings['pieces']:,}. A run reads about {seen:,} of them{longer}. The "
        f"longest run is {epochs:.2f} epochs. Every run in the table has the learning rate "
        f"{settings['optimizer.learning_rate']:g} and dropout {settings['model.dropout']:g}. "
        f"The test part has {settings['test_tokens']:,} wordpieces. Nothing else was selected by "
        "the dev part. Operations and parameters do not include embedding and softmax. "
        f"{HOW_COMPARED} {spread_sentence(results, on_dev)}\n\n"
        f"{HOW_DECIDED}\n\n{claims_table(compared)}\n"
        f"{trials(settings, on_dev, MODELS, TRIALS)}"
        f"{core_hours(runs)}\n\n"
        f"```\n{command}\n```\n"
    )


def percent(difference: float) -> float:
    """Converts a difference of ln(perplexity) to a change of the perplexity in percent."""
    return 100 * math.expm1(difference)


def plot(settings: Mapping[str, Any], runs: Sequence[Run]) -> Figure:
    """Plots the mean learning curves of the longest runs, and the perplexity with more experts."""
    results = results_of(runs, ARMS)
    lengths = lengths_of(results)
    longest = of_length(results, lengths[-1])
    figure = Figure(figsize=(10, 4.2), layout="constrained", dpi=150)
    learning, capacity = figure.subplots(1, 2)
    for model in (model for model in MODELS if longest[model]):
        points = mean_curve(runs, model + lengths[-1])
        points = [(tokens / 1e6, ppl) for tokens, ppl in points]
        learning.plot(*zip(*points, strict=True), marker=".", label=model)
    learning.set(xlabel="training wordpieces (millions)", ylabel="dev perplexity", yscale="log")
    learning.yaxis.set_minor_formatter("{x:g}")
    learning.legend()
    with_first = [suffix for suffix in lengths if results[FIRST + suffix]]
    for suffix in with_first:
        seen = settings["steps"] * settings["data.tokens_per_batch"] * LENGTHS[suffix]
        same = of_length(results, suffix)
        gaps = [(n, difference(same[model], same[FIRST])) for model, n in MIXTURES.items()]
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
    for arm in [dense + suffix for suffix in with_first[-1:] for dense in DENSE]:
        if gap := difference(results[arm], results[FIRST + with_first[-1]]):
            level = percent(gap.mean)
            capacity.axhline(level, lw=0.8, ls="--", color="grey")
            where = capacity.get_yaxis_transform()
            capacity.annotate(arm, (0.02, level), xycoords=where, fontsize=7, va="bottom")
    capacity.set_xscale("log", base=4)
    capacity.set_xticks([*MIXTURES.values()], [*map(str, MIXTURES.values())])
    capacity.set(
        xlabel="experts, at equal operations",
        ylabel=f"change of the test perplexity from {FIRST} (%)",
    )
    capacity.legend()
    return figure


def main(arguments: Sequence[str] | None = None, root: Path = Path()) -> Results:
    """Runs the study and returns the finished runs."""
    parser = study_parser(__doc__, "capacity", [*ARMS])
    parser.set_defaults(arms=[*MODELS])
    parser.add_argument("--text", choices=TEXTS, default="sources", help="the kind of the corpus")
    options = parser.parse_intermixed_args(arguments)
    name = f"capacity_{options.text}"
    path, runs_folder = options.output / f"{name}.json", Path(options.runs) / options.text

    def config_of(arm: str, seed: int, overrides: Sequence[str]) -> Config:
        model, factor, of_arm = ARMS[arm]
        config = read_config(
            root / "configs" / "small" / f"{_FILES.get(model, model)}.toml",
            [
                f"data.encoded={runs_folder / 'encoded'}",
                *SETTINGS,
                *_OF_MODEL[model],
                *overrides,
                *of_arm,
            ],
            Config,
        )
        longer = replace(config, steps=config.steps * factor)
        return config_of_run(longer, runs_folder, arm, seed)

    def run(arm: str, seed: int) -> Run:
        return record_of(train_and_test(config_of(arm, seed, options.overrides), text, [QUARTER]))

    if not options.report:
        first = config_of(FIRST, 0, options.overrides)
        if options.text != "sources" and first.data.corpus == "sources":
            raise ConfigError(f"data.corpus must be given for --text {options.text}, got sources")
        set_up_for(first)
        text = load_text(first.data)
        settings = settings_of(first, text, options.text)
        run_missing(
            [(arm, seed) for seed in options.seeds for arm in options.arms],
            run,
            path,
            settings,
            [*ARMS],
            runs_folder,
        )

    def report(stored: Stored) -> Report | None:
        results = results_of(stored.runs, ARMS)
        if not lengths_of(results):
            return None
        compared = claims(results)
        changed = changed_options(stored.settings, config_of(FIRST, 0, []))
        corpus = [] if options.text == "sources" else ["data.corpus=CORPUS"]
        command = ["python", "scripts/studies/capacity.py", "--text", options.text, *corpus]
        command += changed
        commands = commands_of(command, stored.runs, MODELS)
        page = as_markdown(name, *stored, compared, commands)
        return Report(page, claims_data(compared), plot(*stored))

    return results_of(report_stored(path, report), ARMS)
