"""Counts the FLOPs of the operators' GEMMs for `torch.utils.flop_counter.FlopCounterMode`."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

from moe_ext.ops._experts import GATED_ACTIVATIONS

Shape = Sequence[int]


def _formula(operator: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Registers the formula of an operator, in place of that of an earlier import."""
    flop_registry.pop(operator, None)
    return register_flop_formula(operator)


def _of_rows(x: Shape, inverse: Shape | None, weights: Sequence[Shape]) -> int:
    """Counts the FLOPs of multiplying each row of x, or of inverse if given, by its weights."""
    num_rows = x[0] if inverse is None else prod(inverse)
    return 2 * num_rows * sum(fan_in * width for _, fan_in, width in weights)


@_formula(torch.ops.moe_ext.experts)
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


@_formula(torch.ops.moe_ext._experts_backward)
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
    needs_parameters: Sequence[bool],
    *rest: Any,
    **out: Any,
) -> int:
    return _of_gradients(x, inverse, gates, weights, hidden, needs_x, needs_parameters)


def _of_gradients(
    x: Shape,
    inverse: Shape | None,
    gates: Shape | None,
    weights: Sequence[Shape],
    hidden: Sequence[Shape],
    needs_x: bool,
    needs_parameters: Sequence[bool],
) -> int:
    """Counts the FLOPs of the gradients of experts; see `_experts_backward` for the arguments."""
    last = len(weights) - 1
    learned = [layer for layer in range(last + 1) if any(needs_parameters[layer :: last + 1])]
    passed = [  # the weights of the layers that compute a gradient of their input
        weight
        for layer, weight in enumerate(weights)
        if needs_x or layer > min(learned, default=last) or (gates is not None and layer == last)
    ]
    recomputed = [] if hidden else weights[:last]
    products = [weight for weight, needed in zip(weights, needs_parameters, strict=False) if needed]
    return _of_rows(x, inverse, [*passed, *recomputed, *products])


def _unpacked(
    x: Shape, panels: Sequence[Shape], columns: Sequence[int], activation: str
) -> list[Shape]:
    """Returns the shapes [E, fan_in, columns] of packed weights."""
    factor = 2 if activation in GATED_ACTIVATIONS else 1
    fans_in = [x[1], *(width // factor for width in columns)]
    return [(of[0], *sizes) for of, *sizes in zip(panels, fans_in, columns, strict=False)]


@_formula(torch.ops.moe_ext.packed_experts)
def _packed_experts(
    x: Shape,
    offsets: Shape | None,
    inverse: Shape | None,
    token_offsets: Shape | None,
    gates: Shape | None,
    weights: Sequence[Shape],
    formats: Sequence[str],
    groups: Sequence[int],
    columns: Sequence[int],
    biases: Sequence[Shape] | None,
    activation: str,
    *rest: Any,
    **out: Any,
) -> int:
    return _of_rows(x, inverse, _unpacked(x, weights, columns, activation))


@_formula(torch.ops.moe_ext._packed_experts_backward)
def _packed_experts_backward(
    grad_y: Shape,
    x: Shape,
    offsets: Shape | None,
    inverse: Shape | None,
    token_offsets: Shape | None,
    gates: Shape | None,
    weights: Sequence[Shape],
    formats: Sequence[str],
    groups: Sequence[int],
    columns: Sequence[int],
    biases: Sequence[Shape] | None,
    hidden: Sequence[Shape],
    activation: str,
    needs_x: bool,
    needs_biases: Sequence[bool],
    *rest: Any,
    **out: Any,
) -> int:
    unpacked = _unpacked(x, weights, columns, activation)
    needs_parameters = [*[False] * len(weights), *needs_biases]
    return _of_gradients(x, inverse, gates, unpacked, hidden, needs_x, needs_parameters)


def _of_classes(input: Shape, linear_weight: Shape, num_products: int) -> int:
    return 2 * num_products * prod(input) * linear_weight[0]


@_formula(torch.ops.moe_ext.linear_cross_entropy)
def _linear_cross_entropy(input: Shape, linear_weight: Shape, *rest: Any, **out: Any) -> int:
    *_, keep_gradients = rest
    return _of_classes(input, linear_weight, 1 + sum(keep_gradients[:2]))


@_formula(torch.ops.moe_ext._linear_cross_entropy_backward)
def _linear_cross_entropy_backward(
    grad_loss: Shape, input: Shape, linear_weight: Shape, *rest: Any, **out: Any
) -> int:
    """Counts the recomputed logits and the gradients; scaling kept gradients needs no GEMM."""
    *_, gradients, needs = rest
    return 0 if gradients else _of_classes(input, linear_weight, 1 + sum(needs[:2]))


def _lstm_products(x: Shape, weight_recurrent: Shape, projection: Shape | None) -> list[int]:
    """Returns the multiply-adds of weight_input, weight_recurrent and projection, with padding."""
    rows, d_input = prod(x[:2]), x[2]
    gates, width = weight_recurrent
    return [rows * gates * d_input, rows * gates * width, rows * prod(projection or [0])]


@_formula(torch.ops.moe_ext.lstm)
def _lstm(
    x: Shape,
    weight_input: Shape,
    weight_recurrent: Shape,
    bias: Shape | None = None,
    projection: Shape | None = None,
    *rest: Any,
    **out: Any,
) -> int:
    return 2 * sum(_lstm_products(x, weight_recurrent, projection))


@_formula(torch.ops.moe_ext._lstm_backward)
def _lstm_backward(
    grad_m: Shape | None,
    grad_m_n: Shape | None,
    grad_c_n: Shape | None,
    x: Shape,
    weight_input: Shape,
    weight_recurrent: Shape,
    projection: Shape | None,
    *rest: Any,
    **out: Any,
) -> int:
    """Counts the GEMMs of the time steps and of the gradients that are needed."""
    by_input, by_recurrent, by_projection = _lstm_products(x, weight_recurrent, projection)
    needs: Sequence[bool] = rest[-1]
    of_x, of_input, of_recurrent, _, of_projection, *_ = needs
    return 2 * (
        (of_x + of_input) * by_input
        + (1 + of_recurrent) * by_recurrent
        + (1 + of_projection) * by_projection
    )
