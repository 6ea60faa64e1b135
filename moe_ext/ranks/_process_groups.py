"""Makes further process groups of the same ranks."""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from moe_ext.ranks.collectives import Ranks


def duplicate(ranks: Ranks, backend: str | None = None, timeout: timedelta | None = None) -> Ranks:
    """Returns the same ranks in a new process group. All of these ranks must call it together.

    Collectives in different groups need no common order.

    Args:
        ranks: the ranks.
        backend, timeout: the options of the new group; None: as in the group of ranks.
    """
    if ranks.group is None or ranks.size == 1:
        return ranks
    if timeout is None:
        timeout = timeout_of(ranks.group)
    if backend is None:
        backend = dist.get_backend_config(ranks.group)
    some = ranks.size < dist.get_world_size()  # then only these ranks call this
    members = dist.get_process_group_ranks(ranks.group)
    group = dist.new_group(members, timeout, backend, use_local_synchronization=some)
    assert isinstance(group, ProcessGroup)  # this rank is a member
    return Ranks(group)


def timeout_of(group: ProcessGroup) -> timedelta:
    """Returns the timeout of a group, for more groups of its ranks."""
    device = next(iter(group._device_types))
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout
