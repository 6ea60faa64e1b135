"""The arguments and attributes capacity_factor and drop, which `MoE` had in version 0.1."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar, cast

from moe_ext._capacity import Capacity, Drop
from moe_ext.checks import require

_Init = TypeVar("_Init", bound=Callable[..., None])


def takes_former_capacity(init: _Init) -> _Init:
    """Lets a constructor with the argument capacity take capacity_factor and drop instead."""

    @wraps(init)
    def constructing(*args: Any, **options: Any) -> None:
        factor, drop = options.pop("capacity_factor", None), options.pop("drop", None)
        if factor is None:
            _require_no_drop(drop)
        else:
            _warn("the arguments")
            options["capacity"] = Capacity(factor, drop or "position")
        init(*args, **options)

    return cast(_Init, constructing)


class FormerCapacity:
    """Gives a layer with the attribute capacity the attributes capacity_factor and drop."""

    capacity: Capacity | float | None

    @property
    def capacity_factor(self) -> float | None:
        """The factor of the capacity; None: no capacity. Deprecated: use capacity."""
        _warn("the attributes")
        capacity = Capacity.from_option(self.capacity)
        return None if capacity is None else capacity.factor

    @capacity_factor.setter
    def capacity_factor(self, factor: float | None) -> None:
        _warn("the attributes")
        capacity = Capacity.from_option(self.capacity)
        drop: Drop = "position" if capacity is None else capacity.drop
        self.capacity = None if factor is None else Capacity(factor, drop)

    @property
    def drop(self) -> Drop:
        """Which assignments an expert drops. Deprecated: use capacity."""
        _warn("the attributes")
        capacity = Capacity.from_option(self.capacity)
        return "position" if capacity is None else capacity.drop

    @drop.setter
    def drop(self, drop: Drop) -> None:
        _warn("the attributes")
        capacity = Capacity.from_option(self.capacity)
        if capacity is None:
            _require_no_drop(drop)
        else:
            self.capacity = replace(capacity, drop=drop)


def _require_no_drop(drop: object) -> None:
    rule = "be left out without capacity_factor"
    require(drop in (None, "position"), "MoE: drop", rule, drop)


def _warn(former: str) -> None:
    text = f"MoE: {former} capacity_factor and drop are now capacity=Capacity(factor, drop)"
    warnings.warn(text, DeprecationWarning, stacklevel=3)
