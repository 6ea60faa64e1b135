"""Measures expert parallelism on one rank: the layers, their transfers and the rounds."""

import argparse
import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
from moe_lab.analysis.cluster import exchange_bytes
from moe_lab.progress import progress

__all__ = ["GROUPS", "PASSES", "UNITS", "Bytes", "Found", "Key", "measure"]

PASSES = ("forward", "backward")
UNITS = list(get_args(ExchangeUnit))
GROUPS = "groups"  # the exchange of placement="groups"


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
            name: "groups" if name == GROUPS else "experts" for name in args.exchanges
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
