"""Compares translation models with and without experts, at small scale (Fig. 4, Tables 2 to 4).

    python scripts/studies/translation.py data.corpus=path/to/parallel/text
    python scripts/studies/translation.py data.corpus=PATH --pairs en-fr --seeds 1 --arms none
    python scripts/studies/translation.py --report data.corpus=PATH

Trains the models of configs/mt/small-*.toml for each language pair:

- moe-32: MoE layers with noisy top-k gates
- moe-32-balanced: MoE layers with strictly balanced gates
- dense: dense layers with equal operations instead of MoE layers; the paper has no such model
- none: neither MoE layers nor dense layers; the paper's baseline

The script translates the test part with each model. It writes translation.md, .json and .png to the
folder OUTPUT (default: docs/results), with perplexity, BLEU and ten unedited translations. The plot
shows dev perplexity over the number of source words processed.

A run takes 10 to 20 minutes on one processor. To share the runs, start the same command several
times with the same --runs. --report writes the page without training.
"""

import argparse
import shlex
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure

from moe_ext.lab.decoding import Bleu
from moe_ext.lab.training.config import TranslationConfig, read_config
from moe_ext.lab.training.device import set_up_for
from moe_ext.lab.training.logging import read_metrics
from moe_ext.lab.training.metrics import perplexity
from moe_ext.lab.training.report import markdown_table, write_report
from moe_ext.lab.training.study import (
    HOW_COMPARED,
    HOW_DECIDED,
    Claim,
    Results,
    as_change,
    as_data,
    claims_data,
    claims_table,
    command_of,
    difference,
    mean_perplexity,
    run_study,
    size_cells,
    study_parser,
)
from moe_ext.lab.training.text import PairText, load_text, parallel_text
from moe_ext.lab.training.translation import bleu_of_test, require_bleu, translated_test

MIXTURE, BALANCED, DENSE, NONE = "moe-32", "moe-32-balanced", "dense", "none"
ARMS = (MIXTURE, BALANCED, DENSE, NONE)
PAIRS = ("en-fr", "en-de")
SETTINGS = ("num_threads=1",)
_NUM_SHOWN = 10
_NEAR = 0.8  # share of word trigrams that makes a near duplicate


@dataclass(frozen=True)
class Study:
    """The corpus and the finished runs of one language pair.

    Attributes:
        config: the configuration of the model moe-32.
        text: the corpus, encoded as token ids.
        results: the finished runs by model and seed.
        source_words: the number of source words in one epoch of training.
        test: the sentences of the test part and their reference translations.
        near: for each test sentence, whether it is a near duplicate of a training sentence.
        bleu: the BLEU scores by model, one for each seed.
        distinct_bleu: BLEU scores without near duplicates, by model; {} if no sentence remains.
    """

    config: TranslationConfig
    text: PairText
    results: Results
    source_words: int
    test: list[tuple[str, str]]
    near: list[bool]
    bleu: dict[str, list[Bleu]]
    distinct_bleu: dict[str, list[Bleu]]


def near_duplicates(sentences: Sequence[str], text: Iterable[str]) -> list[bool]:
    """Finds the `sentences` whose word trigrams occur to 80% or more in one sentence of `text`."""

    def trigrams(sentence: str) -> set[tuple[str, ...]]:
        words = ["", *sentence.lower().split(), ""]
        return set(zip(words, words[1:], words[2:], strict=False))

    numbers = defaultdict(list)
    sizes = []
    for number, sentence in enumerate(sentences):
        own = trigrams(sentence)
        sizes.append(len(own))
        for trigram in own:
            numbers[trigram].append(number)
    near = [False] * len(sentences)
    for sentence in text:
        shared = Counter(
            number for trigram in trigrams(sentence) for number in numbers.get(trigram, ())
        )
        for number, count in shared.items():
            near[number] |= count >= _NEAR * sizes[number]
    return near


def study(languages: str, options: argparse.Namespace, root: Path) -> Study:
    """Trains the models of --arms for one language pair, and translates its test part."""
    arms = {
        name: read_config(
            root / "configs" / "mt" / f"small-{name}.toml",
            [*SETTINGS, f'data.pairs=["{languages}"]', *options.overrides],
            TranslationConfig,
        )
        for name in ARMS
    }
    config = arms[MIXTURE]
    set_up_for(config)
    text = load_text(config.data)
    results = run_study(
        arms,
        options.seeds,
        text,
        Path(options.runs) / languages,
        train=() if options.report else options.arms,
        then=translated_test,
    )
    (train,), (test,) = (parallel_text(config.data, part) for part in ("train", "test"))
    pairs = [*test]
    near = near_duplicates([source for source, _ in pairs], (source for source, _ in train))

    def bleu(keep: Sequence[bool] | None = None) -> dict[str, list[Bleu]]:
        return {
            name: [bleu_of_test(result.run, keep)[languages] for result in runs.values()]
            for name, runs in results.items()
        }

    distinct = {} if all(near) else bleu([not each for each in near])
    return Study(config, text, results, source_words(text), pairs, near, bleu(), distinct)


