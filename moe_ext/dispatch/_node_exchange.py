"""Expert parallelism over nodes with a slow network between them: two exchanges, one in the other.

A node is a group of ranks with fast links, such as the GPUs of a machine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.checks import require
from moe_ext.dispatch._exchange import Exchange, Received
from moe_ext.ranks._process_groups import timeout_of
from moe_ext.ranks._rows import scale_grad
from moe_ext.ranks.collectives import Ranks
from moe_ext.ranks.placement import ExpertPlacement

__all__ = ["NodeExchange"]

# The groups of each rank between the nodes and within its node: process groups are costly.
_groups: WeakKeyDictionary[ProcessGroup, dict[int, tuple[Ranks, Ranks]]] = WeakKeyDictionary()


@dataclass(frozen=True)
class _BlockPlacement(ExpertPlacement):
    """Assigns the given blocks of experts to ranks, or to nodes."""

    blocks: tuple[range, ...] = ()

    def experts_of(self, rank: int) -> range:
        return self.blocks[rank]


class NodeExchange(Exchange):
    """Computes the mixture of experts that are sharded over the ranks of several nodes.

    1. an exchange between the nodes sends each token at most once to each node: to the rank that
       has the same place in the node as the rank of the token
    2. an exchange within the node sends the token at most once to each rank with one of its experts
    3. the sums of the experts' outputs return the same way, one for each (token, node) pair

    Both exchanges send tokens, as `Exchange` does with unit="tokens". Compared with it, fewer bytes
    pass between nodes, and each transfer is done twice. The summation order differs, so outputs
    agree to rounding.

    Args:
        placement, ranks: see `Exchange`. Consecutive ranks are on the same node.
        ranks_per_node: the number of ranks of each node.
        num_chunks: number of chunks of each rank's tokens; one chunk is sent between nodes while
            another one is sent within nodes or computed.

    Raises:
        ValueError: ranks_per_node does not divide the number of ranks.
    """

    def __init__(
        self, placement: ExpertPlacement, ranks: Ranks, ranks_per_node: int, num_chunks: int = 1
    ) -> None:
        super().__init__(placement, ranks, "tokens", num_chunks)
        rule = f"divide the number of ranks, {ranks.size}"
        divides = ranks.size % ranks_per_node == 0
        require(divides, "NodeExchange: ranks_per_node", rule, ranks_per_node)
        owned = [placement.experts_of(rank) for rank in range(ranks.size)]
        firsts = range(0, ranks.size, ranks_per_node)
        nodes = [range(owned[r].start, owned[r + ranks_per_node - 1].stop) for r in firsts]
        node = ranks.rank // ranks_per_node
        node_blocks = owned[node * ranks_per_node :][:ranks_per_node]
        own = [range(e.start - nodes[node].start, e.stop - nodes[node].start) for e in node_blocks]
        between, within = _groups_of_nodes(ranks, ranks_per_node)
        self.between: Exchange = Exchange(
            _BlockPlacement(placement.num_experts, len(nodes), blocks=tuple(nodes)),
            between,
            "tokens",
            num_chunks,
            "sum",
        )
        self.within: Exchange = Exchange(
            _BlockPlacement(len(nodes[node]), ranks_per_node, blocks=tuple(own)),
            within,
            "tokens",
            reduction="sum",
        )

    def run(
        self,
        x: Tensor,
        gates: Tensor,
        expert_index: Tensor,
        token_offsets: Tensor | None,
        compute: Callable[[int, Received], tuple[Tensor, Sequence[Tensor]]],
        values: Sequence[Tensor] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        """Sends the tokens to the owners of their experts; see `Exchange.run`."""
        require(values is None, "NodeExchange: values", "be None", values)

        def forward(chunk: int, received: Received) -> tuple[Tensor, Sequence[Tensor]]:
            slots = received.gates, received.expert_index, received.token_offsets
            y, _, _ = self.within.run(received.x, *slots, lambda _, local: compute(chunk, local))
            return y, ()

        # From here to y, gradients are those that the experts need.
        x, gates = scale_grad(x, self.factor), scale_grad(gates, self.factor)
        slots = gates, expert_index, token_offsets
        y, tokens_per_expert, _ = self.between.run(x, *slots, forward, meanwhile=meanwhile)
        return scale_grad(y, 1 / self.factor), tokens_per_expert, ()


def _groups_of_nodes(ranks: Ranks, ranks_per_node: int) -> tuple[Ranks, Ranks]:
    """Returns the ranks with this rank's place in each node, and the ranks of its node.

    All ranks must call this function together. Layers share the groups.
    """
    assert ranks.group is not None
    groups_of_size = _groups.setdefault(ranks.group, {})
    if ranks_per_node not in groups_of_size:
        members = dist.get_process_group_ranks(ranks.group)
        node, place = divmod(ranks.rank, ranks_per_node)
        members_of_groups = (
            members[place::ranks_per_node],
            members[node * ranks_per_node : (node + 1) * ranks_per_node],
        )
        timeout, backend = timeout_of(ranks.group), dist.get_backend_config(ranks.group)
        groups = []
        for numbers in members_of_groups:
            group = dist.new_group(numbers, timeout, backend, use_local_synchronization=True)
            assert isinstance(group, ProcessGroup)  # this rank is a member
            groups.append(Ranks(group))
        groups_of_size[ranks_per_node] = groups[0], groups[1]
    return groups_of_size[ranks_per_node]
