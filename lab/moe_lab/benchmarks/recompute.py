"""Measures what recomputing the experts' hidden layers saves in memory and costs in time.

    moe-lab benchmark recompute                        # 1 and 2 threads, 3 minutes
    moe-lab benchmark recompute --experts 256 --json recompute.json

Runs a mixture of feed-forward experts (App. D) forward and backward in float32, with its hidden
layers saved for backward or recomputed, in interleaved rounds. "saved" is what autograd saves for
backward in addition to the parameters, in bytes per token. "peak" is the growth of the resident set
in forward and backward (Linux).
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from moe_ext import MoE, ops
from moe_lab.benchmarks.harness import Quartiles, environment, interleaved, ratio, report_rows
from moe_lab.benchmarks.memory import peak_mib, saved_bytes
from moe_lab.cli import at_least, make_parser


@dataclass
class Row:
    """The measurements with saved or with recomputed hidden layers; times are medians."""

    threads: int
    hidden: str
    kept_bytes_per_token: float
    peak_mib: float
    forward_ms: float
    total_ms: float
    ratio: Quartiles
    same_gradients: bool


def measure(args: argparse.Namespace) -> list[Row]:
    """Measures saved and recomputed hidden layers with each number of threads."""
    T, E, k, D = args.tokens, args.experts, args.k, args.width
    torch.manual_seed(0)
    experts = MoE(D, E, k, hidden_sizes=[args.hidden]).experts
    parameters = list(experts.parameters())
    index = torch.rand(T, E).topk(k, dim=-1).indices
    plan = ops.dispatch_plan(index, E)
    x = torch.randn(T, D, requires_grad=True)
    gates = torch.rand(T, k).softmax(dim=-1).requires_grad_()
    upstream = torch.randn(T, D)

    def forward(recompute: bool) -> Tensor:
        return experts(x, plan.offsets, inverse=plan.inverse, gates=gates, recompute=recompute)

    def step(recompute: bool) -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(recompute), [x, gates, *parameters], upstream)

    same = all(map(torch.equal, step(False), step(True)))
    rows = []
    ways = {"saved": False, "recomputed": True}
    for threads in args.threads:
        torch.set_num_threads(threads)
        functions: dict[str, Callable[[], object]] = {}
        for name, recompute in ways.items():
            functions[f"forward, {name}"] = partial(forward, recompute)
            functions[f"total, {name}"] = partial(step, recompute)
        seconds = interleaved(functions, args.rounds)
        for name in ways:
            total = seconds[f"total, {name}"]
            rows.append(
                Row(
                    threads,
                    name,
                    saved_bytes(functions[f"forward, {name}"], parameters) / T,
                    peak_mib(functions[f"total, {name}"]),
                    1e3 * statistics.median(seconds[f"forward, {name}"]),
                    1e3 * statistics.median(total),
                    ratio(total, seconds["total, saved"]),
                    same,
                )
            )
    return rows


def main(arguments: list[str] | None = None) -> list[Row]:
    parser = make_parser(__doc__)
    parser.add_argument("--threads", type=at_least(1), nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=at_least(2), default=15)
    parser.add_argument("--tokens", type=at_least(1), default=4096)
    parser.add_argument("--experts", type=at_least(1), default=32)
    parser.add_argument("--k", type=at_least(1), default=4)
    parser.add_argument("--width", type=at_least(1), default=512)
    parser.add_argument("--hidden", type=at_least(1), default=1024)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    T, E, k, D = args.tokens, args.experts, args.k, args.width
    print(environment())
    print(f"T = {T}, E = {E}, k = {k}, D = {D}, F = {args.hidden}, {args.rounds} rounds\n")
    rows = measure(args)
    print(f"gradients are bitwise identical: {'yes' if rows[0].same_gradients else 'NO'}")
    print(f"x has {4 * D} bytes/token, the hidden layer {4 * k * args.hidden} bytes/token\n")
    header = ["threads", "hidden layer", "saved, bytes/token", "peak, MiB"]
    report_rows(
        rows,
        [*header, "forward, ms", "both, ms", "ratio", "quartiles"],
        lambda row: [
            row.threads,
            row.hidden,
            f"{row.kept_bytes_per_token:,.0f}",
            f"{row.peak_mib:.0f}",
            f"{row.forward_ms:.1f}",
            f"{row.total_ms:.1f}",
            *row.ratio.cells(),
        ],
        args.json,
    )
    return rows
