"""How the ranks of a process group share the experts of a layer (Sec. 3.1)."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from moe_ext._compiled import uncompiled, unwrapped_module
from moe_ext.checks import require, require_one_of, require_sizes
from moe_ext.dispatch._exchange import Exchange, ExchangeUnit
from moe_ext.dispatch._group_exchange import GroupExchange
from moe_ext.dispatch._node_exchange import NodeExchange
from moe_ext.experts import Experts, FeedForwardExperts, ModuleExperts
from moe_ext.gates import Gate, HierarchicalGate
from moe_ext.ranks._membership import require_group
from moe_ext.ranks._rows import scale_grad
from moe_ext.ranks._whole import require_whole
from moe_ext.ranks.collectives import Ranks
from moe_ext.ranks.layout import Layout
from moe_ext.ranks.placement import ExpertPlacement

__all__ = ["Balance", "ExpertParallel", "ExpertSharding", "Placement"]

Balance = Literal["global", "local"]
Placement = Literal["experts", "groups"]


@dataclass(frozen=True)
class ExpertParallel:
    """Holds the options for experts that are sharded over ranks: ``MoE(..., parallel=...)``.

    Args:
        process_group: the ranks that share the experts; None: only this rank. A two-dimensional
            DeviceMesh replicates the experts along its first dimension and shards them along its
            second. A one-dimensional DeviceMesh stands for its process group.
        balance: "global" sums importance and load over the ranks before the losses. "local" lets
            every rank balance its own tokens. A strictly balanced gate requires "global"; otherwise
            its thresholds would differ between ranks.
        exchange: the unit that is sent between ranks, "rows" or "tokens"; see `Exchange`. "nodes"
            sends each token once to each node, then within the node; see `NodeExchange`.
        ranks_per_node: with exchange="nodes", the number of ranks of each node, of those that share
            the experts. Consecutive ranks are on the same node. None: LOCAL_WORLD_SIZE of torchrun.
        num_chunks: number of chunks of each rank's experts, of its groups, or with
            exchange="tokens" of its tokens. Each chunk is computed while rows of other chunks are
            sent; see `Exchange`.
        placement: the parts of a rank. "experts": whole groups of experts; every rank has all
            gates. "groups": whole groups with their secondary gates; see `GroupExchange`. Each
            token is then sent once, for any `exchange`. None: "groups" for a `HierarchicalGate`
            with balance="global", else "experts".

    Raises:
        ValueError: an option is out of range, or process_group does not contain this rank.
        TypeError: process_group has the wrong type.
    """

    process_group: ProcessGroup | DeviceMesh | None
    balance: Balance = "global"
    exchange: ExchangeUnit | Literal["nodes"] = "rows"
    num_chunks: int = 1
    placement: Placement | None = None
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        require_group("ExpertParallel: process_group", self.process_group)
        for name, names in (
            ("balance", get_args(Balance)),
            ("exchange", (*get_args(ExchangeUnit), "nodes")),
            ("placement", (*get_args(Placement), None)),
        ):
            require_one_of(f"ExpertParallel: {name}", names, getattr(self, name))
        (num_chunks,) = require_sizes("ExpertParallel", num_chunks=self.num_chunks)
        object.__setattr__(self, "num_chunks", num_chunks)  # an int
        ranks_per_node, name = self.ranks_per_node, "ExpertParallel: ranks_per_node"
        if self.exchange != "nodes":
            require(
                ranks_per_node is None, name, 'be None without exchange="nodes"', ranks_per_node
            )
            return
        if ranks_per_node is None:
            local = os.environ.get("LOCAL_WORLD_SIZE")
            require(local is not None, name, "be given without LOCAL_WORLD_SIZE of torchrun", None)
            ranks_per_node = int(local or 1)
        (ranks_per_node,) = require_sizes("ExpertParallel", ranks_per_node=ranks_per_node)
        object.__setattr__(self, "ranks_per_node", ranks_per_node)


def parallel_options(
    owner: str, process_group: ProcessGroup | DeviceMesh | None, parallel: ExpertParallel | None
) -> ExpertParallel | None:
    """Returns the options of a layer that takes process_group or parallel.

    Raises:
        ValueError: both are given.
        TypeError: parallel has the wrong type.
    """
    if process_group is not None:
        rule = "be None when process_group is given"
        require(parallel is None, f"{owner}: parallel", rule, parallel)
        return ExpertParallel(process_group)
    if not isinstance(parallel, ExpertParallel | None):
        kind = type(parallel).__name__
        raise TypeError(f"{owner}: parallel must be an ExpertParallel, got {kind}")
    return parallel


class ExpertSharding:
    """Shards the experts of one layer over ranks.

    Args:
        options: how ranks share the experts of the layer.
        gate: the gate of the layer.
        num_experts: the number of experts with weights: the first ones of the gate's experts.

    Attributes:
        layout: the `Layout` of the ranks.
        placement: the assignment of experts to ranks.
        local_experts: the indices of this rank's experts.
        balanced: the ranks that balance their tokens together; None: only this rank.
        exchange: sends tokens to their experts, or to their groups with group_exchange; None: this
            rank has all experts.
        group_exchange: computes the mixture by groups; None: the placement is not "groups", or
            this rank has all experts.
        has_dtensors: whether the parameters of the experts are DTensors; see
            `moe_ext.distributed.distribute_experts`.

    Raises:
        ValueError: the gate does not support the options.
    """

    has_dtensors: bool = False

    def __init__(self, options: ExpertParallel, gate: Gate, num_experts: int) -> None:
        self.layout: Layout = Layout.of(options.process_group, "ExpertParallel")
        ranks = self.layout.expert_parallel
        self.placement: ExpertPlacement = ExpertPlacement(
            num_experts, ranks.size, gate.experts_per_group
        )
        self.local_experts: range = self.placement.experts_of(ranks.rank)
        several = self.layout.world.size > 1
        local = options.balance == "local"
        require(
            not (several and local and gate.routes_by_batch),
            "ExpertParallel: balance",
            'be "global" for a gate with routes_by_batch = True',
            options.balance,
        )
        self.balanced: Ranks | None = self.layout.world if several and not local else None
        self.exchange: Exchange | None = None
        self.group_exchange: GroupExchange | None = None
        by_groups = options.placement == "groups"
        name = "ExpertParallel: placement"
        rule = f'be "experts" for {type(gate).__name__}, which ranks cannot share by groups'
        require(gate.shares_groups or not by_groups, name, rule, options.placement)
        rule = 'be "experts" with balance="local"'
        require(not (local and by_groups), name, rule, options.placement)
        if options.placement is None:
            by_groups = gate.shares_groups and not local
        by_nodes = options.exchange == "nodes"
        rule = 'be "experts" with exchange="nodes"'
        require(not (by_groups and by_nodes), name, rule, options.placement)
        sends = f"exchange={options.exchange!r}"
        if options.ranks_per_node is not None:
            sends += f", ranks_per_node={options.ranks_per_node}"
        if by_groups:
            sends = 'placement="groups"'
        # Text for the repr. A layer can be copied; a process group cannot.
        self._options = f"balance={options.balance!r}, {sends}, num_chunks={options.num_chunks}"
        if ranks.size == 1:
            return
        _refuse_replicas()
        if not by_groups:
            self.exchange = _make_exchange(options, self.placement, ranks)
            return
        groups = ExpertPlacement(num_experts // gate.experts_per_group, ranks.size)
        replicas = self.layout.replicas
        self.group_exchange = GroupExchange(groups, ranks, options.num_chunks, replicas)
        self.exchange = self.group_exchange.exchange

    @property
    def local_groups(self) -> range | None:
        """The groups of this rank; None without group_exchange."""
        if self.group_exchange is None:
            return None
        exchange = self.group_exchange.exchange
        return exchange.placement.experts_of(exchange.ranks.rank)

    def gather_rows(self, values: Tensor) -> Tensor:
        """Gathers the rows of all experts, [E, ...], from the rows of each rank's experts.

        The gradient of values is that of the mean of the ranks' losses, like that of an exchange.
        """
        ranks = self.layout.expert_parallel
        if torch.is_grad_enabled() and ranks.size > 1 and not values.requires_grad:
            # For frozen experts too: all ranks must run backward together.
            values = values.detach().requires_grad_()
        return ranks.gather_rows(scale_grad(values, 1 / ranks.size), self.placement.counts)

    def require_experts(self, experts: object) -> None:
        """Checks that the experts support the options of the layer, equally on all ranks.

        Raises:
            ValueError: a chunk of some rank would have no module, or the experts cannot be split.
        """
        if self.exchange is None:
            return
        chunks_tokens = self.exchange.chunks_of == "tokens"
        num_chunks = 1 if chunks_tokens else self.exchange.num_chunks
        if isinstance(experts, ModuleExperts | nn.ModuleList | Sequence):
            placement = self.exchange.placement
            unit = "expert" if self.group_exchange is None else "group"
            require(
                min(placement.counts) >= num_chunks,
                f"MoE: num_{unit}s",
                f"be at least {placement.num_ranks * num_chunks} (one {unit} for each chunk of "
                "each rank)",
                placement.num_experts,
            )
        elif isinstance(experts, Experts):
            require(
                num_chunks == 1 or experts.can_split,
                "ExpertParallel: num_chunks",
                "be 1 for experts without split(sizes)",
                num_chunks,
            )

    def options_of(self, gate: nn.Module, experts: nn.Module) -> dict[str, object]:
        """Returns options of a layer's parts that must agree on all ranks, by name."""
        gate, own = uncompiled(gate), self._parameters_of_own_gates(gate)
        replicated = [(n, p) for n, p in gate.named_parameters() if n.rsplit(".")[-1] not in own]
        return {
            "gate": gate,
            "the trained parameters of the gate": [n for n, p in replicated if p.requires_grad],
            "experts": _text_of(unwrapped_module(experts)),
            "parallel": self._options,
        }

    def _parameters_of_own_gates(self, gate: nn.Module) -> tuple[str, ...]:
        """Returns the names of the gate's parameters that each rank has for its groups alone."""
        if self.group_exchange is None:
            return ()
        return cast(HierarchicalGate, uncompiled(gate)).secondary_parameters

    def require_whole(self, experts: nn.Module, gate: nn.Module) -> None:
        """Raises ValueError if fully_shard has mixed the experts of the ranks, or their gates."""
        if self.has_dtensors:  # fully_shard does not take the parts of a DTensor for replicas
            return
        names = self._parameters_of_own_gates(gate)
        gates = ((n, p) for n, p in gate.named_parameters("gate") if n.rsplit(".")[-1] in names)
        parameters = chain(experts.named_parameters("experts"), gates)
        require_whole(parameters, self.layout.expert_parallel)

    def __repr__(self) -> str:
        local, total = self.local_experts, self.placement.num_experts
        experts = f"experts {local.start}-{local.stop - 1}" if local else "no experts"
        return f"{experts} of {total}, {self._options}"


