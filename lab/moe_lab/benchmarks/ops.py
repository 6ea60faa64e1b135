"""Compares the speed of the routing operators with the same computation in plain torch.

    moe-lab benchmark ops                      # 1 and 2 threads, a table
    moe-lab benchmark ops --threads 1 --rounds 30 --json ops.json

Rounds are interleaved (ours, plain torch, ours, …). "ms" is the median over the rounds. "x" is the
time of the compared function divided by the time of ours, median over the rounds. The last rows
compare dispatch and combine with Tensor.copy_ of the bytes that these operators must move. The
copies go into fresh tensors and into tensors used before. "MiB" is the peak growth of the resident
set during a run (Linux).
"""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from moe_ext import cv_squared, ops
from moe_lab.benchmarks.harness import Quartiles, environment, interleaved, ratio, report_rows
from moe_lab.benchmarks.memory import peak_mib
from moe_lab.cli import at_least, make_parser


@dataclass
class Row:
    """Median ms of an operator and another function; quartiles of the ratio other / operator."""

    threads: int
    operation: str
    ours_ms: float
    peer: str
    peer_ms: float
    ratio: Quartiles
    ours_mib: float
    peer_mib: float


def compare(
    ours: Callable[[], object], peer: Callable[[], object], rounds: int
) -> tuple[float, float, Quartiles]:
    """Times `ours` and `peer` in turn; returns median times in ms and the ratio peer / ours."""
    seconds = interleaved({"ours": ours, "peer": peer}, rounds)
    mine, theirs = (1e3 * statistics.median(each) for each in seconds.values())
    return mine, theirs, ratio(seconds["peer"], seconds["ours"])


def _gating_and_load(T: int, E: int, k: int) -> tuple[Callable, Callable]:
    """Returns gating, Importance, Load and losses as operators and in torch, with backward."""
    generator = torch.Generator().manual_seed(0)
    clean, raw, noise = (torch.randn(T, E, generator=generator) for _ in range(3))
    clean.requires_grad_(), raw.requires_grad_()
    upstream = torch.randn(T, k, generator=generator)

    def ours() -> None:
        kept = ops.noisy_topk_gating(clean, raw, noise, k)
        importance = ops.importance(kept.gates, kept.expert_index, E)
        load = ops.load(clean, kept.noise_stddev, kept.threshold, kept.expert_index)
        loss = (kept.gates * upstream).sum() + cv_squared(importance) + cv_squared(load)
        torch.autograd.grad(loss, [clean, raw])

    def plain() -> None:
        stddev = F.softplus(raw) + 1e-2
        noisy = clean + noise * stddev
        top, index = noisy.topk(k + 1, dim=-1)
        gates = torch.softmax(top[:, :k], dim=-1)
        importance = torch.zeros(E).index_add(0, index[:, :k].flatten(), gates.flatten())
        inside = noisy > top[:, k:]
        threshold = torch.where(inside, top[:, k:], top[:, k - 1 : k])
        load = torch.special.ndtr((clean - threshold) / stddev).sum(0)
        loss = (gates * upstream).sum() + cv_squared(importance) + cv_squared(load)
        torch.autograd.grad(loss, [clean, raw])

    return ours, plain


def _routing(T: int, E: int, k: int) -> tuple[Callable, Callable]:
    """Returns the router of DeepSeek-V3 as an operator and in torch, with backward.

    A token selects in 4 of 8 groups, by sigmoid scores with a selection bias.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(T, E, generator=generator, requires_grad=True)
    bias = torch.randn(E, generator=generator) / 100
    upstream = torch.randn(T, k, generator=generator)
    num_groups, groups_per_token, scale = 8, 4, 2.5

    def ours() -> None:
        gates, _ = ops.topk_routing(
            logits, k, bias, "sigmoid", True, scale, num_groups, groups_per_token
        )
        torch.autograd.grad(gates, [logits], upstream)

    def plain() -> None:
        scores = logits.sigmoid()
        with torch.no_grad():
            biased = (scores + bias).view(T, num_groups, -1)
            of_groups = biased.topk(2, dim=-1).values.sum(-1)
            chosen = of_groups.topk(groups_per_token, dim=-1, sorted=False).indices
            kept = torch.zeros_like(of_groups).scatter_(1, chosen, 1).bool()
            biased = biased.masked_fill(~kept[..., None], float("-inf")).view(T, E)
            index = biased.topk(k, dim=-1, sorted=False).indices
        gates = scores.gather(1, index)
        gates = gates / (gates.sum(-1, keepdim=True) + 1e-20) * scale
        torch.autograd.grad(gates, [logits], upstream)

    return ours, plain


def _batchwise_mask(T: int, E: int, k: int) -> tuple[Callable, Callable]:
    """Returns two functions for the top m = k·T/E rows of each column of softmax gates."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.softmax(torch.randn(T, E, generator=generator), dim=-1)
    m = k * T // E

    def ours() -> None:
        ops.batchwise_topm(scores, m)

    def plain() -> None:
        scores.topk(m, dim=0)

    return ours, plain


