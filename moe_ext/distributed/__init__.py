"""Training with experts that are sharded over the ranks of a process group (Sec. 3).

`MoE(..., process_group=group)` is all that a layer needs. This package has its options, what a
model around it needs, and the parts below.

init_process_group  as torch's, after a restart by torchrun too
ExpertParallel      the options: balance, exchange, num_chunks, a mesh with replicas
parallelize         averages the dense gradients, leaves the experts where they are
clip_grad_norm_     clips by the norm of all gradients, on whatever rank they are
GradScaler          skips a step on all ranks when one of them overflows
expert_parameters   the parameters that are sharded, and how
Checkpoints         written by any number of ranks, read by any other number
full_state_dict     the state_dict of a single process, and load_full_state_dict

Below them:

Ranks, AllToAll     the ranks of a group and the differentiable collectives between them
ExpertPlacement     which rank owns which experts
ExpertSharding      a layer's experts, divided over ranks
Exchange            sends tokens to the owners of their experts, and the outputs back
"""

from moe_ext.distributed._parallelize import parallelize
from moe_ext.distributed._parameters import ExpertParameter, expert_parameters
from moe_ext.distributed._state import full_state_dict, load_full_state_dict
from moe_ext.distributed.checkpoint import CheckpointError, Checkpoints, Loaded
from moe_ext.distributed.exchange import Exchange, ExchangeUnit
from moe_ext.distributed.gradients import GradScaler, clip_grad_norm_
from moe_ext.distributed.placement import ExpertPlacement
from moe_ext.distributed.ranks import AllToAll, Ranks, blocks
from moe_ext.distributed.sharding import Balance, ExpertParallel, ExpertSharding, Layout
from moe_ext.distributed.torchrun import init_process_group

__all__ = [
    "AllToAll",
    "Balance",
    "CheckpointError",
    "Checkpoints",
    "Exchange",
    "ExchangeUnit",
    "ExpertParallel",
    "ExpertParameter",
    "ExpertPlacement",
    "ExpertSharding",
    "GradScaler",
    "Layout",
    "Loaded",
    "Ranks",
    "blocks",
    "clip_grad_norm_",
    "expert_parameters",
    "full_state_dict",
    "init_process_group",
    "load_full_state_dict",
    "parallelize",
]
