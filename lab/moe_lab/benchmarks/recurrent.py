"""Compares bounded-memory back-propagation through a MoE-LSTM with plain back-propagation.

    moe-lab benchmark recurrent                       # 1 thread, 4 minutes, 3 GiB
    moe-lab benchmark recurrent --slots 2 5 --json recurrent.json

A run is a forward pass over t steps and a backward pass. Backward starts from a gradient of y and
the balancing losses and ends at all weights. "plain" saves all activations for backward.
Rounds are interleaved (plain, m = 1, m = 2, …).

    evaluations   number of cell evaluations: t in forward, the rest in backward, together
                  C(t, m) + 1
    ms            median time over the rounds
    x             time divided by the time of plain, median over the rounds, with quartiles
    x by C(t, m)  the ratio x that follows from the number of evaluations, if an evaluation takes as
                  long as in a forward pass without autograd
    MiB           peak of torch's allocations, without weights, x and the gradient of y
    states        the part of "MiB" that the m states take
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from moe_ext import MoELSTM
from moe_ext.recurrent import num_evaluations
from moe_lab.benchmarks.harness import Quartiles, environment, interleaved, ratio, report_rows
from moe_lab.benchmarks.memory import peak_allocated_mib
from moe_lab.cli import at_least, make_parser
from moe_lab.progress import progress


@dataclass
class Row:
    """The measurements with one number m of stored states (0: plain back-propagation)."""

    slots: int
    evaluations: int
    minimum: int
    ms: float
    ratio: Quartiles
    expected_ratio: float
    mib: float
    states_mib: float


def measure(args: argparse.Namespace) -> list[Row]:
    """Measures plain back-propagation, and each number of stored states."""
    S, B, D = args.steps, args.batch, args.width
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    layer = MoELSTM(D, D, args.experts, args.k, dropout=0.1)
    parameters = list(layer.parameters())
    x, grad_y = torch.randn(2, B, S, D)
    evaluations = 0

    def count(*_: object) -> None:
        nonlocal evaluations
        evaluations += 1

    layer.cell.moe.register_forward_pre_hook(count)

    def run_with(slots: int | None) -> Callable[[], object]:
        def run() -> None:
            layer.memory_slots = slots
            y, _, aux = layer(x)
            torch.autograd.grad([y, aux.loss], parameters, [grad_y, None])

        return run

    runs = {slots: run_with(slots or None) for slots in (0, *args.slots)}
    mib, counted = {}, {}
    for slots, run in progress(runs.items(), "memory", "runs", len(runs)):
        evaluations = 0
        mib[slots] = peak_allocated_mib(run)
        counted[slots] = evaluations

    def forward() -> None:
        with torch.no_grad():
            layer(x)

    timed = {str(slots): run for slots, run in runs.items()}
    seconds = interleaved({"forward": forward, **timed}, args.rounds, 1)
    plain = seconds["0"]
    evaluation = statistics.median(seconds["forward"]) / S
    rows = []
    for slots in runs:
        mine = seconds[str(slots)]
        again = (counted[slots] - S) * evaluation
        rows.append(
            Row(
                slots,
                counted[slots],
                num_evaluations(S, slots) if slots else S,
                1e3 * statistics.median(mine),
                ratio(mine, plain),
                1 + again / statistics.median(plain),
                mib[slots],
                slots * 2 * B * D * 4 / 2**20,
            )
        )
    return rows


def main(arguments: list[str] | None = None) -> list[Row]:
    parser = make_parser(__doc__)
    slots = [1, 2, 3, 5, 10, 20, 50, 100]
    parser.add_argument("--slots", type=at_least(1), nargs="+", default=slots)
    parser.add_argument("--steps", type=at_least(1), default=100)
    parser.add_argument("--batch", type=at_least(1), default=256)
    parser.add_argument("--width", type=at_least(1), default=128, help="width of input and state")
    parser.add_argument("--experts", type=at_least(1), default=8)
    parser.add_argument("--k", type=at_least(1), default=2)
    parser.add_argument("--threads", type=at_least(1), default=1)
    parser.add_argument("--rounds", type=at_least(2), default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    S, B, D = args.steps, args.batch, args.width
    threads = f"{args.threads} thread{'s' * (args.threads > 1)}"
    print(environment())
    print(
        f"t = {S} steps, batch {B}, widths {D} and {D}, {args.experts} experts "
        f"[{2 * D}, {4 * D}], k = {args.k}, float32, {threads}, {args.rounds} rounds\n"
    )
    rows = measure(args)
    header = ["m", "evaluations", "C(t, m)", "C / t", "ms", "x", "quartiles", "x by C(t, m)"]
    report_rows(
        rows,
        [*header, "MiB", "states"],
        lambda row: [
            row.slots or "plain",
            row.evaluations,
            row.minimum,
            f"{row.minimum / S:.2f}",
            f"{row.ms:.0f}",
            *row.ratio.cells(),
            f"{row.expected_ratio:.2f}",
            f"{row.mib:.1f}",
            f"{row.states_mib:.1f}",
        ],
        args.json,
    )
    return rows
