"""How the ranks of a process group share the experts of a layer (Sec. 3.1)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from moe_ext.checks import require, require_sizes
from moe_ext.distributed.exchange import Exchange, ExchangeUnit
from moe_ext.distributed.placement import ExpertPlacement
from moe_ext.distributed.ranks import Ranks
from moe_ext.experts import Experts, ModuleExperts
from moe_ext.gates import Gate

__all__ = ["Balance", "ExpertParallel", "ExpertSharding", "Layout"]

Balance = Literal["global", "local"]


class Layout(NamedTuple):
    """How the ranks that train together divide a layer.

    Attributes:
        world: all of them, each with tokens of its own.
        expert_parallel: those that share the experts; the exchange is among them.
        replicas: those that have the same experts as this one.
    """

    world: Ranks
    expert_parallel: Ranks
    replicas: Ranks

    @classmethod
    def of(cls, group: ProcessGroup | DeviceMesh | None) -> "Layout":
        """Of a process group, all of which share the experts, or of a mesh of
        [replicas, expert_parallel].

        Raises:
            ValueError: the mesh has more than two dimensions, or two without names.
        """
        if not isinstance(group, DeviceMesh):
            ranks = Ranks(group)
            return cls(ranks, ranks, Ranks())
        name = "Layout: process_group"
        require(group.ndim <= 2, name, "be a mesh of 1 or 2 dimensions", group.ndim)
        if group.ndim == 1:
            return cls.of(group.get_group())
        names = group.mesh_dim_names
        require(names is not None, name, "be a mesh with mesh_dim_names", names)
        world = group._flatten().get_group()
        return cls(*map(Ranks, (world, group.get_group(1), group.get_group(0))))


@dataclass(frozen=True)
class ExpertParallel:
    """The options of a layer whose experts are shared by ranks: `MoE(..., parallel=...)`.

    Args:
        process_group: the ranks that share the experts; None: this process alone. A DeviceMesh of
            two dimensions has replicas of the experts along the first and shards them along the
            second; one of one dimension is its group.
        balance: "global": importance and load are summed over the ranks before the losses;
            "local": every rank balances its own tokens. A strictly balanced gate needs "global",
            because its thresholds would differ between the ranks.
        exchange: what is sent between ranks, "rows" or "tokens"; see `Exchange`.
        num_chunks: how many chunks of experts each rank computes one after the other, while the
            rows of other chunks are on their way; see `Exchange`.

    Raises:
        ValueError: an option is out of range.
    """

    process_group: ProcessGroup | DeviceMesh | None
    balance: Balance = "global"
    exchange: ExchangeUnit = "rows"
    num_chunks: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.process_group, ProcessGroup | DeviceMesh | None):
            kind = type(self.process_group).__name__
            rule = "be a ProcessGroup, a DeviceMesh or None"
            raise TypeError(f"ExpertParallel: process_group must {rule}, got {kind}")
        for name, names in (("balance", get_args(Balance)), ("exchange", get_args(ExchangeUnit))):
            value = getattr(self, name)
            require(
                value in names, f"ExpertParallel: {name}", f"be one of {', '.join(names)}", value
            )
        require_sizes("ExpertParallel", num_chunks=self.num_chunks)


class ExpertSharding:
    """The experts of one layer, divided over ranks.

    Args:
        options: how they are divided.
        gate: of the layer.

    Attributes:
        layout: the ranks, by what they share.
        placement: which experts each rank has.
        local_experts: the experts of this rank.
        balanced: the ranks whose tokens are balanced together; None: this rank alone.
        exchange: sends tokens to their experts; None: this rank has all experts.

    Raises:
        ValueError: the gate does not work with the balance.
    """

    def __init__(self, options: ExpertParallel, gate: Gate) -> None:
        # As text, for the repr: a layer is copied, and a process group cannot be.
        self._options = (
            f"balance={options.balance!r}, exchange={options.exchange!r}, "
            f"num_chunks={options.num_chunks}"
        )
        self.layout = Layout.of(options.process_group)
        ranks = self.layout.expert_parallel
        self.placement = ExpertPlacement(gate.num_experts, ranks.size, gate.experts_per_group)
        self.local_experts = self.placement.experts_of(ranks.rank)
        several = self.layout.world.size > 1
        local = options.balance == "local"
        require(
            not (several and local and gate.routes_by_batch),
            "ExpertParallel: balance",
            'be "global" for a gate with routes_by_batch = True',
            options.balance,
        )
        self.balanced = self.layout.world if several and not local else None
        self.exchange = None
        if ranks.size > 1:
            self.exchange = Exchange(self.placement, ranks, options.exchange, options.num_chunks)

    def require_experts(self, experts: object) -> None:
        """Checks, alike on all ranks, that these experts can be divided as the options say.

        Raises:
            ValueError: a chunk of some rank would have no module, or the experts cannot be split.
        """
        if self.exchange is None:
            return
        num_chunks = self.exchange.num_chunks
        if isinstance(experts, ModuleExperts | nn.ModuleList | Sequence):
            least = self.placement.num_ranks * num_chunks
            require(
                min(self.placement.counts) >= num_chunks,
                "MoE: num_experts",
                f"be at least {least} where experts are modules, one for each chunk of each rank",
                self.placement.num_experts,
            )
        elif isinstance(experts, Experts):
            require(
                num_chunks == 1 or experts.can_split,
                "ExpertParallel: num_chunks",
                "be 1 for experts that have no split(sizes)",
                num_chunks,
            )

    def __repr__(self) -> str:
        here, total = self.local_experts, self.placement.num_experts
        experts = f"experts {here.start}-{here.stop - 1}" if here else "no experts"
        return f"{experts} of {total}, {self._options}"
