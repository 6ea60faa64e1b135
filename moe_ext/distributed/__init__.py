"""Training with experts that are spread over processes (Sec. 3).

`MoE(..., process_group=group)` is all that a layer needs; here is what a model around it does.

init_process_group  as torch's, after a restart by torchrun too
parallelize         dense parameters averaged, experts left where they are
clip_grad_norm_     by the norm of all gradients, wherever they are
GradScaler          an overflow anywhere is one everywhere
expert_parameters   what is spread, and how
Checkpoints         written by any number of processes, read by any other
full_state_dict     of a single process, and load_full_state_dict
"""

from moe_ext.distributed.checkpoint import CheckpointError, Checkpoints, Loaded
from moe_ext.distributed.gradients import GradScaler, clip_grad_norm_
from moe_ext.distributed.parallelize import parallelize
from moe_ext.distributed.parameters import ExpertParameter, expert_parameters
from moe_ext.distributed.state import full_state_dict, load_full_state_dict
from moe_ext.distributed.torchrun import init_process_group
from moe_ext.exchange import Placement

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "ExpertParameter",
    "GradScaler",
    "Loaded",
    "Placement",
    "clip_grad_norm_",
    "expert_parameters",
    "full_state_dict",
    "init_process_group",
    "load_full_state_dict",
    "parallelize",
]
