"""Compares the speed of factored Adam and of torch's optimizers on a layer of experts.

    moe-lab benchmark optim                     # 1 and 2 threads, a table; takes 6 GiB
    moe-lab benchmark optim --threads 1 --rounds 5 --experts 32 --json optim.json

All optimizers step the same weights with the same gradients, in interleaved rounds. "ms" is the
median over the rounds; "x" is the time divided by the time of factored Adam, median over the
rounds. "bytes" is the optimizer state per weight. The row "add_" times weight.add_(gradient), a
lower bound: it reads the gradients once, and reads and writes the weights once.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from moe_ext.optim import FactoredAdam
from moe_lab.benchmarks.harness import Quartiles, environment, interleaved, ratio, report_rows
from moe_lab.cli import at_least, make_parser


@dataclass
class Row:
    """One optimizer: its median time in ms, and its time relative to factored Adam."""

    threads: int
    step: str
    ms: float
    ratio: Quartiles
    state_bytes: float


def _ways_of_stepping(params: list[nn.Parameter]) -> dict[str, tuple[Callable, Callable]]:
    """Returns each optimizer's step and a function for its state bytes per weight, by name."""
    ours = FactoredAdam(params, lr=1e-6)
    # Both modes of Adam share one object: their states are equal and large.
    adam = torch.optim.Adam(params, lr=1e-6)
    adafactor = torch.optim.Adafactor(params, lr=1e-6)

    def adam_step(mode: str) -> Callable:
        def step() -> None:
            adam.param_groups[0].update(foreach=mode == "foreach", fused=mode == "fused")
            adam.step()

        return step

    @torch.no_grad()
    def add() -> None:
        for param in params:
            if param.grad is not None:
                param.add_(param.grad, alpha=-1e-6)

    def state_bytes(optimizer: torch.optim.Optimizer) -> Callable:
        def measure() -> float:
            kept = sum(x.nbytes for state in optimizer.state.values() for x in state.values())
            return kept / sum(param.numel() for param in params)

        return measure

    return {
        "FactoredAdam": (ours.step, state_bytes(ours)),
        "torch Adam(foreach=True)": (adam_step("foreach"), state_bytes(adam)),
        "torch Adam(fused=True)": (adam_step("fused"), state_bytes(adam)),
        "torch Adafactor": (adafactor.step, state_bytes(adafactor)),
        "add_": (add, lambda: 0.0),
    }


def measure(params: list[nn.Parameter], threads: int, rounds: int) -> list[Row]:
    torch.set_num_threads(threads)
    ways = _ways_of_stepping(params)
    seconds = interleaved({name: step for name, (step, _) in ways.items()}, rounds, warm_up=1)
    rows = []
    for name, (_, state_bytes) in ways.items():
        by_ours = ratio(seconds[name], seconds["FactoredAdam"])
        milliseconds = 1e3 * statistics.median(seconds[name])
        rows.append(Row(threads, name, milliseconds, by_ours, state_bytes()))
    return rows


def main(arguments: list[str] | None = None) -> list[Row]:
    parser = make_parser(__doc__)
    parser.add_argument("--threads", type=at_least(1), nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=at_least(2), default=11)
    parser.add_argument("--experts", type=at_least(1), default=256)
    parser.add_argument("--d-model", type=at_least(1), default=512)
    parser.add_argument("--hidden", type=at_least(1), default=1024)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    E, D, F = args.experts, args.d_model, args.hidden

    print(environment())
    print(f"weights [{E}, {D}, {F}] and [{E}, {F}, {D}], float32, {args.rounds} rounds\n")
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(E, D, F)), nn.Parameter(torch.randn(E, F, D))]
    for param in params:
        param.grad = torch.randn_like(param)
    rows = [row for threads in args.threads for row in measure(params, threads, args.rounds)]
    report_rows(
        rows,
        ["threads", "step", "ms", "x", "quartiles", "bytes"],
        lambda row: [
            row.threads,
            row.step,
            f"{row.ms:.1f}",
            *row.ratio.cells(),
            f"{row.state_bytes:.3f}",
        ],
        args.json,
    )
    return rows
