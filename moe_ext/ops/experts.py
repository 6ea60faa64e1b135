"""The experts' computation, Section 2 and 3.2: feed-forward networks on rows grouped by expert."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def _gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """act(a) · b, of an input whose last dimension holds a and b side by side."""

    def apply(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return activation(a) * b

    return apply


GATED_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "geglu": _gated(F.gelu),
    "glu": _gated(torch.sigmoid),
    "reglu": _gated(F.relu),
    "swiglu": _gated(F.silu),
}

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "identity": lambda x: x,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
    **GATED_ACTIVATIONS,
}


def grouped_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """out[r] = rows[r] · weight[e] + bias[e] for the rows r of expert e; returns [R, F].

    Args:
        rows: [R, D], grouped by expert.
        weight: [E, D, F].
        bias: [E, F] or None.
        offsets: [E + 1] int64, ascending from 0 to R: expert e has the rows from offsets[e] on.

    Raises:
        ValueError, TypeError: an argument's shape, type, device or value does not fit.
    """
    return torch.ops.moe_ext.grouped_linear(rows, weight, bias, offsets)


def experts(
    rows: Tensor,
    offsets: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] | None = None,
    activation: str = "relu",
) -> Tensor:
    """E_e(x) for the rows x of every expert e: linear layers with an activation between them.

    Args:
        rows: [R, D], grouped by expert.
        offsets: [E + 1] int64, where each expert's rows begin and end.
        weights: [E, D, F_1], [E, F_1, F_2], …, [E, F_n, D_out]; before a gated activation the
            matrix is twice as wide as the layer.
        biases: one [E, width] for each of `weights`, or None.
        activation: a key of `ACTIVATIONS`.

    Returns:
        [R, D_out].

    Raises:
        ValueError, TypeError: an argument's shape, type, device or value does not fit.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"experts: activation must be one of {', '.join(sorted(ACTIVATIONS))}, "
            f"got {activation!r}"
        )
    if len(weights) == 0 or (biases is not None and len(biases) != len(weights)):
        raise ValueError(
            "experts: weights and biases must be one for each linear layer, at least one, "
            f"got {len(weights)} weights and {'no' if biases is None else len(biases)} biases"
        )
    for layer, weight in enumerate(weights):
        if layer > 0:
            rows = ACTIVATIONS[activation](rows)
        rows = grouped_linear(rows, weight, None if biases is None else biases[layer], offsets)
    return rows
