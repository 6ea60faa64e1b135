"""Measures expert parallelism on one rank: the layers, their transfers and the rounds."""

import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ext import Experts, HierarchicalMoE, HierarchicalNoisyTopKGate, MoE, MoEAux
from moe_ext.distributed import AllToAll, ExpertParallel, ExpertPlacement, Placement, Ranks
from moe_lab.analysis.cluster import exchange_bytes
from moe_lab.benchmarks.cases import GROUPS, NODES, UNITS
from moe_lab.progress import progress

PASSES = ("forward", "backward")
# Sent in a pass, by kind. "between" are those of rows, slots and counts to ranks of other nodes.
BYTES = ("rows", "slots", "minimum", "counts", "losses", "between")


class Key(NamedTuple):
    """A timed function: "alone", "transfers", "raw" or "step", at a number of ranks."""

    processes: int
    what: str
    exchange: str = ""
    chunks: int = 1


class RankTimes(NamedTuple):
    """The measurements of one rank: seconds and waiting seconds of the rounds, bytes by pass."""

    seconds: dict[Key, list[float]]
    waited: dict[Key, list[float]]
    passes: dict[Key, dict[str, dict[str, float]]]
    peak_mib: float  # the largest resident set of the process (Linux), all layers included


class Call(NamedTuple):
    """One call of all_to_all_single by one rank."""

    dtype: torch.dtype
    shape: tuple[int, ...]  # of a row
    sent: list[int]
    received: list[int]
    peers: Sequence[int]  # torch's numbers of the ranks of the group

    def kind(self, width: int) -> str:
        """Returns "counts" of rows, "rows" of the width of x, or "slots": gates, noise, indices."""
        if self.dtype == torch.int64:
            return "counts"
        is_rows = self.dtype.is_floating_point and self.shape == (width,)
        return "rows" if is_rows else "slots"

    def leaving(self, ranks_per_node: int = 1) -> int:
        """Returns the bytes that this rank sends to ranks of other nodes in this call."""
        node = dist.get_rank() // ranks_per_node
        pairs = zip(self.sent, self.peers, strict=True)
        number = sum(number for number, peer in pairs if peer // ranks_per_node != node)
        return number * self.dtype.itemsize * int(torch.Size(self.shape).numel())


@contextlib.contextmanager
def recorded(calls: list[Call], sums: list[int]) -> Iterator[None]:
    """Adds the all_to_all_single calls of the block to `calls`, all_reduce bytes to `sums`."""
    all_to_all_single, all_reduce = dist.all_to_all_single, dist.all_reduce

    def note_call(output: Tensor, input: Tensor, received: Any, sent: Any, **options: Any) -> Any:
        shape, peers = tuple(input.shape[1:]), dist.get_process_group_ranks(options.get("group"))
        calls.append(Call(input.dtype, shape, list(sent), list(received), peers))
        return all_to_all_single(output, input, received, sent, **options)

    def note_sum(tensor: Tensor, *options: Any, **more: Any) -> Any:
        sums.append(tensor.nbytes)
        return all_reduce(tensor, *options, **more)

    with (
        patch.object(dist, "all_to_all_single", note_call),
        patch.object(dist, "all_reduce", note_sum),
    ):
        yield


@contextlib.contextmanager
def process_group(args: Any) -> Iterator[int]:
    """Sets up the rank that torchrun started, and yields its number."""
    torch.set_num_threads(args.threads)
    backend = "nccl" if getattr(args, "device", "cpu") == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=2))
    yield dist.get_rank()
    dist.destroy_process_group()


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


