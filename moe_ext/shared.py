"""The shared expert of a layer, which processes every token (arXiv 2401.06066)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.types import Device

from moe_ext import ops
from moe_ext._argument_names import explains_names
from moe_ext.checks import require_bool, require_tokens
from moe_ext.experts import ActivationLike, FeedForwardExperts
from moe_ext.gates._logits import logits

__all__ = ["SharedExpert"]


class SharedExpert(nn.Module):
    """Computes a feed-forward network of every token, for ``MoE(shared_expert=...)``.

    A shared expert is always on (DeepSeekMoE, Dai et al. 2024, arXiv 2401.06066, Eq. 9). The layer
    adds its output to the output of the routed experts. N shared experts of width F without
    output bias are a single one of width N · F, because their outputs are summed.

    With gated, the output is sigmoid(x·w_gate) E(x), as in Qwen2-MoE (arXiv 2407.10671). The logit
    is computed in at least float32.

    Args:
        d_model: D, the width of x.
        hidden_sizes, activation, activation_args, bias, d_output, device: see `FeedForwardExperts`.
        dtype: see `FeedForwardExperts`. w_gate has torch's default dtype.
        gated: whether a sigmoid of each token scales the output. w_gate starts at zero, so all
            sigmoids are 0.5.
        recompute: whether to recompute the hidden layers in the backward pass; see `MoE`.

    Attributes:
        expert: a `FeedForwardExperts` with a single expert.
        w_gate: [D, 1] parameter; None without gated.

    Raises:
        ValueError: see `FeedForwardExperts`.
        TypeError: see `FeedForwardExperts`; or gated or recompute is not a bool.
    """

    w_gate: nn.Parameter | None
    recompute: bool

    @explains_names
    def __init__(
        self,
        d_model: int,
        hidden_sizes: int | Sequence[int],
        *,
        activation: ActivationLike = "relu",
        activation_args: Sequence[float] | None = None,
        bias: bool = False,
        d_output: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        gated: bool = False,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        gated, self.recompute = require_bool("SharedExpert", gated=gated, recompute=recompute)
        self.expert: FeedForwardExperts = FeedForwardExperts(
            1,
            d_model,
            hidden_sizes,
            activation=activation,
            activation_args=activation_args,
            bias=bias,
            d_output=d_output,
            device=device,
            dtype=dtype,
        )
        w_gate = nn.Parameter(torch.zeros(d_model, 1, device=device)) if gated else None
        self.register_parameter("w_gate", w_gate)

    def reset_parameters(self) -> None:
        """Reinitializes the weights of the expert and sets w_gate to zero."""
        self.expert.reset_parameters()
        if self.w_gate is not None:
            nn.init.zeros_(self.w_gate)

    def forward(self, x: Tensor) -> Tensor:
        """Maps the tokens x [T, D] to [T, d_output].

        Raises:
            ValueError, TypeError: x has a wrong shape or dtype, or is not a tensor.
        """
        d_model = self.expert.d_model
        assert d_model is not None
        require_tokens("SharedExpert", x, d_model)
        if self.w_gate is None:
            return self.expert(x, None, recompute=self.recompute)
        row = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
        # torch.sigmoid rounds differently at the end of a tensor, so that the output of a token
        # would not be bitwise identical for another number of tokens.
        (gate_logits,) = logits(x, self.w_gate)
        gates = ops.topk_routing(gate_logits, 1, score="sigmoid", renormalize=False).gates
        return self.expert(x, None, inverse=row, gates=gates, recompute=self.recompute)

    if TYPE_CHECKING:
        __call__ = forward
