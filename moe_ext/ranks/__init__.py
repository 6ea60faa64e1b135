"""Ranks that work together: process groups and collectives.

Contents::

    collectives  Ranks, AllToAll: the ranks of a group and the collectives between them
    layout       Layout: how the ranks that train divide the experts of a layer
    placement    ExpertPlacement: assigns experts to ranks

`moe_ext.distributed` exports these names.
"""

__all__: list[str] = []
