"""Compares translation models with and without experts, at small scale (Fig. 4, Tables 2 to 4).

    python scripts/studies/translation.py data.corpus=CORPUS
    python scripts/studies/translation.py data.corpus=CORPUS --seeds 1 --arms none "none rate 0.008"
    python scripts/studies/translation.py --text manuals --pair en-fr data.corpus=CORPUS
    python scripts/studies/translation.py --report

Trains the models of configs/mt/small-*.toml for one language pair:

- moe-32: MoE layers with noisy top-k gates
- moe-32-balanced: MoE layers with strictly balanced gates
- dense: dense layers with equal operations instead of MoE layers; the paper has no such model
- none: neither MoE layers nor dense layers; the paper's baseline

Models whose names end in " rate" or " dropout" have another learning rate or dropout; --arms
selects them.

By default, the corpus is Multi30k, with captions of images. CORPUS is a folder with its files
train, val and test_2016_flickr. The corpus of --text manuals has manuals, help and descriptions of
packages; there, the models have twice the vocabulary and no dropout.

The file OUTPUT/translation_TEXT_PAIR.json (default: docs/results) keeps every finished run, with
ten unedited translations, so the study can grow over many occasions and machines. A run that is
interrupted continues from its checkpoint in RUNS. To share the runs, start the command several
times. A run takes 10 to 20 minutes on one processor. The script also writes the page,
translation_TEXT_PAIR.md, and its plot of dev perplexity over source words; --report writes them
without training and without the corpus.
"""

import math
import shlex
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure

from moe_ext.lab.training.config import ConfigError, TranslationConfig, read_config
from moe_ext.lab.training.device import set_up_for
from moe_ext.lab.training.logging import read_metrics
from moe_ext.lab.training.metrics import perplexity
from moe_ext.lab.training.report import markdown_table, write_report
from moe_ext.lab.training.results import train_and_test
from moe_ext.lab.training.statistics import PairedDifference, mean_difference
from moe_ext.lab.training.stored import (
    Run,
    changed_options,
    core_hours,
    locked,
    mean_curve,
    read_stored,
    record_of,
    results_of,
    run_missing,
    shared_settings,
)
from moe_ext.lab.training.study import (
    HOW_COMPARED,
    HOW_DECIDED,
    Results,
    as_change,
    difference,
    mean_perplexity,
    run_folder,
    size_cells,
    study_parser,
    trials,
    verdict,
)
from moe_ext.lab.training.text import PairText, load_text, parallel_text
from moe_ext.lab.training.translation import bleu_of_test, require_bleu, translated_test

MIXTURE, BALANCED, DENSE, NONE = "moe-32", "moe-32-balanced", "dense", "none"
MODELS = (MIXTURE, BALANCED, DENSE, NONE)
TRIALS = {  # suffixes of the names of models with another learning rate or dropout
    " rate 0.002": "optimizer.learning_rate=2e-3",
    " rate 0.008": "optimizer.learning_rate=8e-3",
    " dropout 0.1": "model.dropout=0.1",
    " dropout 0.3": "model.dropout=0.3",
}
# The model and the settings of each arm.
ARMS: dict[str, tuple[str, list[str]]] = {model: (model, []) for model in MODELS}
ARMS |= {m + suffix: (m, [setting]) for suffix, setting in TRIALS.items() for m in MODELS}
MASKS = ("nll_batchwise", "mask_disagreement", "share_without_expert")  # metrics of strict gates
_NUM_SHOWN = 10
_NEAR = 0.8  # share of word trigrams that makes a near duplicate


class Kind(NamedTuple):
    """A kind of corpus.

    Attributes:
        contents: what the corpus contains.
        settings: options of the models that differ from those of configs/mt.
        published: BLEU of another model on the same test part, by language pair.
        model: the other model and its source.
    """

    contents: str
    settings: tuple[str, ...] = ()
    published: Mapping[str, float] = MappingProxyType({})
    model: str = ""


