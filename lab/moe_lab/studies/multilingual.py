"""Compares translation models for one and for several language pairs (Table 5, small scale).

    moe-lab study multilingual data.corpus=CORPUS
    moe-lab study multilingual data.corpus=CORPUS --arms moe dense --seeds 1
    moe-lab study multilingual --text manuals data.corpus=CORPUS --arms moe-oversampled
    moe-lab study multilingual --report

Trains the models of configs/mt/small-moe-32.toml and small-dense.toml with one shared vocabulary of
wordpieces:

- moe: MoE layers with 32 experts, trained on all language pairs together
- dense: dense layers with equal operations instead of MoE layers, trained on all language pairs
- single: a separate dense model for each language pair, which sees about twice as much text of its
  pair as the multilingual models
- single-short: the model single with half the steps, and so about as much text of its pair as the
  multilingual models
- moe-oversampled: the model moe, with every language pair oversampled to the size of the largest;
  --arms selects it, for --text manuals, whose pairs differ in size

With captions, the attention of the multilingual models does not see the token ``<2xx>``, with which
each source begins. It sees this token in the arms "moe attends language" and "dense attends
language". The arm "dense rate 0.002" is the model dense with another learning rate, "moe dropout
0.3" with another dropout. --arms selects such arms.

By default, the corpus is Multi30k, with captions of images in English, German and French. CORPUS is
a folder with its files train, val and test_2016_flickr. The corpus of --text manuals has manuals,
help and descriptions of packages, in English to and from six languages. There, the models have a
vocabulary of 16,000 wordpieces, no dropout and half the learning rate.

The file OUTPUT/multilingual_TEXT.json (default: runs/results) keeps every finished run with
perplexity and BLEU of each language pair, so the study can grow over many occasions and machines. A
run that is interrupted continues from its checkpoint in RUNS. To share the runs, start the command
several times. A multilingual run takes 40 minutes on one processor. The script also writes the
page, multilingual_TEXT.md, and its plot of the two language pairs with the least text. --report
writes them without training and without the corpus.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_lab.data import EncodedPairs, PairBatch, batches_of
from moe_lab.errors import ConfigError
from moe_lab.experiments.results import Result, train_and_test
from moe_lab.experiments.stored import (
    Report,
    Run,
    Stored,
    changed_options,
    commands_of,
    record_of,
    report_stored,
    run_missing,
    shared_settings,
)
from moe_lab.experiments.study import claims_data, config_of_run, study_parser
from moe_lab.models import TranslationModel
from moe_lab.studies._multilingual_page import (
    DENSE,
    MIXTURE,
    MODELS,
    OVERSAMPLED,
    SHORT,
    SINGLE,
    TRIED,
    arms_of,
    as_markdown,
    comparisons,
    least_text,
    model_of,
    of_models,
    plot,
)
from moe_lab.studies.translation import TEXTS
from moe_lab.training.checkpoint import load_run
from moe_lab.training.config import TranslationConfig, read_config
from moe_lab.training.device import set_up_for
from moe_lab.training.logging import read_metrics
from moe_lab.training.metrics import by_language_pair
from moe_lab.training.text import PairText, load_text
from moe_lab.training.translation import bleu_of_test

DEFAULT_MODELS = (MIXTURE, DENSE, SINGLE)
_ATTENTION_SENTENCES = 200  # dev sentences of each language pair for `weight_of_language`


class Settings(NamedTuple):
    """Options of the models that differ from those of configs/mt, for a kind of corpus.

    Attributes:
        of_all: options of all models.
        of_single: options of `SINGLE`, whose models see about twice as much text of their pair as
            the multilingual models. Their learning rate ends at the same fraction of its peak.
        of_short: likewise of `SHORT`, whose models see about as much text of their pair.
    """

    of_all: tuple[str, ...]
    of_single: tuple[str, ...]
    of_short: tuple[str, ...]


_PAIRS_OF_MANUALS = [
    languages
    for other in ("fr", "de", "ja", "ko", "pt", "es")
    for languages in (f"en-{other}", f"{other}-en")
]
SETTINGS = {
    "captions": Settings(
        (
            'data.pairs=["en-de","de-en","en-fr","fr-en"]', "data.vocab_size=6000",
            "steps=5000", "log.eval_every=500", "model.attend_language=false",
        ),
        ("steps=2500", "optimizer.warmup_steps=150", "model.attend_language=true"),
        (
            "steps=1250", "optimizer.warmup_steps=75", "model.attend_language=true",
            "log.eval_every=250",
        ),
    ),
    "manuals": Settings(
        (
            f"data.pairs={json.dumps(_PAIRS_OF_MANUALS)}", "data.vocab_size=16000",
            "steps=5000", "log.eval_every=250", "log.eval_sentences=200",
            "model.dropout=0.0", "optimizer.learning_rate=2e-3", "optimizer.hold_steps=1960",
        ),
        ("steps=800", "optimizer.warmup_steps=200", "optimizer.hold_steps=162"),
        ("steps=400", "optimizer.warmup_steps=100", "optimizer.hold_steps=81"),
    ),
}  # fmt: skip


def settings_of(config: TranslationConfig, text: PairText) -> dict[str, Any]:
    """Returns what all runs of the study share: facts of the text, and options of training."""
    names = text.train.names
    sizes = text.train.pair.bincount(minlength=len(names)).tolist()
    return {
        "train_pairs": dict(zip(names, sizes, strict=True)),
        **shared_settings(config, text),
    }


def tested(result: Result, text: PairText, least: Sequence[str]) -> dict[str, Any]:
    """Returns what a run adds to its record: the figures of each language pair.

    least: the language pairs whose dev perplexity the page plots.
    """
    bleu = bleu_of_test(result.run)
    nll = {
        name: each.nll for name, each in by_language_pair(result.sentence_nll, text.test).items()
    }
    dev = read_metrics(result.run, "dev")
    return {
        "pairs": {name: {"nll": nll[name], "bleu": bleu[name].score} for name in nll},
        "signatures": sorted({each.signature for each in bleu.values()}),
        "perplexity": {
            name: [
                [each["step"], each.get(f"perplexity/{name}", each["perplexity"])] for each in dev
            ]
            for name in least
            if name in nll
        },
    }


def weight_of_language(run: Path, dev: EncodedPairs) -> float:
    """Computes the mean attention weight of the first source token, ``<2xx>``, over predictions."""
    model = load_run(run).model
    assert isinstance(model, TranslationModel)
    total, number = 0.0, 0
    for batch in batches_of(dev, tokens_per_batch=2_560, shuffle=False).epoch(0):
        assert isinstance(batch, PairBatch)
        state = model.start(model.encode(batch.source, batch.source_mask))
        for inputs, mask in zip(batch.inputs.T, batch.mask.T, strict=True):
            _, attention, state = model.step(inputs, state)
            total += float(attention[mask, 0].double().sum())
            number += int(mask.sum())
    return total / number


def main(arguments: Sequence[str] | None = None) -> list[Run]:
    """Runs the study and returns the finished runs."""
    parser = study_parser(__doc__, "multilingual", [*MODELS, *TRIED])
    parser.set_defaults(arms=[*DEFAULT_MODELS])
    parser.add_argument(
        "--text", choices=SETTINGS, default="captions", help="the kind of the corpus"
    )
    options = parser.parse_intermixed_args(arguments)
    name, kind = f"multilingual_{options.text}", SETTINGS[options.text]
    path, runs_folder = options.output / f"{name}.json", Path(options.runs) / options.text

    def config_of(arm: str, overrides: Sequence[str]) -> TranslationConfig:
        model, *of_arm = TRIED.get(arm, (arm,))
        file = "moe-32" if model in (MIXTURE, OVERSAMPLED) else "dense"
        of_model = ["data.oversample=true"] if model == OVERSAMPLED else []
        of_model += {SINGLE: kind.of_single, SHORT: kind.of_short}.get(model, ())
        return read_config(
            f"mt/small-{file}",
            [
                "num_threads=1",
                f"data.encoded={runs_folder / 'encoded'}",
                *kind.of_all,
                *of_model,
                *overrides,
                *of_arm,
            ],
            TranslationConfig,
        )

        first = config_of(MIXTURE, options.overrides)
        pairs = first.data.pairs
        if len(pairs) < 2:
            raise ConfigError(f"data.pairs must list at least 2 language pairs, got {list(pairs)}")
        set_up_for(first)
        text = load_text(first.data)
        settings = settings_of(first, text)
        least = least_text(settings["train_pairs"])
        runs_folder.mkdir(parents=True, exist_ok=True)
        wordpieces = runs_folder / f"wordpieces-{text.vocabulary.fingerprint()[:12]}.model"
        text.vocabulary.save(wordpieces)

        def run(arm: str, seed: int) -> Run:
            model = model_of(arm)
            languages = arm.removeprefix(model).strip()
            overrides = [*options.overrides, f"data.wordpieces={wordpieces}"]
            overrides += [f'data.pairs=["{languages}"]'] if languages else []
            config = config_of_run(config_of(model, overrides), runs_folder, arm, seed)
            own = load_text(config.data) if languages else text
            result = train_and_test(config, own)
            extra = tested(result, own, least)
            if not languages:
                dev = own.dev.first(_ATTENTION_SENTENCES)
                extra["weight_of_language"] = weight_of_language(result.run, dev)
            extra |= {"steps": config.steps, "learning_rate": config.optimizer.learning_rate}
            return record_of(result) | extra

        run_missing(
            [(arm, seed) for seed in options.seeds for arm in arms_of(options.arms, pairs)],
            run,
            path,
            settings,
            arms_of((*MODELS, *TRIED), pairs),
            runs_folder,
        )

    def report(stored: Stored) -> Report | None:
        if not (runs := of_models(stored.runs)):
            return None
        compared = comparisons(stored.runs)
        changed = changed_options(stored.settings, config_of(MIXTURE, []))
        command = ["moe-lab", "study", "multilingual", "--text", options.text]
        command += ["data.corpus=CORPUS", *changed]
        # --arms names the models of single pairs without their pair.
        named = {(model_of(run["arm"]), run["seed"]): run for run in stored.runs}
        named_runs = [run | {"arm": model} for (model, _), run in named.items()]
        commands = commands_of(command, named_runs, DEFAULT_MODELS)
        contents = TEXTS[options.text].contents
        page = as_markdown(name, contents, *stored, compared, commands)
        return Report(page, claims_data(compared), plot(stored.settings, runs))

    return report_stored(path, report)
