"""Counts the FLOPs of the operators' GEMMs for `torch.utils.flop_counter.FlopCounterMode`."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

from moe_ext.ops._activations import width_factor

Shape = Sequence[int]


def _formula(operator: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Registers the formula of an operator, in place of that of an earlier import."""
    flop_registry.pop(operator, None)
    return register_flop_formula(operator)


class _Layer(NamedTuple):
    """A layer of experts; see csrc/moe_ext.cpp for the arguments of the operators."""

    fan_in: int
    width: int
    rank: int  # of its low-rank adapter

    @property
    def weight(self) -> int:
        return self.fan_in * self.width

    @property
    def adapter(self) -> int:
        return self.rank * (self.fan_in + self.width)


def _layers(
    x: Shape,
    weights: Sequence[Shape],
    activation: str,
    columns: Sequence[int] | None,
    lora_a: Sequence[Shape] | None,
) -> list[_Layer]:
    widths = columns or [width for _, _, width in weights]
    fans_in = [x[1], *(width // width_factor(activation) for width in widths[:-1])]
    ranks = [a[-1] for a in lora_a] if lora_a else [0] * len(widths)
    return list(map(_Layer, fans_in, widths, ranks))


@_formula(torch.ops.moe_ext.experts)
def _experts(
    x: Shape,
    offsets: Shape | None,
    inverse: Shape | None,
    token_offsets: Shape | None,
    gates: Shape | None,
    weights: Sequence[Shape],
    biases: Sequence[Shape] | None,
    activation: str,
    keep_hidden: bool,
    activation_args: Sequence[float] | None = None,
    formats: Sequence[str] | None = None,
    groups: Sequence[int] | None = None,
    columns: Sequence[int] | None = None,
    arithmetic: str = "exact",
    lora_a: Sequence[Shape] | None = None,
    *rest: Any,
    **out: Any,
) -> int:
    num_rows = x[0] if inverse is None else prod(inverse)
    layers = _layers(x, weights, activation, columns, lora_a)
    return 2 * num_rows * sum(layer.weight + layer.adapter for layer in layers)


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
    activation_args: Sequence[float] | None = None,
    formats: Sequence[str] | None = None,
    groups: Sequence[int] | None = None,
    columns: Sequence[int] | None = None,
    lora_a: Sequence[Shape] | None = None,
    *rest: Any,
    **out: Any,
) -> int:
    layers = _layers(x, weights, activation, columns, lora_a)
    last = len(layers) - 1
    learned = [i for i in range(last + 1) if any(needs_parameters[i :: last + 1])]
    first = min(learned, default=last)
    products = 0
    for i, layer in enumerate(layers):
        needs = needs_parameters[i :: last + 1]
        needs_weight, needs_a, needs_b = needs[0], *(needs[-2:] if lora_a else (False, False))
        if not hidden and i < last:
            products += layer.weight + layer.adapter
        if needs_x or i > first or (gates is not None and i == last):
            products += layer.weight + layer.rank * layer.fan_in
        if needs_x or i >= first or (gates is not None and i == last):
            products += layer.rank * layer.width
        products += needs_weight * layer.weight + needs_b * layer.adapter
        products += needs_a * layer.rank * layer.fan_in
    num_rows = x[0] if inverse is None else prod(inverse)
    return 2 * num_rows * products


def _class_flops(input: Shape, linear_weight: Shape, num_products: int) -> int:
    return 2 * num_products * prod(input) * linear_weight[0]


@_formula(torch.ops.moe_ext.linear_cross_entropy)
def _linear_cross_entropy(input: Shape, linear_weight: Shape, *rest: Any, **out: Any) -> int:
    *_, keep_gradients = rest
    return _class_flops(input, linear_weight, 1 + sum(keep_gradients[:2]))


@_formula(torch.ops.moe_ext._linear_cross_entropy_backward)
def _linear_cross_entropy_backward(
    grad_loss: Shape, input: Shape, linear_weight: Shape, *rest: Any, **out: Any
) -> int:
    """Counts the recomputed logits and the gradients; scaling kept gradients needs no GEMM."""
    *_, gradients, needs = rest
    return 0 if gradients else _class_flops(input, linear_weight, 1 + sum(needs[:2]))


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
    needs_x, needs_input, needs_recurrent, _, needs_projection, *_ = needs
    return 2 * (
        (needs_x + needs_input) * by_input
        + (1 + needs_recurrent) * by_recurrent
        + (1 + needs_projection) * by_projection
    )
