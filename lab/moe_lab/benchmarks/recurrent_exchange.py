"""Compares the two ways in which ranks share the experts of a MoE-LSTM.

    moe-lab benchmark recurrent-exchange                       # 2 ranks, 2 minutes
    moe-lab benchmark recurrent-exchange --bandwidth 200       # MB/s; Linux, root
    moe-lab benchmark recurrent-exchange --processes 4 --slots 5

"rows" exchanges rows in each time step, "gathered" gathers the weights of all experts once
(``gather_experts`` of `MoELSTM`). A step is a forward and backward pass. The script starts its own
ranks and runs one batch size after the other. Rounds are interleaved and begin with a barrier. A
time is that of the slowest rank; figures are medians over the rounds, with quartiles in brackets.

    sent        MB that all ranks pass to `all_to_all_single` for other ranks, indices included
    predicted   MB by `moe_ext.recurrent.exchanged_bytes`, for a gate that chooses all experts
                equally often
    chosen      the way that the layer chooses by itself: the one with fewer predicted bytes

--bandwidth limits the loopback device that all ranks share, in a separate network namespace.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ext import MoELSTM
from moe_ext.recurrent import exchanged_bytes
from moe_lab.benchmarks._distributed_report import quartiles
from moe_lab.benchmarks.distributed import launch
from moe_lab.benchmarks.harness import Quartiles, environment, report_rows
from moe_lab.cli import at_least, exit_status, make_parser
from moe_lab.progress import progress

WAYS = {"rows": False, "gathered": True}


@dataclass
class Row:
    """The measurements of one way with one batch size."""

    batch: int
    way: str
    sent: int
    predicted: float
    ms: Quartiles
    chosen: bool


def bytes_sent(step: Callable[[], object]) -> int:
    """Returns the bytes that all ranks send to other ranks in a step."""
    sent, rank = 0, dist.get_rank()
    all_to_all_single = dist.all_to_all_single

    def note(output: Tensor, rows: Tensor, into: Any, out: list[int], **options: Any) -> Any:
        nonlocal sent
        sent += (sum(out) - out[rank]) * rows.shape[1:].numel() * rows.itemsize
        return all_to_all_single(output, rows, into, out, **options)

    with patch.object(dist, "all_to_all_single", note):
        step()
    total = torch.tensor(sent)
    dist.all_reduce(total)
    return int(total)


def measure(args: argparse.Namespace, batch: int) -> list[Row]:
    """Measures both ways with a batch size; all ranks call this together."""
    size = dist.get_world_size()
    torch.manual_seed(0)
    layer = MoELSTM(
        args.width,
        args.width,
        args.experts,
        args.k,
        process_group=dist.group.WORLD,
        memory_slots=args.slots or None,
    )
    torch.manual_seed(dist.get_rank())
    x, grad_y = torch.randn(2, batch, args.steps, args.width)
    x.requires_grad_()

    def step() -> None:
        y, _, aux = layer(x)
        torch.autograd.backward([y, aux.loss], [grad_y, None])
        layer.zero_grad()

    sent = {}
    for way, layer.gather_experts in WAYS.items():
        sent[way] = bytes_sent(step)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(args.rounds):
        for way, layer.gather_experts in WAYS.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds[way].append(float(slowest))
    predicted = exchanged_bytes(layer, args.steps, size * batch * args.steps)
    return [
        Row(
            batch,
            way,
            sent[way],
            predicted[gathered],
            Quartiles.of(1e3 * s for s in seconds[way]),
            (predicted[1] < predicted[0]) == gathered,
        )
        for way, gathered in WAYS.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--processes", type=at_least(2), default=2)
    sizes = [4, 16, 64, 256]
    parser.add_argument(
        "--batch", type=at_least(1), nargs="+", default=sizes, help="sequences of each rank"
    )
    parser.add_argument("--steps", type=at_least(1), default=20)
    parser.add_argument("--width", type=at_least(1), default=128, help="width of input and state")
    parser.add_argument("--experts", type=at_least(1), default=16)
    parser.add_argument("--k", type=at_least(1), default=2)
    parser.add_argument("--slots", type=at_least(0), default=0, help="memory_slots (0: none)")
    parser.add_argument("--threads", type=at_least(1), default=1, help="threads of each rank")
    parser.add_argument("--rounds", type=at_least(2), default=9)
    parser.add_argument("--bandwidth", type=float, default=0, help="MB/s (0: no limit)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    if not dist.is_torchelastic_launched():
        given = sys.argv[1:] if arguments is None else arguments
        name = "moe_lab.benchmarks.recurrent_exchange"
        return launch(name, given, args.processes, args.threads, args.bandwidth)

    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    first = dist.get_rank() == 0
    batches = progress(args.batch, "batch", "sizes") if first else args.batch
    rows = [row for batch in batches for row in measure(args, batch)]
    dist.destroy_process_group()
    if not first:
        return 0
    d = args.width
    link = f"{args.bandwidth:g} MB/s" if args.bandwidth else "not limited"
    print(environment())
    print(
        f"{args.processes} ranks, {args.steps} steps, widths {d} and {d}, {args.experts} experts "
        f"[{2 * d}, {4 * d}], k = {args.k}, memory_slots = {args.slots or None}, float32, "
        f"{args.rounds} rounds, link {link}\n"
    )
    report_rows(
        rows,
        ["batch", "way", "sent, MB", "predicted, MB", "step, ms", "chosen"],
        lambda row: [
            row.batch,
            row.way,
            f"{row.sent / 1e6:.1f}",
            f"{row.predicted / 1e6:.1f}",
            quartiles(row.ms, ".0f"),
            "yes" if row.chosen else "",
        ],
        args.json,
    )
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
