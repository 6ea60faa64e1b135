"""Compares the speed of the routing operators with the same computation in plain torch.

    moe-lab benchmark ops                      # 1 and 2 threads, a table
    moe-lab benchmark ops --threads 1 --rounds 30 --json ops.json

Rounds are interleaved (ours, plain torch, ours, …). "ms" is the median over the rounds. "x" is the
time of the compared function divided by the time of ours, median over the rounds. The last rows
compare dispatch and combine with Tensor.copy_ of the bytes that these operators must move. The
copies go into fresh tensors and into tensors used before. "MiB" is the peak growth of the resident
set during a run (Linux).
"""

from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_ext import cv_squared, ops
from moe_lab.benchmarks.harness import Row, interleaved, ratio
from moe_lab.benchmarks.memory import peak_mib

Function = Callable[[], object]
TITLE = "T = {tokens}, E = {experts}, k = {k}, D = {width}, float32, {rounds} rounds"
HEADER = "threads | operation | ours, ms | MiB | against | ms | MiB | x | quartiles"
CELLS = (
    "{threads} | {operation} | {ours_ms:.3f} | {ours_mib:.0f} | {peer} | {peer_ms:.3f} | "
    "{peer_mib:.0f} | {ratio:.2f|}"
)


def measure(args: Any) -> Iterator[Row]:
    T, E, k, D = sizes = args.tokens, args.experts, args.k, args.width
    for operation, moe_ext, peers in (
        ("gating + load, fwd + bwd", *_gating_and_load(T, E, k)),
        (f"routing, k = {args.routing_k}, fwd + bwd", *_routing(T, E, args.routing_k)),
        ("batchwise mask", *_batchwise_mask(T, E, k)),
        ("dispatch plan", *_plan(T, E, k)),
        ("dispatch + combine, fwd + bwd", *_dispatch_and_combine(*sizes)),
    ):
        for name, peer in peers.items():
            seconds = interleaved({"ours": moe_ext, "peer": peer}, args.rounds)
            ms = {which: 1e3 * median(samples) for which, samples in seconds.items()}
            yield Row(
                threads=args.threads,
                operation=operation,
                ours_ms=ms["ours"],
                peer=name,
                peer_ms=ms["peer"],
                ratio=ratio(seconds["peer"], seconds["ours"]),
                ours_mib=peak_mib(moe_ext),
                peer_mib=peak_mib(peer),
            )
    unit = 4 * T / 2**20
    print(f"T·k·D floats are {unit * k * D:.0f} MiB, T·E floats {unit * E:.0f} MiB\n")


# Each of these returns the operators' function and the functions that it is compared with.


def _gating_and_load(T: int, E: int, k: int) -> tuple[Function, dict[str, Function]]:
    """Gating, Importance, Load and losses, with backward."""
    clean, raw, noise = torch.randn(3, T, E).unbind()
    clean.requires_grad_(), raw.requires_grad_()
    upstream = torch.randn(T, k)

    def moe_ext() -> None:
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

    return moe_ext, {"plain torch": plain}


def _routing(T: int, E: int, k: int) -> tuple[Function, dict[str, Function]]:
    """The router of DeepSeek-V3, with backward.

    A token selects in 4 of 8 groups, by sigmoid scores with a selection bias.
    """
    logits = torch.randn(T, E, requires_grad=True)
    bias, upstream = torch.randn(E) / 100, torch.randn(T, k)
    num_groups, groups_per_token, scale = 8, 4, 2.5

    def moe_ext() -> None:
        gates, _ = ops.topk_routing(
            logits, k, bias, "sigmoid", True, scale, num_groups, groups_per_token
        )
        torch.autograd.grad(gates, [logits], upstream)

    def plain() -> None:
        scores = logits.sigmoid()
        with torch.no_grad():
            biased = (scores + bias).view(T, num_groups, -1)
            group_scores = biased.topk(2, dim=-1).values.sum(-1)
            chosen = group_scores.topk(groups_per_token, dim=-1, sorted=False).indices
            kept = torch.zeros_like(group_scores).scatter_(1, chosen, 1).bool()
            biased = biased.masked_fill(~kept[..., None], float("-inf")).view(T, E)
            index = biased.topk(k, dim=-1, sorted=False).indices
        gates = scores.gather(1, index)
        gates = gates / (gates.sum(-1, keepdim=True) + 1e-20) * scale
        torch.autograd.grad(gates, [logits], upstream)

    return moe_ext, {"plain torch": plain}


def _batchwise_mask(T: int, E: int, k: int) -> tuple[Function, dict[str, Function]]:
    """The top m = k·T/E rows of each column of softmax gates."""
    scores, m = torch.softmax(torch.randn(T, E), dim=-1), k * T // E
    return lambda: ops.batchwise_topm(scores, m), {"topk(dim=0)": lambda: scores.topk(m, dim=0)}


def _plan(T: int, E: int, k: int) -> tuple[Function, dict[str, Function]]:
    """The dispatch plan, and a stable argsort with a bincount in torch."""
    index = _random_choices(T, E, k)

    def plain() -> None:
        flat = index.flatten()
        permutation = flat.argsort(stable=True)
        flat.bincount(minlength=E).cumsum(0)
        torch.empty_like(permutation).scatter_(0, permutation, torch.arange(T * k))

    return lambda: ops.dispatch_plan(index, E), {"argsort + bincount": plain}


def _dispatch_and_combine(T: int, E: int, k: int, D: int) -> tuple[Function, dict[str, Function]]:
    """Dispatch and combine with identity experts, with backward.

    The copies move the bytes that the operators must move. The first copies into fresh tensors of
    the outputs' sizes, as an operator must. The second copies into memory that was used before.
    """
    gates = torch.rand(T, k, requires_grad=True)
    x, grad_y = torch.randn(T, D, requires_grad=True), torch.randn(T, D)
    plan = ops.dispatch_plan(_random_choices(T, E, k), E)
    token = plan.permutation // k

    def moe_ext() -> None:
        y = ops.combine(ops.dispatch(x, plan.inverse), gates, plan.inverse)
        torch.autograd.grad(y, [x, gates], grad_y)

    def plain() -> None:
        rows = x.index_select(0, token)
        weight = gates.flatten().index_select(0, plan.permutation)
        y = torch.zeros_like(x).index_add(0, token, rows * weight[:, None])
        torch.autograd.grad(y, [x, gates], grad_y)

    # In units of T·D elements, dispatch reads 1 and writes k; combine reads k and writes 1. The
    # backward of combine reads 1 + k and writes k; the backward of dispatch reads k and writes 1.
    # Copies of k, 1, k and 1 units read and write the same amount, except for k reads.
    large, small = torch.randn(T * k, D), torch.randn(T, D)
    touched = [torch.zeros_like(source) for source in (large, small, large, small)]

    def copy_to(targets: Iterable[Tensor]) -> None:
        for target, source in zip(targets, (large, small, large, small), strict=True):
            target.copy_(source)
        large.sum()  # the remaining k reads

    return moe_ext, {
        "index_select + index_add": plain,
        "copy, fresh memory": lambda: copy_to([torch.empty_like(target) for target in touched]),
        "copy, touched memory": lambda: copy_to(touched),
    }


def _random_choices(T: int, E: int, k: int) -> Tensor:
    return torch.rand(T, E).topk(k, dim=-1).indices