def _make_layer(args: Any, group: dist.ProcessGroup | None, exchange: str, chunks: int) -> MoE:
    size = 1 if group is None else dist.get_world_size(group)
    experts, b = args.experts * size, args.group_size
    k = min(args.k, experts // max(b, 1), b or experts)
    options: dict[str, Any] = {"hidden_sizes": [args.hidden]}
    if args.compute_ms:
        rows = args.tokens * (k * k if b else k)
        options = {"experts": _Resting(args.experts, args.compute_ms / 1e3 / rows)}
    if group is not None:
        unit: Any = exchange if exchange in UNITS else "rows"
        placement: Placement = "groups" if exchange == GROUPS else "experts"
        options["parallel"] = ExpertParallel(
            group, exchange=unit, num_chunks=chunks, placement=placement
        )
    sizes = (experts // b, b, k) if b else (experts, k)
    layer = (HierarchicalMoE if b else MoE)(args.width, *sizes, **options)
    return layer.to(args.device, getattr(torch, args.dtype))


class _World:
    """The layers of one rank in a process group, and the functions whose run time is measured."""

    def __init__(self, group: dist.ProcessGroup | None, args: Any) -> None:
        self.ranks = Ranks(group)
        size, dtype = self.ranks.size, getattr(torch, args.dtype)
        self.x = torch.randn(args.tokens, args.width, device=args.device, dtype=dtype)
        self.x.requires_grad_()
        self.dy = torch.randn_like(self.x) / args.tokens
        self.passes: dict[Key, dict[str, dict[str, float]]] = {}
        alone = partial(self.step, _make_layer(args, None, "", 1))
        self.functions: dict[Key, Callable[[], object]] = {Key(size, "alone"): alone}
        for exchange in args.exchanges if size > 1 else ():
            for chunks in args.chunks:
                key = Key(size, "step", exchange, chunks)
                layer = _make_layer(args, group, exchange, chunks)
                calls = self.count(key, layer)
                self.functions[key] = partial(self.step, layer)
                if chunks == 1 and exchange != NODES:
                    self.add_transfers(size, exchange, *calls)

    def backward(self, layer: MoE, y: Tensor, aux: MoEAux) -> None:
        torch.autograd.backward([y, aux.loss], [self.dy, None])
        self.x.grad = None
        layer.zero_grad()

    def step(self, layer: MoE) -> None:
        self.backward(layer, *layer(self.x))

    def count(self, key: Key, layer: MoE) -> tuple[list[Call], list[Call]]:
        """Records the bytes of a step; returns the all_to_all_single calls of each pass."""
        calls: tuple[list[Call], list[Call]] = [], []
        sums: tuple[list[int], list[int]] = [], []
        with recorded(calls[0], sums[0]):
            y, aux = layer(self.x)
        with recorded(calls[1], sums[1]):
            self.backward(layer, y, aux)
        index, secondary = aux.expert_index, None
        assert layer.sharding is not None
        placement, groups = layer.sharding.placement, layer.sharding.group_exchange
        if groups is not None:
            assert isinstance(layer.gate, HierarchicalNoisyTopKGate)
            k2 = layer.gate.k_of_levels[1]
            secondary = layer.gate.experts_per_group, k2
            index = index[:, ::k2] // layer.gate.experts_per_group
            placement = groups.exchange.placement
        sizes = self.x.shape[1], y.shape[1], self.x.element_size()
        leaving = self.leaving(index, placement)
        gate_bytes = aux.gates.element_size()
        least: Sequence[float] = 0, 0
        if key.exchange != NODES:
            least = exchange_bytes(*leaving, *sizes, key.exchange, gate_bytes, secondary)
        per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        self.passes[key] = {}
        for name, called, summed, minimum in zip(PASSES, calls, sums, least, strict=True):
            counted: dict[str, float] = dict.fromkeys(BYTES, 0)
            counted |= {"minimum": minimum, "losses": sum(summed)}
            for call in called:
                counted[call.kind(self.x.shape[1])] += call.leaving()
                counted["between"] += call.leaving(per_node)
            self.passes[key][name] = counted
        return calls

    def leaving(self, expert_index: Tensor, placement: ExpertPlacement) -> tuple[int, int]:
        """Returns the numbers of rows and of (token, rank) pairs that leave this rank."""
        owners = [[placement.owner(e) for e in experts] for experts in expert_index.tolist()]
        remote_owners = [[owner for owner in ranks if owner != self.ranks.rank] for ranks in owners]
        return sum(map(len, remote_owners)), sum(len(set(ranks)) for ranks in remote_owners)

    def add_transfers(
        self, size: int, exchange: str, forward: list[Call], backward: list[Call]
    ) -> None:
        """Adds the recorded calls without a layer: through `AllToAll`, and in plain torch."""

        def tensor(call: Call, number: list[int]) -> Tensor:
            shape = sum(number), *call.shape
            return torch.ones(shape, dtype=call.dtype, device=self.x.device)

        calls = [*forward, *backward]
        sent = [tensor(call, call.sent) for call in calls]
        received = [tensor(call, call.received) for call in calls]
        leaves = [
            rows.clone().requires_grad_(rows.is_floating_point()) for rows in sent[: len(forward)]
        ]

        def raw() -> None:
            for call, rows, buffer in zip(calls, sent, received, strict=True):
                sizes = call.received, call.sent
                dist.all_to_all_single(buffer, rows, *sizes, group=self.ranks.group)

        def transfers() -> None:
            arrived = [
                AllToAll(rows, self.ranks, call.sent, call.received).wait()
                for call, rows in zip(forward, leaves, strict=True)
            ]
            trios = zip(arrived, leaves, received, strict=False)
            outputs, inputs, grads = zip(*(t for t in trios if t[0].requires_grad), strict=True)
            torch.autograd.grad(outputs, inputs, grads)

        self.functions[Key(size, "transfers", exchange)] = transfers
        self.functions[Key(size, "raw", exchange)] = raw


class _Waiting:
    """Adds up the seconds that this rank waits for transfers."""

    def __init__(self) -> None:
        self.seconds = 0.0
        finish = AllToAll.finish

        def timed(transfer: AllToAll, back: bool = False) -> list[Tensor]:
            start = time.perf_counter()
            values = finish(transfer, back)
            self.seconds += time.perf_counter() - start
            return values

        patch.object(AllToAll, "finish", timed).start()


def measure(args: Any) -> list[RankTimes]:
    """Runs the benchmark; returns the measurements of all ranks, on every rank."""
    rank = dist.get_rank()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    synchronize = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    torch.manual_seed(rank)
    waiting = _Waiting()
    keys: list[Key] = []
    times = RankTimes({}, {}, {}, 0.0)
    functions: dict[Key, Callable[[], object]] = {}
    for number in args.processes:
        group = dist.new_group(range(number)) if number > 1 else None
        names: list[Any] = [None]
        if rank < number and group != dist.GroupMember.NON_GROUP_MEMBER:
            world = _World(group, args)
            functions |= world.functions
            times.passes.update(world.passes)
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
            waiting.seconds, start = 0.0, time.perf_counter()
            functions[key]()
            synchronize()
            if number >= 0:
                times.seconds.setdefault(key, []).append(time.perf_counter() - start)
                times.waited.setdefault(key, []).append(waiting.seconds)
    times = times._replace(peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, times)
    return everything