TEXTS = {
    "captions": Kind(
        "captions of images, the public corpus Multi30k",
        published={"en-de": 41.02, "en-fr": 61.80},
        model="Transformer-Tiny of Wu et al. (2021, arXiv:2105.14462), which sees no images,",
    ),
    "manuals": Kind(
        "manuals, help and descriptions of packages",
        (
            "steps=2500",
            "data.vocab_size=8000",
            "model.dropout=0.0",
            "optimizer.hold_steps=700",
        ),
    ),
}


def near_duplicates(sentences: Sequence[str], text: Iterable[str]) -> list[bool]:
    """Returns for each sentence whether 80% of its word trigrams occur in a sentence of `text`."""

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


def source_words(text: PairText) -> int:
    """Counts the source words of the training pairs that pass the length filter."""
    pieces = text.vocabulary.pieces(range(len(text.vocabulary)))
    begins_word = torch.tensor([piece.startswith("\u2581") for piece in pieces])
    return int(begins_word[text.train.source.stream].sum())


def settings_of(config: TranslationConfig, text: PairText) -> dict[str, Any]:
    """Returns what all runs of the study share: facts of the text, and options of training."""
    (train,), (test,) = (parallel_text(config.data, part) for part in ("train", "test"))
    sentences = [list(pair) for pair in test]
    near = near_duplicates([source for source, _ in sentences], (source for source, _ in train))
    return {
        "train_pairs": len(text.train),
        "train_tokens": text.train.num_tokens,
        "source_words": source_words(text),
        "test_pairs": len(sentences),
        "near_duplicates": [number for number, is_near in enumerate(near) if is_near],
        "shown": [sentences[number] for number in numbers_shown(len(sentences))],
        **shared_settings(config, text),
    }


def numbers_shown(num_sentences: int) -> list[int]:
    """Returns the numbers of ten evenly spaced sentences."""
    return (
        torch.linspace(0, num_sentences - 1, _NUM_SHOWN, dtype=torch.float64)
        .round()
        .long()
        .tolist()
    )


def tested(run: Path, languages: str, near: Sequence[int]) -> dict[str, Any]:
    """Returns the BLEU of a finished run, ten translations, and the masks of strict gates.

    near: the numbers of the test sentences that are near duplicates of training sentences.
    """
    translations = translated_test(run)[languages]
    distinct = [True] * len(translations)
    for number in near:
        distinct[number] = False
    bleu = bleu_of_test(run)[languages]
    last = read_metrics(run, "train")[-1] | read_metrics(run, "dev")[-1]
    return {
        "bleu": bleu.score,
        "distinct_bleu": bleu_of_test(run, distinct)[languages].score if any(distinct) else None,
        "lowercased_bleu": bleu_of_test(run, lowercase=True)[languages].score,
        "signature": bleu.signature,
        "shown": [translations[number] for number in numbers_shown(len(translations))],
        "masks": {key: last[key] for key in MASKS if key in last},
    }


class Comparison(NamedTuple):
    """A claim about two models, with the differences between them over paired seeds.

    Attributes:
        claim: the claim in words.
        compared: the two models.
        difference: the difference in ln(perplexity); negative if the claim holds.
        bleu: the difference in BLEU; positive if the claim holds.
    """

    claim: str
    compared: str
    difference: PairedDifference | None
    bleu: PairedDifference | None


def comparisons(runs: Sequence[Run]) -> list[Comparison]:
    """Tests the claims of the paper for both gates."""
    results = results_of(runs, ARMS)
    bleu: dict[str, dict[int, float]] = {arm: {} for arm in ARMS}
    for run in runs:
        bleu[run["arm"]][run["seed"]] = run["bleu"]
    return [
        Comparison(
            claim,
            f"{arm} against {other}",
            difference(results[arm], results[other]),
            mean_difference(
                [bleu[arm][seed] - bleu[other][seed] for seed in bleu[arm] if seed in bleu[other]]
            ),
        )
        for claim, other in (
            ("mixtures translate better than a model without them", NONE),
            ("mixtures translate better than dense layers with equal operations", DENSE),
        )
        for arm in (MIXTURE, BALANCED)
    ]


