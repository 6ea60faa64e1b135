"""Packs the experts of trained models in 4 and 8 bits, and measures what the rounding costs.

    moe-lab study packed data.corpus=CORPUS
    moe-lab study packed --report

Trains configs/small/moe-32.toml on 3.1 million words for each seed, with the options of the studies
of routers. Then the experts' weights are quantized in each format of `moe_ext.formats` that has a
standard rule, dequantized, and the test part is evaluated. A run takes 4 minutes on one processor.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_ext import FeedForwardExperts
from moe_ext.formats import FormatName, Packed, dequantize, quantize
from moe_lab.experiments.arms import Arm
from moe_lab.experiments.claims import percent
from moe_lab.experiments.page import Page, Plot, new_axes
from moe_lab.experiments.runs import PairedDifference, number_of, test_nll
from moe_lab.experiments.single_run import Result
from moe_lab.experiments.store import Stored
from moe_lab.markdown import markdown_table
from moe_lab.studies.routing import RoutingStudy
from moe_lab.training.checkpoint import load_run
from moe_lab.training.metrics import evaluate

MODEL = "moe-32"
FORMATS: dict[str, tuple[FormatName, int | None]] = {  # by name: a format and its group
    "int8, a scale for each row": ("int8", None),
    "gguf_q8_0": ("gguf_q8_0", None),
    "fp8, blocks of 128 x 128": ("fp8", None),
    "int4, groups of 32": ("int4", 32),
    "int4, groups of 128": ("int4", 128),
    "nf4": ("nf4", None),
    "gguf_q4_0": ("gguf_q4_0", None),
    "mxfp4": ("mxfp4", None),
    "gguf_mxfp4": ("gguf_mxfp4", None),
}


class PackedFormats(RoutingStudy):
    name = "packed"
    models = usual = (MODEL,)

    def measured(self, arm: Arm, result: Result) -> dict[str, Any]:
        model = load_run(result.run).model
        [experts] = (module for module in model.modules() if isinstance(module, FeedForwardExperts))
        trained = [weight.detach().clone() for weight in experts.weights]
        size = sum(weight.numel() for weight in trained)
        length = _norm(trained)
        results: dict[str, Any] = {}
        for name, (format, group) in FORMATS.items():
            packed = [quantize(weight.mT, format, group) for weight in trained]
            rounded = [dequantize(*weight, format=format).mT for weight in packed]
            with torch.no_grad():
                for weight, values in zip(experts.weights, rounded, strict=True):
                    weight.copy_(values)
            test = evaluate(model, self.text.test, tokens_per_batch=10_000)
            errors = [a - b for a, b in zip(rounded, trained, strict=True)]
            results[name] = {
                "bits": 8 * sum(map(_bytes, packed)) / size,
                "error": _norm(errors) / length,
                "nll": test.nll,
            }
        return {"formats": results}

    def page(self, stored: Stored) -> Page | None:
        runs = stored.by_arm()[Arm(MODEL)]
        rows, points = [], {}
        for name in FORMATS:
            bits, error, nll = (number_of("formats", name, key) for key in ("bits", "error", "nll"))
            change = runs.gap(nll, test_nll)
            assert change is not None  # there are runs
            points[name] = runs.mean(bits), change
            rows.append(
                [
                    name,
                    f"{runs.mean(bits):.2f}",
                    f"{100 * runs.mean(error):.2f}%",
                    f"{runs.perplexity(nll):.2f}",
                    change.text(lambda gap: f"{percent(gap):+.3f}", "%"),
                ]
            )
        header = ["format", "bits for a weight", "error", "test ppl", "change, 95%"]
        return self.filled(
            stored,
            seeds=len(runs),
            perplexity=runs.perplexity(),
            plot=plot(points),
            formats=markdown_table(header, rows),
        )


def plot(points: Mapping[str, tuple[float, PairedDifference]]) -> Plot:
    """Plots the change of the perplexity over the bits for a weight, with intervals."""
    figure, axes = new_axes(7, 4.2)
    for name, (bits, change) in points.items():
        ends = [end for end in (change.low, change.high) if end is not None]
        (line,) = axes.plot(bits, percent(change.mean), "o", label=name)
        axes.plot([bits] * len(ends), [*map(percent, ends)], "_-", color=line.get_color())
    axes.axhline(0, color="black", linewidth=0.8, linestyle="--")
    axes.set(xlabel="bits for a weight", ylabel="change of the test perplexity, %")
    axes.grid(alpha=0.3)
    axes.legend()
    return Plot("change of the perplexity over the bits for a weight", figure)


def _bytes(packed: Packed) -> int:
    return packed.codes.nbytes + (0 if packed.scales is None else packed.scales.nbytes)


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(tensor.square().sum().item() for tensor in tensors))


run = PackedFormats.start
