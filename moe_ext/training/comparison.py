"""Two models by paired runs: MoE against a dense one of equal operations, or any two.

Runs of the same seed share the order of the data, the dropout masks and the initial embedding,
softmax and LSTMs; models of the same sizes, all initial weights. The unit of analysis is the test
log-perplexity of a run after its last step.
"""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_ext.analysis import Cost, cost
from moe_ext.data.files import atomic_file
from moe_ext.training.config import (
    Config,
    ConfigError,
    config_differences,
    config_from_dict,
    config_value,
)
from moe_ext.training.logging import read_metrics
from moe_ext.training.loop import Trainer
from moe_ext.training.metrics import evaluate, mean_of, perplexity
from moe_ext.training.text import Text

_BALANCE_BATCHES = 50  # Table 6 averages over "several" training batches


@dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes:
        run: its folder.
        seed: its seed.
        cost: the size of its model.
        test_nll: nats per token of the test part, after the last step.
        words_per_second: predictions in training, median over the log lines.
        balance: CV(Importance), CV(Load), max/mean Load over the last training batches and all
            layers; {} without MoE layers.
        sentence_nll: [N] float64, nats of each test sentence.
    """

    run: Path
    seed: int
    cost: Cost
    test_nll: float
    words_per_second: float
    balance: dict[str, float]
    sentence_nll: Tensor

    @property
    def perplexity(self) -> float:
        return perplexity(self.test_nll)


@dataclass(frozen=True)
class Interval:
    """A mean and what it may be."""

    mean: float
    low: float
    high: float


def dense_counterpart(config: Config) -> Config:
    """MoE-1-Wide of App. C.1: one expert, k times as wide, in the place of the MoE.

    Raises:
        ConfigError: the model has no MoE layer, or experts of other than one hidden layer.
    """
    model = config.model
    if "moe" not in model.layers or len(model.moe.hidden_sizes) != 1:
        raise ConfigError(
            "model must have an MoE layer, of experts with one hidden layer, to be compared with a "
            f"dense model, got layers {model.layers} and hidden_sizes {model.moe.hidden_sizes}"
        )
    layers = ["ffn" if kind == "moe" else kind for kind in model.layers]
    wide = replace(
        model.ffn,
        hidden_sizes=[model.moe.experts_per_token * model.moe.hidden_sizes[0]],
        activation=model.moe.activation,
    )
    return replace(config, model=replace(model, layers=layers, ffn=wide))


def arms(config: Config, against: Config | None = None) -> dict[str, Config]:
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


def arm_titles(config: Config, against: Config | None = None) -> dict[str, str]:
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
    config: Config, text: Text, output: str | Path, against: Config | None = None
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
    results = {}
    for arm, arm_config in arms(config, against).items():
        folder = Path(output) / f"{arm}-seed{config.seed}"
        arm_config = replace(
            arm_config, output=str(folder), resume=(folder / "config.toml").exists()
        )
        results[arm] = _load_result(arm_config, text) or _train_and_test(arm_config, text)
    return results


def _train_and_test(config: Config, text: Text) -> Result:
    trainer = Trainer(config, text)
    if not trainer.run():
        raise KeyboardInterrupt
    run = trainer.folder
    test = evaluate(
        trainer.model,
        text.test,
        tokens_per_batch=config.data.tokens_per_batch,
        title="testing" if config.log.progress else "",
    )
    with atomic_file(run / "test_nll.pt") as file:
        torch.save(test.sentence_nll, file)
    records = read_metrics(run, "train")
    recent = records[-math.ceil(_BALANCE_BATCHES / config.log.log_every) :]
    keys = ("cv_importance", "cv_load", "max_over_mean_load")
    values = {
        "config": asdict(config),
        "vocabulary": text.vocabulary.fingerprint(),
        "cost": asdict(cost(trainer.model)),
        "test_nll": test.nll,
        "test_perplexity": test.perplexity,
        "words_per_second": statistics.median(r["words_per_second"] for r in records),
        "balance": mean_of(
            {key: statistics.fmean(record[key]) for key in keys}
            for record in recent
            if keys[0] in record
        ),
    }
    with atomic_file(run / "result.json") as file:
        file.write(json.dumps(values, indent=1).encode())
    result = _load_result(config, text)
    assert result is not None
    return result


def _load_result(config: Config, text: Text) -> Result | None:
    run = Path(config.output)
    if not (run / "result.json").is_file():
        return None
    values = json.loads((run / "result.json").read_text("utf-8"))
    changed = config_differences(config_from_dict(values["config"]), config)
    if values["vocabulary"] != text.vocabulary.fingerprint():
        changed.append("the text of data.corpus")
    if changed:
        raise ConfigError(
            f"{', '.join(changed)} must stay as in the finished run {run}; "
            "set it back, or give another output folder"
        )
    return Result(
        run=run,
        seed=config.seed,
        cost=Cost(**values["cost"]),
        test_nll=values["test_nll"],
        words_per_second=values["words_per_second"],
        balance=values["balance"],
        sentence_nll=torch.load(run / "test_nll.pt", weights_only=True),
    )


def mean_difference(differences: Sequence[float], confidence: float = 0.95) -> Interval | None:
    """Mean of paired differences with its t interval; None for fewer than two."""
    if len(differences) < 2:
        return None
    from scipy import stats  # type: ignore[import-untyped]

    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    half = float(stats.t.ppf((1 + confidence) / 2, len(differences) - 1)) * error
    return Interval(mean, mean - half, mean + half)


def bootstrap_difference(
    a: Tensor, b: Tensor, lengths: Tensor, *, samples: int = 2_000, confidence: float = 0.95
) -> Interval:
    """(sum a - sum b) / tokens with its percentile interval over resampled test sentences.

    Says how far the sentences of this test set decide between these two runs; how far seeds do, it
    can't say.

    Args:
        a, b: [N], nats of each sentence under two models.
        lengths: [N] int64, its tokens.
        samples: how often sentences are drawn anew.
        confidence: of the interval.
    """
    generator = torch.Generator().manual_seed(0)
    difference = (a - b).double()
    means = []
    for _ in range(samples):
        drawn = torch.randint(len(a), (len(a),), generator=generator)
        means.append(float(difference[drawn].sum() / lengths[drawn].sum()))
    tails = torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=torch.float64)
    low, high = torch.tensor(means, dtype=torch.float64).quantile(tails).tolist()
    return Interval(float(difference.sum() / lengths.sum()), low, high)


def comparison_report(pairs: Sequence[dict[str, Result]], text: Text) -> dict[str, Any]:
    """All numbers of a comparison, ready for JSON.

    Differences are ln ppl(first arm) - ln ppl(second arm): below zero where the first is better;
    the relative change of the perplexity is e^difference - 1. The balance is the first arm's.
    """
    lengths = text.test.starts.diff()
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
