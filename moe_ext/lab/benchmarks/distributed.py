"""Measures the cost of expert parallelism: bytes sent, time of the all-to-all, throughput.

    python scripts/benchmarks/distributed.py                          # 1, 2, 4 ranks: 4 minutes
    python scripts/benchmarks/distributed.py --processes 2 --bandwidth 200      # MB/s; Linux, root
    python scripts/benchmarks/distributed.py --processes 2 --bandwidth 200 --compute-ms 200
    python scripts/benchmarks/distributed.py --group-size 16 --experts 64 --k 2    # hierarchical
    python scripts/benchmarks/distributed.py --json distributed.json --plot distributed.png
    torchrun --nproc-per-node 8 scripts/benchmarks/distributed.py --processes 1 8 --device cuda

Without torchrun, the script starts its own ranks (gloo on the CPU, NCCL on CUDA). A step is the
forward and backward pass of a `MoE` layer. Backward starts from a gradient of y and the balancing
losses and ends at x and all parameters. --tokens and --experts are per rank, so a rank has the same
number of rows at every world size (Sec. 3.1). The gate's gradients are not all-reduced.

Bytes are what the layer passes to `all_to_all_single` for other ranks, summed over all ranks. The
minimum for --exchanges rows is the number of (token, expert) assignments to other ranks times
d_in + d_out elements, in forward and again in backward. The minimum for --exchanges tokens counts
(token, rank) pairs instead, plus a gate and an index for each row, and the gate's gradient. With
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
--compute-ms, experts sleep for this time per step, a third of it in forward, and use no processor.
This models an accelerator that computes while the processors send.
"""

import argparse
import contextlib
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ext import Experts, HierarchicalMoE, HierarchicalNoisyTopKGate, MoE, MoEAux
from moe_ext.distributed import (
    AllToAll,
    Exchange,
    ExchangeUnit,
    ExpertParallel,
    ExpertPlacement,
    GroupExchange,
    Placement,
    Ranks,
)
from moe_ext.lab.analysis.cluster import exchange_bytes
from moe_ext.lab.benchmarks.harness import Quartiles, environment, options_as_text, ratio
from moe_ext.lab.benchmarks.memory import keep_freed_memory
from moe_ext.lab.experiments.report import markdown_table
from moe_ext.lab.files import write_json
from moe_ext.lab.progress import progress
from moe_ext.lab.training.command import at_least, exit_status, make_parser
from moe_ext.lab.training.device import avoid_missing_amx

PASSES = ("forward", "backward")
_UNITS = list(get_args(ExchangeUnit))
_GROUPS = "groups"  # the exchange of placement="groups"


class Key(NamedTuple):
    """A timed function: "alone", "transfers", "raw" or "step", at a number of ranks."""

    processes: int
    what: str
    exchange: str = ""
    chunks: int = 1


class _Call(NamedTuple):
    """One call of all_to_all_single by one rank."""

    dtype: torch.dtype
    shape: tuple[int, ...]  # of a row
    sent: list[int]
    received: list[int]

    def kind(self, width: int) -> str:
        """Returns "indices", "gates" or "rows"; the first call of a step sends the row counts.

        Gates include the noise of gates.

        Args:
            width: the width of x and y.
        """
        if not self.dtype.is_floating_point:
            return "indices"
        return "rows" if self.shape == (width,) else "gates"

    def leaving(self, rank: int) -> int:
        """Returns the bytes that `rank` sends to other ranks in this call."""
        number = sum(self.sent) - self.sent[rank]
        return number * self.dtype.itemsize * int(torch.Size(self.shape).numel())


@dataclass
class Bytes:
    """The bytes that are sent to other ranks in one forward or backward pass, by kind."""

    rows: int = 0
    gates: int = 0
    indices: int = 0
    minimum: float = 0
    counts: int = 0
    losses: int = 0


@dataclass
class Result:
    """The measurements of a layer at a number of ranks; quartiles are over the rounds."""

    processes: int
    exchange: str
    chunks: int
    step_ms: Quartiles
    tokens_per_second: float
    efficiency: float | None
    by_alone: Quartiles
    waits: float
    alone_ms: float
    transfers_ms: float | None = None
    raw_ms: float | None = None
    by_raw: Quartiles | None = None
    raw_mb_per_second: float | None = None
    hidden: Quartiles | None = None
    bytes: dict[str, Bytes] | None = None


