"""Compares translation models with and without experts, at small scale (Fig. 4, Tables 2 to 4).

    moe-lab study translation data.corpus=CORPUS
    moe-lab study translation data.corpus=CORPUS --seeds 1 --arms none "none rate 0.008"
    moe-lab study translation --pair en-fr data.corpus=CORPUS
    moe-lab study translation --report

Trains the models of configs/mt/small-MODEL.toml for one language pair:

- moe-32: MoE layers with noisy top-k gates
- moe-32-balanced: MoE layers with strictly balanced gates
- dense: dense layers with equal operations instead of MoE layers; the paper has no such model
- none: neither MoE layers nor dense layers; the paper's baseline

The arm "none rate 0.008" is the model none with another learning rate, "none dropout 0.1" with
another dropout. --arms selects such arms.

The corpus is Multi30k, with captions of images. CORPUS is a folder with its files train, val and
test_2016_flickr. A run takes 15 to 45 minutes on one processor. The page shows ten unedited
translations of each model.
"""

import argparse
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moe_lab.errors import ConfigError
from moe_lab.experiments.arms import Arm
from moe_lab.experiments.claims import as_change, claims_data, verdict
from moe_lab.experiments.page import Claims, Page, Plot, new_axes
from moe_lab.experiments.runs import ArmRuns, PairedDifference, Runs, dev_nll, number_of
from moe_lab.experiments.single_run import Result
from moe_lab.experiments.store import Stored
from moe_lab.experiments.study import TrainedStudy
from moe_lab.experiments.trials import trials
from moe_lab.markdown import markdown_table
from moe_lab.training.config import TranslationConfig, read_config
from moe_lab.training.logging import read_metrics
from moe_lab.training.text import PairText, parallel_text

MIXTURE, BALANCED, DENSE, NONE = "moe-32", "moe-32-balanced", "dense", "none"
MODELS = (MIXTURE, BALANCED, DENSE, NONE)
MASKS = ("nll_batchwise", "mask_disagreement", "share_without_expert")  # metrics of strict gates
_NUM_SHOWN = 10
# A test sentence is a near duplicate if it has more than this share of word trigrams in common.
NEAR = 0.8
# BLEU of Transformer-Tiny in Wu et al. (2021, arXiv 2105.14462).
_PUBLISHED = {"en-de": 41.02, "en-fr": 61.80}

# Sentences and table of the pages of both studies of translation.
CORPUS = "captions of images, the public corpus Multi30k"
BLEU = "BLEU is sacreBLEU's score of a beam search with the penalties of Wu et al. (2016)."
CLAIM_HEADER = ["claim", "compared", "perplexity, 95%", "verdict", "BLEU, 95%", "verdict"]


class Translation(TrainedStudy):
    models = usual = MODELS
    arm_settings = ("rate", "dropout")
    text: PairText

    def __init__(self, options: argparse.Namespace) -> None:
        self.name = f"translation_captions_{options.pair}"
        self.given = ("--pair", options.pair, "data.corpus=CORPUS")
        super().__init__(options, self.name)

    def config(self, arm: Arm, overrides: Sequence[str]) -> TranslationConfig:
        options = [
            "num_threads=1",
            f'data.pairs=["{self.options.pair}"]',
            f"data.encoded={self.runs_folder / 'encoded'}",
        ]
        options += [*overrides, *arm.overrides]
        return read_config(f"mt/small-{arm.model}", options, TranslationConfig)

    def settings(self) -> dict[str, Any]:
        pairs = self.config(self.first, self.options.overrides).data.pairs
        if pairs != [self.options.pair]:
            raise ConfigError(f"data.pairs must be that of --pair, got {pairs}")
        return super().settings()

    def settings_of(self, config: Any) -> dict[str, Any]:
        text = self.text
        (train,), (test,) = (parallel_text(config.data, part) for part in ("train", "test"))
        sentences = [list(pair) for pair in test]
        near = near_duplicates([source for source, _ in sentences], (source for source, _ in train))
        self.near = [number for number, is_near in enumerate(near) if is_near]
        return {
            "train_pairs": len(text.train),
            "train_tokens": text.train.num_tokens,
            "source_words": source_words(text),
            "test_pairs": len(sentences),
            "near_duplicates": self.near,
            "shown": [sentences[number] for number in numbers_shown(len(sentences))],
        } | super().settings_of(config)

    def measured(self, arm: Arm, result: Result) -> dict[str, Any]:
        return tested(result.run, self.options.pair, self.near)

    def page(self, stored: Stored) -> Page | None:
        runs, settings = stored.by_arm(), stored.settings
        if not runs.select(MODELS):
            return None
        claimed = claims(runs)
        return self.filled(
            stored,
            plot=plot(settings, runs),
            models=table(settings, runs),
            decided=claimed.table,
            claims=claimed,
            corpus=CORPUS,
            num_near=len(settings["near_duplicates"]),
            near=NEAR,
            convergence=convergence(runs, MODELS),
            crossover=crossover(settings, runs),
            bleu=BLEU,
            published=_PUBLISHED.get(settings["data.pairs"][0]),
            signatures=", ".join(sorted({f"`{run['signature']}`" for run in stored.runs})),
            trials=trials(settings, runs, MODELS),
            masks=masks(runs[Arm(BALANCED)]),
            shown=shown(settings, runs),
        )


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
            near[number] |= count >= NEAR * sizes[number]
    return near


