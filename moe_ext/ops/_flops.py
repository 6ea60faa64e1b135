"""Counts the FLOPs of the experts' GEMMs for `torch.utils.flop_counter.FlopCounterMode`."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

Shape = Sequence[int]


def _of_rows(x: Shape, inverse: Shape | None, weights: Sequence[Shape]) -> int:
    """Counts the FLOPs of multiplying each row of x, or of inverse if given, by its weights."""
    num_rows = x[0] if inverse is None else prod(inverse)
    return 2 * num_rows * sum(fan_in * width for _, fan_in, width in weights)


@register_flop_formula(torch.ops.moe_ext.experts)
def _experts(
    x: Shape,
    offsets: Shape | None,
    inverse: Shape | None,
    token_offsets: Shape | None,
    gates: Shape | None,
    weights: Sequence[Shape],
    *rest: Any,
    **out: Any,
) -> int:
    return _of_rows(x, inverse, weights)


@register_flop_formula(torch.ops.moe_ext._experts_backward)
def _experts_backward(
    grad_y: Shape,
    x: Shape,
    offsets: Shape | None,
    inverse: Shape | None,
    token_offsets: Shape | None,
    gates: Shape | None,
    weights: Sequence[Shape],
    biases: Sequence[Shape] | None,
    hidden: Sequence[Shape],
    activation: str,
    needs_x: bool,
    needs_parameters: bool,
    *rest: Any,
    **out: Any,
) -> int:
    last = len(weights) - 1
    passed = [  # the weights of the layers that compute a gradient of their input
        weight
        for layer, weight in enumerate(weights)
        if needs_x or (needs_parameters and layer > 0) or (gates is not None and layer == last)
    ]
    recomputed = [] if hidden else weights[:last]
    learned = weights if needs_parameters else []
    return _of_rows(x, inverse, [*passed, *recomputed, *learned])
