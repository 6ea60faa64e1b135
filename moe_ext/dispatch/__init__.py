"""How tokens reach their experts: one dispatcher for each way, and the options of ranks.

Contents::

    Dispatcher      what `MoE` holds: tokens stay on this rank, or ranks exchange them
    ExpertParallel  how ranks share the experts of a layer: the options
    ExpertSharding  which rank has which experts of a layer
    GroupExchange   sends tokens to groups of experts with their secondary gates
"""

from moe_ext.dispatch._dispatchers import Dispatcher
from moe_ext.dispatch._groups import GroupExchange
from moe_ext.dispatch._sharding import Balance, ExpertParallel, ExpertSharding, Placement

__all__ = [
    "Balance",
    "Dispatcher",
    "ExpertParallel",
    "ExpertSharding",
    "GroupExchange",
    "Placement",
]
