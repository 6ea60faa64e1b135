"""The experts' computation, Sections 2 and 3.2: feed-forward networks, each on its own rows."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

Activation = Literal[
    "geglu", "gelu", "glu", "identity", "reglu", "relu", "sigmoid", "silu", "swiglu", "tanh"
]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)

# act(a) · b, of an input whose last dimension holds a and b side by side.
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
    """E_e(x), linear layers with an activation between them, of the experts e that x is for.

    Three forms, of which the last is the whole of Eq. 1 as one operator:

    - without inverse and gates, x are rows grouped by expert, and so is what comes out;
    - with inverse, x are tokens, copied to their rows as `dispatch` does;
    - with inverse and gates, y_t = Σ_s gates[s] · E_s(x_t), summed as `combine` does.

    Products of float32 are of float32 on CUDA too, where torch's own may be of TF32 (`allow_tf32`).

    For the backward pass it keeps x and the hidden layers before their activation, not the copies
    of the tokens, nor the experts' outputs: ∂L/∂gate = ⟨∂L/∂A, A⟩ with A the last layer's input.

    Args:
        x: [R, D], or [T, D] with inverse.
        weights: [E, D, F_1], [E, F_1, F_2], …, [E, F_n, D_out]; before a gated activation the
            matrix is twice as wide as the layer. A single one makes a linear layer for each expert.
        biases: one [E, width] for each of `weights`, or None.
        activation: one of `ACTIVATIONS`.
        offsets: [E + 1] int64, where each expert's rows begin and end; None: R / E rows each.
        inverse: [T, K] int64, or [R] with token_offsets, the rows of each token's slots, as
            `dispatch_plan` makes it.
        gates: of inverse's shape, of any floating type.
        token_offsets: [T + 1] int64, where each token's slots begin and end; None: K slots each.
        recompute: keep x only, and compute the hidden layers again in the backward pass (App. D):
            the same bits in less memory.

    Returns:
        [R, D_out], or [T, D_out] with gates.

    Raises:
        ValueError, TypeError, IndexError: an argument's shape, type, device or value does not fit.
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
