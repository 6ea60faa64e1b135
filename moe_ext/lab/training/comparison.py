"""Two models by paired runs: MoE against a dense one of equal operations, or any two.

Runs of the same seed share the order of the data, the dropout masks and the initial embedding,
softmax and LSTMs; models of the same sizes, all initial weights. The unit of analysis is the test
log-perplexity of a run after its last step.
"""

from dataclasses import asdict, replace
from typing import Any

from moe_ext.lab.analysis import Cost
from moe_ext.lab.training.config import (
    AnyConfig,
    ConfigError,
    TranslationConfig,
    config_differences,
    config_value,
)
from moe_ext.lab.training.report import markdown_table
from moe_ext.lab.training.statistics import PairedDifference, bootstrap_difference
from moe_ext.lab.training.study import Results, as_change, difference, size_cells
from moe_ext.lab.training.text import Text

_BALANCE = (("cv_importance", 3), ("cv_load", 3), ("max_over_mean_load", 2))  # and their digits


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


def comparison_report(results: Results, text: Text) -> dict[str, Any]:
    """All numbers of a comparison, ready for JSON, of the seeds that both arms have.

    Differences are ln ppl(first arm) - ln ppl(second arm): below zero where the first is better;
    the relative change of the perplexity is e^difference - 1. The balance is the first arm's.

    Raises:
        ConfigError: there is no such seed, as other processes are at the runs or they diverged.
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
            "--output must hold a pair of finished runs; other processes are at them, or they "
            "diverged: then delete their folders, or give another --output"
        )
    gap = difference(first, second)
    assert gap is not None  # there are rows
    return {
        "difference": asdict(gap),
        "test_tokens": int(lengths.sum()),
        "train_tokens": text.train.num_tokens,
        "vocabulary": len(text.vocabulary),
        "cost": {arm: asdict(next(iter(runs.values())).cost) for arm, runs in results.items()},
        "pairs": rows,
    }


def comparison_page(report: dict[str, Any], config: AnyConfig) -> str:
    """The report of `comparison_report` as a page with one row for each seed.

    Args:
        report: with "models" beside, what `arm_titles` returns.
        config: that of the first model.
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
