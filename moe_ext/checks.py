"""Argument checks with one common form of error message."""

import math
import operator
from collections.abc import Collection, Sequence
from typing import Any, NoReturn, SupportsFloat, SupportsIndex, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

__all__ = [
    "given",
    "is_whole",
    "refuse",
    "require",
    "require_at_least",
    "require_bool",
    "require_dtype",
    "require_floating",
    "require_k",
    "require_k_of_levels",
    "require_mask",
    "require_not_nested",
    "require_one_of",
    "require_positive",
    "require_shape",
    "require_sizes",
    "require_tensor",
    "require_tokens",
    "required",
]

_T = TypeVar("_T")
_TINY, _MAX = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
_RULE = f"be 0 or a number of float32 (magnitude {_TINY:.2g} to {_MAX:.2g})"


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
        refuse(name, rule, value)


def refuse(name: str, rule: str, value: object) -> NoReturn:
    """Raises ValueError for a rule that does not hold; see `require`."""
    raise ValueError(f"{name} must {rule}, got {value!r}")


def required(value: _T | None, name: str, rule: str, shown: object = None) -> _T:
    """Returns a value that must not be None.

    Args:
        value: the value.
        name, rule: see `require`.
        shown: the value in the message.

    Raises:
        ValueError: value is None: "<name> must <rule>, got <shown>".
    """
    if value is None:
        refuse(name, rule, shown)
    return value


def require_one_of(name: str, choices: Collection[object], value: object) -> None:
    """Raises ValueError unless value is one of the choices; see `require`."""
    require(value in choices, name, f"be one of {', '.join(map(str, choices))}", value)


def given(**values: _T | None) -> dict[str, _T]:
    """Returns the values that are not None: the optional arguments that were given."""
    return {name: value for name, value in values.items() if value is not None}


def require_at_least(minimum: float, owner: str = "", **values: SupportsFloat) -> tuple[float, ...]:
    """Requires that every value is a number of float32 and at least a minimum; returns the floats.

    A number is what ``float`` accepts, such as a NumPy scalar or a fraction, but no bool, string or
    tensor. Layers compute in float32. So a number other than 0 must not round to 0 or infinity
    there.

    Args:
        minimum: the smallest allowed value.
        owner: the class or function that takes the arguments; "" for options.
        values: the arguments, by name.

    Raises:
        ValueError: "<owner>: <name> must be at least <minimum>, got <value>", or "be a finite
            number", or "be 0 or a number of float32".
    """
    numbers = []
    for name, value in values.items():
        number = _float(value)
        if not (number == 0 or _TINY <= abs(number) <= _MAX) or number < minimum:
            name = _argument(owner, name)
            require(abs(number) < math.inf, name, "be a finite number", value)
            require(number >= minimum, name, f"be at least {minimum}", value)
            refuse(name, _RULE, value)
        numbers.append(number)
    return tuple(numbers)


def require_positive(owner: str, **values: SupportsFloat) -> tuple[float, ...]:
    """Requires that every value is a number above 0, as `require_at_least`; returns the floats."""
    numbers = require_at_least(-math.inf, owner, **values)
    for name, number in zip(values, numbers, strict=True):
        require(number > 0, f"{owner}: {name}", "be a number above 0", values[name])
    return numbers


def _argument(owner: str, name: str) -> str:
    return f"{owner}: {name}" if owner else name


def _float(value: object) -> float:
    """Converts a number; NaN for other values."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number and (isinstance(value, str | Tensor) or _is_bool(value)):
        return math.nan
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _is_bool(value: object) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool"  # of NumPy


def require_bool(owner: str, **values: bool) -> tuple[bool, ...]:
    """Returns the bools; raises TypeError, prefixed by owner, if a value is not True or False."""
    for name, value in values.items():
        if not _is_bool(value):
            raise TypeError(f"{owner}: {name} must be True or False, got {value!r}")
    return tuple(map(bool, values.values()))


def require_tensor(owner: str, **values: object) -> None:
    """Raises TypeError, prefixed by owner, if a value is not a tensor."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            if isinstance(value, PackedSequence):
                kind += ": use torch.nn.utils.rnn.pad_packed_sequence, and pass a mask"
            raise TypeError(f"{owner}: {name} must be a tensor, got {kind}")