def source_words(text: PairText) -> int:
    """Counts the source words of the training pairs that pass the length filter."""
    begins_word = torch.tensor(text.vocabulary.begins_word)
    return int(begins_word[text.train.source.stream].sum())


def numbers_shown(num_sentences: int) -> list[int]:
    """Returns the numbers of ten evenly spaced sentences."""
    places = torch.linspace(0, num_sentences - 1, _NUM_SHOWN, dtype=torch.float64)
    return places.round().long().tolist()


def tested(run: Path, languages: str, near: Sequence[int]) -> dict[str, Any]:
    """Returns the BLEU of a finished run, ten translations, and the masks of strict gates.

    The sentences `near` are near duplicates of training sentences.
    """
    from moe_lab.training.translation import bleu_of_test, translated_test  # imports FSDP

    translations = translated_test(run)[languages]
    distinct = [number not in {*near} for number in range(len(translations))]
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
    """A claim about two models, with the differences between them over paired seeds."""

    claim: str
    compared: str
    difference: PairedDifference | None  # in ln(perplexity); negative if the claim holds
    bleu: PairedDifference | None  # positive if the claim holds


def comparisons(runs: Runs) -> list[Comparison]:
    return [
        Comparison(
            claim,
            f"{arm} against {baseline}",
            runs[Arm(arm)].minus(runs[Arm(baseline)]),
            runs[Arm(arm)].minus(runs[Arm(baseline)], number_of("bleu")),
        )
        for claim, baseline in (
            ("mixtures translate better than a model without them", NONE),
            ("mixtures translate better than dense layers with equal operations", DENSE),
        )
        for arm in (MIXTURE, BALANCED)
    ]


def claim_cells(
    claim: str, compared: str, difference: PairedDifference | None, bleu: PairedDifference | None
) -> list[str]:
    """Formats a claim with its verdicts by perplexity and by BLEU, for a table."""
    bleu_cells = ["" if bleu is None else f"{bleu:+.2f}", verdict(bleu, 0.0, math.inf)]
    return [claim, compared, as_change(difference), verdict(difference), *bleu_cells]


def claims(runs: Runs) -> Claims:
    """Makes the part of the page with the claims about models that have runs."""
    compared = comparisons(runs)
    rows = [claim_cells(*c) for c in compared if c.difference is not None]
    table = markdown_table(CLAIM_HEADER, rows) if rows else ""
    return Claims(table, claims_data(compared))


def table(settings: Mapping[str, Any], runs: Runs) -> str:
    """Formats size, perplexity and BLEU of the models, with one row per model.

    There is a BLEU without near duplicates if these are at least 1% of the test sentences.
    """
    scores = {"bleu": "BLEU", "lowercased_bleu": "BLEU, lowercased"}
    if len(settings["near_duplicates"]) >= 0.01 * settings["test_pairs"]:
        scores["distinct_bleu"] = "BLEU without near duplicates"
    rows = []
    for name, arm_runs in runs.select(MODELS):
        bleu = [[run[key] for run in arm_runs.values()] for key in scores]
        rows.append(
            [
                name,
                *arm_runs.size_cells(),
                len(arm_runs),
                f"{arm_runs.perplexity():.3f}",
                as_change(arm_runs.minus(runs[Arm(NONE)])) if name != NONE else "",
                *("" if None in values else f"{statistics.fmean(values):.2f}" for values in bleu),
            ]
        )
    header = ["model", "ops/timestep", "parameters", "seeds", "test ppl", "change from none, 95%"]
    return markdown_table([*header, *scores.values()], rows)


