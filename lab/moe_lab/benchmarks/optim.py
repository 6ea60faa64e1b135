"""Compares the speed of factored Adam and of torch's optimizers on a layer of experts.

    moe-lab benchmark optim                     # 1 and 2 threads, a table; takes 6 GiB
    moe-lab benchmark optim --threads 1 --rounds 5 --experts 32 --json optim.json

All optimizers step the same weights with the same gradients, in interleaved rounds. "ms" is the
median over the rounds; "x" is the time divided by the time of factored Adam, median over the
rounds. "bytes" is the optimizer state per weight. The row "add_" times weight.add_(gradient), a
lower bound: it reads the gradients once, and reads and writes the weights once.
"""

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from moe_ext.optim import FactoredAdam
from moe_lab.benchmarks.harness import Row, interleaved, ratio

TITLE = (
    "weights [{experts}, {d_model}, {hidden}] and [{experts}, {hidden}, {d_model}], float32, "
    "{rounds} rounds"
)
HEADER = "threads | step | ms | x | quartiles | bytes"
CELLS = "{threads} | {step} | {ms:.1f} | {ratio:.2f|} | {state_bytes:.3f}"


def measure(args: Any) -> Iterator[Row]:
    E, D, F = args.experts, args.d_model, args.hidden
    params = [nn.Parameter(torch.randn(E, D, F)), nn.Parameter(torch.randn(E, F, D))]
    for param in params:
        param.grad = torch.randn_like(param)
    factored = FactoredAdam(params, lr=1e-6)
    # Both modes of Adam share one object: their states are equal and large.
    adam = torch.optim.Adam(params, lr=1e-6)
    adafactor = torch.optim.Adafactor(params, lr=1e-6)

    def adam_step(mode: str) -> None:
        adam.param_groups[0].update(foreach=mode == "foreach", fused=mode == "fused")
        adam.step()

    @torch.no_grad()
    def add() -> None:
        for param in params:
            assert param.grad is not None
            param.add_(param.grad, alpha=-1e-6)

    steps: dict[str, tuple[Callable[[], object], torch.optim.Optimizer | None]] = {
        "FactoredAdam": (factored.step, factored),
        "torch Adam(foreach=True)": (partial(adam_step, "foreach"), adam),
        "torch Adam(fused=True)": (partial(adam_step, "fused"), adam),
        "torch Adafactor": (adafactor.step, adafactor),
        "add_": (add, None),
    }
    seconds = interleaved({name: step for name, (step, _) in steps.items()}, args.rounds, warm_up=1)
    weights = sum(param.numel() for param in params)
    for name, (_, optimizer) in steps.items():
        states = optimizer.state.values() if optimizer else []
        yield Row(
            threads=args.threads,
            step=name,
            ms=1e3 * median(seconds[name]),
            ratio=ratio(seconds[name], seconds["FactoredAdam"]),
            state_bytes=sum(x.nbytes for state in states for x in state.values()) / weights,
        )
