"""One model for twelve language pairs (Table 5 of the paper, in small).

    python scripts/studies/multilingual.py data.corpus=path/to/parallel/text
    python scripts/studies/multilingual.py data.corpus=PATH --arms moe dense --seeds 1
    python scripts/studies/multilingual.py --report data.corpus=PATH

Trains the models of configs/mt/small-multilingual-*.toml on all their language pairs at once: with
mixtures of experts, with dense layers of equal operations in their place, and with mixtures again,
every language pair oversampled to the size of the largest. Then the dense model on each language
pair alone. All share one vocabulary of wordpieces. Translates the test parts and writes
OUTPUT/multilingual.md, .json and .png (OUTPUT is docs/results if not given): perplexity and BLEU of
each language pair, how often one model is better than another, and the learning curves of the two
language pairs with the least text, which oversampling may harm. A multilingual run takes 45 minutes
on one processor, one of a language pair 6 minutes.
Started several times with the same --runs, the processes share the runs; with --report nothing is
trained.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from moe_ext.lab.decoding import Bleu
from moe_ext.lab.training.config import ConfigError, TranslationConfig, read_config
from moe_ext.lab.training.device import set_up_for
from moe_ext.lab.training.logging import read_metrics
from moe_ext.lab.training.metrics import by_language_pair, perplexity
from moe_ext.lab.training.report import markdown_table, write_report
from moe_ext.lab.training.statistics import PairedDifference, mean_difference
from moe_ext.lab.training.study import (
    Results,
    as_change,
    as_data,
    command_of,
    run_study,
    size_cells,
    study_parser,
)
from moe_ext.lab.training.text import PairText, load_text
from moe_ext.lab.training.translation import bleu_of_test, require_bleu, translated_test

MIXTURE, DENSE, OVERSAMPLED, SINGLE = "moe", "dense", "moe-oversampled", "single"
ARMS = (MIXTURE, DENSE, OVERSAMPLED, SINGLE)
SETTINGS = ("num_threads=1",)
_OF_ARM = {
    MIXTURE: ("small-multilingual-moe-64", ()),
    DENSE: ("small-multilingual-dense", ()),
    OVERSAMPLED: ("small-multilingual-moe-64", ("data.oversample=true",)),
    SINGLE: (
        "small-multilingual-dense",
        # The rate ends at the same share of its peak.
        ("steps=800", "optimizer.warmup_steps=200", "optimizer.hold_steps=162"),
    ),
}


@dataclass(frozen=True)
class Study:
    """The runs.

    Attributes:
        config: of the mixture.
        text: of all language pairs.
        results: of the multilingual models.
        single: of the models of one language pair, by this.
        bleu: of each run, by language pair.
    """

    config: TranslationConfig
    text: PairText
    results: Results
    single: Results
    bleu: dict[Path, dict[str, Bleu]]


class Figures(NamedTuple):
    """Of a model's test part in one language pair, means over its seeds.

    Attributes:
        nll: nats per target piece.
        bleu: the BLEU score of sacreBLEU.
        num_seeds: the number of seeds.
    """

    nll: float
    bleu: float
    num_seeds: int


class _Comparison(NamedTuple):
    """Two models, language pair by language pair.

    Attributes:
        difference: in ln ppl, its mean over the language pairs; None of fewer than two.
        num_pairs: how many there are.
        lower_perplexity, higher_bleu: in how many of them the first model is the better one.
    """

    difference: PairedDifference | None
    num_pairs: int
    lower_perplexity: int
    higher_bleu: int


def study(options: argparse.Namespace, root: Path) -> Study:
    """The models, trained, tested and translated with as the options ask for."""

    def config_of(arm: str, *changes: str) -> TranslationConfig:
        name, settings = _OF_ARM[arm]
        return read_config(
            root / "configs" / "mt" / f"{name}.toml",
            [*SETTINGS, *settings, *options.overrides, *changes],
            TranslationConfig,
        )

    first = config_of(MIXTURE)
    if len(first.data.pairs) < 2:
        raise ConfigError(f"data.pairs must be several, got {list(first.data.pairs)}")
    set_up_for(first)
    text = load_text(first.data)
    runs = Path(options.runs)
    runs.mkdir(parents=True, exist_ok=True)
    wordpieces = runs / "wordpieces.model"
    text.vocabulary.save(wordpieces)
    train = () if options.report else options.arms
    shared = f"data.wordpieces={wordpieces}"
    results = run_study(
        {arm: config_of(arm, shared) for arm in (MIXTURE, DENSE, OVERSAMPLED)},
        options.seeds,
        text,
        runs,
        train=train,
        then=translated_test,
    )
    single: Results = {}
    for languages in first.data.pairs:
        config = config_of(SINGLE, shared, f'data.pairs=["{languages}"]')
        single |= run_study(
            {languages: config},
            options.seeds,
            load_text(config.data),
            runs / SINGLE,
            train=[languages] if SINGLE in train else (),
            then=translated_test,
        )
    finished = [run for runs in (*results.values(), *single.values()) for run in runs.values()]
    bleu = {result.run: bleu_of_test(result.run) for result in finished}
    return Study(first, text, results, single, bleu)


def figures(study: Study) -> dict[str, dict[str, Figures]]:
    """By model and language pair; of runs that are finished."""
    nll_of = {
        run.run: by_language_pair(run.sentence_nll, study.text.test)
        for runs in study.results.values()
        for run in runs.values()
    }
    found: dict[str, dict[str, Figures]] = {arm: {} for arm in ARMS}
    for arm, languages in product(ARMS, study.config.data.pairs):
        runs = [*(study.single[languages] if arm == SINGLE else study.results[arm]).values()]
        if not runs:
            continue
        nll = [run.test_nll if arm == SINGLE else nll_of[run.run][languages].nll for run in runs]
        bleu = [study.bleu[run.run][languages].score for run in runs]
        found[arm][languages] = Figures(statistics.fmean(nll), statistics.fmean(bleu), len(runs))
    return found


def comparison(a: dict[str, Figures], b: dict[str, Figures]) -> _Comparison:
    """Of two models' figures by language pair."""
    both = [(figures, b[languages]) for languages, figures in a.items() if languages in b]
    return _Comparison(
        mean_difference(
            [ours.nll - theirs.nll for ours, theirs in both],
            num_seeds=min((each.num_seeds for pair in both for each in pair), default=0),
        ),
        len(both),
        sum(ours.nll < theirs.nll for ours, theirs in both),
        sum(ours.bleu > theirs.bleu for ours, theirs in both),
    )