def source_words(text: PairText) -> int:
    """Counts the source words of the training pairs that pass the length filter."""
    pieces = text.vocabulary.pieces(range(len(text.vocabulary)))
    begins_word = torch.tensor([piece.startswith("\u2581") for piece in pieces])
    return int(begins_word[text.train.source.stream].sum())


def claims(studies: dict[str, Study]) -> list[Claim]:
    """Returns the claims of the paper for both gates, per language pair and over all pairs."""
    pooled = {
        arm: {
            (languages, seed): run
            for languages, each in studies.items()
            for seed, run in each.results[arm].items()
        }
        for arm in ARMS
    }
    parts = {languages: each.results for languages, each in studies.items()} | {"all": pooled}
    return [
        Claim(claim, f"{arm} against {other}, {part}", difference(results[arm], results[other]))
        for claim, other in (
            ("mixtures lower the perplexity of a model without them", NONE),
            ("mixtures have a lower perplexity than dense layers with equal operations", DENSE),
        )
        for arm in (MIXTURE, BALANCED)
        for part, results in parts.items()
    ]


def table(study: Study) -> str:
    """Formats size, perplexity, BLEU and speed of the models, with one row per model."""
    rows = []
    for name, runs in study.results.items():
        if not runs:
            continue
        cost = next(iter(runs.values())).cost
        bleu = study.bleu[name], study.distinct_bleu.get(name)
        rows.append(
            [
                name,
                *size_cells(cost),
                len(runs),
                f"{mean_perplexity(runs):.3f}",
                "" if name == NONE else as_change(difference(runs, study.results[NONE])),
                *(
                    f"{statistics.fmean(each.score for each in of_runs):.2f}" if of_runs else ""
                    for of_runs in bleu
                ),
                f"{statistics.median(r.words_per_second for r in runs.values()):,.0f}",
            ]
        )
    header = [
        "model", "ops/timestep", "parameters", "seeds", "test ppl", f"against {NONE}, 95%", "BLEU",
        "BLEU without near duplicates", "wordpieces/s",
    ]  # fmt: skip
    return markdown_table(header, rows)


def balance(study: Study) -> str:
    """Describes the masks of the strictly balanced gates; returns "" if they have no run."""
    train, dev = [], []
    for result in study.results[BALANCED].values():
        train.append(read_metrics(result.run, "train")[-1])
        dev.append(read_metrics(result.run, "dev")[-1])
    if not train:
        return ""

    def mean(key: str) -> str:
        values = (
            100 * statistics.fmean(record[key][layer] for record in train) for layer in (0, 1)
        )
        return " and ".join(f"{value:.1f}%" for value in values)

    by_batch, by_threshold = (
        statistics.fmean(record[key] for record in dev) for key in ("nll_batchwise", "nll")
    )
    return (
        f"The gates of {BALANCED} are strictly balanced. The final dev perplexity was "
        f"{perplexity(by_threshold):.3f} with the threshold mask and {perplexity(by_batch):.3f} "
        "with the batchwise mask. In the last training batches, the two masks differed in "
        f"{mean('mask_disagreement')} of the assignments in encoder and decoder. The "
        f"batchwise mask gave no expert to {mean('share_without_expert')} of the tokens.\n"
    )


def shown(study: Study) -> str:
    """Formats ten evenly spaced sentences of the test part and their translations."""
    (languages,) = study.config.data.pairs
    first = {
        name: translated_test(next(iter(runs.values())).run)[languages]
        for name, runs in study.results.items()
        if runs
    }
    width = max(map(len, ["reference", *first]))
    lines = []
    evenly = torch.linspace(0, len(study.test) - 1, _NUM_SHOWN, dtype=torch.float64)
    for index in evenly.round().long().tolist():
        source, reference = study.test[index]
        all_of_it = {"source": source, "reference": reference}
        all_of_it |= {name: translations[index] for name, translations in first.items()}
        lines += [f"    {name:<{width}}  {sentence}" for name, sentence in all_of_it.items()]
        lines.append("")
    return "\n".join(lines)


