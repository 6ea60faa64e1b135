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

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch

from moe_ext import MoELSTM
from moe_ext.recurrent import num_evaluations
from moe_lab.benchmarks.harness import Row, interleaved, ratio
from moe_lab.benchmarks.memory import peak_allocated_mib

TITLE = (
    "t = {steps} steps, batch {batch}, width {width}, {experts} experts, k = {k}, float32, "
    "{threads} threads, {rounds} rounds"
)
HEADER = "m | evaluations | C(t, m) | C / t | ms | x | quartiles | x by C(t, m) | MiB | states"
CELLS = (
    "{m} | {evaluations} | {minimum} | {minimum_by_steps:.2f} | {ms:.0f} | {ratio:.2f|} | "
    "{expected_ratio:.2f} | {mib:.1f} | {states_mib:.1f}"
)


def measure(args: Any) -> Iterator[Row]:
    S, B, D = args.steps, args.batch, args.width
    layer = MoELSTM(D, D, args.experts, args.k, dropout=0.1)
    parameters = list(layer.parameters())
    x, grad_y = torch.randn(2, B, S, D)
    evaluations = 0

    def count(*_: object) -> None:
        nonlocal evaluations
        evaluations += 1

    layer.cell.moe.register_forward_pre_hook(count)

    def run(slots: int) -> None:
        layer.memory_slots = slots or None
        y, _, aux = layer(x)
        torch.autograd.grad([y, aux.loss], parameters, [grad_y, None])

    @torch.no_grad()
    def forward() -> None:
        layer(x)

    runs: dict[int, Callable[[], None]] = {s: partial(run, s) for s in (0, *args.slots)}
    mib, counted = {}, {}
    for slots, function in runs.items():
        evaluations = 0
        mib[slots] = peak_allocated_mib(function)
        counted[slots] = evaluations
    seconds = interleaved({-1: forward} | runs, args.rounds, 1)
    plain, evaluation = seconds[0], median(seconds[-1]) / S
    for slots in runs:
        minimum = num_evaluations(S, slots) if slots else S
        yield Row(
            slots=slots,
            m=slots or "plain",
            evaluations=counted[slots],
            minimum=minimum,
            minimum_by_steps=minimum / S,
            ms=1e3 * median(seconds[slots]),
            ratio=ratio(seconds[slots], plain),
            expected_ratio=1 + (counted[slots] - S) * evaluation / median(plain),
            mib=mib[slots],
            states_mib=slots * 2 * B * D * 4 / 2**20,
        )
