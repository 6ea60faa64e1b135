"""How tokens reach their experts: the options, the owners of the experts, and the transfers."""

from moe_ext.dispatch.groups import GroupExchange
from moe_ext.dispatch.sharding import Balance, ExpertParallel, ExpertSharding, Placement

__all__ = ["Balance", "ExpertParallel", "ExpertSharding", "GroupExchange", "Placement"]
