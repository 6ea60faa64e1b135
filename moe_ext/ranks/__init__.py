"""Ranks that work together: process groups, collectives and the exchange of rows.

Contents::

    Ranks, AllToAll     the ranks of a group and the differentiable collectives between them
    Layout              how the ranks that train divide the experts of a layer
    ExpertPlacement     assigns experts to ranks
    Exchange            sends tokens to the owners of their experts and returns the outputs
    NodeExchange        the same, but each token is sent once to each node, then within the node

`moe_ext.distributed` exports these names too.
"""

from moe_ext.ranks.collectives import AllToAll, Ranks, block, blocks
from moe_ext.ranks.exchange import ChunksOf, Exchange, ExchangeUnit, Received
from moe_ext.ranks.layout import Layout
from moe_ext.ranks.nodes import NodeExchange
from moe_ext.ranks.placement import ExpertPlacement

__all__ = [
    "AllToAll",
    "ChunksOf",
    "Exchange",
    "ExchangeUnit",
    "ExpertPlacement",
    "Layout",
    "NodeExchange",
    "Ranks",
    "Received",
    "block",
    "blocks",
]
