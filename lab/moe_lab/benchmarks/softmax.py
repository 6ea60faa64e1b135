"""Compares the time of a training step with the sampled softmax and with the full softmax.

    moe-lab benchmark softmax                            # V = 793,471; takes 9 GiB
    moe-lab benchmark softmax --classes 10000 --sampled 1024 --width 128
    moe-lab benchmark softmax --rounds 5 --json softmax.json

A step computes the loss of --tokens rows and its gradients, then runs Adam on weight and bias.
Targets follow a log-uniform distribution, as word frequencies do. Both softmax kinds use the same
weights, in interleaved rounds. "x" is the time with the full softmax divided by the time with the
sampled softmax, median over the rounds, with quartiles.
"""

from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

import torch

from moe_lab.benchmarks.harness import Row, interleaved, ratio
from moe_lab.models import LogUniformSampler, SampledSoftmax

TITLE = "V = {classes:,}, S = {sampled:,}, D = {width}, T = {tokens:,}, float32, {threads} threads"
HEADER = "step | sampled, s | full, s | x | quartiles"
CELLS = "{step} | {sampled:.3f} | {full:.3f} | {ratio:.1f|}"


def measure(args: Any) -> Iterator[Row]:
    softmax = SampledSoftmax(args.width, args.classes, args.sampled)
    optimizer = torch.optim.Adam(softmax.parameters(), lr=1e-4, fused=True)
    words = LogUniformSampler(args.classes, 1)
    targets = torch.cat([words.draw().classes for _ in range(args.tokens)])
    hidden = torch.randn(args.tokens, args.width, requires_grad=True)

    def step(training: bool, update: bool) -> None:
        softmax.train(training)  # evaluation uses the full loss
        (softmax.loss(hidden, targets) / args.tokens).backward()
        if update:
            optimizer.step()
        optimizer.zero_grad()

    parts = {"loss and gradients": False, "with Adam's step": True}
    timed = {
        (name, training): partial(step, training, update)
        for name, update in parts.items()
        for training in (True, False)
    }
    seconds = interleaved(timed, args.rounds, warm_up=1)
    for name in parts:
        sampled, full = seconds[name, True], seconds[name, False]
        medians = {"sampled": median(sampled), "full": median(full)}
        yield Row(step=name, **medians, ratio=ratio(full, sampled))