def masks(strict: ArmRuns) -> dict[str, Any]:
    """Returns the figures of the masks of strictly balanced gates; {} without a run of them."""
    if not strict:
        return {}

    def mean(key: str) -> str:
        values = (strict.mean(number_of("masks", key, layer)) for layer in (0, 1))
        return " and ".join(f"{100 * value:.1f}%" for value in values)

    return {
        "threshold": strict.perplexity(dev_nll),
        "batchwise": strict.perplexity(number_of("masks", "nll_batchwise")),
        **{key: mean(key) for key in MASKS[1:]},
    }


def convergence(runs: Runs, models: Iterable[str]) -> str:
    """Compares the dev perplexity at the end with that after about 90% of the training.

    All runs of the models are evaluated after the same steps, with nearly equal numbers of tokens.
    """
    share, changes = 0.0, []
    for name in models:
        curve = runs[Arm(name)].curve()
        earlier = [(tokens, ppl) for tokens, ppl in curve if tokens <= 0.905 * curve[-1][0]]
        if earlier:
            (before, then), (end, now) = earlier[-1], curve[-1]
            share = (end - before) / end
            changes.append(f"{name} {100 * (now / then - 1):+.1f}%")
    if not changes:
        return ""
    return (
        f"Change of the dev perplexity in the last {share:.0%} of the training: "
        f"{', '.join(changes)}."
    )


def crossover(settings: Mapping[str, Any], runs: Runs) -> str:
    """Says from which epoch on a mixture has a lower dev perplexity than the dense layers.

    The curves are means over the seeds that both models have.
    """
    sentences = []
    for name in (MIXTURE, BALANCED):
        mixture, dense = runs[Arm(name)], runs[Arm(DENSE)]
        if not (seeds := mixture.keys() & dense.keys()):
            continue
        curves = (own.on(seeds).curve() for own in (mixture, dense))
        first = None  # tokens of training at the first evaluation after which the mixture is ahead
        for (tokens, our_ppl), (_, their_ppl) in zip(*curves, strict=True):
            if our_ppl >= their_ppl:
                first = None
            elif first is None:
                first = tokens
        sentences.append(
            f"At the end, {name} does not have a lower dev perplexity than {DENSE}."
            if first is None
            else f"From epoch {first / settings['train_tokens']:.1f} on, {name} has a lower dev "
            f"perplexity than {DENSE}."
        )
    return " ".join(sentences)


def shown(settings: Mapping[str, Any], runs: Runs) -> str:
    """Formats ten evenly spaced sentences of the test part and their translations."""
    # The runs of a model are in the order of seeds.
    first = {name: next(iter(arm_runs.values())) for name, arm_runs in runs.select(MODELS)}
    width = max(map(len, ["reference", *first]))
    blocks = []
    for number, (source, reference) in enumerate(settings["shown"]):
        all_of_it = {"source": source, "reference": reference}
        all_of_it |= {name: run["shown"][number] for name, run in first.items()}
        lines = [f"    {name:<{width}}  {sentence}" for name, sentence in all_of_it.items()]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def plot(settings: Mapping[str, Any], runs: Runs) -> Plot:
    """Plots dev perplexity against source words processed, one curve for each model (Fig. 4)."""
    figure, axes = new_axes(6, 4.2)
    scale = settings["source_words"] / settings["train_tokens"] / 1e6  # millions of words per piece
    for name in MODELS:
        if points := [(tokens * scale, ppl) for tokens, ppl in runs[Arm(name)].curve()]:
            axes.plot(*zip(*points, strict=True), label=name, lw=1.2)
    axes.set(xlabel="source words processed, millions", ylabel="dev perplexity", yscale="log")
    axes.legend()
    return Plot("dev perplexity against source words", figure)


run = Translation.start
