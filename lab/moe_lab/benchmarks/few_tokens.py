"""Measures whole MoE layers, gate included, on few tokens: the steps of a decoder.

    moe-lab benchmark few-tokens                       # 1 thread
    moe-lab benchmark few-tokens --shape 512 64 2 1024 --tokens 1 8 --json few.json

A call is a forward pass without gradients in evaluation mode. The tokens of every call differ, so
that other experts run. Functions are called in interleaved rounds.

    moe_ext      microseconds of a call of MoE, with ReLU and two matrices for each expert
    limit        the time to read the weights of the chosen experts and of the gate, divided by the
                 time of moe_ext. The bandwidth is measured in the same rounds (torch.dot)
    loop         the time of a Python loop over the chosen experts, divided by that of moe_ext
    training     microseconds of a forward pass in training mode, with gradients enabled
    grouped_mm,  the times of transformers' MixtralSparseMoeBlock with these implementations of its
    batched_mm   experts, divided by that of MoE with SwiGLU experts of the same sizes. Their hidden
                 layer is a third smaller, so that an expert has about as many weights

All figures are medians over the rounds.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_ext import MoE, TopKGate
from moe_lab.benchmarks.harness import Quartiles, Row, interleaved, ratio
from moe_lab.benchmarks.peers import mixtral_config
from moe_lab.benchmarks.roofline import stream_probe

SHAPES = [(64, 8, 2, 128), (512, 64, 2, 1_024)]
IMPLEMENTATIONS = ("grouped_mm", "batched_mm")
MIN_SECONDS = 0.005  # of the calls in a round
TITLE = "float32, {threads} threads"
HEADER = "D, E, k, h | T | moe_ext, us | limit | loop | training, us | grouped_mm | batched_mm"
CELLS = (
    "{shape} | {tokens} | {moe_ext.median:.0f} | {limit.median:.2f} | {loop.median:.2f} | "
    "{training.median:.0f} | {transformers[grouped_mm].median:.2f} | "
    "{transformers[batched_mm].median:.2f}"
)


def loop(layer: MoE, x: Tensor) -> Tensor:
    """Computes a MoE in evaluation mode by a loop over the chosen experts, in plain torch."""
    w_1, w_2 = layer.experts.parameters()
    top = (x @ layer.gate.get_parameter("w_gate")).topk(layer.k)
    gates = top.values.softmax(-1)
    y = torch.zeros_like(x)
    for e in top.indices.unique().tolist():
        token, choice = torch.where(top.indices == e)
        rows = torch.relu(x[token] @ w_1[e]) @ w_2[e]
        y.index_add_(0, token, rows * gates[token, choice, None])
    return y


def gated_width(hidden: int) -> int:
    """Returns two thirds of a width, as a multiple of 16, which torch's grouped_mm requires."""
    return max(16, 2 * hidden // 3 // 16 * 16)


def mixtral_block(shape: Sequence[int], implementation: str) -> nn.Module:
    d_model, num_experts, k, hidden = shape
    mixtral, config = mixtral_config(implementation, d_model, num_experts, k, gated_width(hidden))
    block = mixtral.MixtralSparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    return block.eval()


def calls(function: Callable[[Tensor], object], inputs: Sequence[Tensor], grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        for x in inputs:
            function(x)


def measure(args: Any) -> Iterator[Row]:
    for shape, num_tokens in itertools.product(args.shape or SHAPES, args.tokens):
        yield _measured(shape, num_tokens, args.rounds)


def _measured(shape: Sequence[int], num_tokens: int, rounds: int) -> Row:
    d_model, num_experts, k, hidden = shape
    layer, training = (MoE(d_model, num_experts, k, hidden_sizes=[hidden]) for _ in range(2))
    layer.eval()
    swiglu = partial(MoE, d_model, num_experts, k, activation="swiglu")
    gate = TopKGate(d_model, num_experts, k)
    gated = swiglu(hidden_sizes=[gated_width(hidden)], gate=gate).eval()
    for module in (layer, training):
        nn.init.normal_(module.gate.get_parameter("w_gate"))
    inputs = [torch.randn(num_tokens, d_model) for _ in range(16)]
    torch.testing.assert_close(layer(inputs[0])[0], loop(layer, inputs[0]), rtol=1e-4, atol=1e-4)
    once = interleaved({"": partial(calls, layer, inputs, False)}, 3)[""]
    inputs *= max(1, round(MIN_SECONDS / min(once)))

    stream = stream_probe()
    functions: dict[str, Callable[[], object]] = {
        "stream": stream.function,
        "moe_ext": partial(calls, layer, inputs, False),
        "loop": partial(calls, partial(loop, layer), inputs, False),
        "training": partial(calls, training, inputs, True),
        "gated": partial(calls, gated, inputs, False),
    }
    for name in IMPLEMENTATIONS:
        sequences = [x[None] for x in inputs]
        functions[name] = partial(calls, mixtral_block(shape, name), sequences, False)
    seconds = interleaved(functions, rounds, warm_up=1)

    chosen = [layer(x)[1].expert_index.unique().numel() for x in inputs[:16]]
    weights = 2 * d_model * hidden * sum(chosen) / len(chosen) + d_model * num_experts
    limits = [4 * weights * s / stream.work.bytes * len(inputs) for s in seconds["stream"]]
    microseconds = 1e6 / len(inputs)
    return Row(
        shape=", ".join(map(str, shape)),
        tokens=num_tokens,
        moe_ext=Quartiles.from_values(seconds["moe_ext"]).scaled(microseconds),
        limit=ratio(limits, seconds["moe_ext"]),
        loop=ratio(seconds["loop"], seconds["moe_ext"]),
        training=Quartiles.from_values(seconds["training"]).scaled(microseconds),
        transformers={name: ratio(seconds[name], seconds["gated"]) for name in IMPLEMENTATIONS},
    )