def as_markdown(studies: dict[str, Study], command: str) -> str:
    """Formats the Markdown page, with the command that writes the page."""
    config = next(iter(studies.values())).config
    steps, batch = config.steps, config.data.tokens_per_batch
    lines = [
        "# Mixtures of experts in translation\n",
        f"```\n{command}\n```\n",
        f"Each model trains for {steps:,} steps of about {batch:,} source and target wordpieces. "
        f"Both languages share one vocabulary of {config.data.vocab_size:,} wordpieces. Perplexity "
        f"is per target wordpiece of the test part. {HOW_COMPARED} BLEU is sacreBLEU's score of a "
        "beam search with the penalties of Wu et al. (2016). A test sentence is a near "
        f"duplicate if at least {_NEAR:.0%} of its word trigrams occur in one training sentence. "
        "Operations and parameters do not include embedding and softmax.\n",
        "![dev perplexity against source words](translation.png)\n",
        f"{HOW_DECIDED}\n",
        claims_table(claims(studies)),
    ]
    for languages, each in studies.items():
        text = each.text
        lines += [
            f"## {languages}\n",
            f"The training part has {len(text.train):,} sentence pairs ({each.source_words:,} "
            f"source words, {text.train.num_tokens:,} target wordpieces). The test part has "
            f"{len(text.test):,} pairs; {sum(each.near):,} of them are near duplicates.\n",
            table(each),
            balance(each),
            "These are ten evenly spaced sentences of the test part, and their translations by the "
            "models of the first seed:\n",
            shown(each),
        ]
    bleu = [score for each in studies.values() for scores in each.bleu.values() for score in scores]
    lines.append(f"Signature of sacreBLEU: `{bleu[0].signature}`.\n")
    return "\n".join(lines)


def plot(studies: dict[str, Study]) -> Figure:
    """Plots dev perplexity against source words processed, one curve for each model (Fig. 4)."""
    figure = Figure(figsize=(6 * len(studies), 4.2), layout="constrained", dpi=150)
    panels = figure.subplots(1, len(studies), squeeze=False)
    for (languages, each), axes in zip(studies.items(), panels[0], strict=True):
        words_per_piece = each.source_words / each.text.train.num_tokens
        for name, runs in each.results.items():
            of_steps = defaultdict(list)
            for result in runs.values():
                for record in read_metrics(result.run, "dev"):
                    of_steps[record["step"]].append(record)
            # Only steps that all runs measured: log.eval_every may differ between runs.
            common = [
                of_steps[step] for step in sorted(of_steps) if len(of_steps[step]) == len(runs)
            ]
            words = [of_step[0]["tokens"] * words_per_piece / 1e6 for of_step in common]
            means = [perplexity(statistics.fmean(r["nll"] for r in of_step)) for of_step in common]
            if runs:
                axes.plot(words, means, label=name, lw=1.2)
        axes.set_yscale("log")
        axes.set(
            xlabel="source words processed, millions", ylabel="dev perplexity", title=languages
        )
        axes.legend()
    return figure


def main(arguments: Sequence[str] | None = None, root: Path = Path()) -> dict[str, Study]:
    """Runs the study and returns the finished runs by language pair."""
    parser = study_parser(__doc__, "translation", ARMS)
    parser.add_argument("--pairs", nargs="+", default=PAIRS, help="language pairs, such as en-fr")
    options = parser.parse_intermixed_args(arguments)
    require_bleu()
    studies = {languages: study(languages, options, root) for languages in options.pairs}
    studies = {languages: each for languages, each in studies.items() if any(each.results.values())}
    if not studies:
        print("nothing to report yet: no run is finished")
        return studies
    command = command_of("translation", options)
    if tuple(options.pairs) != PAIRS:
        command += f" --pairs {shlex.join(options.pairs)}"
    page = as_markdown(studies, command)
    data = {
        "claims": claims_data(claims(studies)),
        "languages": {
            languages: {
                "corpus": each.config.data.corpus,
                "train_pairs": len(each.text.train),
                "source_words": each.source_words,
                "test_pairs": len(each.text.test),
                "near_duplicates": sum(each.near),
                "models": as_data(each.results),
                "bleu": {name: list(map(asdict, scores)) for name, scores in each.bleu.items()},
            }
            for languages, each in studies.items()
        },
    }
    write_report(options.output, "translation", page, data, plot(studies))
    return studies