def require_not_nested(owner: str, **values: object) -> None:
    """Raises TypeError, prefixed by owner, if a value is not a tensor, or is a nested tensor."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            require_tensor(owner, **{name: value})
        elif value.is_nested:
            rule = "must be a padded tensor, not a nested one (see torch.nested.to_padded_tensor)"
            raise TypeError(f"{owner}: {name} {rule}, got {value.layout}")


def is_whole(value: object) -> bool:
    """Returns whether value is an int or what ``operator.index`` accepts; not a bool or tensor."""
    if isinstance(value, Tensor) or _is_bool(value):
        return False
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def require_sizes(owner: str, minimum: int = 1, **values: SupportsIndex) -> tuple[int, ...]:
    """Requires that every value is a whole number and at least `minimum`; returns the ints.

    Args:
        owner: the class or function that takes the arguments; "" for options.
        minimum: the smallest allowed value.
        values: the arguments, by name. See `is_whole`.

    Raises:
        ValueError: "<owner>: <name> must be <rule>, got <value>".
    """
    for name, value in values.items():
        name = _argument(owner, name)
        require(is_whole(value), name, "be a whole number", value)
        require(operator.index(value) >= minimum, name, f"be at least {minimum}", value)
    return tuple(map(operator.index, values.values()))


def require_k(owner: str, k: SupportsIndex, num_experts: int) -> int:
    """Returns k as an int; raises ValueError, prefixed by owner, if it is not in [1, num_experts].

    See `is_whole` for the whole numbers.
    """
    rule = f"be a whole number between 1 and num_experts = {num_experts}"
    require(is_whole(k) and 1 <= operator.index(k) <= num_experts, f"{owner}: k", rule, k)
    return operator.index(k)


def require_k_of_levels(
    owner: str,
    k: SupportsIndex | Sequence[SupportsIndex],
    d_model: SupportsIndex,
    num_groups: SupportsIndex,
    experts_per_group: SupportsIndex,
) -> tuple[int, int]:
    """Checks the sizes of a two-level gate and returns (k1, k2). A single number k means (k, k).

    The sizes are d_model, num_groups, experts_per_group and k. Errors begin with owner.

    Raises:
        ValueError: a size is below 1, k1 is not between 1 and num_groups, or k2 not between 1 and
            experts_per_group.
    """
    _, num_groups, experts_per_group = require_sizes(
        owner, d_model=d_model, num_groups=num_groups, experts_per_group=experts_per_group
    )
    levels: Sequence[Any] = k if isinstance(k, Sequence) and len(k) == 2 else (k, k)
    rule = "be a whole number or a pair of them"
    require(all(map(is_whole, levels)), f"{owner}: k", rule, k)
    k1, k2 = map(operator.index, levels)
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
        actual = tuple(value.shape)
        require(actual == shape, f"{owner}: {name}", f"have shape {shape}", actual)


def require_floating(owner: str, x: Tensor, name: str = "x") -> None:
    """Raises TypeError, which begins with owner and name, if x is not floating point."""
    if not x.is_floating_point():
        raise TypeError(f"{owner}: {name} must have a floating-point dtype, got {x.dtype}")


def require_tokens(owner: str, x: Tensor, d_model: int) -> None:
    """Requires that x is a floating-point tensor [T, d_model]; errors begin with owner.

    Raises:
        ValueError: x has another shape.
        TypeError: x is not a tensor, a nested one, or not floating point.
    """
    # All conditions are tested here too: the calls would take microseconds.
    if not isinstance(x, Tensor) or x.is_nested:
        require_not_nested(owner, x=x)
    if x.dim() != 2 or x.shape[1] != d_model:
        refuse(f"{owner}: x", f"have shape [T, d_model = {d_model}]", tuple(x.shape))
    if not x.is_floating_point():
        require_floating(owner, x)


def require_dtype(owner: str, dtype: torch.dtype | None) -> torch.dtype | None:
    """Returns dtype; raises TypeError, prefixed by owner, if it is not floating point or None."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"{owner}: dtype must be a floating-point dtype, got {dtype!r}")
    return dtype


def require_mask(owner: str, mask: Tensor, shape: tuple[int, ...]) -> None:
    """Requires that owner's mask is a bool tensor, else TypeError, of a shape, else ValueError."""
    require_tensor(owner, mask=mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"{owner}: mask must have dtype torch.bool, got {mask.dtype}")
    require_shape(owner, shape, mask=mask)
