"""A row of the table of operators."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One row of the table."""

    function: Callable  # Takes the arguments by name, as users call it.
    make: Callable  # Maps (dtype, **sizes) to the arguments of one sample.
    reference: Callable  # Maps float64 arguments to the outputs of reference.py.
    samples: list[dict]  # Sizes for the reference and the gradients, including edge cases.
    typical: list[dict]  # Few sizes for expensive checks. The first one is used for the errors.
    large: list[dict]  # Sizes that several threads share.
    limits: list[dict] = field(default_factory=list)  # Sizes that overflow narrow counters.
    precise: list[dict]  # Sizes for the measurement of rounding errors.
    units: int = 2  # Of assert_as_accurate.
    plain: Callable | None = None  # The same in plain torch, in the dtype of the arguments.
    differentiable: tuple[str, ...] = ()
    twice_differentiable: bool = False  # Otherwise a second derivative raises an error.
    constant: tuple[int, ...] = ()  # The floating-point outputs without a gradient.
    backward: str | None = None  # The operator that computes the gradients.
    autocast: torch.dtype | None = None  # The dtype of floating-point arguments under autocast.
    products: bool = False  # Uses GEMMs: bits depend on instruction set and device.
    equations: tuple[str, ...] = ()
    lacks: dict[str, str] = field(default_factory=dict)  # Property -> why it is lacking.
    # Errors apart from wrong dtypes, devices and numbers of dimensions of every tensor:
    # (exception, argument in the message, changed arguments or a function that changes valid ones,
    # value in the message or a function of the changed arguments)
    bad: list[tuple] = field(default_factory=list)
    backward_bad: list[tuple] = field(default_factory=list)
    free: dict[str, tuple] = field(default_factory=dict)  # arguments of any "type" or "dimensions"


NO_GRADIENT = dict.fromkeys(("derivatives", "needed", "accuracy"), "no output is differentiable")
