"""One model for twelve language pairs (Table 5 of the paper, in small).

    python scripts/reproduce_multilingual.py data.corpus=path/to/parallel/text
    python scripts/reproduce_multilingual.py --arms moe dense --seeds 1 data.corpus=PATH
    python scripts/reproduce_multilingual.py --report data.corpus=PATH

Trains the models of configs/mt/small-multilingual-*.toml on all their language pairs at once: with
mixtures of experts, with dense layers of equal operations in their place, and with mixtures again,
every language pair oversampled to the size of the largest. Then the dense model on each language
pair alone. All share one vocabulary of wordpieces. Translates the test parts and writes
OUTPUT/multilingual.md, .json and .png (OUTPUT is docs/results if not given): perplexity and BLEU of
each language pair, and the learning curve of the one with the least text, which oversampling may
harm. A multilingual run takes 45 minutes on one processor, one of a language pair 6 minutes.
Started several times with the same --runs, the processes share the runs; with --report nothing is
trained.

Ctrl-C or SIGTERM saves the run in progress and ends the script with status 130; the same command
goes on. Status 1: training diverged; 2: an option, file or folder that can't be used, in one
sentence.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from moe_ext.decoding import Bleu
from moe_ext.training.command import exit_status
from moe_ext.training.config import TranslationConfig, read_config
from moe_ext.training.device import set_up_torch
from moe_ext.training.logging import read_metrics
from moe_ext.training.metrics import by_language_pair, perplexity
from moe_ext.training.report import markdown_table, write_report
from moe_ext.training.results import Result
from moe_ext.training.study import (
    Claim,
    Results,
    as_data,
    claims_data,
    claims_table,
    command_of,
    paired,
    run_study,
    size_cells,
    study_parser,
)
from moe_ext.training.text import PairText, load_text
from moe_ext.training.translation import bleu_of_test, require_bleu, translated_test

_ROOT = Path(__file__).resolve().parent.parent
MIXTURE, DENSE, OVERSAMPLED, SINGLE = "moe", "dense", "moe-oversampled", "single"
ARMS = (MIXTURE, DENSE, OVERSAMPLED, SINGLE)
SETTINGS = ("num_threads=1",)
OF_ARM = {
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


def study(options: argparse.Namespace) -> Study:
    """The models, trained, tested and translated with as the options ask for."""

    def config_of(arm: str, *changes: str) -> TranslationConfig:
        name, settings = OF_ARM[arm]
        return read_config(
            _ROOT / "configs" / "mt" / f"{name}.toml",
            [*SETTINGS, *settings, *options.overrides, *changes],
            TranslationConfig,
        )

    first = config_of(MIXTURE)
    set_up_torch(first.device, first.num_threads, first.autocast)
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


def nll_of(result: Result, text: PairText, languages: str) -> float:
    """Nats per target piece of a language pair's test part, of a multilingual model."""
    return by_language_pair(result.sentence_nll, text.test)[languages].nll


def claims(study: Study) -> list[Claim]:
    """The claim, the language pairs, and the difference in ln ppl: below zero if it holds."""
    mixture, dense = study.results[MIXTURE], study.results[DENSE]
    better = "the mixture is better than the dense model"
    rows = [Claim(better, "all", paired(mixture, dense, lambda result: result.test_nll))]
    for languages in study.config.data.pairs:
        single = study.single[languages]

        def nll(result: Result, languages: str = languages, single: Any = single) -> float:
            if any(result is each for each in single.values()):
                return result.test_nll
            return nll_of(result, study.text, languages)

        alone = "and than a model of these languages alone"
        rows.append(Claim(better, languages, paired(mixture, dense, nll)))
        rows.append(Claim(alone, languages, paired(mixture, single, nll)))
    return rows


def table(study: Study) -> str:
    """A line for each language pair: perplexity and BLEU of each model, means over the seeds."""
    text = study.text
    sizes = text.train.pair.bincount(minlength=len(text.train.names)).tolist()
    rows = []
    for languages, size in zip(text.train.names, sizes, strict=True):
        cells = [languages, f"{size:,}"]
        for arm in ARMS:
            runs = [*(study.single[languages] if arm == SINGLE else study.results[arm]).values()]
            if not runs:
                cells += ["", ""]
                continue
            nll = [r.test_nll if arm == SINGLE else nll_of(r, text, languages) for r in runs]
            bleu = [study.bleu[result.run][languages].score for result in runs]
            cells += [f"{perplexity(statistics.fmean(nll)):.2f}", f"{statistics.fmean(bleu):.1f}"]
        rows.append(cells)
    header = ["languages", "training pairs"]
    for arm in ARMS:
        header += [f"{arm}: ppl", "BLEU"]
    return markdown_table(header, rows)


def sizes_of_models(study: Study) -> str:
    """A line for each kind of model."""
    rows = []
    every = {**study.results, SINGLE: next(iter(study.single.values()), {})}
    for arm, runs in every.items():
        if not runs:
            continue
        result = next(iter(runs.values()))
        steps = read_metrics(result.run, "train")[-1]["step"]
        cost = result.cost
        rows.append(
            [
                arm,
                *size_cells(cost),
                f"{steps:,}",
                len(runs),
            ]
        )
    return markdown_table(["model", "ops/timestep", "parameters", "steps", "seeds"], rows)


def least_text(text: PairText) -> list[str]:
    """The two language pairs with the fewest training pairs."""
    order = text.train.pair.bincount(minlength=len(text.train.names)).argsort(stable=True)
    return [text.train.names[index] for index in order[:2].tolist()]


def as_markdown(study: Study, command: str) -> str:
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
        "The rate ends at two thirds of its peak for all. Perplexity is by target piece of the "
        "test part, exp of the mean over seeds of ln ppl; BLEU is sacreBLEU's, of Japanese by "
        "characters. Operations and parameters are without embedding and softmax.\n\n"
        f"{sizes_of_models(study)}\n{table(study)}\n"
        f"![{' and '.join(least_text(study.text))}](multilingual.png)\n\n"
        "Differences are means over pairs of runs of one seed with their 95% t interval.\n\n"
        f"{claims_table(claims(study), 'languages')}\n"
        f"sacreBLEU's signatures: {', '.join(f'`{each}`' for each in signatures)}\n"
    )


def plot(study: Study) -> Figure:
    """Dev perplexity of the language pairs with the least text, by the steps."""
    panels = least_text(study.text)
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


def main(arguments: Sequence[str] | None = None) -> Study:
    parser = study_parser(__doc__, "multilingual", ARMS)
    options = parser.parse_intermixed_args(arguments)
    require_bleu()
    found = study(options)
    if not any(found.results.values()):
        print("nothing to report yet: a multilingual run must be finished")
        return found
    page = as_markdown(found, command_of("multilingual", options))
    data = {
        "corpus": found.config.data.corpus,
        "models": as_data(found.results),
        "single": as_data(found.single),
        "bleu": {
            str(run.relative_to(options.runs)): {pair: asdict(bleu) for pair, bleu in each.items()}
            for run, each in found.bleu.items()
        },
        "claims": claims_data(claims(found)),
    }
    write_report(options.output, "multilingual", page, data, plot(found))
    return found


if __name__ == "__main__":
    sys.exit(exit_status(main))