def comparisons_table(compared: Iterable[Comparison]) -> str:
    """Formats the claims with a verdict by perplexity and one by BLEU."""
    rows = [
        [
            each.claim,
            each.compared,
            as_change(each.difference),
            verdict(each.difference),
            "" if each.bleu is None else f"{each.bleu:+.2f}",
            verdict(each.bleu, 0.0, math.inf),
        ]
        for each in compared
    ]
    header = ["claim", "compared", "perplexity, 95%", "verdict", "BLEU, 95%", "verdict"]
    return markdown_table(header, rows)


def table(runs: Sequence[Run]) -> str:
    """Formats size, perplexity and BLEU of the models, with one row per model."""
    results = results_of(runs, ARMS)
    rows = []
    for name in MODELS:
        if not (of_arm := results[name]):
            continue
        bleu = [
            [run[key] for run in runs if run["arm"] == name]
            for key in ("bleu", "distinct_bleu", "lowercased_bleu")
        ]
        rows.append(
            [
                name,
                *size_cells(next(iter(of_arm.values())).cost),
                len(of_arm),
                f"{mean_perplexity(of_arm):.3f}",
                as_change(difference(of_arm, results[NONE])) if name != NONE else "",
                *("" if None in scores else f"{statistics.fmean(scores):.2f}" for scores in bleu),
            ]
        )
    header = [
        "model", "ops/timestep", "parameters", "seeds", "test ppl",
        "change from none, 95%", "BLEU", "BLEU without near duplicates", "BLEU, lowercased",
    ]  # fmt: skip
    return markdown_table(header, rows)


def published(kind: Kind, languages: str) -> str:
    """States the BLEU of another model on the same test part; "" if none is known."""
    if languages not in kind.published:
        return ""
    return (
        f"For comparison: the {kind.model} has BLEU {kind.published[languages]:.2f} on this test "
        "part. Its text was prepared in another way, so the comparison is rough."
    )


def balance(runs: Sequence[Run]) -> str:
    """Describes the masks of the strictly balanced gates; "" without a run of them."""
    strict = [run for run in runs if run["arm"] == BALANCED]
    if not strict:
        return ""

    def mean(key: str) -> str:
        values = (
            100 * statistics.fmean(run["masks"][key][layer] for run in strict) for layer in (0, 1)
        )
        return " and ".join(f"{value:.1f}%" for value in values)

    by_batch = statistics.fmean(run["masks"]["nll_batchwise"] for run in strict)
    by_threshold = statistics.fmean(run["dev"][-1][1] for run in strict)
    return (
        f"The gates of {BALANCED} are strictly balanced. The final dev perplexity was "
        f"{perplexity(by_threshold):.3f} with the threshold mask and {perplexity(by_batch):.3f} "
        "with the batchwise mask. In the last training batches, the two masks differed in "
        f"{mean('mask_disagreement')} of the assignments in encoder and decoder. The "
        f"batchwise mask gave no expert to {mean('share_without_expert')} of the tokens.\n"
    )


def convergence(runs: Sequence[Run]) -> str:
    """Compares the dev perplexity at the end with the last one before 90% of the training."""
    changes = []
    for name in MODELS:
        curve = mean_curve(runs, name)
        earlier = [(tokens, ppl) for tokens, ppl in curve if tokens <= 0.9 * curve[-1][0]]
        if earlier:
            (before, then), (end, now) = earlier[-1], curve[-1]
            share = (end - before) / end
            changes.append(f"{name} {100 * (now / then - 1):+.1f}% in the last {share:.0%}")
    if not changes:
        return ""
    return f"Change of the dev perplexity by the end of the training: {', '.join(changes)}."


