"""Feed-forward experts, each applied to its own rows (Sections 2 and 3.2)."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

Activation = Literal[
    "geglu", "gelu", "glu", "identity", "reglu", "relu", "sigmoid", "silu", "swiglu", "tanh"
]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)

# act(a) · b; the last dimension of the input is the concatenation of a and b.
GATED_ACTIVATIONS: tuple[Activation, ...] = ("geglu", "glu", "reglu", "swiglu")


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
) -> Tensor:
    """Applies each expert to its rows: linear layers with an activation between them.

    There are three forms. The last one computes all of Eq. 1 in one operator:

    - Without inverse and gates, x and the result are rows sorted by expert.
    - With inverse, x are tokens. The operator copies them to their rows as `dispatch` does.
    - With inverse and gates, it also sums y_t = Σ_s gates[s] · E_s(x_t) as `combine` does.

    On CUDA, float32 inputs are multiplied in float32, never in TF32; `allow_tf32` has no effect.

    The operator saves x and the hidden layers before their activation for backward. It saves
    neither the dispatched rows nor the expert outputs. The gradient of a gate needs neither:
    ∂L/∂gate = ⟨∂L/∂A, A⟩, where A is the input of the last layer.

    Args:
        x: [R, D], or [T, D] with inverse.
        weights: [E, D, F_1], [E, F_1, F_2], …, [E, F_n, D_out]. A single weight makes each expert
            a linear layer. Before a gated activation, the weight has twice the layer's width.
            A weight is read without a copy if it is contiguous or the view `p.mT` of a contiguous
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

    Returns:
        [R, D_out], or [T, D_out] with gates.

    Raises:
        ValueError, TypeError, IndexError: an argument has a wrong shape, dtype, device or value.
    """
    inputs = [x, *weights, *(biases or []), *([] if gates is None else [gates])]
    differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    y, _ = torch.ops.moe_ext.experts(
        x,
        offsets,
        inverse,
        token_offsets,
        gates,
        weights,
        biases or None,
        activation,
        differentiated and not recompute,
    )
    return y
