"""What modules of experts need to know of their activation."""

import math
from collections.abc import Sequence

from moe_ext.checks import require, require_at_least, require_one_of, require_positive
from moe_ext.ops._experts import (
    ACTIVATIONS,
    CLAMPED_ACTIVATIONS,
    GATED_ACTIVATIONS,
    Activation,
)


def width_factor(activation: str) -> int:
    """Returns the input width of the activation as a multiple of its output width."""
    return 2 if activation in GATED_ACTIVATIONS else 1


def checked_activation(
    owner: str, activation: Activation, activation_args: Sequence[float] | None
) -> tuple[float, ...] | None:
    """Checks the activation of owner, and returns activation_args as numbers of float32."""
    require_one_of(f"{owner}: activation", ACTIVATIONS, activation)
    args = list(activation_args or ())
    clamped = activation in CLAMPED_ACTIVATIONS
    require(
        len(args) == (3 if clamped else 0),
        f"{owner}: activation_args",
        f"be {'limit, alpha and offset' if clamped else 'empty'} for {activation}",
        args,
    )
    if not clamped:
        return None
    limit, alpha, offset = args
    owner = f"{owner}: activation_args"
    rest = require_at_least(-math.inf, owner, alpha=alpha, offset=offset)
    return *require_positive(owner, limit=limit), *rest
