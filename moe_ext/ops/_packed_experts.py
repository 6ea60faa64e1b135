"""Feed-forward experts whose frozen weights are packed."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from moe_ext.formats import PackedWeight
from moe_ext.ops._experts import Activation, LoRA, lora_arguments
from moe_ext.ops._gradients import needs_gradient


def require_packed(owner: str, weights: Sequence[PackedWeight]) -> None:
    """Raises TypeError, prefixed by owner, if weights are not a sequence of PackedWeight."""
    if not isinstance(weights, Sequence) or isinstance(weights, PackedWeight):  # itself a tuple
        kind = type(weights).__name__
        raise TypeError(f"{owner}: weights must be a sequence of PackedWeight, got {kind}")
    for i, weight in enumerate(weights):
        if not isinstance(weight, PackedWeight):
            kind = type(weight).__name__
            raise TypeError(f"{owner}: weights[{i}] must be a PackedWeight, got {kind}")


def packed_experts(
    x: Tensor,
    weights: Sequence[PackedWeight],
    biases: Sequence[Tensor] | None = None,
    activation: Activation = "relu",
    *,
    offsets: Tensor | None = None,
    inverse: Tensor | None = None,
    gates: Tensor | None = None,
    token_offsets: Tensor | None = None,
    recompute: bool = False,
    activation_args: Sequence[float] | None = None,
    arithmetic: Literal["exact", "integer"] = "exact",
    lora: Sequence[LoRA | None] | None = None,
) -> Tensor:
    """Applies each expert to its rows, as `experts`, with weights that stay packed.

    The result is that of `experts` with the weights ``weight.dequantize(x.dtype).mT``. The numbers
    are computed from their codes in the cache; no weight matrix is written to memory. x, biases,
    gates and adapters have gradients. The weights are frozen.

    CUDA is experimental: no kernel has run on a GPU yet. There, the weights of all experts are
    unpacked in each call.

    Args:
        x: [R, D], or [T, D] with inverse; any floating-point dtype.
        weights: one for each layer, with E experts each. The layers may have different formats.
        biases: one [E, width] for each of `weights`, in the dtype of x, or None.
        activation: one of `ACTIVATIONS`.
        offsets: as for `experts`.
        inverse: as for `experts`.
        gates: as for `experts`.
        token_offsets: as for `experts`.
        recompute: as for `experts`.
        activation_args: as for `experts`.
        arithmetic: "exact", or "integer" for the fastest inference on a CPU. Then the inputs of a
            layer are rounded to int8 in segments of s inputs, s = 32 or the largest power of two
            below it that divides the group of the weights. The error of a pre-activation is at
            most Σ_g max|x_g| · Σ|w_g| / 254 over the segments g, apart from the rounding of float32
            sums. No gradients, float64, fp8 and nf4.
        lora: as for `experts`. Adapters are multiplied in the precision of x.

    Returns:
        [R, D_out], or [T, D_out] with gates.

    Raises:
        ValueError, TypeError, IndexError: an argument has a wrong shape, dtype, device or value.
    """
    require_packed("packed_experts", weights)
    adapters = lora_arguments("packed_experts", x, lora)
    y: Tensor
    y, *_ = torch.ops.moe_ext.experts(
        x,
        offsets,
        inverse,
        token_offsets,
        gates,
        [weight.panels for weight in weights],
        biases,
        activation,
        not recompute and needs_gradient(x, biases, gates, *adapters.values()),
        activation_args,
        [weight.format for weight in weights],
        [weight.group for weight in weights],
        [weight.outputs for weight in weights],
        arithmetic,
        **adapters,
    )
    return y
