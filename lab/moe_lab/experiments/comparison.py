"""Comparison of two models by paired runs, by default of a MoE model and its dense counterpart.

Runs with the same seed share the data order, the dropout masks, and the initial weights of
embedding, softmax and LSTMs. Models with the same sizes share all initial weights. The unit of
analysis is the test log-perplexity of a run after its last step.
"""

from dataclasses import asdict, replace
from typing import Any

from moe_lab.analysis import Cost
from moe_lab.errors import ConfigError
from moe_lab.experiments.report import markdown_table
from moe_lab.experiments.statistics import PairedDifference, bootstrap_difference
from moe_lab.experiments.study import Results, as_change, difference, size_cells
from moe_lab.training.config import AnyConfig, TranslationConfig, config_differences, config_value
from moe_lab.training.text import Text

_BALANCE = (("cv_importance", 3), ("cv_load", 3), ("max_over_mean_load", 2))  # with decimals


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
    if found := [name for name, value in without.items() if value]:
        raise ConfigError(
            "model must have a dense counterpart of equal operations, got one with "
            f"{', '.join(found)}"
        )
    width = model.moe.experts_per_token * model.moe.hidden_sizes[0] + sum(model.moe.shared_sizes)
    wide = replace(
        model.ffn,
        hidden_sizes=[width],
        activation=model.moe.activation,
    )
    if isinstance(config, TranslationConfig):
        return replace(config, model=replace(config.model, between="ffn", ffn=wide))
    layers = ["ffn" if kind == "moe" else kind for kind in layers]
    return replace(config, model=replace(config.model, layers=layers, ffn=wide))


def arms(config: AnyConfig, against: AnyConfig | None = None) -> dict[str, AnyConfig]:
    """Returns the two compared configurations by name; against=None means the dense counterpart.

    Raises:
        ConfigError: there is no dense counterpart, or the two configurations are equal, or they
            differ in seed or data.
    """
    if against is None:
        return {"moe": config, "dense": dense_counterpart(config)}
    changed = config_differences(config, against)
    if not changed:
        raise ConfigError("the compared configurations must differ, got the same options twice")
    if any(key == "seed" or key.startswith("data.") for key in changed):
        raise ConfigError(
            "the compared configurations must have the same seed and data, got different "
            f"{', '.join(changed)}"
        )
    return {"config": config, "against": against}


def arm_titles(config: AnyConfig, against: AnyConfig | None = None) -> dict[str, str]:
    """Returns a title for each compared model, with the options in which the models differ."""
    if against is None:
        return {"moe": "MoE", "dense": "dense"}
    return {
        arm: ", ".join(
            f"{key.rpartition('.')[2]}={config_value(each, key)}"
            for key in config_differences(config, against)
        )
        for arm, each in arms(config, against).items()
    }


def comparison_report(results: Results, text: Text) -> dict[str, Any]:
    """Computes all numbers of a comparison of two models over paired seeds, as data for JSON.

    A difference is ln ppl(first arm) - ln ppl(second arm); negative means a better first arm. The
    relative change of the perplexity is e^difference - 1. The balance metrics are those of the
    first arm.

    Raises:
        ConfigError: no seed is finished for both arms.
    """
    lengths = text.test.lengths
    first, second = results.values()
    rows: list[dict[str, Any]] = []
    for seed in first:
        if seed not in second:
            continue
        pair = {arm: runs[seed] for arm, runs in results.items()}
        a, b = pair.values()
        rows.append(
            {
                "seed": seed,
                **{f"{arm}_perplexity": result.perplexity for arm, result in pair.items()},
                "difference": a.test_nll - b.test_nll,
                "bootstrap": asdict(bootstrap_difference(a.sentence_nll, b.sentence_nll, lengths)),
                "balance": a.balance,
                "words_per_second": {arm: result.words_per_second for arm, result in pair.items()},
            }
        )
    if not rows:
        raise ConfigError(
            "--output must hold finished runs of both arms with the same seed, got none; wait for "
            "runs in progress, delete the folders of diverged runs, or give another --output"
        )
    gap = difference(first, second)
    assert gap is not None  # rows is not empty
    return {
        "difference": asdict(gap),
        "test_tokens": int(lengths.sum()),
        "train_tokens": text.train.num_tokens,
        "vocabulary": len(text.vocabulary),
        "cost": {arm: asdict(next(iter(runs.values())).cost) for arm, runs in results.items()},
        "pairs": rows,
    }


def comparison_page(report: dict[str, Any], config: AnyConfig) -> str:
    """Formats a report as a page with one table row for each seed.

    Args:
        report: result of `comparison_report`, with the result of `arm_titles` as "models".
        config: configuration of the first arm.
    """
    titles = report["models"]
    costs = {title: Cost(**report["cost"][arm]) for arm, title in titles.items()}
    sizes = markdown_table(
        ["model", "ops/timestep", "parameters", "with embedding and softmax"],
        [
            [title, *size_cells(cost), f"{cost.total_parameters / 1e6:.2f}M"]
            for title, cost in costs.items()
        ],
    )
    header = ["seed", *(f"{title}: test ppl" for title in titles.values()), "difference in ln ppl"]
    header += ["95% over test sentences", "CV(Importance)", "CV(Load)", "max/mean Load"]
    header += [f"{title}: words/s" for title in titles.values()]
    rows = []
    for row in report["pairs"]:
        balance, speed, interval = row["balance"], row["words_per_second"], row["bootstrap"]
        rows.append(
            [
                row["seed"],
                *(f"{row[f'{arm}_perplexity']:.2f}" for arm in titles),
                f"{row['difference']:+.4f}",
                f"[{interval['low']:+.4f}, {interval['high']:+.4f}]",
                *(f"{balance[key]:.{digits}f}" if balance else "" for key, digits in _BALANCE),
                *(f"{speed[arm]:,.0f}" for arm in titles),
            ]
        )
    gap = PairedDifference(**report["difference"])
    over = f", with the 95% t interval over {len(report['pairs'])} paired seeds"
    summary = (
        f"Mean difference in ln ppl, {' - '.join(titles.values())}"
        f"{'' if gap.low is None else over}: {gap:+.4f}. "
        f"As a change of the perplexity: {as_change(gap)}."
    )
    return f"""\
{config.steps:,} steps of about {config.data.tokens_per_batch:,} tokens; corpus \
{config.data.corpus}: {report["train_tokens"]:,} training and \
{report["test_tokens"]:,} test tokens, vocabulary {report["vocabulary"]:,}.

{sizes}
{markdown_table(header, rows)}
{summary}
"""