def comparisons(found: dict[str, dict[str, Figures]]) -> dict[str, _Comparison]:
    """What the paper compares, and what oversampling does."""
    return {
        f"{arm} against {other}": comparison(found[arm], found[other])
        for arm, other in ((MIXTURE, DENSE), (MIXTURE, SINGLE), (OVERSAMPLED, MIXTURE))
        if found[arm].keys() & found[other].keys()
    }


def _comparisons_table(compared: dict[str, _Comparison]) -> str:
    """A line for each two models."""
    rows = [
        [
            what,
            as_change(each.difference),
            f"{each.lower_perplexity} of {each.num_pairs}",
            f"{each.higher_bleu} of {each.num_pairs}",
        ]
        for what, each in compared.items()
    ]
    return markdown_table(["models", "perplexity, 95%", "lower perplexity", "higher BLEU"], rows)


def table(study: Study, found: dict[str, dict[str, Figures]]) -> str:
    """A line for each language pair: perplexity and BLEU of each model."""
    names = study.text.train.names
    sizes = study.text.train.pair.bincount(minlength=len(names)).tolist()
    rows = []
    for languages, size in zip(names, sizes, strict=True):
        cells = [languages, f"{size:,}"]
        for arm in ARMS:
            each = found[arm].get(languages)
            cells += [f"{perplexity(each.nll):.2f}", f"{each.bleu:.1f}"] if each else ["", ""]
        rows.append(cells)
    header = ["languages", "training pairs"]
    for arm in ARMS:
        header += [f"{arm}: ppl", "BLEU"]
    return markdown_table(header, rows)


