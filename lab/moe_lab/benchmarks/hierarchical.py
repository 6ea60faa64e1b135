"""Compares the speed of a hierarchical mixture of 131,072 experts with mixtures of 1,024 experts.

    moe-lab benchmark hierarchical                   # 2 threads, 10 minutes, 12 GiB
    moe-lab benchmark hierarchical --groups 64                   # 32,768 experts
    moe-lab benchmark hierarchical --json docs/results/hierarchical.json

A step is a layer's forward pass, and a backward pass from a gradient of y and the balancing losses
to x and all weights. With such small experts, the gate takes much of the time. Per token, a flat
gate of E experts computes 2 E logits (clean and noisy). A hierarchical gate with a groups of b
experts computes 2 (a + k1 b) logits, for k1 groups per token. The command compares the large layer
with two layers of 1,024 experts, each in two variants. The first variant has experts of the same
width. The second variant, marked "=", has wider experts, so a token needs as many multiply-adds as
in the large layer:

    flat           its gate costs about as much as the large layer's gate
    hierarchical   its gate is cheap: almost all time of "=" is spent in a few wide GEMMs

Rounds are interleaved. Times are medians over the rounds in microseconds per token. "x" is the time
of the large layer divided by the time of the layer in the row, median over the rounds. The stages
(gate, dispatch plan, experts) are timed separately, each forward and backward. "MiB" is the peak
growth of the resident set in a step (Linux), without the weights.
"""

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch

from moe_ext import HierarchicalMoE, MoE, cv_squared, ops
from moe_lab.analysis.costs import moe_ops
from moe_lab.benchmarks.harness import Row, interleaved, ratio
from moe_lab.benchmarks.memory import peak_mib

_STAGES = ("gate", "plan", "experts")
TITLE = (
    "T = {tokens:,}, D = {d_model}, k = {k} at each level, float32, {threads} threads, "
    "{rounds} rounds"
)
HEADER = (
    "layer | experts | hidden | parameters, M | multiply-adds: gate | experts | step, us | x | "
    "quartiles | gate, us | plan, us | experts, us | MiB"
)
CELLS = (
    "{layer} | {experts} | {hidden} | {millions:.1f} | {gate_ops:,} | {expert_ops:,} | "
    "{step_us:.2f} | {ratio:.2f|} | {stage_us[gate]:.2f} | {stage_us[plan]:.2f} | "
    "{stage_us[experts]:.2f} | {mib:,.0f}"
)


def _functions_of(layer: MoE, tokens: int) -> dict[str, Callable[[], None]]:
    """Returns functions that run a step of `layer` and each stage, forward and backward."""
    x = torch.randn(tokens, layer.d_model, requires_grad=True)
    upstream = torch.randn_like(x) / tokens
    gate_upstream = torch.randn(tokens, layer.k) / tokens
    with torch.no_grad():
        chosen = layer.gate(x)
    gates, expert_index = chosen.gates.requires_grad_(), chosen.expert_index
    routed = ops.dispatch_plan(expert_index, layer.num_experts)

    def clear() -> None:
        layer.zero_grad()
        x.grad = gates.grad = None

    def step() -> None:
        y, aux = layer(x)
        torch.autograd.backward([y, aux.loss], [upstream, None])
        clear()

    def gate() -> None:
        gating = layer.gate(x)
        losses = cv_squared(gating.importance) + cv_squared(gating.load)
        torch.autograd.backward([gating.gates, losses], [gate_upstream, None])
        clear()

    def plan() -> None:
        ops.dispatch_plan(expert_index, layer.num_experts)

    def experts() -> None:
        layer.experts(x, routed.offsets, inverse=routed.inverse, gates=gates).backward(upstream)
        clear()

    return {"step": step, "gate": gate, "plan": plan, "experts": experts}


def _make_layers(args: Any) -> dict[str, tuple[str, MoE]]:
    """Returns the compared layers by name, each with its number of experts as text."""

    def layer(groups: int, num_experts: int, hidden: int) -> tuple[str, MoE]:
        torch.manual_seed(0)
        if groups == 0:
            flat = MoE(args.d_model, num_experts, args.k**2, hidden_sizes=[hidden])
            return f"{num_experts}", flat
        sizes = groups, num_experts // groups, args.k
        text = f"{groups} x {num_experts // groups}"
        return text, HierarchicalMoE(args.d_model, *sizes, hidden_sizes=[hidden])

    large = layer(args.groups, args.groups * args.experts_per_group, args.hidden)
    layers = {"hierarchical, large": large}
    for name, groups in (("flat", 0), ("hierarchical", args.peer_groups)):
        layers[name] = layer(groups, args.peer_experts, args.hidden)
        left = sum(moe_ops(large[1])) - moe_ops(layers[name][1]).gate
        hidden = max(1, round(left / (2 * args.k**2 * args.d_model)))
        layers[f"{name}, ="] = layer(groups, args.peer_experts, hidden)
    return layers


def measure(args: Any) -> Iterator[Row]:
    layers = _make_layers(args)
    functions: dict[tuple[str, str], Callable[[], None]] = {}
    mib: dict[str, float] = {}
    for name, (_, layer) in layers.items():
        layer_functions = _functions_of(layer, args.tokens)
        mib[name] = peak_mib(layer_functions["step"])
        functions |= {(what, name): function for what, function in layer_functions.items()}
    seconds = interleaved(functions, args.rounds)
    for name, (size, layer) in layers.items():
        ops_of_layer = moe_ops(layer)
        parameters = sum(parameter.numel() for parameter in layer.parameters())
        us = {what: 1e6 * median(seconds[what, name]) / args.tokens for what in ("step", *_STAGES)}
        yield Row(
            layer=name,
            experts=size,
            hidden=next(layer.experts.parameters()).shape[2],
            parameters=parameters,
            millions=parameters / 1e6,
            gate_ops=ops_of_layer.gate,
            expert_ops=ops_of_layer.experts,
            step_us=us.pop("step"),
            ratio=ratio(seconds["step", "hierarchical, large"], seconds["step", name]),
            stage_us=us,
            mib=mib[name],
        )
