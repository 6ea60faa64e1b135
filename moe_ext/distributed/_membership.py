"""Checks that an argument is a process group of this rank."""

from types import NoneType, UnionType
from typing import get_args

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh


def require_group(
    name: str, group: object, kinds: UnionType = ProcessGroup | DeviceMesh | None
) -> None:
    """Requires that an argument is one of the kinds, and not a group or mesh without this rank.

    Raises:
        TypeError: group has another type; the message begins with name.
        ValueError: group does not contain this rank.
    """
    if isinstance(group, DeviceMesh):
        inside = group.get_coordinate() is not None
    else:
        # new_group returns NON_GROUP_MEMBER, a number, to the ranks that are not in the group.
        other = dist.GroupMember.NON_GROUP_MEMBER
        inside = not (dist.is_initialized() and type(group) is type(other) and group == other)
    if not inside:
        raise ValueError(
            f"{name} must contain this rank, got a group without rank {dist.get_rank()}; "
            "only the ranks of a group may use it"
        )
    if not isinstance(group, kinds):
        *names, last = ("None" if k is NoneType else f"a {k.__name__}" for k in get_args(kinds))
        rule = f"be {', '.join(names)} or {last}"
        raise TypeError(f"{name} must {rule}, got {type(group).__name__}")