# What each rank runs


@contextlib.contextmanager
def recorded(calls: list[_Call], sums: list[int]) -> Iterator[None]:
    """Adds the all_to_all_single calls of the block to `calls`, all_reduce bytes to `sums`."""
    all_to_all_single, all_reduce = dist.all_to_all_single, dist.all_reduce

    def note_call(output: Tensor, input: Tensor, received: Any, sent: Any, **options: Any) -> Any:
        calls.append(_Call(input.dtype, tuple(input.shape[1:]), list(sent), list(received)))
        return all_to_all_single(output, input, received, sent, **options)

    def note_sum(tensor: Tensor, *options: Any, **more: Any) -> Any:
        sums.append(tensor.nbytes)
        return all_reduce(tensor, *options, **more)

    with (
        patch.object(dist, "all_to_all_single", note_call),
        patch.object(dist, "all_reduce", note_sum),
    ):
        yield


class _Waiting:
    """Adds up the seconds that this rank waits for transfers."""

    def __init__(self) -> None:
        self.seconds = 0.0
        finish = AllToAll.finish

        def timed(transfer: AllToAll) -> Tensor:
            start = time.perf_counter()
            buffer = finish(transfer)
            self.seconds += time.perf_counter() - start
            return buffer

        patch.object(AllToAll, "finish", timed).start()


class _Resting(Experts):
    """Experts that sleep instead of computing."""

    def __init__(self, num_experts: int, seconds_per_row: float) -> None:
        super().__init__(num_experts, None)
        self.seconds_per_row = seconds_per_row

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        return _Rest.apply(x, len(x) * self.seconds_per_row)

    def split(self, sizes: Sequence[int]) -> list["_Resting"]:
        return [_Resting(size, self.seconds_per_row) for size in sizes]


class _Rest(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds * 2 / 3)
        return grad.clone(), None


