"""Argument checks with one common form of error message."""

import math
from collections.abc import Collection, Sequence
from numbers import Real
from typing import TypeVar

import torch
from torch import Tensor

__all__ = [
    "given",
    "is_whole",
    "require",
    "require_at_least",
    "require_bool",
    "require_floating",
    "require_k",
    "require_k_of_levels",
    "require_mask",
    "require_one_of",
    "require_shape",
    "require_sizes",
    "require_tensor",
]

_T = TypeVar("_T")


def require(holds: bool, name: str, rule: str, value: object) -> None:
    """Raises ValueError unless a rule holds.

    Args:
        holds: whether the rule holds.
        name: the option, or "<class or function>: <argument>".
        rule: the rule, such as "be at least 1".
        value: the value that was given.

    Raises:
        ValueError: "<name> must <rule>, got <value>".
    """
    if not holds:
        raise ValueError(f"{name} must {rule}, got {value!r}")


def require_one_of(name: str, choices: Collection[object], value: object) -> None:
    """Raises ValueError unless value is one of the choices; see `require`."""
    require(value in choices, name, f"be one of {', '.join(map(str, choices))}", value)


def given(**values: _T | None) -> dict[str, _T]:
    """Returns the values that are not None: the optional arguments that were given."""
    return {name: value for name, value in values.items() if value is not None}


def require_at_least(minimum: float, owner: str = "", **values: float) -> None:
    """Requires that every value is a finite number and at least a minimum.

    Args:
        minimum: the smallest allowed value.
        owner: the class or function that takes the arguments; "" for options.
        values: the arguments, by name.

    Raises:
        ValueError: "<owner>: <name> must be at least <minimum>, got <value>", or "be a finite
            number".
    """
    for name, value in values.items():
        name = f"{owner}: {name}" if owner else name
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        require(is_number and abs(value) < math.inf, name, "be a finite number", value)
        require(value >= minimum, name, f"be at least {minimum}", value)


def require_bool(owner: str, **values: bool) -> None:
    """Raises TypeError, prefixed by owner, if a value is not True or False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f"{owner}: {name} must be True or False, got {value!r}")


def require_tensor(owner: str, **values: object) -> None:
    """Raises TypeError, prefixed by owner, if a value is not a tensor."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{owner}: {name} must be a tensor, got {type(value).__name__}")


def is_whole(value: object) -> bool:
    """Returns True if value is an int; False for a bool, a NumPy integer or a tensor."""
    return isinstance(value, int) and not isinstance(value, bool)


def require_sizes(owner: str, minimum: int = 1, **values: int) -> None:
    """Requires that every value is a whole number and at least `minimum`.

    Args:
        owner: the class or function that takes the arguments.
        minimum: the smallest allowed value.
        values: the arguments, by name.

    Raises:
        ValueError: "<owner>: <name> must be <rule>, got <value>".
    """
    for name, value in values.items():
        require(is_whole(value), f"{owner}: {name}", "be a whole number", value)
    require_at_least(minimum, owner, **values)


def require_k(owner: str, k: int, num_experts: int) -> None:
    """Raises ValueError, prefixed by owner, if k is not a whole number from 1 to num_experts."""
    rule = f"be a whole number between 1 and num_experts = {num_experts}"
    require(is_whole(k) and 1 <= k <= num_experts, f"{owner}: k", rule, k)


def require_k_of_levels(
    owner: str,
    k: int | tuple[int, int],
    d_model: int,
    num_groups: int,
    experts_per_group: int,
) -> tuple[int, int]:
    """Checks the sizes of a two-level gate and returns (k1, k2). A single number k means (k, k).

    The sizes are d_model, num_groups, experts_per_group and k. Errors begin with owner.

    Raises:
        ValueError: a size is below 1, k1 is not between 1 and num_groups, or k2 not between 1 and
            experts_per_group.
    """
    sizes = {"num_groups": num_groups, "experts_per_group": experts_per_group}
    require_sizes(owner, d_model=d_model, **sizes)
    k1, k2 = k if isinstance(k, Sequence) and len(k) == 2 else (k, k)
    require(is_whole(k1) and is_whole(k2), f"{owner}: k", "be a whole number or a pair of them", k)
    for level, chosen, choices, limit in (
        ("first", k1, num_groups, "num_groups"),
        ("second", k2, experts_per_group, "experts_per_group"),
    ):
        rule = f"be between 1 and {limit} = {choices} at the {level} level"
        require(1 <= chosen <= choices, f"{owner}: k", rule, k)
    return k1, k2


def require_shape(owner: str, shape: tuple[int, ...], **values: Tensor) -> None:
    """Raises ValueError, prefixed by owner, if a tensor in values does not have the shape."""
    for name, value in values.items():
        found = tuple(value.shape)
        require(found == shape, f"{owner}: {name}", f"have shape {shape}", found)


def require_floating(owner: str, x: Tensor) -> None:
    """Raises TypeError, prefixed by owner, if x is not floating point."""
    if not x.is_floating_point():
        raise TypeError(f"{owner}: x must have a floating-point dtype, got {x.dtype}")


def require_mask(owner: str, mask: Tensor, shape: tuple[int, ...]) -> None:
    """Requires that owner's mask is a bool tensor, else TypeError, of a shape, else ValueError."""
    require_tensor(owner, mask=mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"{owner}: mask must have dtype torch.bool, got {mask.dtype}")
    require_shape(owner, shape, mask=mask)
