"""Counts operations and parameters of the models of the paper's Tables 2 to 5, 7 and 8.

    moe-lab study paper-tables           # prints, writes runs/results/paper_tables.*
    moe-lab study paper-tables --output DIR

The script builds every model of configs/ on torch's meta device, without memory for the weights,
and counts it with lab/moe_lab/analysis/costs.py. The published figures are in
lab/moe_lab/analysis/paper.py. The second table has the floating-point operations of a training
batch, counted as in Section 5.1. It also has the time that these operations take at the published
TFLOPS/GPU.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from moe_lab.analysis import cost, training_flops
from moe_lab.analysis.paper import PUBLISHED, PUBLISHED_TRANSLATION, Published
from moe_lab.cli import add_output, make_parser
from moe_lab.experiments.report import write_report
from moe_lab.models import LanguageModel, TranslationModel
from moe_lab.training.config import Config, TranslationConfig, read_config

_COLUMNS = {  # the title and the unit of each column
    "ops": ("ops/timestep, M", 1e6),
    "parameters": ("parameters, M", 1e6),
    "total": ("total, B", 1e9),
}
_SAMPLED = (8192, 4096)  # sampled classes of the softmax: the configurations' number, half of it
_NOTES = {
    (
        "lm1b",
        "MoE-256",
        "ops",
    ): "The count 8.6508 rounds to 8.7; the paper prints 8.6. Rounding first to 8.65 "
    "and then half to even gives 8.6.",
    ("lm1b", "MoE-34M", "total"): "The count 5.9397 rounds to 5.9; the paper prints 6.0. A "
    "vocabulary of 800,000 words instead of 793,471 gives 5.95.",
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


def _markdown(rows: Sequence[dict[str, Any]], translation: Sequence[dict[str, Any]]) -> str:
    notes: list[str] = []

    def cells(row: dict[str, Any], column: str) -> str:
        value = row[column]
        mark = "yes"
        if not value["match"]:
            notes.append(_NOTES[row["table"], row["model"], column])
            mark = f"no ({len(notes)})"
        sizes = f"{value['published']:.1f} | {value['counted']:.4f} | {value['deviation']:+.4f}"
        return f"{sizes} | {mark}"

    def model(row: dict[str, Any]) -> str:
        return row["model"] if row["table"] == "lm1b" else f"News {row['model']}"

    def number(value: float | None, form: str) -> str:
        return format(value, form) if value else "–"

    def table(head: Sequence[str], lines: Sequence[str]) -> str:
        rows = [f"| {row} |" for row in (" | ".join(head), *lines)]
        return "\n".join([rows[0], f"|{'---|' * len(head)}", *rows[1:]])

    names = [name for name, _ in _COLUMNS.values()]
    matches = {column: sum(row[column]["match"] for row in rows) for column in _COLUMNS}
    sizes = table(
        ["model", *(title for name in names for title in (name, "counted", "deviation", "same"))],
        [f"{model(row)} | {' | '.join(cells(row, column) for column in _COLUMNS)}" for row in rows],
    )
    times = table(
        ["model", "GPUs", "TFLOPS/GPU", "10¹² flops a batch", "step, s", "hours", "published"]
        + [f"experts' share, S = {num_sampled:,}" for num_sampled in _SAMPLED]
        + ["intensity"],
        [
            f"{model(row)} | {number(row['gpus'], 'd')} | {number(row['tflops'], '.2f')} "
            f"| {row['flops_of_batch'] / 1e12:.2f} | {number(row['step_seconds'], '.2f')} "
            f"| {number(row['hours'], '.1f')} | {row['hours_published'] or '–'} "
            f"| {' | '.join(number(share, '.1%') for share in row['expert_share'].values())} "
            f"| {number(row['intensity'], ',.0f')}"
            for row in rows
        ],
    )
    of_translation = table(
        ["model", "ops/timestep, M", "counted", "total, B", "counted"],
        [
            f"`{row['config']}`, {row['tables']} | {row['published']['ops']} "
            f"| {row['counted']['ops']:.2f} | {row['published']['total']} "
            f"| {row['counted']['total']:.3f}"
            for row in translation
        ],
    )
    return f"""\
# The cost columns of Tables 2 to 5, 7 and 8

```
moe-lab study paper-tables
```

The table compares the published sizes with those of the models in `configs/lm1b` and
`configs/news`, counted on the meta device. Of {len(rows)} models, these agree to the printed digit:
{", ".join(f"{c} {m}" for c, m in matches.items())}.

{sizes}

{"".join(f"{number}. {note}{chr(10)}" for number, note in enumerate(notes, 1))}
{_COUNTED}

## Floating-point operations

{_FLOPS.format(_SAMPLED[0])}

{times}

{_SHARES}

## Translation

{of_translation}

Here a timestep has one source and one target word. The operations include the softmax and exclude
the attention. Both models have a vocabulary of 32,000 wordpieces, with one embedding for source and
target; two embeddings give the same printed total. Table 4 has the first model on production data
of Google.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the study."""
    parser = make_parser(__doc__)
    add_output(parser)
    options = parser.parse_args(arguments)
    rows = [count(published) for published in PUBLISHED]
    translation = count_translation()
    report = {"language_models": rows, "translation": translation}
    write_report(options.output, "paper_tables", _markdown(rows, translation), report)
