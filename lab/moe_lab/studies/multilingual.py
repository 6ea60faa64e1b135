"""Compares translation models for one and for several language pairs (Table 5, small scale).

    moe-lab study multilingual data.corpus=CORPUS
    moe-lab study multilingual data.corpus=CORPUS --arms moe dense --seeds 1
    moe-lab study multilingual --report

Trains the models of configs/mt/small-moe-32.toml and small-dense.toml with one shared vocabulary of
wordpieces:

- moe: MoE layers with 32 experts, trained on all language pairs together
- dense: dense layers with equal operations instead of MoE layers, trained on all language pairs
- single: a separate dense model for each language pair, which sees about twice as much text of its
  pair as the multilingual models
- single-short, only with --arms: the model single with half the steps, and so about as much text of
  its pair as the multilingual models

The attention of the multilingual models does not see the token ``<2xx>``, with which each source
begins. It sees this token in the arms "moe attends language" and "dense attends language". The arm
"dense rate 0.002" is the model dense with another learning rate, "moe dropout 0.3" with another
dropout. --arms selects such arms.

The corpus is Multi30k, with captions of images in English, German and French. CORPUS is a folder
with its files train, val and test_2016_flickr. A multilingual run takes 40 minutes on one
processor. The page has perplexity and BLEU of each language pair. Its plot shows the two pairs with
the least text.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_lab.data import EncodedPairs, PairBatch, batches_of
from moe_lab.errors import ConfigError
from moe_lab.experiments.arms import Arm
from moe_lab.experiments.claims import claims_data
from moe_lab.experiments.page import Claims, Command, Page, Plot, new_axes
from moe_lab.experiments.runs import (
    PairedDifference,
    Run,
    Runs,
    commands_of,
    dev_nll,
    mean_difference,
)
from moe_lab.experiments.single_run import Result, train_and_test
from moe_lab.experiments.store import Stored
from moe_lab.experiments.study import TrainedStudy
from moe_lab.experiments.trials import trials
from moe_lab.markdown import markdown_table
from moe_lab.models import TranslationModel
from moe_lab.studies.translation import BLEU, CLAIM_HEADER, CORPUS, claim_cells, convergence
from moe_lab.training.config import TranslationConfig, read_config
from moe_lab.training.logging import read_metrics
from moe_lab.training.metrics import by_language_pair, perplexity
from moe_lab.training.text import PairText, load_text

_ATTENTION_SENTENCES = 200  # dev sentences of each language pair for `weight_of_language`


MIXTURE, DENSE = "moe", "dense"
SINGLE, SHORT = "single", "single-short"  # a model of each language pair
MODELS = (MIXTURE, DENSE, SINGLE, SHORT)
USUAL = (MIXTURE, DENSE, SINGLE)

# Options of the models that differ from those of configs/mt. The learning rate of the models of a
# single language pair ends at the same fraction of its peak as that of the others.
SETTINGS = (
    'data.pairs=["en-de","de-en","en-fr","fr-en"]', "data.vocab_size=6000",
    "steps=5000", "log.eval_every=500", "model.attend_language=false",
)  # fmt: skip
SINGLE_OPTIONS = {
    SINGLE: ("steps=2500", "optimizer.warmup_steps=150", "model.attend_language=true"),
    SHORT: (
        "steps=1250", "optimizer.warmup_steps=75", "model.attend_language=true",
        "log.eval_every=250",
    ),
}  # fmt: skip


class Multilingual(TrainedStudy):
    name = "multilingual_captions"
    given = ("data.corpus=CORPUS",)
    models = MODELS
    usual = USUAL
    arm_settings = ("attends_language", "rate", "dropout")
    text: PairText
    wordpieces: Path  # the vocabulary of all runs

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options, "captions")

    def config(self, arm: Arm, overrides: Sequence[str]) -> TranslationConfig:
        options = ["num_threads=1", f"data.encoded={self.runs_folder / 'encoded'}", *SETTINGS]
        options += [*SINGLE_OPTIONS.get(arm.model, ()), *overrides, *arm.overrides]
        options += [f'data.pairs=["{arm.pair}"]'] if arm.pair else []
        file = "moe-32" if arm.model == MIXTURE else "dense"
        return read_config(f"mt/small-{file}", options, TranslationConfig)

    def settings(self) -> dict[str, Any]:
        pairs = self.config(self.first, self.options.overrides).data.pairs
        if len(pairs) < 2:
            raise ConfigError(f"data.pairs must list at least 2 language pairs, got {list(pairs)}")
        self.bases = [
            f"{model} {languages}".rstrip()
            for model in MODELS
            for languages in (pairs if model in (SINGLE, SHORT) else [""])
        ]
        return super().settings()

    def settings_of(self, config: Any) -> dict[str, Any]:
        text, names = self.text, self.text.train.names
        sizes = text.train.pair.bincount(minlength=len(names)).tolist()
        self.train_pairs = dict(zip(names, sizes, strict=True))
        self.runs_folder.mkdir(parents=True, exist_ok=True)
        name = f"wordpieces-{text.vocabulary.fingerprint()[:12]}.model"
        self.wordpieces = self.runs_folder / name
        text.vocabulary.save(self.wordpieces)
        settings = super().settings_of(config)
        del settings["train_tokens"]
        return {"train_pairs": self.train_pairs, **settings}

    def planned(self) -> Iterator[tuple[Arm, int]]:
        """Yields the runs; a separate model of each language pair is an arm."""
        for arm, seed in super().planned():
            pairs = self.train_pairs if arm.model in (SINGLE, SHORT) else [""]
            yield from ((Arm(**vars(arm) | {"pair": languages}), seed) for languages in pairs)

    def run(self, arm: Arm, seed: int) -> Run:
        overrides = [*self.options.overrides, f"data.wordpieces={self.wordpieces}"]
        config = self.config_of_run(arm, seed, overrides)
        text = load_text(config.data) if arm.pair else self.text
        result = train_and_test(config, text)
        extra = tested(result, text, least_text(self.train_pairs))
        if not arm.pair:
            dev = text.dev.first(_ATTENTION_SENTENCES)
            extra["weight_of_language"] = weight_of_language(result.run, dev)
        extra |= {"steps": config.steps, "learning_rate": config.optimizer.learning_rate}
        return result.record() | extra

    def commands(self, stored: Stored) -> Command:
        # --arms names the models of single pairs without their pair.
        named: dict[tuple[str, int], Run] = {}
        for arm, runs in stored.by_arm().items():
            name = arm.model if arm.pair else str(arm)
            named |= {(name, seed): run | {"arm": name} for seed, run in runs.items()}
        return Command(commands_of(self.command(stored.settings), [*named.values()], USUAL))

    def page(self, stored: Stored) -> Page | None:
        all_runs, settings = stored.by_arm(), stored.settings
        # The runs with other options are compared in tables of their own.
        runs = Runs({arm: runs for arm, runs in all_runs.items() if not arm.trial})
        if not runs:
            return None
        models = {arm.model for arm in runs}
        usual_runs = [run for arm_runs in runs.values() for run in arm_runs.values()]
        signatures = sorted({f"`{name}`" for run in usual_runs for name in run["signatures"]})
        tried = Runs({arm: r for arm, r in all_runs.items() if not arm.attends_language})
        claimed = claims(comparisons(runs))
        return self.filled(
            stored,
            plot=plot(settings, runs),
            sizes=sizes_of_models(runs),
            pairs=table(settings["train_pairs"], runs),
            decided=claimed.table,
            claims=claimed,
            corpus=CORPUS,
            single=SINGLE in models,
            short=SHORT in models,
            convergence=convergence(runs, [MIXTURE, DENSE]),
            bleu=BLEU,
            signatures=", ".join(signatures),
            trials=trials(settings, tried, (MIXTURE, DENSE)),
            attention=attention_table(all_runs),
        )


def tested(result: Result, text: PairText, least: Sequence[str]) -> dict[str, Any]:
    """Returns the figures of each language pair, and the curves of those with the least text."""
    from moe_lab.training.translation import bleu_of_test  # imports FSDP

    bleu = bleu_of_test(result.run)
    nll = {name: r.nll for name, r in by_language_pair(result.sentence_nll, text.test).items()}
    dev = read_metrics(result.run, "dev")
    return {
        "pairs": {name: {"nll": nll[name], "bleu": bleu[name].score} for name in nll},
        "signatures": sorted({score.signature for score in bleu.values()}),
        "perplexity": {
            name: [[row["step"], row.get(f"perplexity/{name}", row["perplexity"])] for row in dev]
            for name in least
            if name in nll
        },
    }


def weight_of_language(run: Path, dev: EncodedPairs) -> float:
    """Computes the mean attention weight of the first source token, ``<2xx>``, over predictions."""
    from moe_lab.training.checkpoint import load_run  # imports FSDP

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


def least_text(train_pairs: Mapping[str, int]) -> list[str]:
    """Returns the two language pairs with the fewest training sentences."""
    return sorted(train_pairs, key=lambda languages: train_pairs[languages])[:2]


class Figures(NamedTuple):
    """The results of a run on the test part of one language pair."""

    nll: float  # nats per target piece
    bleu: float  # the score of sacreBLEU


PairFigures = Mapping[str, Mapping[int, Figures]]  # of a model, by language pair and seed


class Comparison(NamedTuple):
    """A claim about two models, with the differences between them over the language pairs.

    The differences are means over num_pairs, paired over the seeds; None if no seed has all pairs.
    """

    claim: str
    compared: str
    difference: PairedDifference | None  # in ln(perplexity); negative if the claim holds
    bleu: PairedDifference | None  # positive if the claim holds
    num_pairs: int  # the number of language pairs that both models have
    lower_perplexity: int  # how many pairs have a lower perplexity of the first model
    higher_bleu: int


def attention_table(runs: Runs) -> str:
    """Compares the attention on ``<2xx>`` with the dev perplexity; "" if no run attends to it."""
    several = {arm: arm_runs for arm, arm_runs in runs.items() if not arm.pair}
    if not any(arm.attends_language for arm in several):
        return ""

    def cell(run: Run | None) -> str:
        if run is None:
            return ""
        weight = run.get("weight_of_language")
        shown = "not measured" if weight is None else f"{weight:.2f}"
        return f"{perplexity(dev_nll(run)):.2f} ({shown})"

    seeds = sorted(set().union(*several.values()))
    rows = [[arm, *(cell(arm_runs.get(s)) for s in seeds)] for arm, arm_runs in several.items()]
    return markdown_table(["model", *(f"seed {seed}" for seed in seeds)], rows)


def figures(runs: Runs) -> dict[str, dict[str, dict[int, Figures]]]:
    """Collects the results of finished runs by model, language pair and seed."""
    collected: dict[str, dict[str, dict[int, Figures]]] = {model: {} for model in MODELS}
    for arm, arm_runs in runs.items():
        for seed, run in arm_runs.items():
            for languages, values in run["pairs"].items():
                collected[arm.model].setdefault(languages, {})[seed] = Figures(**values)
    return collected


def means(figures_of_seeds: Mapping[int, Figures]) -> Figures:
    return Figures(*map(statistics.fmean, zip(*figures_of_seeds.values(), strict=True)))


_CLAIMS = (  # in the mean over the language pairs
    (MIXTURE, DENSE, "one mixture translates better than one dense model"),
    (MIXTURE, SINGLE, "one mixture translates better than a dense model for each language pair"),
    (MIXTURE, SHORT, "the same, for as much text of each language pair"),
)


def comparison(
    results: Mapping[str, PairFigures], model: str, baseline: str, claim: str
) -> Comparison | None:
    """Compares two models over the language pairs and seeds that both have; None without any."""
    pairs = []  # the results of the two models for a language pair and the same seeds
    for languages, figures in results[model].items():
        base_figures = results[baseline].get(languages, {})
        if seeds := sorted(figures.keys() & base_figures.keys()):
            pairs.append([{seed: side[seed] for seed in seeds} for side in (figures, base_figures)])
    if not pairs:
        return None
    common_seeds = sorted(set.intersection(*(set(a) for a, _ in pairs)))
    compared = [(means(a), means(b)) for a, b in pairs]

    def mean_over_pairs(value: Callable[[Figures], float]) -> PairedDifference | None:
        return mean_difference(
            [
                statistics.fmean(value(a[seed]) - value(b[seed]) for a, b in pairs)
                for seed in common_seeds
            ]
        )

    return Comparison(
        claim,
        f"{model} against {baseline}",
        mean_over_pairs(lambda mean: mean.nll),
        mean_over_pairs(lambda mean: mean.bleu),
        len(pairs),
        sum(a.nll < b.nll for a, b in compared),
        sum(a.bleu > b.bleu for a, b in compared),
    )


def comparisons(runs: Runs) -> list[Comparison]:
    """Tests the claims about arms that both have runs."""
    results = figures(runs)
    compared = (comparison(results, *claim) for claim in _CLAIMS)
    return [result for result in compared if result is not None]


def claims(compared: Sequence[Comparison]) -> Claims:
    """Makes the part of the page with the claims, and the language pairs that support them."""
    rows = [
        [
            *claim_cells(result.claim, result.compared, result.difference, result.bleu),
            f"{result.lower_perplexity} of {result.num_pairs}",
            f"{result.higher_bleu} of {result.num_pairs}",
        ]
        for result in compared
    ]
    table = markdown_table([*CLAIM_HEADER, "lower perplexity", "higher BLEU"], rows)
    return Claims(table if rows else "", claims_data(compared))


def table(train_pairs: Mapping[str, int], runs: Runs) -> str:
    """Formats perplexity and BLEU of each model, one row for each language pair."""
    by_model = {model: pairs for model, pairs in figures(runs).items() if pairs}
    rows = []
    for languages, size in train_pairs.items():
        cells = [languages, f"{size:,}"]
        for pairs in by_model.values():
            mean = means(pairs[languages]) if languages in pairs else None
            cells += [f"{perplexity(mean.nll):.2f}", f"{mean.bleu:.1f}"] if mean else ["", ""]
        rows.append(cells)
    header = [cell for model in by_model for cell in (f"{model}: ppl", "BLEU")]
    return markdown_table(["languages", "training pairs", *header], rows)


def sizes_of_models(runs: Runs) -> str:
    """Formats the size and the training of the models, one row for each kind of model."""
    rows = {}
    for arm, arm_runs in runs.items():
        last = [*arm_runs.values()][-1]
        rows[arm.model] = [
            arm.model,
            *arm_runs.size_cells(),
            f"{last['steps']:,}",
            f"{last['learning_rate']:g}",
            len({seed for a in runs if a.model == arm.model for seed in runs[a]}),
        ]
    header = ["model", "ops/timestep", "parameters", "steps", "peak learning rate", "seeds"]
    return markdown_table(header, [*rows.values()])


def plot(settings: Mapping[str, Any], runs: Runs) -> Plot:
    """Plots dev perplexity against steps for the two language pairs with the least text."""
    panels = least_text(settings["train_pairs"])
    figure, axes = new_axes(12, 4.2, columns=len(panels))
    for panel, languages in zip(axes, panels, strict=True):
        curves = {}  # of the first seed of each model
        for arm, arm_runs in runs.items():
            if curve := next(iter(arm_runs.values()))["perplexity"].get(languages):
                curves[arm.model] = curve
        for model in (model for model in MODELS if model in curves):
            panel.plot(*zip(*curves[model], strict=True), label=model, lw=1.2)
        panel.set(xlabel="steps", ylabel="dev perplexity", title=languages, yscale="log")
        panel.legend()
    return Plot("dev perplexity against steps", figure)


run = Multilingual.start
