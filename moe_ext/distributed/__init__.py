"""Training with experts that are sharded over the ranks of a process group (Sec. 3).

A single layer needs only ``MoE(..., process_group=group)``. This package has the options of such a
layer and the tools to train a model that contains it::

    init_process_group  initializes torch.distributed, also after a restart by torchrun
    ExpertParallel      the options: placement, balance, exchange, num_chunks, a mesh with replicas
    parallelize         averages the gradients of the dense parameters; keeps experts sharded
    clip_grad_norm_     clips by the norm of the gradients of all ranks
    GradScaler          skips a step on all ranks if the gradients of one rank overflow
    expert_parameters   lists the sharded parameters and their shards
    Checkpoints         saves with one number of ranks, loads with any other number
    full_state_dict     gathers the state_dict of a single process
    load_full_state_dict  loads each rank's part of the state_dict of a single process

Building blocks::

    Ranks, AllToAll     the ranks of a group and the differentiable collectives between them
    ExpertPlacement     assigns experts to ranks
    ExpertSharding      the experts of a layer, sharded over ranks
    Exchange            sends tokens to the owners of their experts and returns the outputs
    GroupExchange       the same for groups of a hierarchical mixture with their secondary gates
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
    "ChunksOf",
    "Exchange",
    "ExchangeUnit",
    "ExpertParallel",
    "ExpertParameter",
    "ExpertPlacement",
    "ExpertSharding",
    "GradScaler",
    "GroupExchange",
    "Layout",
    "Loaded",
    "Placement",
    "Ranks",
    "Received",
    "blocks",
    "clip_grad_norm_",
    "expert_parameters",
    "full_state_dict",
    "init_process_group",
    "load_full_state_dict",
    "parallelize",
]


def __getattr__(name: str) -> Any:
    """Imports a public name on its first use.

    An import at the top would be circular: these modules import the module of `moe_ext.MoE`, which
    imports modules of this package.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module("moe_ext.distributed._names"), name)
    return globals().setdefault(name, value)


def __dir__() -> list[str]:
    return __all__
