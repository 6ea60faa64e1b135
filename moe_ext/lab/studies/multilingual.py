"""Compares translation models for one and for twelve language pairs (Table 5, small scale).

    python scripts/studies/multilingual.py data.corpus=path/to/parallel/text
    python scripts/studies/multilingual.py data.corpus=PATH --arms moe dense --seeds 1
    python scripts/studies/multilingual.py --report data.corpus=PATH

Trains the models of configs/mt/small-multilingual-*.toml with one shared vocabulary of wordpieces:

- moe: MoE layers, trained on all language pairs together
- dense: dense layers with equal operations instead of MoE layers, trained on all language pairs
- moe-oversampled: the model moe, with every language pair oversampled to the size of the largest
- single: a separate dense model for each language pair

The script translates the test parts. It writes multilingual.md, .json and .png to the folder OUTPUT
(default: docs/results), with perplexity and BLEU of each language pair. The plot shows dev
perplexity of the two language pairs with the least text, which oversampling may harm.

A multilingual run takes 45 minutes on one processor, a run of one language pair 6 minutes. To share
the runs, start the same command several times with the same --runs. --report writes the page
without training.
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
        # The schedule ends at the same fraction of its peak learning rate.
        ("steps=800", "optimizer.warmup_steps=200", "optimizer.hold_steps=162"),
    ),
}


@dataclass(frozen=True)
class Study:
    """The finished runs of all models.

    Attributes:
        config: the configuration of the model moe.
        text: the encoded text of all language pairs.
        results: the runs of the multilingual models, by model and seed.
        single: the runs of the models of one language pair, by language pair and seed.
        bleu: the BLEU scores of each run, by the run's folder and language pair.
    """

    config: TranslationConfig
    text: PairText
    results: Results
    single: Results
    bleu: dict[Path, dict[str, Bleu]]


class Figures(NamedTuple):
    """A model's results on the test part of one language pair.

    Attributes:
        nll: nats per target piece, mean over seeds.
        bleu: sacreBLEU's score, mean over seeds.
        num_seeds: the number of seeds.
    """

    nll: float
    bleu: float
    num_seeds: int


class _Comparison(NamedTuple):
    """The comparison of two models over the language pairs.

    Attributes:
        difference: the mean difference in ln(perplexity) over num_pairs; None if num_pairs is 0.
        num_pairs: the number of language pairs that both models have.
        lower_perplexity: the number of language pairs with a lower perplexity of the first model.
        higher_bleu: the number of language pairs with a higher BLEU of the first model.
    """

    difference: PairedDifference | None
    num_pairs: int
    lower_perplexity: int
    higher_bleu: int


def study(options: argparse.Namespace, root: Path) -> Study:
    """Trains and tests the models of --arms, and translates the test parts with them.

    Raises:
        ConfigError: data.pairs has fewer than two language pairs.
    """

    def config_of(arm: str, *changes: str) -> TranslationConfig:
        name, settings = _OF_ARM[arm]
        return read_config(
            root / "configs" / "mt" / f"{name}.toml",
            [*SETTINGS, *settings, *options.overrides, *changes],
            TranslationConfig,
        )

    first = config_of(MIXTURE)
    if len(first.data.pairs) < 2:
        raise ConfigError(
            f"data.pairs must list at least 2 language pairs, got {list(first.data.pairs)}"
        )
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
    """Collects the results of finished runs by model and language pair."""
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
    """Compares the figures `a` and `b` of two models over the language pairs that both have."""
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
    """Returns the comparisons of the paper, and of moe with and without oversampling."""
    return {
        f"{arm} against {other}": comparison(found[arm], found[other])
        for arm, other in ((MIXTURE, DENSE), (MIXTURE, SINGLE), (OVERSAMPLED, MIXTURE))
        if found[arm].keys() & found[other].keys()
    }


def _comparisons_table(compared: dict[str, _Comparison]) -> str:
    """Formats the comparisons as a table, with one row per comparison."""
    rows = [
        [
            what,
            as_change(each.difference),
            f"{each.lower_perplexity} of {each.num_pairs}",
            f"{each.higher_bleu} of {each.num_pairs}",
        ]
        for what, each in compared.items()
    ]
    return markdown_table(
        ["models", "difference in perplexity, 95%", "lower perplexity", "higher BLEU"], rows
    )


def table(study: Study, found: dict[str, dict[str, Figures]]) -> str:
    """Formats perplexity and BLEU of each model, one row for each language pair."""
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
    """Formats the size and the training of the models, one row for each kind of model."""
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
        ["model", "ops/timestep", "parameters", "steps", "peak learning rate", "seeds"], rows
    )


def _least_text(text: PairText) -> list[str]:
    """Returns the two language pairs with the fewest training sentences."""
    order = text.train.pair.bincount(minlength=len(text.train.names)).argsort(stable=True)
    return [text.train.names[index] for index in order[:2].tolist()]


def as_markdown(study: Study, found: dict[str, dict[str, Figures]], command: str) -> str:
    """Formats the Markdown page, with the command that writes the page."""
    config = study.config
    signatures = sorted({bleu.signature for each in study.bleu.values() for bleu in each.values()})
    return (
        "# One model for all language pairs\n\n"
        f"```\n{command}\n```\n\n"
        f"A training step has about {config.data.tokens_per_batch:,} source and target wordpieces. "
        f"All languages share one vocabulary of {config.data.vocab_size:,} wordpieces. `moe` and "
        "`dense` see the language pairs in their natural proportions, `moe-oversampled` sees all "
        "language pairs equally often. `single` stands for dense models that are trained on one "
        "language pair each. Perplexity is per target wordpiece of the test part, and exp of the "
        "mean of ln(perplexity) over seeds. BLEU is sacreBLEU's score, with character "
        "tokenization for Japanese. Operations and parameters do not include embedding and "
        "softmax.\n\n"
        f"{_sizes_of_models(study)}\n{table(study, found)}\n"
        f"![{' and '.join(_least_text(study.text))}](multilingual.png)\n\n"
        "The differences in perplexity are means over the language pairs. With three seeds or "
        "more, a 95% t interval over the language pairs follows in brackets. This interval "
        "measures the variation between language pairs, not between seeds. In the paper, the "
        "mixture has a higher BLEU than the multilingual model without experts in 11 of 12 "
        "language pairs. The mixture has a higher BLEU than the models of one language pair in 8 "
        "of 12 pairs. "
        "Those models saw more text of their language pair (Table 5).\n\n"
        f"{_comparisons_table(comparisons(found))}\n"
        f"Signatures of sacreBLEU: {', '.join(f'`{each}`' for each in signatures)}.\n"
    )


def plot(study: Study) -> Figure:
    """Plots dev perplexity against steps for the two language pairs with the least text."""
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
    """Runs the study and returns the finished runs."""
    parser = study_parser(__doc__, "multilingual", ARMS)
    options = parser.parse_intermixed_args(arguments)
    require_bleu()
    found = study(options, root)
    if not any(found.results.values()):
        print("nothing to report yet: no multilingual run is finished")
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
