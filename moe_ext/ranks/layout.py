"""How the ranks that train together divide the experts of a layer."""

from typing import NamedTuple

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from moe_ext.checks import require
from moe_ext.ranks._membership import require_group
from moe_ext.ranks.collectives import Ranks

__all__ = ["Layout"]


class Layout(NamedTuple):
    """Describes how the ranks that train together divide the experts of a layer.

    Attributes:
        world: all ranks that train; each has its own tokens.
        expert_parallel: the ranks that share one set of experts and exchange tokens.
        replicas: the ranks that have the same experts as this rank.
    """

    world: Ranks
    expert_parallel: Ranks
    replicas: Ranks

    @classmethod
    def of(cls, group: ProcessGroup | DeviceMesh | None, owner: str = "Layout") -> "Layout":
        """Makes the layout of a process group, or of a mesh [replicas, expert_parallel].

        All ranks of a process group or a one-dimensional mesh share one set of experts.

        Args:
            group: the process group or the mesh; None: only this rank.
            owner: the class or function that takes the group; errors begin with it.

        Raises:
            TypeError: group has another type.
            ValueError: the group does not contain this rank. Or a mesh has more than two
                dimensions, or two dimensions without names.
        """
        name = f"{owner}: process_group"
        require_group(name, group)
        if not isinstance(group, DeviceMesh):
            ranks = Ranks(group)
            return cls(ranks, ranks, Ranks())
        require(group.ndim <= 2, name, "be a mesh of 1 or 2 dimensions", group.ndim)
        if group.ndim == 1:
            return cls.of(group.get_group(), owner)
        names = group.mesh_dim_names
        require(names is not None, name, "be a mesh with mesh_dim_names", names)
        world = group._flatten().get_group()
        return cls(*map(Ranks, (world, group.get_group(1), group.get_group(0))))
