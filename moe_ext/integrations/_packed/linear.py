"""A linear layer of transformers whose weight is packed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from moe_ext import ops
from moe_ext._panel_parameters import Arithmetic, panels_name
from moe_ext.formats import PackedWeight

__all__ = ["PackedLinear"]


class PackedLinear(nn.Module):
    """A linear layer whose weight stays in 4 or 8 bits: ``torch.nn.Linear`` with a packed weight.

    It is computed as an expert that gets all rows; see `moe_ext.ops.packed_experts`. The weight is
    frozen.

    Args:
        linear: the ``torch.nn.Linear`` whose place it takes. Its bias is not copied.
        arithmetic: see `moe_ext.QuantizedExperts`.

    Attributes:
        in_features: the number of inputs.
        out_features: the number of outputs.
        bias: the bias [out_features], or None.
        arithmetic: the constructor argument; it may change between calls.
    """

    def __init__(self, linear: Any, arithmetic: Arithmetic = "exact") -> None:
        super().__init__()
        self.in_features: int = linear.in_features
        self.out_features: int = linear.out_features
        self.bias: nn.Parameter | None = linear.bias
        self.arithmetic: Arithmetic = arithmetic
        self._layout: PackedWeight | None = None  # without the panels, a parameter of this name:
        self._key: str = ""
        self._like: Tensor
        self.register_buffer("_like", torch.empty(0, dtype=linear.weight.dtype), persistent=False)

    def set_weight(self, weight: PackedWeight) -> None:
        """Sets the weight, as that of one expert. Its panels are not copied."""
        self._layout = weight._replace(panels=weight.panels.new_empty(0))
        self._key = panels_name(0, weight)
        self.register_parameter(self._key, nn.Parameter(weight.panels, requires_grad=False))

    @property
    def weights(self) -> tuple[PackedWeight, ...]:
        """The packed weight, as that of one expert; () until it is set."""
        if self._layout is None:
            return ()
        return (self._layout._replace(panels=getattr(self, self._key)),)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of `weight`, which follows that of the model."""
        return self._like.dtype

    @property
    def qweight(self) -> Tensor:
        """The panels of the weight, by the name under which PEFT looks for a packed weight."""
        return self.weights[0].panels

    @property
    def weight(self) -> Tensor:
        """The dequantized weight [out, in], computed anew in the dtype of the model."""
        return self.dequantize(self.dtype)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight [out, in] as floats."""
        return self.weights[0].dequantize(dtype)[0]

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [..., in_features] to [..., out_features]."""
        rows = x.reshape(-1, self.in_features)
        biases = None if self.bias is None else [self.bias[None]]
        y = ops.packed_experts(rows, self.weights, biases, arithmetic=self.arithmetic)
        return y.view(*x.shape[:-1], self.out_features)

    def _packed_sizes(self) -> Iterable[tuple[Tensor, int]]:
        """Yields the panels and the number of weights in them."""
        return [(w.panels, self.in_features * self.out_features) for w in self.weights]

    def extra_repr(self) -> str:
        """Returns the arguments that the text of the module shows."""
        packed = [f"format={w.format}, {w.panels.nbytes:,} bytes" for w in self.weights]
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return ", ".join([sizes, f"bias={self.bias is not None}", *packed])
