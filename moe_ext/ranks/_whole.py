"""Refuses ``fully_shard`` around parameters of which each rank has a part of its own."""

import sys
from collections.abc import Iterable

from torch import Tensor, nn
from torch.distributed import get_process_group_ranks

from moe_ext.checks import require
from moe_ext.ranks.collectives import Ranks

WHOLE = "be whole on this rank, not sharded by fully_shard (use parallelize)"
_MARK = "_is_fsdp_managed_module"  # fully_shard sets it at its end, on each module
_HAS_DTENSORS = "_has_dtensors"


def is_mark(name: str) -> bool:
    """Returns whether fully_shard sets the attribute of this name after it has divided a module."""
    return name == _MARK


def is_marked(module: object) -> bool:
    """Returns whether fully_shard has divided a module, or left out its parameters.

    Experts that are DTensors count as not divided: fully_shard knows that their parts differ.
    """
    names = getattr(module, "__dict__", ())
    return _MARK in names and _HAS_DTENSORS not in names


def mark_dtensors(experts: nn.Module) -> None:
    """Tells `is_marked` that the parameters of experts are DTensors."""
    vars(experts)[_HAS_DTENSORS] = True


def require_whole(parameters: Iterable[tuple[str, Tensor]], ranks: Ranks) -> None:
    """Requires that fully_shard has not divided parameters over ranks that have other values.

    It takes them for replicas, and would gather a mixture of the values of all ranks.

    Args:
        parameters: the parameters of this rank, by name.
        ranks: the ranks that have other values.

    Raises:
        ValueError: a parameter is divided over these ranks.
    """
    dtensor = sys.modules["torch.distributed.tensor"].DTensor  # imported by fully_shard
    group_ranks = set() if ranks.group is None else {*get_process_group_ranks(ranks.group)}
    for name, param in parameters:
        if isinstance(param, dtensor):
            shared = group_ranks.intersection(param.device_mesh.mesh.flatten().tolist())
            require(len(shared) <= 1, f"MoE: {name}", WHOLE, type(param).__name__)
