"""Comparison of two models by paired runs, by default of a MoE model and its dense counterpart.

Runs with the same seed share the data order, the dropout masks, and the initial weights of
embedding, softmax and LSTMs. Models with the same sizes share all initial weights. The unit of
analysis is the test log-perplexity of a run after its last step.
"""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_lab.errors import ConfigError
from moe_lab.experiments.arms import Arm
from moe_lab.experiments.claims import Claim, as_change, claims_data
from moe_lab.experiments.page import Claims, Command, Page
from moe_lab.experiments.runs import CONFIDENCE, ArmRuns, Run, test_nll
from moe_lab.experiments.single_run import Result
from moe_lab.experiments.store import Stored
from moe_lab.experiments.study import TrainedStudy
from moe_lab.markdown import markdown_table
from moe_lab.training.config import (
    AnyConfig,
    TranslationConfig,
    config_differences,
    config_value,
    read_config,
)
from moe_lab.training.metrics import perplexity

_BOOTSTRAP_SAMPLES = 2_000  # number of random samples of the test sentences
_BALANCE = (("cv_importance", 3), ("cv_load", 3), ("max_over_mean_load", 2))  # with decimals


class Comparison(TrainedStudy):
    """The comparison of a model with its dense counterpart, or with the same model changed.

    In the options, `name` is that of the store, and `config` is the file of the first model.
    `against` has the options to change in the second model. [] compares with the dense counterpart.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.models = self.usual = ("config", "against") if options.against else ("moe", "dense")
        options.arms, options.runs = [Arm(model) for model in self.models], options.output
        self.name = options.name
        super().__init__(options)

    def config(self, arm: Arm, overrides: Sequence[str]) -> AnyConfig:
        """Returns the configuration of a model."""
        config = read_config(self.options.config, overrides)
        if arm.model == self.models[0]:
            return config
        if not self.options.against:
            return dense_counterpart(config)
        against = read_config(self.options.config, [*overrides, *self.options.against])
        changed = config_differences(config, against)
        if not changed:
            raise ConfigError("the compared configurations must differ, got the same options twice")
        if any(key == "seed" or key.startswith("data.") for key in changed):
            raise ConfigError(
                "the compared configurations must have the same seed and data, got different "
                f"{', '.join(changed)}"
            )
        return against

    def configs(self) -> list[AnyConfig]:
        return [self.config(Arm(model), self.options.overrides) for model in self.models]

    def settings_of(self, config: AnyConfig) -> dict[str, Any]:
        first, second = self.configs()
        titles = ["MoE", "dense"]
        if self.options.against:
            changed = config_differences(first, second)
            titles = [
                ", ".join(f"{key.rpartition('.')[2]}={config_value(c, key)}" for key in changed)
                for c in (first, second)
            ]
        return super().settings_of(config) | {
            "corpus": config.data.corpus,
            "titles": titles,
            "sentence_tokens": self.text.test.lengths.tolist(),
        }

    def measured(self, arm: Arm, result: Result) -> dict[str, Any]:
        return {"sentence_nll": [round(nll, 4) for nll in result.sentence_nll.tolist()]}

    def program(self) -> list[str]:
        against = ["--against", *self.options.against] if self.options.against else []
        return ["moe-lab", "compare", str(self.options.config), "data.corpus=CORPUS", *against]

    def commands(self, stored: Stored) -> Command:
        seeds = sorted({str(run["seed"]) for run in stored.runs})
        return Command(shlex.join([*self.command(stored.settings), "--seeds", *seeds]))

    def page(self, stored: Stored) -> Page:
        """Makes the page, with one table row for each seed."""
        runs, settings, titles = stored.by_arm(), stored.settings, stored.settings["titles"]
        first, second = (runs[Arm(model)] for model in self.models)
        seeds = sorted(first.keys() & second.keys())
        if not seeds:
            raise ConfigError(
                f"{self.store.path} must hold finished runs of both models with the same seed, got "
                "none; wait for runs in progress, or give another --output"
            )
        lengths = torch.tensor(settings["sentence_tokens"])
        sizes = [
            [title, *costs.size_cells(), f"{_total(costs) / 1e6:.2f}M"]
            for title, costs in zip(titles, (first, second), strict=True)
        ]
        rows = [self._row(first[seed], second[seed], lengths) for seed in seeds]
        header = ["seed", *(f"{title}: test ppl" for title in titles), "difference in ln ppl"]
        header += ["95% over test sentences", "CV(Importance)", "CV(Load)", "max/mean Load"]
        header += [f"{title}: words/s" for title in titles]
        gap = first.minus(second)
        assert gap is not None  # there are seeds
        over = f", with the 95% t interval over {len(seeds)} paired seeds"
        what = " - ".join(titles)
        return Page(
            f"{titles[0]} against {titles[1]}",
            [
                f"{settings['steps']:,} steps of about {settings['data.tokens_per_batch']:,} "
                f"tokens; corpus {settings['corpus']}: {settings['train_tokens']:,} training and "
                f"{int(lengths.sum()):,} test tokens, vocabulary {settings['pieces']:,}.",
                markdown_table(
                    ["model", "ops/timestep", "parameters", "with embedding and softmax"], sizes
                ),
                markdown_table(header, rows),
                Claims(
                    f"Mean difference in ln ppl, {what}{'' if gap.low is None else over}: "
                    f"{gap:+.4f}. As a change of the perplexity: {as_change(gap)}.",
                    claims_data([Claim("", what, gap)]),
                ),
                self.commands(stored),
            ],
        )

    def _row(self, a: Run, b: Run, lengths: Tensor) -> list[object]:
        nll_a, nll_b = (torch.tensor(r["sentence_nll"], dtype=torch.float64) for r in (a, b))
        (low, high), balance = bootstrap_difference(nll_a, nll_b, lengths), a["balance"]
        return [
            a["seed"],
            *(f"{perplexity(test_nll(run)):.2f}" for run in (a, b)),
            f"{test_nll(a) - test_nll(b):+.4f}",
            f"[{low:+.4f}, {high:+.4f}]",
            *(f"{balance[key]:.{digits}f}" if balance else "" for key, digits in _BALANCE),
            *(f"{run['words_per_second']:,.0f}" for run in (a, b)),
        ]


def bootstrap_difference(a: Tensor, b: Tensor, lengths: Tensor) -> tuple[float, float]:
    """Computes a 95% bootstrap interval of (sum(a) - sum(b)) / sum(lengths) over sentences.

    The percentile interval covers the choice of test sentences for two runs, not the choice of
    seeds. a and b [N] are the nats of each sentence under two models. `lengths` [N] are its tokens.
    """
    generator = torch.Generator().manual_seed(0)
    difference = (a - b).double()
    means = []
    for _ in range(_BOOTSTRAP_SAMPLES):
        drawn = torch.randint(len(a), (len(a),), generator=generator)
        means.append(float(difference[drawn].sum() / lengths[drawn].sum()))
    tails = torch.tensor([(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], dtype=torch.float64)
    low, high = torch.tensor(means, dtype=torch.float64).quantile(tails).tolist()
    return low, high


def _total(runs: ArmRuns) -> int:
    return int(next(iter(runs.values()))["cost"]["total_parameters"])


def dense_counterpart(config: AnyConfig) -> AnyConfig:
    """Replaces each MoE layer by one expert of k times the hidden width (MoE-1-Wide, App. C.1).

    Raises:
        ConfigError: the model has no MoE layer, or its experts do not have one hidden layer. Or
            other layers or experts of it have no counterpart of equal operations.
    """
    model = config.model
    if isinstance(config, TranslationConfig):
        layers = [config.model.between]
    else:
        layers = config.model.layers
    if "moe" not in layers or len(model.moe.hidden_sizes) != 1:
        raise ConfigError(
            "model must have a MoE layer whose experts have one hidden layer to get a dense "
            f"counterpart, got layers {layers} and hidden_sizes {model.moe.hidden_sizes}"
        )
    without = {
        "moe_lstm": "moe_lstm" in layers,
        "num_identity_experts": model.moe.num_identity_experts,
        "num_null_experts": model.moe.num_null_experts,
        "shared_sizes": len(model.moe.shared_sizes) > 1,
    }
    if options := [name for name, value in without.items() if value]:
        raise ConfigError(
            "model must have a dense counterpart of equal operations, got one with "
            f"{', '.join(options)}"
        )
    width = model.moe.experts_per_token * model.moe.hidden_sizes[0] + sum(model.moe.shared_sizes)
    wide = replace(model.ffn, hidden_sizes=[width], activation=model.moe.activation)
    if isinstance(config, TranslationConfig):
        return replace(config, model=replace(config.model, between="ffn", ffn=wide))
    layers = ["ffn" if kind == "moe" else kind for kind in layers]
    return replace(config, model=replace(config.model, layers=layers, ffn=wide))
