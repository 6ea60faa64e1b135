"""How tokens reach their experts: one dispatcher for each way, and the options of ranks.

Contents::

    Dispatcher      what `MoE` holds: tokens stay on this rank, or ranks exchange them
    ExpertParallel  how ranks share the experts of a layer: the options
    ExpertSharding  which rank has which experts of a layer
    Exchange        sends tokens to the owners of their experts and returns the outputs
    NodeExchange    the same, but each token is sent once to each node, then within the node
    GroupExchange   sends tokens to groups of experts with their secondary gates

`moe_ext.distributed` exports all of them but `Dispatcher`.
"""

from moe_ext.dispatch._dispatchers import Dispatcher

__all__ = ["Dispatcher"]
