"""Compares the speed of a hierarchical mixture of 131,072 experts with mixtures of 1,024 experts.

    moe-lab benchmark hierarchical                   # 2 threads, 10 minutes, 12 GiB
    moe-lab benchmark hierarchical --groups 64                   # 32,768 experts
    moe-lab benchmark hierarchical --json docs/results/hierarchical.json

A step is a layer's forward pass, and a backward pass from a gradient of y and the balancing losses
to x and all weights. With such small experts, the gate takes much of the time. Per token, a flat
gate of E experts computes 2 E logits (clean and noisy). A hierarchical gate with a groups of b
experts computes 2 (a + k1 b) logits, for k1 groups per token. The script compares the large layer
with two layers of 1,024 experts, each in two variants. The first variant has experts of the same
width. The second variant, marked "=", has wider experts, so a token needs as many multiply-adds as
in the large layer:

    flat           its gate costs about as much as the large layer's gate
    hierarchical   its gate is cheap: almost all time of "=" is spent in a few wide GEMMs

Rounds are interleaved. Times are medians over the rounds in microseconds per token. "x" is the time
of the large layer divided by the time of the layer in the row, median over the rounds. The stages
(gate, dispatch plan, experts) are timed separately, each forward and backward. "MiB" is the peak
growth of the resident set in a step (Linux), without the weights. The process keeps freed memory,
because clearing fresh pages would dominate the time.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from moe_ext import HierarchicalMoE, MoE, cv_squared, ops
from moe_lab.analysis import moe_ops
from moe_lab.benchmarks.harness import Quartiles, environment, interleaved, ratio, report_rows
from moe_lab.benchmarks.memory import peak_mib
from moe_lab.cli import at_least, make_parser

_STAGES = ("gate", "plan", "experts")


@dataclass
class Row:
    """One layer: its size, multiply-adds per token, and median times in microseconds per token."""

    layer: str
    experts: str
    hidden: int
    parameters: int
    gate_ops: int
    expert_ops: int
    step_us: float
    ratio: Quartiles
    stage_us: dict[str, float]
    mib: float


def _functions_of(layer: MoE, tokens: int) -> dict[str, Callable[[], None]]:
    """Returns functions that run a step of `layer` and each stage, forward and backward."""
    x = torch.randn(tokens, layer.d_model, requires_grad=True)
    upstream = torch.randn_like(x) / tokens
    gate_upstream = torch.randn(tokens, layer.k) / tokens
    with torch.no_grad():
        chosen = layer.gate(x)
    gates, expert_index = chosen.gates.requires_grad_(), chosen.expert_index
    offsets_and_inverse = ops.dispatch_plan(expert_index, layer.num_experts)

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
        plan = offsets_and_inverse
        layer.experts(x, plan.offsets, inverse=plan.inverse, gates=gates).backward(upstream)
        clear()

    return {"step": step, "gate": gate, "plan": plan, "experts": experts}


def _make_layers(args: argparse.Namespace) -> dict[str, tuple[str, MoE]]:
    """Returns the compared layers by name, each with its number of experts as text."""

    def layer(groups: int, num_experts: int, hidden: int) -> MoE:
        torch.manual_seed(0)
        if groups == 0:
            return MoE(args.d_model, num_experts, args.k**2, hidden_sizes=[hidden])
        sizes = groups, num_experts // groups, args.k
        return HierarchicalMoE(args.d_model, *sizes, hidden_sizes=[hidden])

    size = f"{args.groups} x {args.experts_per_group}"
    large = layer(args.groups, args.groups * args.experts_per_group, args.hidden)
    layers = {"hierarchical, large": (size, large)}
    for name, groups in (("flat", 0), ("hierarchical", args.peer_groups)):
        n = args.peer_experts
        size = f"{groups} x {n // groups}" if groups else f"{n}"
        layers[name] = size, layer(groups, n, args.hidden)
        left = sum(moe_ops(large)) - moe_ops(layers[name][1]).gate
        hidden = max(1, round(left / (2 * args.k**2 * args.d_model)))
        layers[f"{name}, ="] = size, layer(groups, n, hidden)
    return layers


def main(arguments: list[str] | None = None) -> list[Row]:
    parser = make_parser(__doc__)
    parser.add_argument("--groups", type=at_least(1), default=256)
    parser.add_argument("--experts-per-group", type=at_least(1), default=512)
    parser.add_argument("--peer-experts", type=at_least(1), default=1024)
    parser.add_argument("--peer-groups", type=at_least(1), default=32)
    parser.add_argument(
        "--k",
        type=at_least(1),
        default=2,
        help="experts of a token at each level (flat layers: k²)",
    )
    parser.add_argument("--d-model", type=at_least(1), default=128)
    parser.add_argument("--hidden", type=at_least(1), default=16)
    parser.add_argument("--tokens", type=at_least(1), default=131_072)
    parser.add_argument("--threads", type=at_least(1), default=2)
    parser.add_argument("--rounds", type=at_least(2), default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    print(environment())
    print(
        f"T = {args.tokens:,}, D = {args.d_model}, k = {args.k} at each level, float32, "
        f"{args.threads} threads, {args.rounds} rounds\n"
    )

    layers = _make_layers(args)
    functions: dict[str, Callable[[], None]] = {}
    mib: dict[str, float] = {}
    for name, (_, layer) in layers.items():
        of_layer = _functions_of(layer, args.tokens)
        mib[name] = peak_mib(of_layer["step"])
        functions |= {f"{what}, {name}": function for what, function in of_layer.items()}
    seconds = interleaved(functions, args.rounds)

    def microseconds(what: str, name: str) -> float:
        return 1e6 * statistics.median(seconds[f"{what}, {name}"]) / args.tokens

    rows = []
    for name, (size, layer) in layers.items():
        rows.append(
            Row(
                name,
                size,
                next(layer.experts.parameters()).shape[2],
                sum(parameter.numel() for parameter in layer.parameters()),
                *moe_ops(layer),
                microseconds("step", name),
                ratio(seconds["step, hierarchical, large"], seconds[f"step, {name}"]),
                {stage: microseconds(stage, name) for stage in _STAGES},
                mib[name],
            )
        )
    header = ["layer", "experts", "hidden", "parameters, M", "multiply-adds: gate", "experts"]
    header += ["step, us", "x", "quartiles", *(f"{stage}, us" for stage in _STAGES), "MiB"]
    report_rows(
        rows,
        header,
        lambda row: [
            row.layer,
            row.experts,
            row.hidden,
            f"{row.parameters / 1e6:.1f}",
            f"{row.gate_ops:,}",
            f"{row.expert_ops:,}",
            f"{row.step_us:.2f}",
            *row.ratio.cells(),
            *(f"{row.stage_us[stage]:.2f}" for stage in _STAGES),
            f"{row.mib:,.0f}",
        ],
        args.json,
    )
    return rows
