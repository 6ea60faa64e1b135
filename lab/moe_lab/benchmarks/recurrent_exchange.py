"""Compares the two ways in which ranks share the experts of a MoE-LSTM.

    moe-lab benchmark recurrent-exchange                       # 2 ranks, 2 minutes
    moe-lab benchmark recurrent-exchange --bandwidth 200       # MB/s; Linux, root
    moe-lab benchmark recurrent-exchange --processes 4 --slots 5

"rows" exchanges rows in each time step, "gathered" gathers the weights of all experts once
(``gather_experts`` of `MoELSTM`). A step is a forward and backward pass. The command starts its own
ranks and runs one batch size after the other. Rounds are interleaved and begin with a barrier. A
time is that of the slowest rank; figures are medians over the rounds, with quartiles in brackets.

    sent        MB that all ranks pass to `all_to_all_single` for other ranks, indices included
    predicted   MB by `moe_ext.recurrent.exchanged_bytes`, for a gate that chooses all experts
                equally often
    chosen      the way that the layer chooses by itself: the one with fewer predicted bytes

--bandwidth limits the loopback device that all ranks share, in a separate network namespace.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from moe_ext import MoELSTM
from moe_ext.recurrent import exchanged_bytes
from moe_lab.benchmarks._distributed_ranks import Call, process_group, recorded
from moe_lab.benchmarks.harness import (
    Quartiles,
    Row,
    environment,
    host_seconds,
    interleaved,
    report,
)

HEADER = "batch | way | sent, MB | predicted, MB | step, ms | chosen"
CELLS = "{batch} | {way} | {sent_mb:.1f} | {predicted_mb:.1f} | {ms:.0f~} | {mark}"
WAYS = {"rows": False, "gathered": True}


def run(args: Any) -> int:
    with process_group(args) as rank:
        rows = [row for batch in args.batch for row in _measure(args, batch)]
    if rank == 0:
        link = f"{args.bandwidth:g} MB/s" if args.bandwidth else "not limited"
        print(environment())
        print(
            f"{args.processes} ranks, {args.steps} steps, width {args.width}, {args.experts} "
            f"experts, k = {args.k}, memory_slots = {args.slots or None}, float32, "
            f"{args.rounds} rounds, link {link}\n"
        )
        report(rows, HEADER, CELLS, args.json)
    return 0


def _bytes_sent(step: Callable[[], object]) -> int:
    """Returns the bytes that all ranks send to other ranks in a step."""
    calls: list[Call] = []
    with recorded(calls, []):
        step()
    return int(_over_ranks(sum(call.leaving() for call in calls), "SUM"))


def _over_ranks(value: float, how: str) -> float:
    result = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(result, getattr(dist.ReduceOp, how))
    return float(result)


def _slowest(function: Callable[[], object]) -> float:
    dist.barrier()
    return _over_ranks(host_seconds(function), "MAX")


def _measure(args: Any, batch: int) -> Iterator[Row]:
    """Measures both ways with a batch size; all ranks call this together."""
    torch.manual_seed(0)
    sizes = args.width, args.width, args.experts, args.k
    slots = args.slots or None
    layer = MoELSTM(*sizes, process_group=dist.group.WORLD, memory_slots=slots)
    torch.manual_seed(dist.get_rank())
    x, grad_y = torch.randn(2, batch, args.steps, args.width)
    x.requires_grad_()

    def step(gathered: bool) -> None:
        layer.gather_experts = gathered
        y, _, aux = layer(x)
        torch.autograd.backward([y, aux.loss], [grad_y, None])
        layer.zero_grad()

    steps = {way: partial(step, gathered) for way, gathered in WAYS.items()}
    sent = {way: _bytes_sent(function) for way, function in steps.items()}
    seconds = interleaved(steps, args.rounds, warm_up=0, clock=_slowest)
    predicted = exchanged_bytes(layer, args.steps, dist.get_world_size() * batch * args.steps)
    for way, gathered in WAYS.items():
        chosen = (predicted[1] < predicted[0]) == gathered
        yield Row(
            batch=batch,
            way=way,
            sent=sent[way],
            sent_mb=sent[way] / 1e6,
            predicted=predicted[gathered],
            predicted_mb=predicted[gathered] / 1e6,
            ms=Quartiles.from_values(seconds[way]).scaled(1e3),
            chosen=chosen,
            mark="yes" if chosen else "",
        )