def plan(T: int, E: int, k: int) -> tuple[Callable, Callable]:
    """Returns the dispatch plan, and a stable argsort with a bincount in torch."""
    index = _random_choices(T, E, k)

    def ours() -> None:
        ops.dispatch_plan(index, E)

    def plain() -> None:
        flat = index.flatten()
        permutation = flat.argsort(stable=True)
        counts = flat.bincount(minlength=E)
        counts.cumsum(0)
        torch.empty_like(permutation).scatter_(0, permutation, torch.arange(T * k))

    return ours, plain


def _dispatch_and_combine(T: int, E: int, k: int, D: int) -> tuple[Callable, ...]:
    """Returns four functions for dispatch and combine with identity experts, with backward.

    The functions are the operators, plain torch, and two copies of the bytes that must move. The
    first copies into fresh tensors of the outputs' sizes, as an operator must. The second copies
    into memory that was used before.
    """
    index = _random_choices(T, E, k)
    gates = torch.rand(T, k, requires_grad=True)
    x = torch.randn(T, D, requires_grad=True)
    grad_y = torch.randn(T, D)
    dispatch_plan = ops.dispatch_plan(index, E)
    token = dispatch_plan.permutation // k

    def ours() -> None:
        rows = ops.dispatch(x, dispatch_plan.inverse)
        y = ops.combine(rows, gates, dispatch_plan.inverse)
        torch.autograd.grad(y, [x, gates], grad_y)

    def plain() -> None:
        rows = x.index_select(0, token)
        weight = gates.flatten().index_select(0, dispatch_plan.permutation)
        y = torch.zeros_like(x).index_add(0, token, rows * weight[:, None])
        torch.autograd.grad(y, [x, gates], grad_y)

    # In units of T·D elements, dispatch reads 1 and writes k; combine reads k and writes 1. The
    # backward of combine reads 1 + k and writes k; the backward of dispatch reads k and writes 1.
    # Copies of k, 1, k and 1 units read and write the same amount, except for k reads.
    large, small = torch.randn(T * k, D), torch.randn(T, D)
    touched = [torch.zeros_like(source) for source in (large, small, large, small)]

    def copy_to(targets: Iterable[torch.Tensor]) -> None:
        for target, source in zip(targets, (large, small, large, small), strict=True):
            target.copy_(source)
        large.sum()  # the remaining k reads

    def fresh_copy() -> None:
        copy_to([torch.empty_like(target) for target in touched])

    def warm_copy() -> None:
        copy_to(touched)

    return ours, plain, fresh_copy, warm_copy


def _random_choices(T: int, E: int, k: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(T, E, generator=generator).topk(k, dim=-1).indices


def main(arguments: list[str] | None = None) -> list[Row]:
    parser = make_parser(__doc__)
    parser.add_argument("--threads", type=at_least(1), nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=at_least(2), default=21)
    parser.add_argument("--tokens", type=at_least(1), default=4096)
    parser.add_argument("--experts", type=at_least(1), default=256)
    parser.add_argument("--k", type=at_least(1), default=4)
    parser.add_argument("--routing-k", type=at_least(1), default=8)
    parser.add_argument("--width", type=at_least(1), default=512)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    T, E, k, D = args.tokens, args.experts, args.k, args.width

    print(environment())
    print(f"T = {T}, E = {E}, k = {k}, D = {D}, float32, {args.rounds} rounds\n")
    rows = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        routing = _routing(T, E, args.routing_k)
        moved, plain, fresh_copy, warm_copy = _dispatch_and_combine(T, E, k, D)
        for operation, ours, peer, name in (
            ("gating + load, fwd + bwd", *_gating_and_load(T, E, k), "plain torch"),
            (f"routing, k = {args.routing_k}, fwd + bwd", *routing, "plain torch"),
            ("batchwise mask", *_batchwise_mask(T, E, k), "topk(dim=0)"),
            ("dispatch plan", *plan(T, E, k), "argsort + bincount"),
            ("dispatch + combine, fwd + bwd", moved, plain, "index_select + index_add"),
            ("dispatch + combine, fwd + bwd", moved, fresh_copy, "copy, fresh memory"),
            ("dispatch + combine, fwd + bwd", moved, warm_copy, "copy, touched memory"),
        ):
            mine, theirs, by_ours = compare(ours, peer, args.rounds)
            memory = peak_mib(ours), peak_mib(peer)
            rows.append(Row(threads, operation, mine, name, theirs, by_ours, *memory))
    unit = 4 * T / 2**20
    print(f"T·k·D floats are {unit * k * D:.0f} MiB, T·E floats {unit * E:.0f} MiB\n")
    report_rows(
        rows,
        ["threads", "operation", "ours, ms", "MiB", "against", "ms", "MiB", "x", "quartiles"],
        lambda row: [
            row.threads,
            row.operation,
            f"{row.ours_ms:.3f}",
            f"{row.ours_mib:.0f}",
            row.peer,
            f"{row.peer_ms:.3f}",
            f"{row.peer_mib:.0f}",
            *row.ratio.cells(),
        ],
        args.json,
    )
    return rows
