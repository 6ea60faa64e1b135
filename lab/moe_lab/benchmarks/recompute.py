"""Measures what recomputing the experts' hidden layers saves in memory and costs in time.

    moe-lab benchmark recompute                        # 1 and 2 threads, 3 minutes
    moe-lab benchmark recompute --experts 256 --json recompute.json

Runs a mixture of feed-forward experts (App. D) forward and backward in float32, with its hidden
layers saved for backward or recomputed, in interleaved rounds. "saved" is what autograd saves for
backward in addition to the parameters, in bytes per token. "peak" is the growth of the resident set
in forward and backward (Linux).
"""

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from moe_ext import MoE, ops
from moe_lab.benchmarks.harness import Row, interleaved, ratio
from moe_lab.benchmarks.memory import peak_mib, saved_bytes

TITLE = "T = {tokens}, E = {experts}, k = {k}, D = {width}, F = {hidden}, {rounds} rounds"
HEADER = (
    "threads | hidden layer | saved, bytes/token | peak, MiB | forward, ms | both, ms | ratio | "
    "quartiles"
)
CELLS = (
    "{threads} | {hidden} | {kept_bytes_per_token:,.0f} | {peak_mib:.0f} | {forward_ms:.1f} | "
    "{total_ms:.1f} | {ratio:.2f|}"
)


def measure(args: Any) -> Iterator[Row]:
    T, E, k, D = args.tokens, args.experts, args.k, args.width
    experts = MoE(D, E, k, hidden_sizes=[args.hidden]).experts
    parameters = list(experts.parameters())
    plan = ops.dispatch_plan(torch.rand(T, E).topk(k, dim=-1).indices, E)
    x, upstream = torch.randn(T, D, requires_grad=True), torch.randn(T, D)
    gates = torch.rand(T, k).softmax(dim=-1).requires_grad_()

    def forward(recompute: bool) -> Tensor:
        return experts(x, plan.offsets, inverse=plan.inverse, gates=gates, recompute=recompute)

    def step(recompute: bool) -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(recompute), [x, gates, *parameters], upstream)

    same = all(map(torch.equal, step(False), step(True)))
    print(f"gradients are bitwise identical: {'yes' if same else 'NO'}")
    print(f"x has {4 * D} bytes/token, the hidden layer {4 * k * args.hidden} bytes/token\n")
    functions: dict[tuple[str, str], Callable[[], object]] = {}
    for name, recompute in (("saved", False), ("recomputed", True)):
        functions["forward", name] = partial(forward, recompute)
        functions["total", name] = partial(step, recompute)
    seconds = interleaved(functions, args.rounds)
    for name in ("saved", "recomputed"):
        total = seconds["total", name]
        yield Row(
            threads=args.threads,
            hidden=name,
            kept_bytes_per_token=saved_bytes(functions["forward", name], parameters) / T,
            peak_mib=peak_mib(functions["total", name]),
            forward_ms=1e3 * median(seconds["forward", name]),
            total_ms=1e3 * median(total),
            ratio=ratio(total, seconds["total", "saved"]),
            same_gradients=same,
        )
