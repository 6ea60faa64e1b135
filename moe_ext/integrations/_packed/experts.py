"""An experts module of transformers whose experts are packed."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from moe_ext import ops
from moe_ext.experts import Experts
from moe_ext.quantized import QuantizedExperts

__all__ = ["PackedExperts"]


class PackedExperts(nn.Module):
    """The experts of a mixture layer of transformers, computed by `moe_ext.QuantizedExperts`.

    It stands in the place of the experts module of transformers and is called as that module:
    with hidden_states [T, D], top_k_index [T, K] and top_k_weights [T, K].

    Args:
        module: the experts module of transformers.
        packed: the experts; None: they are set later.

    Attributes:
        num_experts: the number of experts, E.
        packed: the experts: a `moe_ext.QuantizedExperts`, or experts in its place.
    """

    is_of_transformers: ClassVar[bool] = True

    def __init__(self, module: nn.Module, packed: Experts | None = None) -> None:
        super().__init__()
        self.num_experts: int = module.num_experts  # type: ignore[assignment]
        self.post_expert_norm: nn.Module | None = getattr(module, "post_expert_norm", None)
        self.packed: Any = packed

    @property
    def quantized(self) -> QuantizedExperts | None:
        """The packed experts, which may have adapters; None if others took their place."""
        own = getattr(self.packed, "base", self.packed)
        return own if isinstance(own, QuantizedExperts) else None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns the outputs [T, D], in the dtype of hidden_states."""
        biases = getattr(getattr(self.packed, "base", self.packed), "biases", None)
        x = hidden_states if biases is None else hidden_states.to(biases[0].dtype)
        plan = ops.dispatch_plan(top_k_index.long(), self.num_experts)
        norm = self.post_expert_norm
        gates = top_k_weights if norm is None else None
        y: Tensor = self.packed(x, plan.offsets, inverse=plan.inverse, gates=gates)
        if norm is not None:
            y = ops.combine(norm(y), top_k_weights, plan.inverse)
        return y.to(hidden_states.dtype)
