"""Counts operations and parameters of the models of the paper's Tables 2 to 5, 7 and 8.

    moe-lab study paper-tables           # prints, writes runs/results/paper_tables.*
    moe-lab study paper-tables --output DIR

The study builds every model of configs/ on torch's meta device, without memory for the weights, and
counts it with moe_lab.analysis.costs. The published figures are in moe_lab.analysis.paper. The
second table has the floating-point operations of a training batch, counted as in Section 5.1. It
also has the time that these operations take at the published TFLOPS/GPU.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from moe_lab.analysis.costs import cost, training_flops
from moe_lab.analysis.paper import PUBLISHED, PUBLISHED_TRANSLATION, Published
from moe_lab.experiments.page import Command, Page, page_of_template, publish, table_of
from moe_lab.markdown import markdown_table
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
    batch_flops = config.data.tokens_per_batch * config.optimizer.accumulate * flops[0].total
    seconds = None
    if published.tflops and published.gpus:
        seconds = batch_flops / (published.gpus * published.tflops * 1e12)
    k = config.model.moe.experts_per_token if "moe" in config.model.layers else 1
    return row | {
        "gpus": published.gpus,
        "tflops": published.tflops,
        "flops_of_batch": batch_flops,
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
    rows = [count(published) for published in PUBLISHED]
    return {"language_models": rows, "translation": count_translation()}


def _number(value: float | None, form: str) -> str:
    return format(value, form) if value else "–"


def _model(row: Mapping[str, Any]) -> str:
    return str(row["model"]) if row["table"] == "lm1b" else f"News {row['model']}"


def _share(num_sampled: int, row: Mapping[str, Any]) -> str:
    return _number(row["expert_share"][num_sampled], ".1%")


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
    times: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "model": _model,
        "GPUs": lambda row: _number(row["gpus"], "d"),
        "TFLOPS/GPU": lambda row: _number(row["tflops"], ".2f"),
        "10¹² flops a batch": lambda row: f"{row['flops_of_batch'] / 1e12:.2f}",
        "step, s": lambda row: _number(row["step_seconds"], ".2f"),
        "hours": lambda row: _number(row["hours"], ".1f"),
        "published": lambda row: row["hours_published"] or "–",
        **{f"experts' share, S = {number:,}": partial(_share, number) for number in _SAMPLED},
        "intensity": lambda row: _number(row["intensity"], ",.0f"),
    }
    translation_table = markdown_table(
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
    return page_of_template(
        __file__,
        command=Command("moe-lab study paper-tables"),
        number=len(rows),
        matches=", ".join(matches),
        sizes=sizes,
        notes="\n".join(notes),
        sampled=_SAMPLED[0],
        times=table_of(times, [(row,) for row in rows]),
        translation=translation_table,
    )


def run(options: argparse.Namespace) -> None:
    report = counted()
    publish(options.output, "paper_tables", page_of(report), report)