def crossover(settings: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """Says from which epoch on a mixture has a lower dev perplexity than the dense layers.

    The curves are means over the seeds that both models have. A mixture whose perplexity is higher
    at the end is left out.
    """
    seeds = {
        name: {run["seed"] for run in runs if run["arm"] == name}
        for name in (MIXTURE, BALANCED, DENSE)
    }
    found = []
    for name in (MIXTURE, BALANCED):
        both = seeds[name] & seeds[DENSE]
        curves = (mean_curve([r for r in runs if r["seed"] in both], n) for n in (name, DENSE))
        lower = [
            (tokens, ours < theirs) for (tokens, ours), (_, theirs) in zip(*curves, strict=True)
        ]
        always = [tokens for tokens, _ in takewhile(lambda each: each[1], reversed(lower))]
        if always:
            found.append(f"{name} from epoch {always[-1] / settings['train_tokens']:.1f} on")
    if not found:
        return ""
    return f"The dev perplexity is below that of {DENSE} with {' and with '.join(found)}."


def shown(settings: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """Formats ten evenly spaced sentences of the test part and their translations."""
    first = {run["arm"]: run["shown"] for run in reversed(runs)}  # runs are in the order of seeds
    names = [name for name in MODELS if name in first]
    width = max(map(len, ["reference", *names]))
    lines = []
    for number, (source, reference) in enumerate(settings["shown"]):
        all_of_it = {"source": source, "reference": reference}
        all_of_it |= {name: first[name][number] for name in names}
        lines += [f"    {name:<{width}}  {sentence}" for name, sentence in all_of_it.items()]
        lines.append("")
    return "\n".join(lines)


def _paragraph(*sentences: str) -> str:
    """Joins sentences and leaves out empty ones."""
    return " ".join(filter(None, sentences))


def as_markdown(
    name: str, kind: Kind, settings: Mapping[str, Any], runs: Sequence[Run], command: str
) -> str:
    """Formats the page: plot, table, verdicts, translations, cost, command."""
    signatures = ", ".join(sorted({f"`{run['signature']}`" for run in runs}))
    lines = [
        f"# Mixtures of experts in translation, {settings['data.pairs'][0]}\n",
        f"![dev perplexity against source words]({name}.png)\n",
        "In the paper, a mixture of 2,048 experts has BLEU 40.35 from English to French and 26.03 "
        "to German. GNMT, a model without experts that needs more operations, has BLEU 39.22 and "
        "24.91 (Tables 2 and 3).\n",
        table(runs),
        f"{HOW_DECIDED} For BLEU, above and below are exchanged.\n",
        comparisons_table(comparisons(runs)),
        f"- Corpus: {kind.contents}. "
        f"The training part has {settings['train_pairs']:,} sentence pairs "
        f"({settings['source_words']:,} source words, {settings['train_tokens']:,} target "
        f"wordpieces). The test part has {settings['test_pairs']:,} pairs; "
        f"{len(settings['near_duplicates']):,} of them are near duplicates. A test sentence is a "
        f"near duplicate if at least {_NEAR:.0%} of the word trigrams of its source occur in one "
        f"source of the training part. Both languages share one vocabulary of "
        f"{settings['pieces']:,} wordpieces.",
        _paragraph(
            f"- Training: {settings['steps']:,} steps of about "
            f"{settings['data.tokens_per_batch']:,} source and target wordpieces, with the "
            f"learning rate {settings['optimizer.learning_rate']:g} and dropout "
            f"{settings['model.dropout']:g}.",
            convergence(runs),
            crossover(settings, runs),
        ),
        f"- Perplexity is per target wordpiece of the test part. {HOW_COMPARED}",
        _paragraph(
            "- BLEU is sacreBLEU's score of a beam search with the penalties of Wu et al. (2016).",
            published(kind, settings["data.pairs"][0]),
            f"Signature of sacreBLEU: {signatures}.",
        ),
        "- Operations and parameters do not include embedding and softmax.\n",
        trials(settings, results_of(runs, ARMS, "dev"), MODELS, TRIALS),
        balance(runs),
        "These are ten evenly spaced sentences of the test part, and their translations by the "
        "first run of each model:\n",
        shown(settings, runs),
        f"{core_hours(runs)}\n",
        f"```\n{command}\n```\n",
    ]
    return "\n".join(line for line in lines if line)


def plot(settings: Mapping[str, Any], runs: Sequence[Run]) -> Figure:
    """Plots dev perplexity against source words processed, one curve for each model (Fig. 4)."""
    figure = Figure(figsize=(6, 4.2), layout="constrained", dpi=150)
    axes = figure.subplots()
    words_per_piece = settings["source_words"] / settings["train_tokens"]
    for name in MODELS:
        points = [(tokens * words_per_piece / 1e6, ppl) for tokens, ppl in mean_curve(runs, name)]
        if points:
            axes.plot(*zip(*points, strict=True), label=name, lw=1.2)
    axes.set(xlabel="source words processed, millions", ylabel="dev perplexity", yscale="log")
    axes.legend()
    return figure


def main(arguments: Sequence[str] | None = None, root: Path = Path()) -> Results:
    """Runs the study and returns the finished runs."""
    parser = study_parser(__doc__, "translation", [*ARMS])
    parser.set_defaults(arms=MODELS)
    parser.add_argument("--text", choices=TEXTS, default="captions", help="the kind of the corpus")
    parser.add_argument("--pair", default="en-de", help="the language pair, such as en-de")
    options = parser.parse_intermixed_args(arguments)
    kind = TEXTS[options.text]
    name = f"translation_{options.text}_{options.pair}"
    path, runs_folder = Path(options.output) / f"{name}.json", Path(options.runs) / name

    def config_of(arm: str, seed: int, overrides: Sequence[str]) -> TranslationConfig:
        model, of_arm = ARMS[arm]
        config = read_config(
            root / "configs" / "mt" / f"small-{model}.toml",
            [
                "num_threads=1",
                f'data.pairs=["{options.pair}"]',
                f"data.encoded={runs_folder / 'encoded'}",
                *kind.settings,
                *overrides,
                *of_arm,
            ],
            TranslationConfig,
        )
        return replace(
            config, seed=seed, output=str(run_folder(runs_folder, arm.replace(" ", "-"), seed))
        )

    if not options.report:
        require_bleu()
        first = config_of(MIXTURE, 0, options.overrides)
        if first.data.pairs != [options.pair]:
            raise ConfigError(f"data.pairs must be that of --pair, got {first.data.pairs}")
        set_up_for(first)
        text = load_text(first.data)
        settings = settings_of(first, text)

        def run(arm: str, seed: int) -> Run:
            started = time.process_time()
            result = train_and_test(config_of(arm, seed, options.overrides), text)
            extra = tested(result.run, options.pair, settings["near_duplicates"])
            return record_of(result, time.process_time() - started) | extra

        keys = [(arm, seed) for seed in options.seeds for arm in options.arms]
        run_missing(keys, run, path, settings, [*ARMS], runs_folder)
    with locked(path):
        stored = read_stored(path)
        results = results_of(stored.runs if stored else [], ARMS)
        if stored is None:
            print("nothing to report yet: no run is finished")
            return results
        command = shlex.join(
            [
                "python", "scripts/studies/translation.py", "--text", options.text,
                "--pair", options.pair, "data.corpus=CORPUS",
                *changed_options(stored.settings, config_of(MIXTURE, 0, [])),
            ]
        )  # fmt: skip
        page = as_markdown(name, kind, *stored, command)
        compared = [
            {
                **each._asdict(),
                "difference": each.difference and asdict(each.difference),
                "bleu": each.bleu and asdict(each.bleu),
            }
            for each in comparisons(stored.runs)
        ]
        data = {**stored._asdict(), "claims": compared}
        write_report(options.output, name, page, data, plot(*stored))
    return results
