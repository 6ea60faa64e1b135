"""Checks that an argument is a process group of this rank."""

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh


def require_group(
    name: str, group: object, kinds: tuple[type, ...] = (ProcessGroup, DeviceMesh)
) -> None:
    """Requires that an argument is None, or of one of the kinds and contains this rank.

    Raises:
        TypeError: group has another type; the message begins with name.
        ValueError: group does not contain this rank.
    """
    if isinstance(group, DeviceMesh):
        inside = group.get_coordinate() is not None
    else:
        # new_group returns NON_GROUP_MEMBER, a number, to the ranks that are not in the group.
        absent = dist.GroupMember.NON_GROUP_MEMBER
        inside = not (dist.is_initialized() and type(group) is type(absent) and group == absent)
    if not inside:
        raise ValueError(
            f"{name} must contain this rank, got a group without rank {dist.get_rank()}; "
            "only the ranks of a group may use it"
        )
    if group is not None and not isinstance(group, kinds):
        rule = "be " + ", ".join(f"a {kind.__name__}" for kind in kinds) + " or None"
        raise TypeError(f"{name} must {rule}, got {type(group).__name__}")
