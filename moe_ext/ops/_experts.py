"""Feed-forward experts, each applied to its own rows (Sections 2 and 3.2)."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from moe_ext.checks import require_tensor
from moe_ext.ops._gradients import needs_gradient

Activation = Literal[
    "clamped_swiglu",
    "geglu",
    "geglu_tanh",
    "gelu",
    "gelu_tanh",
    "glu",
    "identity",
    "interleaved_clamped_swiglu",
    "reglu",
    "relu",
    "relu_squared",
    "sigmoid",
    "silu",
    "swiglu",
    "tanh",
]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)

# Computed from a and b; the last dimension of the input is the concatenation of a and b. In the
# interleaved activation, a has the even columns and b the odd ones.
GATED_ACTIVATIONS: tuple[Activation, ...] = (
    "clamped_swiglu",
    "geglu",
    "geglu_tanh",
    "glu",
    "interleaved_clamped_swiglu",
    "reglu",
    "swiglu",
)

# The activations with the arguments (limit, alpha, offset).
CLAMPED_ACTIVATIONS: tuple[Activation, ...] = ("clamped_swiglu", "interleaved_clamped_swiglu")


class LoRA(NamedTuple):
    """A low-rank adapter of one layer of E experts (LoRA, arXiv 2106.09685, Eq. 3).

    A layer with the input h computes h W_e + scale · (h a_e) b_e, and its bias. No tensor of the
    size of W is formed, forward or backward; the backward pass recomputes h a_e.
    """

    a: Tensor
    """[E, fan_in, r], in the dtype of the input rows; contiguous, or p.mT of a contiguous p."""
    b: Tensor
    """[E, r, width], in the dtype of the input rows; contiguous, or p.mT of a contiguous p."""
    scale: float = 1.0
    mask: Tensor | None = None
    """Dropout: [R, fan_in] bool, in the order of the rows. The matrix a sees 0 in place of the
    numbers of h where it is False; `scale` must include 1 / (1 - p)."""


def lora_arguments(
    name: str, x: Tensor, lora: Sequence[LoRA | None] | None
) -> dict[str, list[Tensor] | list[float]]:
    """Returns the arguments of the operator for `lora`; shape [0] stands for none in a layer."""
    if lora is None:
        return {}
    is_sequence = isinstance(lora, Sequence)
    for item in lora if is_sequence else [lora]:
        if not (is_sequence and isinstance(item, LoRA | None)):
            kind = type(item).__name__
            raise TypeError(f"{name}: lora must be a sequence of LoRA or None, got {kind}")
    require_tensor(name, x=x)
    absent = x.new_empty(0, layout=torch.strided)
    no_mask = absent.new_empty(0, dtype=torch.bool)
    adapters = [LoRA(absent, absent) if adapter is None else adapter for adapter in lora]
    return dict(
        lora_a=[adapter.a for adapter in adapters],
        lora_b=[adapter.b for adapter in adapters],
        lora_scales=[adapter.scale for adapter in adapters],
        lora_masks=[no_mask if adapter.mask is None else adapter.mask for adapter in adapters],
    )


def experts(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] | None = None,
    activation: Activation = "relu",
    *,
    offsets: Tensor | None = None,
    inverse: Tensor | None = None,
    gates: Tensor | None = None,
    token_offsets: Tensor | None = None,
    recompute: bool = False,
    activation_args: Sequence[float] | None = None,
    lora: Sequence[LoRA | None] | None = None,
) -> Tensor:
    """Applies each expert to its rows: linear layers with an activation between them.

    There are three forms. The last one computes all of Eq. 1 in one operator:

    - Without inverse and gates, x and the result are rows sorted by expert.
    - With inverse, x are tokens. The operator copies them to their rows as `dispatch` does.
    - With inverse and gates, it also sums y_t = Σ_s gates[s] · E_s(x_t) as `combine` does.

    With the halves a and b of a row, a gated activation is activation(a) · b, as in "swiglu":
    a · sigmoid(a) · b. "clamped_swiglu" is g · sigmoid(alpha · g) · (u + offset), where
    g = min(a, limit) and u = clamp(b, -limit, limit). gpt-oss has (limit, alpha, offset) =
    (7, 1.702, 1) and interleaves a and b: "interleaved_clamped_swiglu" takes a from the even
    columns and b from the odd columns. The gradient is 0 at a limit and beyond it.

    On CUDA, float32 inputs are multiplied in float32, never in TF32; `allow_tf32` has no effect.

    The operator saves x and the hidden layers before their activation for backward. It saves
    neither the dispatched rows nor the expert outputs. The gradient of a gate needs neither:
    ∂L/∂gate = ⟨∂L/∂A, A⟩, where A is the input of the last layer.

    CUDA is experimental: no kernel has run on a GPU yet.

    Args:
        x: [R, D], or [T, D] with inverse.
        weights: [E, D, F_1], [E, F_1, F_2], …, [E, F_n, D_out]. A single weight makes each expert
            a linear layer. Before a gated activation, the weight has twice the layer's width.
            A weight is read without a copy if it is contiguous or the view ``p.mT`` of a contiguous
            p [E, F, D]. Its gradient has the same memory layout, so p gets a contiguous gradient.
            Layers may differ. A weight with other strides is copied at each call.
        biases: one [E, width] for each of `weights`, or None.
        activation: one of `ACTIVATIONS`.
        offsets: [E + 1] int64; expert e has the rows offsets[e] <= r < offsets[e + 1]. None: R / E
            rows for every expert.
        inverse: [T, K] int64, or [R] with token_offsets. The row of each slot, from
            `dispatch_plan`.
        gates: the weight of each slot, in the shape of inverse and any floating-point dtype.
        token_offsets: [T + 1] int64; token t has the slots
            token_offsets[t] <= s < token_offsets[t + 1]. None: each token has K slots.
        recompute: whether to save only x and recompute the hidden layers in the backward pass
            (App. D). This saves memory. Results are bitwise identical to recompute=False.
        activation_args: (limit, alpha, offset) with limit > 0 for `CLAMPED_ACTIVATIONS`, else None.
        lora: the low-rank adapter of each of `weights`, or None where a layer has none.

    Returns:
        [R, D_out], or [T, D_out] with gates.

    Raises:
        ValueError, TypeError, IndexError: an argument has a wrong shape, dtype, device or value.
    """
    adapters = lora_arguments("experts", x, lora)
    y: Tensor
    y, *_ = torch.ops.moe_ext.experts(
        x,
        offsets,
        inverse,
        token_offsets,
        gates,
        weights,
        biases,
        activation,
        not recompute and needs_gradient(x, weights, biases, gates, *adapters.values()),
        activation_args,
        **adapters,
    )
    return y
