"""Compares the time of a training step with the sampled softmax and with the full softmax.

    moe-lab benchmark softmax                            # V = 793,471; takes 9 GiB
    moe-lab benchmark softmax --classes 10000 --sampled 1024 --width 128
    moe-lab benchmark softmax --rounds 5 --json softmax.json

A step computes the loss of --tokens rows and its gradients, then runs Adam on weight and bias.
Targets follow a log-uniform distribution, as word frequencies do. Both softmax kinds use the same
weights, in interleaved rounds. "x" is the time with the full softmax divided by the time with the
sampled softmax, median over the rounds, with quartiles.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from moe_lab.benchmarks.harness import Quartiles, environment, interleaved, ratio, report_rows
from moe_lab.cli import at_least, make_parser
from moe_lab.models import LogUniformSampler, SampledSoftmax


@dataclass
class Row:
    """A part of the step: median seconds, and quartiles of the ratio full / sampled."""

    step: str
    sampled: float
    full: float
    ratio: Quartiles


def steps(
    classes: int, sampled: int, width: int, tokens: int
) -> dict[tuple[str, str], Callable[[], object]]:
    """Returns the functions whose run time is measured, by (part of the step, softmax kind)."""
    softmax = SampledSoftmax(width, classes, sampled)
    optimizer = torch.optim.Adam(softmax.parameters(), lr=1e-4, fused=True)
    words = LogUniformSampler(classes, 1)
    targets = torch.cat([words.draw().classes for _ in range(tokens)])
    hidden = torch.randn(tokens, width, requires_grad=True)

    def gradients(training: bool) -> None:
        softmax.train(training)  # evaluation uses the full loss
        (softmax.loss(hidden, targets) / tokens).backward()

    def step(training: bool) -> None:
        gradients(training)
        optimizer.step()
        optimizer.zero_grad()

    def gradients_alone(training: bool) -> None:
        gradients(training)
        optimizer.zero_grad()

    return {
        (name, kind): partial(f, kind == "sampled")
        for name, f in (("loss and gradients", gradients_alone), ("with Adam's step", step))
        for kind in ("sampled", "full")
    }


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    parser = make_parser(__doc__)
    parser.add_argument("--classes", type=at_least(2), default=793_471, help="V, number of classes")
    parser.add_argument("--sampled", type=at_least(1), default=8_192, help="S, sampled classes")
    parser.add_argument("--width", type=at_least(1), default=512, help="D, width of a row")
    parser.add_argument("--tokens", type=at_least(1), default=2_560, help="T, number of rows")
    parser.add_argument("--threads", type=at_least(1), default=torch.get_num_threads())
    parser.add_argument("--rounds", type=at_least(2), default=3)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    print(
        f"V = {options.classes:,}, S = {options.sampled:,}, D = {options.width}, "
        f"T = {options.tokens:,}, float32, {options.threads} threads; {environment()}\n"
    )
    timed = steps(options.classes, options.sampled, options.width, options.tokens)
    seconds = interleaved(timed, options.rounds, warm_up=1)
    rows = []
    for name in dict.fromkeys(name for name, _ in timed):
        sampled, full = seconds[name, "sampled"], seconds[name, "full"]
        medians = statistics.median(sampled), statistics.median(full)
        rows.append(Row(name, *medians, ratio(full, sampled)))
    report_rows(
        rows,
        ["step", "sampled, s", "full, s", "x", "quartiles"],
        lambda row: [row.step, f"{row.sampled:.3f}", f"{row.full:.3f}", *row.ratio.cells(".1f")],
        options.json,
    )
    return rows