def _make_exchange(options: ExpertParallel, placement: ExpertPlacement, ranks: Ranks) -> Exchange:
    """Makes the exchange of a layer whose ranks share single experts."""
    unit, per_node = options.exchange, options.ranks_per_node
    if unit == "nodes":
        assert per_node is not None
        if 1 < per_node < ranks.size:
            return NodeExchange(placement, ranks, per_node, options.num_chunks)
        unit = "tokens"  # a single node, or nodes of one rank
    return Exchange(placement, ranks, unit, options.num_chunks)


def _text_of(experts: nn.Module) -> str:
    """Describes experts without their number, which differs between ranks."""
    text = type(experts).__name__
    if isinstance(experts, ModuleExperts):
        return text  # each rank may have modules of its own
    if isinstance(experts, FeedForwardExperts):
        text += f" with {experts.activation}{experts.activation_args or ''}"
    shapes = (f"{n} {list(p.shape[1:])} {p.dtype}" for n, p in experts.named_parameters())
    return f"{text}: {', '.join(shapes)}"


@cache
def _refuse_replicas() -> None:
    """Makes DistributedDataParallel refuse to treat different experts as replicas, from now on.

    It would overwrite the experts of all ranks by those of rank 0 before the first forward pass.
    """

    def check(wrapper: nn.Module, name: str, model: nn.Module | None) -> None:
        if not isinstance(wrapper, DistributedDataParallel) or model is None:
            return
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())  # of `parallelize`
        names = {param: name for name, param in model.named_parameters() if name not in ignored}
        group = {*dist.get_process_group_ranks(wrapper.process_group)}
        for layer in model.modules():
            sharding = getattr(layer, "sharding", None)
            if not isinstance(sharding, ExpertSharding) or sharding.exchange is None:
                continue
            sharded = {*dist.get_process_group_ranks(sharding.layout.expert_parallel.group)}
            experts = layer.get_submodule("experts")
            replicated = [names[p] for p in experts.parameters() if p in names]
            require(
                len(group & sharded) == 1 or not replicated,
                "DistributedDataParallel: module",
                "have no experts that are sharded over its ranks, which it would overwrite by "
                "those of one rank (use moe_ext.distributed.parallelize)",
                ", ".join(replicated),
            )

    register_module_module_registration_hook(check)
