"""The cost columns of the paper's Tables 7 and 8, counted from the models of configs/.

    python scripts/studies/paper_tables.py           # prints, writes docs/results/paper_tables.*
    python scripts/studies/paper_tables.py --output DIR

Every model is built on torch's meta device, without memory for its weights, and counted by
moe_ext/lab/analysis/costs.py. The published figures are in moe_ext/lab/analysis/paper.py. The
second table has the floating-point operations of a training batch as Section 5.1 counts them, and
the time that they take at the published TFLOPS/GPU.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from moe_ext.lab.analysis import cost, training_flops
from moe_ext.lab.analysis.paper import PUBLISHED, Published
from moe_ext.lab.models import LanguageModel
from moe_ext.lab.training.command import make_parser
from moe_ext.lab.training.config import Config, read_config
from moe_ext.lab.training.report import write_report

_COLUMNS = {  # the unit of each
    "ops": ("ops/timestep, M", 1e6),
    "parameters": ("parameters, M", 1e6),
    "total": ("total, B", 1e9),
}
_SAMPLED = (8192, 4096)  # classes of the softmax: those of the configurations, and half of them
_NOTES = {
    ("lm1b", "MoE-256", "ops"): "8.6508 is 0.0008 beyond the edge of what rounds to 8.6; rounded "
    "to 8.65 first and then to the even digit it is 8.6.",
    ("lm1b", "MoE-34M", "total"): "5.9397 is 0.0103 below the edge of what rounds to 6.0; with "
    "800,000 words in the place of 793,471 it is 5.95.",
}
_COUNTED = """\
An LSTM has 4u(d + r) + ud weights (u units, input d, recurrent input r; ud where it is projected),
an expert 2dh, a gate of n experts 2dn: W_g and W_noise. In a hierarchical mixture a token meets the
primary gate and the secondary gates of its k groups. The LSTMs' biases, below the printed digits,
are in the totals alone; experts and gates have none. Embedding and softmax are separate. Table 8
does not say how large its vocabulary is: 100,000 words are assumed, and 75,200 to 109,400 would
print the same."""
_FLOPS = """\
Of a training batch as Section 5.1 counts them: forward and backward (twice forward), multiply and
add apart, with a softmax of S = {:,} sampled classes; and the time that they take at the published
TFLOPS/GPU, for a step and for 10 epochs (27,000 steps of 300,000 words; Table 8: one epoch, 40,000
of 2.5 million). The intensity of an expert is its multiply-adds by the numbers that go in and come
out, 2dh / 2d = h with one hidden layer (Sec. 3.2)."""
_SHARES = """\
The paper has the experts' share between 37% and 46% in all mixtures of Table 7. The lowest of them,
MoE-4096-h, comes to 37% with some 4,700 classes; 8,192 is the value of the authors' code. With it
the hours agree for MoE-4096-h, and are 14% and 13% short for the two more expensive models."""


def count(published: Published, root: Path) -> dict[str, Any]:
    """A row: what the paper prints beside what its configuration's model has."""
    config = read_config(root / "configs" / published.config, [], Config)
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


def _markdown(rows: Sequence[dict[str, Any]]) -> str:
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
    return f"""\
# The cost columns of Tables 7 and 8

```
python scripts/studies/paper_tables.py
```

What the paper prints, and what the models of `configs/lm1b` and `configs/news` have, counted on the
meta device. The same to the printed digit: {", ".join(f"{c} {m}" for c, m in matches.items())}
of {len(rows)}.

{sizes}

{"".join(f"{number}. {note}{chr(10)}" for number, note in enumerate(notes, 1))}
{_COUNTED}

## Floating-point operations

{_FLOPS.format(_SAMPLED[0])}

{times}

{_SHARES}
"""


def main(arguments: Sequence[str] | None = None, root: Path = Path()) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--output", type=Path, default=root / "docs" / "results")
    options = parser.parse_args(arguments)
    rows = [count(published, root) for published in PUBLISHED]
    write_report(options.output, "paper_tables", _markdown(rows), rows)
