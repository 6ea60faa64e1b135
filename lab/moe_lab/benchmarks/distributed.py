"""Measures the cost of expert parallelism: bytes sent, time of the all-to-all, throughput.

    moe-lab benchmark distributed                          # 1, 2, 4 ranks: 4 minutes
    moe-lab benchmark distributed --processes 2 --bandwidth 200      # MB/s; Linux, root
    moe-lab benchmark distributed --processes 2 --bandwidth 200 --compute-ms 200
    moe-lab benchmark distributed --processes 4 --nodes 2 --bandwidth 200    # Linux, root
    moe-lab benchmark distributed --group-size 16 --experts 64 --k 2    # hierarchical
    moe-lab benchmark distributed --json distributed.json
    torchrun --nproc-per-node 8 -m moe_lab benchmark distributed --processes 1 8 --device cuda

Without torchrun, the command starts its own ranks (gloo on the CPU, NCCL on CUDA). A step is the
forward and backward pass of a `MoE` layer. Backward starts from a gradient of y and the balancing
losses and ends at x and all parameters. --tokens and --experts are per rank, so a rank has the same
number of rows at every world size (Sec. 3.1). The gate's gradients are not all-reduced.

Bytes are what the layer passes to `all_to_all_single` for other ranks, summed over all ranks. The
minimum for --exchanges rows is the number of (token, expert) assignments to other ranks times
d_in + d_out elements, in forward and again in backward. The minimum for --exchanges tokens counts
(token, rank) pairs instead, plus a gate and an index for each row ("slots"), and the gate's
gradient. With
--group-size, the layer is hierarchical and a token uses k groups and k experts of each. Its
exchange "groups" is ``ExpertParallel(placement="groups")``. The bytes of the row counts ("counts")
and those passed to `all_reduce` ("losses") are listed separately.

Rounds are interleaved, across world sizes too, and each step starts after a barrier. Each time is
that of the slowest rank. Figures are medians over the rounds, with quartiles in brackets:

    alone          each rank runs a layer of its own experts, all ranks at the same time: the GEMMs
                   of a step without an all-to-all (if a rank has at least k experts)
    transfers      all transfers of a step in sequence, through `AllToAll`
    raw            the same transfers by `all_to_all_single` between existing tensors. For transfers
                   and raw, the second of two calls is timed, so the caches are in the same state
    waits          the fraction of the step's time that a rank waits for rows, mean over the ranks
    efficiency     tokens/s, divided by the tokens/s of one rank times the number of ranks
    alone / step   time of alone, divided by the time of a step: efficiency without the slow-down by
                   ranks that share processors
    hidden         (step with 1 chunk - step) / min(transfers, alone): the overlap of all-to-all and
                   computation, as a fraction of the possible overlap

--bandwidth limits the loopback device that all ranks share, in a separate network namespace. With
--nodes 2, half of the ranks are in a second namespace, and --bandwidth limits each direction of the
link between both. "between nodes" are the bytes on this link. The exchange "nodes" is
``ExpertParallel(exchange="nodes")``; its bytes have no minimum here. With --compute-ms, experts
sleep for this time per step, a third of it in forward, and use no processor. This models an
accelerator that computes while the processors send.
"""

import os
from collections.abc import Iterator, Sequence
from statistics import mean, median
from typing import Any

from moe_lab.benchmarks import _distributed_ranks as ranks
from moe_lab.benchmarks._distributed_ranks import BYTES, PASSES, Key, RankTimes
from moe_lab.benchmarks.harness import Quartiles, Row, environment, ratio, table
from moe_lab.benchmarks.memory import keep_freed_memory
from moe_lab.files import write_json

SENT = (
    "ranks | exchange | chunks | pass | rows, MB | slots, MB | total / minimum | "
    "counts, kB | losses, kB | between nodes, MB"
)
SENT_CELLS = (
    "{processes} | {exchange} | {chunks} | {name} | {rows:.3f} | {slots:.3f} | "
    "{by_minimum:.4f} | {counts:.2f} | {losses:.2f} | "
    "{between:.3f}"
)
RAW = "ranks | exchange | transfers, ms | raw, ms | raw, MB/s | transfers / raw"
RAW_CELLS = (
    "{processes} | {exchange} | {transfers_ms:.2f} | {raw_ms:.2f} | {raw_mb_per_second:.0f} | "
    "{by_raw:.3f~}"
)
STEPS = (
    "ranks | exchange | chunks | step, ms | tokens/s | efficiency | alone, ms | alone / step | "
    "waits | hidden"
)
STEPS_CELLS = (
    "{processes} | {exchange} | {chunks} | {step_ms:.1f~} | {tokens_per_second:,.0f} | "
    "{efficiency:.2f} | {alone_ms:.1f} | {by_alone:.2f~} | {waits:.0%} | {hidden:.0%~}"
)


