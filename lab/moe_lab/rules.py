"""Rules of options, which stand next to the option: ``steps: Annotated[int, minimum(1)] = 10``."""

from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

from moe_ext.checks import require, require_at_least, require_one_of

Rule = Callable[[str, Any], object]  # raises ValueError for the name and a wrong value


def minimum(lowest: float) -> Rule:
    return lambda name, value: require_at_least(lowest, **{name: value})


def one_of(*choices: str) -> Rule:
    return lambda name, value: require_one_of(name, choices, value)


def must(rule: str, holds: Callable[[Any], bool]) -> Rule:
    return lambda name, value: require(holds(value), name, rule, value)


Count = Annotated[int, minimum(1)]
Limit = Annotated[int, minimum(0)]  # 0: no limit, or as the option says
Weight = Annotated[float, minimum(0)]
Positive = Annotated[float, must("be positive", lambda value: value > 0)]
Share = Annotated[float, must("be in [0, 1)", lambda value: 0 <= value < 1)]
Widths = Annotated[list[int], must("be positive", lambda values: min(values, default=1) >= 1)]


class Options:
    """Base class of dataclasses of options; checks the rules in the annotations."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            for rule in getattr(hint, "__metadata__", ()):
                rule(name, getattr(self, name))
