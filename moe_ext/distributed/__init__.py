"""Training with experts that are sharded over the ranks of a process group (Sec. 3).

A single layer needs only ``MoE(..., process_group=group)``. This package has the options of such a
layer and the tools to train a model that contains it::

    init_process_group  initializes torch.distributed, also after a restart by torchrun
    ExpertParallel      the options: placement, balance, exchange, num_chunks, a mesh with replicas
    parallelize         averages the gradients of the dense parameters; keeps experts sharded
    distribute_experts  makes experts DTensors, which torch saves, gathers and clips by itself
    ExpertParallelStyle  shards the layers of an existing model by parallelize_module of torch
    clip_grad_norm_     clips by the norm of the gradients of all ranks
    GradScaler          skips a step on all ranks if the gradients of one rank overflow
    expert_parameters   lists the sharded parameters and their shards
    Checkpoints         saves with one number of ranks, loads with any other number
    full_state_dict     gathers the state_dict of a single process
    load_full_state_dict  loads each rank's part of the state_dict of a single process

Building blocks, which `MoE` uses too::

    Ranks, AllToAll     the ranks of a group and the differentiable collectives between them
    ExpertPlacement     assigns experts to ranks
    ExpertSharding      the experts of a layer, sharded over ranks
    Exchange            sends tokens to the owners of their experts and returns the outputs
    NodeExchange        the same over nodes with a slow network between them
    GroupExchange       the same for groups of a hierarchical mixture with their secondary gates
"""

import sys

from moe_ext import files
from moe_ext.dispatch._exchange import ChunksOf, Exchange, ExchangeUnit, Received
from moe_ext.dispatch._group_exchange import GroupExchange
from moe_ext.dispatch._node_exchange import NodeExchange
from moe_ext.dispatch._sharding import Balance, ExpertParallel, ExpertSharding, Placement
from moe_ext.distributed._dtensors import distribute_experts
from moe_ext.distributed._parallelize import parallelize
from moe_ext.distributed._parameters import ExpertParameter, expert_parameters
from moe_ext.distributed._state import full_state_dict, load_full_state_dict
from moe_ext.distributed._style import ExpertParallelStyle
from moe_ext.distributed.checkpoint import CheckpointError, Checkpoints, Loaded
from moe_ext.distributed.gradients import GradScaler, clip_grad_norm_
from moe_ext.distributed.torchrun import init_process_group
from moe_ext.ranks.collectives import AllToAll, Ranks, block, blocks
from moe_ext.ranks.layout import Layout
from moe_ext.ranks.placement import ExpertPlacement

__all__ = [
    "AllToAll",
    "Balance",
    "CheckpointError",
    "Checkpoints",
    "ChunksOf",
    "Exchange",
    "ExchangeUnit",
    "ExpertParallel",
    "ExpertParallelStyle",
    "ExpertParameter",
    "ExpertPlacement",
    "ExpertSharding",
    "GradScaler",
    "GroupExchange",
    "Layout",
    "Loaded",
    "NodeExchange",
    "Placement",
    "Ranks",
    "Received",
    "block",
    "blocks",
    "clip_grad_norm_",
    "distribute_experts",
    "expert_parameters",
    "full_state_dict",
    "init_process_group",
    "load_full_state_dict",
    "parallelize",
]

# The former places of modules, which programs and pickles of earlier versions import.
_package = sys.modules[__name__]
for _former in ("exchange", "placement", "ranks", "sharding"):
    sys.modules[f"{__name__}.{_former}"] = _package
    setattr(_package, _former, _package)
sys.modules[f"{__name__}.files"] = files


def __dir__() -> list[str]:
    """Lists only the public names, for tab completion."""
    return __all__