class _World:
    """The layers of one rank in a process group, and the functions whose run time is measured."""

    def __init__(self, group: dist.ProcessGroup | None, args: argparse.Namespace) -> None:
        self.ranks = Ranks(group)
        size = self.ranks.size
        dtype, device = getattr(torch, args.dtype), torch.device(args.device)
        self.x = torch.randn(args.tokens, args.width, device=device, dtype=dtype)
        self.x.requires_grad_()
        self.dy = torch.randn_like(self.x) / args.tokens
        self.functions: dict[Key, Callable[[], object]] = {}
        self.passes: dict[Key, dict[str, Bytes]] = {}
        alone = self.make(args, None, "experts").to(device, dtype)
        self.functions[Key(size, "alone")] = lambda: self.step(alone)
        if size == 1:
            return
        placements: dict[str, Placement] = {
            name: "groups" if name == _GROUPS else "experts" for name in args.exchanges
        }
        layers = {
            placement: self.make(args, group, placement).to(device, dtype)
            for placement in dict.fromkeys(placements.values())
        }
        for exchange, placement in placements.items():
            layer = layers[placement]
            for chunks in args.chunks:
                key = Key(size, "step", exchange, chunks)
                shared = self.exchange_of(layer, exchange, chunks)
                calls = self.count(key, layer, shared)
                self.functions[key] = partial(self.step, layer, shared)
                if chunks == 1:
                    self.add_transfers(size, exchange, *calls)

    def exchange_of(self, layer: MoE, name: str, num_chunks: int) -> Exchange | GroupExchange:
        """Makes the exchange of a layer that has a process group."""
        sharding = layer.sharding
        assert sharding is not None
        if sharding.group_exchange is None:
            unit: ExchangeUnit = "tokens" if name == "tokens" else "rows"
            return Exchange(sharding.placement, self.ranks, unit, num_chunks)
        groups = sharding.group_exchange.exchange.placement
        return GroupExchange(groups, self.ranks, num_chunks)

    @staticmethod
    def make(
        args: argparse.Namespace, group: dist.ProcessGroup | None, placement: Placement
    ) -> MoE:
        size = 1 if group is None else dist.get_world_size(group)
        experts, b = args.experts * size, args.group_size
        k = min(args.k, experts // max(b, 1), b or experts)
        options: dict[str, Any] = {"hidden_sizes": [args.hidden]}
        if args.compute_ms:
            rows = args.tokens * (k * k if b else k)
            options = {"experts": _Resting(args.experts, args.compute_ms / 1e3 / rows)}
        if group is not None:
            options["parallel"] = ExpertParallel(group, placement=placement)
        if b:
            return HierarchicalMoE(args.width, experts // b, b, k, **options)
        return MoE(args.width, experts, k, **options)

    def forward(
        self, layer: MoE, exchange: Exchange | GroupExchange | None = None
    ) -> tuple[list[Tensor], MoEAux]:
        if exchange is not None:
            assert layer.sharding is not None  # the layer has a process group
            if isinstance(exchange, GroupExchange):
                layer.sharding.group_exchange = exchange
            else:
                layer.sharding.exchange = exchange
        y, aux = layer(self.x)
        return [y, aux.loss], aux

    def backward(self, layer: MoE, results: list[Tensor]) -> None:
        torch.autograd.backward(results, [self.dy, None])
        self.x.grad = None
        layer.zero_grad()

    def step(self, layer: MoE, exchange: Exchange | GroupExchange | None = None) -> None:
        self.backward(layer, self.forward(layer, exchange)[0])

    def count(
        self, key: Key, layer: MoE, exchange: Exchange | GroupExchange
    ) -> tuple[list[_Call], list[_Call]]:
        """Records the bytes of a step; returns the all_to_all_single calls of each pass."""
        calls: list[list[_Call]] = [[], []]
        sums: list[list[int]] = [[], []]
        with recorded(calls[0], sums[0]):
            results, aux = self.forward(layer, exchange)
        with recorded(calls[1], sums[1]):
            self.backward(layer, results)
        index, secondary = aux.expert_index, None
        placement = layer.sharding.placement if layer.sharding else None
        if isinstance(exchange, GroupExchange):
            assert isinstance(layer.gate, HierarchicalNoisyTopKGate)
            k2 = layer.gate.k_of_levels[1]
            secondary = layer.gate.experts_per_group, k2
            index = index[:, ::k2] // layer.gate.experts_per_group
            placement = exchange.exchange.placement
        assert placement is not None  # the layer has a process group
        least = exchange_bytes(
            *self.leaving(index, placement),
            self.x.shape[1],
            results[0].shape[1],
            self.x.element_size(),
            key.exchange,
            aux.gates.element_size(),
            secondary,
        )
        self.passes[key] = {}
        for name, called, summed, minimum in zip(PASSES, calls, sums, least, strict=True):
            found = Bytes(minimum=minimum, losses=sum(summed))
            for number, call in enumerate(called):
                first = (name, number) == ("forward", 0)
                kind = "counts" if first else call.kind(self.x.shape[1])
                setattr(found, kind, getattr(found, kind) + call.leaving(self.ranks.rank))
            self.passes[key][name] = found
        return calls[0], calls[1]

    def leaving(self, expert_index: Tensor, placement: ExpertPlacement) -> tuple[int, int]:
        """Returns the numbers of rows and of (token, rank) pairs that leave this rank."""
        home = self.ranks.rank
        owners = [
            {placement.owner(e) for e in experts if placement.owner(e) != home}
            for experts in expert_index.tolist()
        ]
        rows = sum(placement.owner(e) != home for e in expert_index.flatten().tolist())
        return rows, sum(map(len, owners))

    def add_transfers(
        self, size: int, exchange: str, forward: list[_Call], backward: list[_Call]
    ) -> None:
        """Adds the recorded calls without a layer: through `AllToAll`, and in plain torch."""
        group, device = self.ranks.group, self.x.device

        def tensor(call: _Call, number: list[int]) -> Tensor:
            return torch.ones(sum(number), *call.shape, dtype=call.dtype, device=device)

        calls = [*forward, *backward]
        sent = [tensor(call, call.sent) for call in calls]
        received = [tensor(call, call.received) for call in calls]

        def raw() -> None:
            for call, rows, buffer in zip(calls, sent, received, strict=True):
                dist.all_to_all_single(buffer, rows, call.received, call.sent, group=group)

        leaves = [
            rows.clone().requires_grad_(rows.is_floating_point()) for rows in sent[: len(forward)]
        ]

        def transfers() -> None:
            arrived = [
                AllToAll(rows, self.ranks, call.sent, call.received).wait()
                for call, rows in zip(forward, leaves, strict=True)
            ]
            outputs, inputs, grads = zip(
                *(
                    (there, here, grad)
                    for there, here, grad in zip(arrived, leaves, received, strict=False)
                    if there.requires_grad
                ),
                strict=True,
            )
            torch.autograd.grad(outputs, inputs, grads)

        self.functions[Key(size, "transfers", exchange)] = transfers
        self.functions[Key(size, "raw", exchange)] = raw


class Found(NamedTuple):
    """The measurements of one rank: seconds and waiting seconds of each round, bytes, and memory.

    peak_mib is the largest resident set of the process (Linux), all layers included.
    """

    seconds: dict[Key, list[float]]
    waited: dict[Key, list[float]]
    passes: dict[Key, dict[str, Bytes]]
    peak_mib: float


def measure(args: argparse.Namespace) -> list[Found]:
    """Runs the benchmark; returns the measurements of all ranks, on every rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    synchronize = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    torch.manual_seed(rank)
    waiting = _Waiting()
    keys: list[Key] = []
    found = Found({}, {}, {}, 0.0)
    functions: dict[Key, Callable[[], object]] = {}
    for number in args.processes:
        group = dist.new_group(range(number)) if number > 1 else None
        names: list[Any] = [None]
        if rank < number and group != dist.GroupMember.NON_GROUP_MEMBER:
            world = _World(group, args)
            functions |= world.functions
            found.passes.update(world.passes)
            names = [list(world.functions)]
        dist.broadcast_object_list(names)  # rank 0 is in every group
        keys += names[0]
    rounds = range(-args.warm_up, args.rounds)
    for number in progress(rounds, "rounds", "round") if rank == 0 else rounds:
        for key in keys:
            if key in functions and key.what in ("transfers", "raw"):
                functions[key]()
            dist.barrier()
            if key not in functions:
                continue
            waiting.seconds = 0.0
            start = time.perf_counter()
            functions[key]()
            synchronize()
            if number >= 0:
                found.seconds.setdefault(key, []).append(time.perf_counter() - start)
                found.waited.setdefault(key, []).append(waiting.seconds)
    found = found._replace(peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    everything: list[Any] = [None] * size
    dist.all_gather_object(everything, found)
    return everything


# Evaluation


def results_of(everything: Sequence[Found], args: argparse.Namespace) -> list[Result]:
    """Returns a result for each number of ranks, exchange and number of chunks."""
    seconds: dict[Key, list[float]] = {}
    for key in everything[0].seconds:
        of_each = [found.seconds[key] for found in everything if key in found.seconds]
        seconds[key] = [max(each) for each in zip(*of_each, strict=True)]

    def median_ms(key: Key) -> float:
        return 1e3 * statistics.median(seconds[key])

    single = seconds.get(Key(1, "alone"))
    found = []
    for key, each in seconds.items():
        size = key.processes
        if key.what != "step" and key != Key(1, "alone"):
            continue
        alone = Key(size, "alone")
        step_ms = Quartiles.of(1e3 * s for s in each)
        waited = [
            statistics.median(w / s for w, s in zip(f.waited[key], f.seconds[key], strict=True))
            for f in everything
            if key in f.waited
        ]
        result = Result(
            processes=size,
            exchange=key.exchange,
            chunks=key.chunks,
            step_ms=step_ms,
            tokens_per_second=1e3 * size * args.tokens / step_ms.median,
            efficiency=None if single is None else ratio(single, each).median,
            by_alone=ratio(seconds[alone], each),
            waits=statistics.mean(waited),
            alone_ms=median_ms(alone),
        )
        if key.what == "step":
            result.bytes = {name: total(f.passes[key][name] for f in everything if key in f.passes)
                            for name in PASSES}  # fmt: skip
            transfers, raw = (Key(size, what, key.exchange) for what in ("transfers", "raw"))
            if transfers in seconds:
                result.transfers_ms, result.raw_ms = median_ms(transfers), median_ms(raw)
                result.by_raw = ratio(seconds[transfers], seconds[raw])
                first = key._replace(chunks=1)
                moved = [
                    sum(b.rows + b.gates + b.indices + b.counts for b in f.passes[first].values())
                    for f in everything
                    if first in f.passes
                ]
                result.raw_mb_per_second = sum(moved) / result.raw_ms / 1e3
                could = [min(pair) for pair in zip(seconds[transfers], seconds[alone], strict=True)]
                gain = [a - b for a, b in zip(seconds[first], each, strict=True)]
                result.hidden = ratio(gain, could)
        found.append(result)
    return found


def total(each: Iterable[Bytes]) -> Bytes:
    """Returns the sum of the ranks' bytes."""
    return Bytes(*(sum(values) for values in zip(*(asdict(b).values() for b in each), strict=True)))


def quartiles(values: Quartiles | None, form: str, scale: float = 1.0) -> str:
    if values is None:
        return "–"
    low, middle, high = (format(scale * value, form) for value in values)
    return f"{middle} ({low} to {high})"


def print_results(results: Sequence[Result]) -> None:
    header = ["ranks", "exchange", "chunks", "pass", "rows, MB", "gates, MB", "indices, MB"]
    header += ["total / minimum", "counts, kB", "losses, kB"]
    lines = []
    for result in results:
        for name, found in (result.bytes or {}).items():
            moved = found.rows + found.gates + found.indices
            lines.append(
                [
                    *(str(value) for value in (result.processes, result.exchange, result.chunks)),
                    name,
                    *(f"{b / 1e6:.3f}" for b in (found.rows, found.gates, found.indices)),
                    "–" if found.minimum == 0 else f"{moved / found.minimum:.4f}",
                    *(f"{b / 1e3:.2f}" for b in (found.counts, found.losses)),
                ]
            )
    print("\nBytes that a step sends to other ranks, summed over all ranks\n")
    print(markdown_table(header, lines))

    header = ["ranks", "exchange", "transfers, ms", "raw, ms", "raw, MB/s", "transfers / raw"]
    lines = []
    for result in results:
        if result.raw_ms is not None and result.chunks == 1:
            lines.append(
                [
                    str(result.processes),
                    result.exchange,
                    f"{result.transfers_ms:.2f}",
                    f"{result.raw_ms:.2f}",
                    f"{result.raw_mb_per_second:.0f}",
                    quartiles(result.by_raw, ".3f"),
                ]
            )
    print("The all-to-all without the layer: all transfers of a step\n")
    print(markdown_table(header, lines))

    header = ["ranks", "exchange", "chunks", "step, ms", "tokens/s", "efficiency", "alone, ms"]
    header += ["alone / step", "waits", "hidden"]
    lines = []
    for result in results:
        lines.append(
            [
                str(result.processes),
                *((result.exchange, str(result.chunks)) if result.exchange else ("–", "–")),
                quartiles(result.step_ms, ".1f"),
                f"{result.tokens_per_second:,.0f}",
                "–" if result.efficiency is None else f"{result.efficiency:.2f}",
                f"{result.alone_ms:.1f}",
                quartiles(result.by_alone, ".2f"),
                f"{100 * result.waits:.0f}%",
                "–" if result.chunks == 1 else quartiles(result.hidden, ".0f", 100) + " %",
            ]
        )
    print("Steps\n")
    print(markdown_table(header, lines))


def plot(results: Sequence[Result], path: Path, title: str) -> None:
    """Plots tokens/s over the number of ranks, and the parts of a step's time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    speed, share = figure.subplots(1, 2)
    sizes = sorted({result.processes for result in results})
    single = [result.tokens_per_second for result in results if result.processes == 1]
    variants = dict.fromkeys((r.exchange, r.chunks) for r in results if r.exchange)
    for exchange, chunks in variants:
        points = [(1, each) for each in single] + [
            (r.processes, r.tokens_per_second)
            for r in results
            if (r.exchange, r.chunks) == (exchange, chunks)
        ]
        speed.plot(*zip(*points, strict=True), marker="o", label=f"{exchange}, chunks: {chunks}")
    if single:
        speed.plot(sizes, [single[0] * size for size in sizes], "k--", label="linear")
    alone = {r.processes: 1e3 * r.processes / r.alone_ms for r in results}
    tokens = results[0].tokens_per_second * results[0].step_ms.median / results[0].processes / 1e3
    speed.plot(sizes, [tokens * alone[size] for size in sizes], "k:", label="no exchange")
    speed.set(xlabel="ranks", ylabel="tokens/s", xticks=sizes, ylim=(0, None))
    speed.legend(fontsize=8)
    shown = [r for r in results if r.exchange]
    names = [f"{r.processes}: {r.exchange}, {r.chunks}" for r in shown]
    share.barh(names, [r.step_ms.median for r in shown], color="tab:orange", label="waits")
    share.barh(
        names, [r.step_ms.median * (1 - r.waits) for r in shown], color="tab:blue", label="rest"
    )
    share.set(xlabel="step, ms")
    share.invert_yaxis()
    share.legend(fontsize=8)
    figure.suptitle(title, fontsize=8)
    figure.savefig(path, dpi=120)


def launch(
    module: str, arguments: Sequence[str], processes: int, threads: int, bandwidth: float
) -> int:
    """Runs a module under torchrun; returns the status.

    Args:
        module: the name of the module.
        arguments: its command line.
        processes: number of ranks.
        threads: threads of each rank.
        bandwidth: the limit of the link that the ranks share, in MB/s; 0: no limit.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "localhost", "--nproc-per-node", str(processes)]
    command += ["--module", module, *arguments]
    environ = os.environ | {"OMP_NUM_THREADS": str(threads)}
    if bandwidth:
        # A token bucket limits the rate; its queue is large enough that no packet is dropped.
        limit = f"rate {8 * bandwidth:.0f}mbit burst 256kb limit 1gb"
        set_up = f"ip link set lo up && tc qdisc add dev lo root tbf {limit}"
        command = ["unshare", "--net", "sh", "-c", f'{set_up} && exec "$@"', "sh", *command]
        environ["GLOO_SOCKET_IFNAME"] = "lo"
    return subprocess.run(command, env=environ).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--processes", type=at_least(1), nargs="+", default=[1, 2, 4])
    parser.add_argument(
        "--exchanges",
        nargs="+",
        choices=[*_UNITS, _GROUPS],
        help="default: rows and tokens; with --group-size also groups",
    )
    parser.add_argument(
        "--group-size",
        type=at_least(0),
        default=0,
        help="experts in a group of a hierarchical layer (0: a flat layer)",
    )
    parser.add_argument(
        "--chunks",
        type=at_least(1),
        nargs="+",
        default=[1, 2, 4],
        help="numbers of chunks; must include 1",
    )
    parser.add_argument("--tokens", type=at_least(1), default=1024, help="tokens per rank")
    parser.add_argument("--experts", type=at_least(1), default=8, help="experts per rank")
    parser.add_argument("--k", type=at_least(1), default=4)
    parser.add_argument("--width", type=at_least(1), default=512)
    parser.add_argument("--hidden", type=at_least(1), default=1024)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=at_least(1), default=1, help="threads per rank")
    parser.add_argument("--rounds", type=at_least(2), default=15)
    parser.add_argument(
        "--warm-up", type=at_least(0), default=2, help="number of untimed rounds at the start"
    )
    parser.add_argument(
        "--bandwidth",
        type=float,
        default=0,
        help="limit of the loopback network in MB/s (0: no limit)",
    )
    parser.add_argument(
        "--compute-ms",
        type=float,
        default=0,
        help="ms per step that experts sleep (0: experts compute)",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args(arguments)
    if args.exchanges is None:
        args.exchanges = [*_UNITS, _GROUPS] if args.group_size else _UNITS
    if args.group_size == 0 and _GROUPS in args.exchanges:
        parser.error("--exchanges groups needs --group-size")
    if args.group_size and args.experts % args.group_size:
        parser.error(
            f"--experts must be a multiple of --group-size = {args.group_size}, got {args.experts}"
        )
    if not dist.is_torchelastic_launched():
        given = sys.argv[1:] if arguments is None else arguments
        name = "moe_ext.lab.benchmarks.distributed"
        return launch(name, given, max(args.processes), args.threads, args.bandwidth)

    torch.set_num_threads(args.threads)
    if args.dtype == "bfloat16":
        avoid_missing_amx()
    keep_freed_memory()
    dist.init_process_group(
        {"cpu": "gloo", "cuda": "nccl"}[args.device], timeout=timedelta(minutes=2)
    )
    everything = measure(args)
    if dist.get_rank() == 0:
        results = results_of(everything, args)
        link = f"{args.bandwidth:g} MB/s shared by all ranks" if args.bandwidth else "not limited"
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
            record = {
                "environment": title,
                "arguments": options_as_text(args),
                "results": [asdict(result) for result in results],
            }
            write_json(args.json, record)
        if args.plot:
            plot(results, args.plot, title)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