def _sizes_of_models(study: Study) -> str:
    """A line for each kind of model."""
    rows = []
    every = {**study.results, SINGLE: next(iter(study.single.values()), {})}
    for arm, runs in every.items():
        if not runs:
            continue
        result = next(iter(runs.values()))
        config = read_config(result.run / "config.toml", [], TranslationConfig)
        rows.append(
            [
                arm,
                *size_cells(result.cost),
                f"{config.steps:,}",
                f"{config.optimizer.learning_rate:g}",
                len(runs),
            ]
        )
    return markdown_table(
        ["model", "ops/timestep", "parameters", "steps", "highest rate", "seeds"], rows
    )


def _least_text(text: PairText) -> list[str]:
    """The two language pairs with the fewest training pairs."""
    order = text.train.pair.bincount(minlength=len(text.train.names)).argsort(stable=True)
    return [text.train.names[index] for index in order[:2].tolist()]


def as_markdown(study: Study, found: dict[str, dict[str, Figures]], command: str) -> str:
    """The page, which quotes the command that made it."""
    config = study.config
    signatures = sorted({bleu.signature for each in study.bleu.values() for bleu in each.values()})
    return (
        "# One model for all language pairs\n\n"
        f"```\n{command}\n```\n\n"
        f"Steps of about {config.data.tokens_per_batch:,} source and target pieces; one vocabulary "
        f"of {config.data.vocab_size:,} wordpieces for all languages. The multilingual models see "
        "the language pairs mixed as they are, or (oversampled) all equally often; `single` is the "
        "dense model trained on one language pair alone, whose text every batch is then full of. "
        "Perplexity is by target piece of the "
        "test part, exp of the mean over seeds of ln ppl; BLEU is sacreBLEU's, of Japanese by "
        "characters. Operations and parameters are without embedding and softmax.\n\n"
        f"{_sizes_of_models(study)}\n{table(study, found)}\n"
        f"![{' and '.join(_least_text(study.text))}](multilingual.png)\n\n"
        "Differences are means over the language pairs with their 95% t interval: they say how far "
        "the languages agree, not how far other seeds would. In the paper the mixture has the "
        "higher BLEU in 11 of 12 language pairs against the multilingual model without experts, "
        "and in 8 of 12 against models of one language pair, which saw more of it (Table 5).\n\n"
        f"{_comparisons_table(comparisons(found))}\n"
        f"sacreBLEU's signatures: {', '.join(f'`{each}`' for each in signatures)}\n"
    )


def plot(study: Study) -> Figure:
    """Dev perplexity of the language pairs with the least text, by the steps."""
    panels = _least_text(study.text)
    figure = Figure(figsize=(12, 4.2), layout="constrained", dpi=150)
    axes = figure.subplots(1, len(panels), squeeze=False)
    for panel, languages in zip(axes[0], panels, strict=True):
        curves = {arm: (runs, f"perplexity/{languages}") for arm, runs in study.results.items()}
        curves[SINGLE] = (study.single[languages], "perplexity")
        for arm, (runs, key) in curves.items():
            for result in [*runs.values()][:1]:
                dev = read_metrics(result.run, "dev")
                panel.plot([r["step"] for r in dev], [r[key] for r in dev], label=arm, lw=1.2)
        panel.set_yscale("log")
        panel.set(xlabel="steps", ylabel="dev perplexity", title=languages)
        panel.legend()
    return figure


def main(arguments: Sequence[str] | None = None, root: Path = Path()) -> Study:
    parser = study_parser(__doc__, "multilingual", ARMS)
    options = parser.parse_intermixed_args(arguments)
    require_bleu()
    found = study(options, root)
    if not any(found.results.values()):
        print("nothing to report yet: a multilingual run must be finished")
        return found
    by_pair = figures(found)
    page = as_markdown(found, by_pair, command_of("multilingual", options))
    data = {
        "corpus": found.config.data.corpus,
        "models": as_data(found.results),
        "single": as_data(found.single),
        "bleu": {
            str(run.relative_to(options.runs)): {pair: asdict(bleu) for pair, bleu in each.items()}
            for run, each in found.bleu.items()
        },
        "figures": {
            arm: {languages: each._asdict() for languages, each in of_arm.items()}
            for arm, of_arm in by_pair.items()
        },
        "comparisons": {
            what: {**each._asdict(), "difference": each.difference and asdict(each.difference)}
            for what, each in comparisons(by_pair).items()
        },
    }
    write_report(options.output, "multilingual", page, data, plot(found))
    return found
