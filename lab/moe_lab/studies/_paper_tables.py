"""The counts and the page of the cost columns."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from moe_lab.analysis import cost, training_flops
from moe_lab.analysis.paper import PUBLISHED, PUBLISHED_TRANSLATION, Published
from moe_lab.experiments.report import Command, Page, markdown_table
from moe_lab.models import LanguageModel, TranslationModel
from moe_lab.training.config import Config, TranslationConfig, read_config

_COLUMNS = {  # the title and the unit of each column
    "ops": ("ops/timestep, M", 1e6),
    "parameters": ("parameters, M", 1e6),
    "total": ("total, B", 1e9),
}
_SAMPLED = (8192, 4096)  # sampled classes of the softmax: the configurations' number, half of it
_NOTES = {
    ("lm1b", "MoE-256", "ops"): (
        "The count 8.6508 rounds to 8.7; the paper prints 8.6. Rounding first to 8.65 and then "
        "half to even gives 8.6."
    ),
    ("lm1b", "MoE-34M", "total"): (
        "The count 5.9397 rounds to 5.9; the paper prints 6.0. A vocabulary of 800,000 words "
        "instead of 793,471 gives 5.95."
    ),
}
_COUNTED = """\
The layers have these numbers of weights at model width d:

- An LSTM of u units with a recurrent input of width r has 4u(d + r) weights. A projection adds ud
  weights.
- An expert with h hidden units has 2dh weights.
- A gate of n experts has 2dn weights, W_g and W_noise. In a hierarchical mixture, a token uses the
  primary gate and the secondary gates of its k groups.

Embedding and softmax are counted in the total only. So are the biases of the LSTMs, which are
smaller than the printed precision. Experts and gates have no biases. Table 8 does not state the
size of its vocabulary. The total assumes 100,000 words; any size from 75,200 to 109,400 words gives
the same printed total."""
_FLOPS = """\
The operations of a training batch are counted as in Section 5.1. The backward pass counts twice the
forward pass, and a multiply-add counts as two operations. The softmax has S = {:,} sampled classes.
The step time and the hours follow from the published TFLOPS/GPU. The hours are for 10 epochs, or
27,000 steps of 300,000 words (Table 7), and for one epoch, or 40,000 steps of 2.5 million words
(Table 8). The intensity of an expert is its number of multiply-adds, divided by the number of its
inputs and outputs. With one hidden layer it is 2dh / 2d = h (Sec. 3.2)."""
_SHARES = """\
In the paper, the experts have between 37% and 46% of the operations in all mixtures of Table 7. Of
these mixtures, MoE-4096-h has the lowest share in the table above. The experts' share of MoE-4096-h
would be 37% with about 4,700 sampled classes; the authors' code samples 8,192. With 8,192 sampled
classes, the computed hours agree with the paper for MoE-4096-h. The computed hours are 14% lower
than the paper's for MoE-34M and 13% lower for MoE-143M."""

_TRANSLATION = """\
Here a timestep has one source and one target word. The operations include the softmax and exclude
the attention. Both models have a vocabulary of 32,000 wordpieces, with one embedding for source and
target; two embeddings give the same printed total. Table 4 has the first model on production data
of Google."""


def count(published: Published) -> dict[str, Any]:
    """Counts the model of a published row and compares the counts with the row's figures."""
    config = read_config(published.config, [], Config)
    models = []
    with torch.device("meta"):
        for num_sampled in _SAMPLED:
            options = replace(config.model, num_sampled=num_sampled)
            models.append(LanguageModel(options, config.data.vocab_size))
    size = cost(models[0])
    counted = {
        "ops": size.ops_per_timestep,
        "parameters": size.parameters,
        "total": size.total_parameters,
    }
    row: dict[str, Any] = {"table": published.table, "model": published.name}
    for column, (_, unit) in _COLUMNS.items():
        printed, value = getattr(published, column), counted[column] / unit
        row[column] = {
            "published": printed,
            "counted": value,
            "deviation": value - printed,
            "match": f"{value:.1f}" == f"{printed:.1f}",
        }
    flops = [training_flops(model) for model in models]
    of_batch = config.data.tokens_per_batch * config.optimizer.accumulate * flops[0].total
    seconds = None
    if published.tflops and published.gpus:
        seconds = of_batch / (published.gpus * published.tflops * 1e12)
    k = config.model.moe.experts_per_token if "moe" in config.model.layers else 1
    return row | {
        "gpus": published.gpus,
        "tflops": published.tflops,
        "flops_of_batch": of_batch,
        "step_seconds": seconds,
        "hours": None if seconds is None else config.steps * seconds / 3600,
        "hours_published": published.hours,
        "intensity": flops[0].experts / 6 / (k * 2 * config.model.d_model),
        "expert_share": {s: f.expert_share for s, f in zip(_SAMPLED, flops, strict=True)},
    }


