"""Two models by paired runs: MoE against a dense one of equal operations, or any two.

Runs of the same seed share the order of the data, the dropout masks and the initial embedding,
softmax and LSTMs; models of the same sizes, all initial weights. The unit of analysis is the test
log-perplexity of a run after its last step.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from moe_ext.training.config import (
    AnyConfig,
    ConfigError,
    TranslationConfig,
    config_differences,
    config_value,
)
from moe_ext.training.results import Result, train_and_test
from moe_ext.training.statistics import bootstrap_difference, mean_difference
from moe_ext.training.text import Text


def dense_counterpart(config: AnyConfig) -> AnyConfig:
    """MoE-1-Wide of App. C.1: one expert, k times as wide, in the place of the MoE.

    Raises:
        ConfigError: the model has no MoE layer, or experts of other than one hidden layer.
    """
    model = config.model
    if isinstance(config, TranslationConfig):
        layers = [config.model.between]
    else:
        layers = config.model.layers
    if "moe" not in layers or len(model.moe.hidden_sizes) != 1:
        raise ConfigError(
            "model must have an MoE layer, of experts with one hidden layer, to be compared with a "
            f"dense model, got layers {layers} and hidden_sizes {model.moe.hidden_sizes}"
        )
    wide = replace(
        model.ffn,
        hidden_sizes=[model.moe.experts_per_token * model.moe.hidden_sizes[0]],
        activation=model.moe.activation,
    )
    if isinstance(config, TranslationConfig):
        return replace(config, model=replace(config.model, between="ffn", ffn=wide))
    layers = ["ffn" if kind == "moe" else kind for kind in layers]
    return replace(config, model=replace(config.model, layers=layers, ffn=wide))


def arms(config: AnyConfig, against: AnyConfig | None = None) -> dict[str, AnyConfig]:
    """The two configurations to compare by short names; None is the dense counterpart.

    Raises:
        ConfigError: there is no dense counterpart, or the two are the same or not comparable.
    """
    if against is None:
        return {"moe": config, "dense": dense_counterpart(config)}
    changed = config_differences(config, against)
    if not changed:
        raise ConfigError("what is compared must differ in some option, got the same twice")
    if any(key == "seed" or key.startswith("data.") for key in changed):
        raise ConfigError(
            f"what is compared must have the same seed and data, got other {', '.join(changed)}"
        )
    return {"config": config, "against": against}


def arm_titles(config: AnyConfig, against: AnyConfig | None = None) -> dict[str, str]:
    """What tells the two arms apart, by their short names."""
    if against is None:
        return {"moe": "MoE", "dense": "dense"}
    return {
        arm: ", ".join(
            f"{key.rpartition('.')[2]}={config_value(each, key)}"
            for key in config_differences(config, against)
        )
        for arm, each in arms(config, against).items()
    }


def train_pair(
    config: AnyConfig, text: Text, output: str | Path, against: AnyConfig | None = None
) -> dict[str, Result]:
    """Both arms of one seed, in OUTPUT/ARM-seedN.

    Finished runs are not repeated, interrupted ones are continued.

    Args:
        config: the first arm.
        text: the corpus of its `data`.
        output: folder of the runs' folders.
        against: the second arm; None is the dense counterpart.

    Raises:
        ConfigError: the folder holds something else.
        KeyboardInterrupt: a signal stopped a run, which is saved.
    """
    return {
        arm: train_and_test(
            replace(each, output=str(Path(output) / f"{arm}-seed{config.seed}")), text
        )
        for arm, each in arms(config, against).items()
    }


def comparison_report(pairs: Sequence[dict[str, Result]], text: Text) -> dict[str, Any]:
    """All numbers of a comparison, ready for JSON.

    Differences are ln ppl(first arm) - ln ppl(second arm): below zero where the first is better;
    the relative change of the perplexity is e^difference - 1. The balance is the first arm's.
    """
    lengths = text.test.lengths
    rows: list[dict[str, Any]] = []
    for pair in pairs:
        first, second = pair.values()
        rows.append(
            {
                "seed": first.seed,
                **{f"{arm}_perplexity": result.perplexity for arm, result in pair.items()},
                "difference": first.test_nll - second.test_nll,
                "bootstrap": asdict(
                    bootstrap_difference(first.sentence_nll, second.sentence_nll, lengths)
                ),
                "balance": first.balance,
                "words_per_second": {arm: result.words_per_second for arm, result in pair.items()},
            }
        )
    interval = mean_difference([row["difference"] for row in rows])
    return {
        "difference": asdict(interval) if interval else None,
        "test_tokens": int(lengths.sum()),
        "train_tokens": text.train.num_tokens,
        "vocabulary": len(text.vocabulary),
        "cost": {arm: asdict(result.cost) for arm, result in pairs[0].items()},
        "pairs": rows,
    }
