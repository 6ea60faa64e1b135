"""How the ranks that train together divide the experts of a layer."""

import warnings
from typing import NamedTuple

import torch.distributed as dist
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
        world = _group_of_all(group, name)
        return cls(*map(Ranks, (world, group.get_group(1), group.get_group(0))))


def _group_of_all(mesh: DeviceMesh, name: str) -> ProcessGroup:
    """Returns a process group of all ranks of a mesh: one that exists, or else a new one.

    Warns if only some of torch's ranks make the new group. torch counts the groups to name them. So
    ranks that make no layer, as in another stage of a pipeline, would disagree about later groups.
    """
    for dim in range(mesh.ndim):
        if mesh.size(dim) == mesh.size():
            return mesh.get_group(dim)
    ranks = mesh.mesh.flatten().tolist()
    for flat in mesh._get_root_mesh()._flatten_mapping.values():
        if flat.mesh.flatten().tolist() == ranks:
            return flat.get_group()
    if len(ranks) < dist.get_world_size():
        dims = ", ".join(map(repr, mesh.mesh_dim_names or ()))
        warnings.warn(
            f"{name}: makes a process group of the ranks {ranks}, which all ranks of torch must do "
            f"at the same place; call mesh[{dims}]._flatten() on all ranks after init_device_mesh",
            stacklevel=2,
        )
    return mesh._flatten().get_group()