def count_translation() -> list[dict[str, Any]]:
    """Counts the translation models with 2,048 and 512 experts of Tables 2 to 5."""
    rows = []
    for table, name, ops, total in PUBLISHED_TRANSLATION:
        config = read_config(name, [], TranslationConfig)
        with torch.device("meta"):
            size = cost(TranslationModel(config.model, config.data.vocab_size))
        counted = {"ops": size.ops_per_timestep / 1e6, "total": size.total_parameters / 1e9}
        published = {"ops": ops, "total": total}
        rows.append(
            {"tables": table, "config": f"{name}.toml", "published": published, "counted": counted}
        )
    return rows


def counted() -> dict[str, Any]:
    """Counts all models; returns data for JSON."""
    rows = [count(published) for published in PUBLISHED]
    return {"language_models": rows, "translation": count_translation()}


def _number(value: float | None, form: str) -> str:
    return format(value, form) if value else "–"


def _model(row: Mapping[str, Any]) -> str:
    return str(row["model"]) if row["table"] == "lm1b" else f"News {row['model']}"


def page_of(report: Mapping[str, Any]) -> Page:
    """Makes the page of `counted`: sizes, notes on the deviations, operations, translation."""
    rows = report["language_models"]
    notes: list[str] = []

    def size_cells(row: Mapping[str, Any], column: str) -> list[str]:
        value, mark = row[column], "yes"
        if not value["match"]:
            notes.append(f"{len(notes) + 1}. {_NOTES[row['table'], row['model'], column]}")
            mark = f"no ({len(notes)})"
        sizes = (("published", ".1f"), ("counted", ".4f"), ("deviation", "+.4f"))
        return [*(f"{value[key]:{form}}" for key, form in sizes), mark]

    titles = [(title, "counted", "deviation", "same") for title, _ in _COLUMNS.values()]
    sizes = markdown_table(
        ["model", *chain(*titles)],
        [[_model(row), *chain(*(size_cells(row, c) for c in _COLUMNS))] for row in rows],
    )
    times = markdown_table(
        ["model", "GPUs", "TFLOPS/GPU", "10¹² flops a batch", "step, s", "hours", "published"]
        + [f"experts' share, S = {num_sampled:,}" for num_sampled in _SAMPLED]
        + ["intensity"],
        [
            [
                _model(row),
                _number(row["gpus"], "d"),
                _number(row["tflops"], ".2f"),
                f"{row['flops_of_batch'] / 1e12:.2f}",
                _number(row["step_seconds"], ".2f"),
                _number(row["hours"], ".1f"),
                row["hours_published"] or "–",
                *(_number(share, ".1%") for share in row["expert_share"].values()),
                _number(row["intensity"], ",.0f"),
            ]
            for row in rows
        ],
    )
    of_translation = markdown_table(
        ["model", "ops/timestep, M", "counted", "total, B", "counted"],
        [
            [
                f"`{row['config']}`, {row['tables']}",
                row["published"]["ops"],
                f"{row['counted']['ops']:.2f}",
                row["published"]["total"],
                f"{row['counted']['total']:.3f}",
            ]
            for row in report["translation"]
        ],
    )
    matches = (f"{c} {sum(row[c]['match'] for row in rows)}" for c in _COLUMNS)
    return Page(
        "The cost columns of Tables 2 to 5, 7 and 8",
        [
            Command("moe-lab study paper-tables"),
            "The table compares the published sizes with those of the models in `configs/lm1b` and"
            f"\n`configs/news`, counted on the meta device. Of {len(rows)} models, these agree to "
            f"the printed digit:\n{', '.join(matches)}.",
            sizes,
            "\n".join(notes),
            _COUNTED,
            "## Floating-point operations",
            _FLOPS.format(_SAMPLED[0]),
            times,
            _SHARES,
            "## Translation",
            of_translation,
            _TRANSLATION,
        ],
    )
