"""Compares translation models with and without experts, at small scale (Fig. 4, Tables 2 to 4).

    moe-lab study translation data.corpus=CORPUS
    moe-lab study translation data.corpus=CORPUS --seeds 1 --arms none "none rate 0.008"
    moe-lab study translation --text manuals --pair en-fr data.corpus=CORPUS
    moe-lab study translation --report

Trains the models of configs/mt/small-MODEL.toml for one language pair:

- moe-32: MoE layers with noisy top-k gates
- moe-32-balanced: MoE layers with strictly balanced gates
- dense: dense layers with equal operations instead of MoE layers; the paper has no such model
- none: neither MoE layers nor dense layers; the paper's baseline

The arm "none rate 0.008" is the model none with another learning rate, "none dropout 0.1" with
another dropout. --arms selects such arms.

By default, the corpus is Multi30k, with captions of images. CORPUS is a folder with its files
train, val and test_2016_flickr. The corpus of --text manuals has manuals, help and descriptions of
packages; there, the models have a vocabulary of 8,000 wordpieces, no dropout and 2,500 steps.

The file OUTPUT/translation_TEXT_PAIR.json (default: runs/results) keeps every finished run, with
ten unedited translations, so the study can grow over many occasions and machines. A run that is
interrupted continues from its checkpoint in RUNS. To share the runs, start the command several
times. A run takes 15 to 45 minutes on one processor. The script also writes the page,
translation_TEXT_PAIR.md, and its plot of dev perplexity over source words; --report writes them
without training and without the corpus.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moe_lab.errors import ConfigError
from moe_lab.experiments.results import train_and_test
from moe_lab.experiments.stored import (
    Report,
    Run,
    Stored,
    changed_options,
    commands_of,
    record_of,
    report_stored,
    results_of,
    run_missing,
    shared_settings,
)
from moe_lab.experiments.study import (
    Results,
    claims_data,
    config_of_run,
    study_parser,
)
from moe_lab.studies._translation_page import (
    ARMS,
    MIXTURE,
    MODELS,
    NEAR,
    as_markdown,
    comparisons,
    plot,
)
from moe_lab.training.config import TranslationConfig, read_config
from moe_lab.training.device import set_up_for
from moe_lab.training.logging import read_metrics
from moe_lab.training.text import PairText, load_text, parallel_text
from moe_lab.training.translation import bleu_of_test, translated_test

MASKS = ("nll_batchwise", "mask_disagreement", "share_without_expert")  # metrics of strict gates
_NUM_SHOWN = 10


class Kind(NamedTuple):
    """A kind of corpus.

    Attributes:
        contents: what the corpus contains.
        settings: options of the models that differ from those of configs/mt.
    """

    contents: str
    settings: tuple[str, ...] = ()


TEXTS = {
    "captions": Kind("captions of images, the public corpus Multi30k"),
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
            near[number] |= count >= NEAR * sizes[number]
    return near


def source_words(text: PairText) -> int:
    """Counts the source words of the training pairs that pass the length filter."""
    begins_word = torch.tensor(text.vocabulary.begins_word)
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


def main(arguments: Sequence[str] | None = None) -> Results:
    """Runs the study and returns the finished runs."""
    parser = study_parser(__doc__, "translation", [*ARMS])
    parser.set_defaults(arms=MODELS)
    parser.add_argument("--text", choices=TEXTS, default="captions", help="the kind of the corpus")
    parser.add_argument("--pair", default="en-de", help="the language pair, such as en-de")
    options = parser.parse_intermixed_args(arguments)
    kind = TEXTS[options.text]
    name = f"translation_{options.text}_{options.pair}"
    path, runs_folder = options.output / f"{name}.json", Path(options.runs) / name

    def config_of(arm: str, seed: int, overrides: Sequence[str]) -> TranslationConfig:
        model, of_arm = ARMS[arm]
        config = read_config(
            f"mt/small-{model}",
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
        return config_of_run(config, runs_folder, arm, seed)

        first = config_of(MIXTURE, 0, options.overrides)
        if first.data.pairs != [options.pair]:
            raise ConfigError(f"data.pairs must be that of --pair, got {first.data.pairs}")
        set_up_for(first)
        text = load_text(first.data)
        settings = settings_of(first, text)

        def run(arm: str, seed: int) -> Run:
            result = train_and_test(config_of(arm, seed, options.overrides), text)
            extra = tested(result.run, options.pair, settings["near_duplicates"])
            return record_of(result) | extra

        keys = [(arm, seed) for seed in options.seeds for arm in options.arms]
        run_missing(keys, run, path, settings, [*ARMS], runs_folder)

    def report(stored: Stored) -> Report | None:
        if not any(run["arm"] in MODELS for run in stored.runs):
            return None
        compared = comparisons(stored.runs)
        command = [
            "moe-lab", "study", "translation", "--text", options.text,
            "--pair", options.pair, "data.corpus=CORPUS",
            *changed_options(stored.settings, config_of(MIXTURE, 0, [])),
        ]  # fmt: skip
        commands = commands_of(command, stored.runs, MODELS)
        page = as_markdown(name, kind.contents, *stored, compared, commands)
        return Report(page, claims_data(compared), plot(*stored))

    return results_of(report_stored(path, report), ARMS)