def run(args: Any) -> int:
    keep_freed_memory()
    with ranks.process_group(args) as rank:
        everything = ranks.measure(args)
    if rank > 0:
        return 0
    results = list(results_of(everything, args))
    where = "between two nodes" if args.nodes > 1 else "shared by all ranks"
    link = f"{args.bandwidth:g} MB/s {where}" if args.bandwidth else "not limited"
    title = (
        f"{environment()}; processors: {os.cpu_count()}, threads per rank: {args.threads}\n"
        f"T = {args.tokens} and E = {args.experts} per rank, k = {args.k}, D = {args.width}, "
        f"F = {args.hidden}, "
        + (f"groups of {args.group_size}, " if args.group_size else "")
        + f"{args.dtype} on {args.device}, {args.rounds} rounds, link {link}"
        + (f", experts that sleep for {args.compute_ms:g} ms" if args.compute_ms else "")
    )
    print(title)
    print(f"peak resident set of a rank: {max(f.peak_mib for f in everything):,.0f} MiB")
    print_results(results)
    if args.json:
        record = {"environment": title, "arguments": args.arguments}
        write_json(args.json, record | {"results": [vars(result) for result in results]})
    return 0


def results_of(everything: Sequence[RankTimes], args: Any) -> Iterator[Row]:
    """Yields a result for each number of ranks, exchange and number of chunks."""
    seconds: dict[Key, list[float]] = {}
    for key in everything[0].seconds:
        rank_seconds = [times.seconds[key] for times in everything if key in times.seconds]
        seconds[key] = [max(samples) for samples in zip(*rank_seconds, strict=True)]
    single = seconds.get(Key(1, "alone"))
    for key, samples in seconds.items():
        if key.what != "step" and key != Key(1, "alone"):
            continue
        size = key.processes
        alone = seconds[Key(size, "alone")]
        transfers, raw = (seconds.get(Key(size, w, key.exchange)) for w in ("transfers", "raw"))
        members = [times for times in everything if key in times.waited]
        waits = [
            median(w / s for w, s in zip(f.waited[key], f.seconds[key], strict=True))
            for f in members
        ]
        first = key._replace(chunks=1)
        passes = [p for f in everything for p in f.passes.get(first, {}).values()]
        moved = sum(p[kind] for p in passes for kind in ("rows", "slots", "counts"))
        result = Row(
            processes=size,
            exchange=key.exchange or None,
            chunks=key.chunks,
            step_ms=Quartiles.from_values(1e3 * s for s in samples),
            tokens_per_second=size * args.tokens / median(samples),
            efficiency=ratio(single, samples).median if single else None,
            by_alone=ratio(alone, samples),
            waits=mean(waits),
            alone_ms=1e3 * median(alone),
            **dict.fromkeys(("transfers_ms", "raw_ms", "by_raw", "raw_mb_per_second", "hidden")),
            bytes=None,
        )
        if key.what == "step":
            result.bytes = {
                name: {kind: sum(f.passes[key][name][kind] for f in members) for kind in BYTES}
                for name in PASSES
            }
        if transfers and raw:
            result.transfers_ms, result.raw_ms = 1e3 * median(transfers), 1e3 * median(raw)
            result.by_raw = ratio(transfers, raw)
            result.raw_mb_per_second = moved / median(raw) / 1e6
            if key.chunks > 1:
                could = [min(pair) for pair in zip(transfers, alone, strict=True)]
                gain = [a - b for a, b in zip(seconds[first], samples, strict=True)]
                result.hidden = ratio(gain, could)
        yield result


def print_results(results: Sequence[Row]) -> None:
    sent = []
    for r in results:
        for name, b in (r.bytes or {}).items():
            moved = b["rows"] + b["slots"]
            ratio = moved / b["minimum"] if b["minimum"] else None
            sizes = {kind: size / 1e6 for kind, size in b.items()}  # MB
            sizes |= {kind: b[kind] / 1e3 for kind in ("counts", "losses")}
            sent.append(Row(**vars(r) | sizes, name=name, by_minimum=ratio))
    print("\nBytes that a step sends to other ranks, summed over all ranks\n")
    print(table(SENT, SENT_CELLS, sent))
    print("The all-to-all without the layer: all transfers of a step\n")
    print(table(RAW, RAW_CELLS, [r for r in results if r.raw_ms is not None and r.chunks == 1]))
    print("Steps\n")
    print(table(STEPS, STEPS_CELLS, results))
