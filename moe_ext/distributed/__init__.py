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

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_ext.distributed._names import *  # noqa: F403

__all__ = [  # noqa: F405
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


def __getattr__(name: str) -> Any:
    """Imports the modules when the first name is used.

    They import `moe_ext.MoE`, and its module imports modules of this package.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module("moe_ext.distributed._names"), name)
    return globals().setdefault(name, value)


def __dir__() -> list[str]:
    return __all__
