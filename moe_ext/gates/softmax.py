"""Gates without noise: the softmax over all experts, and the softmax over the top k."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_ext import ops
from moe_ext.distributed.ranks import Ranks
from moe_ext.gates._logits import only_given, zero_
from moe_ext.gates.gate import Gate, Routing

__all__ = ["SoftmaxGate", "TopKGate"]


class SoftmaxGate(Gate):
    """Routes every token to every expert with the gates G(x) = softmax(x·W_g) (Eq. 2).

    Args:
        d_model: D, the width of x.
        num_experts: E, the number of experts.

    Attributes:
        w_gate: [D, E] parameter W_g.

    Raises:
        ValueError: d_model or num_experts is below 1.
    """

    def __init__(self, d_model: int, num_experts: int) -> None:
        super().__init__(d_model, num_experts, num_experts)
        self.w_gate = nn.Parameter(torch.zeros(d_model, num_experts))

    def reset_parameters(self) -> None:
        """Sets all parameters and buffers to zero, their initial values."""
        zero_(self)

    def forward(self, x: Tensor, ranks: Ranks | None = None) -> Routing:
        """Routes x [T, D] to all E experts, in index order; see `Gate.forward` for ranks."""
        logits = self.logits(x, self.w_gate)
        gates = torch.softmax(logits, dim=-1)
        expert_index = torch.arange(self.num_experts, device=x.device).expand(x.shape[0], -1)
        return self.make_routing(gates, expert_index, ranks=ranks, logits=logits)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, num_experts={self.num_experts}"


class TopKGate(Gate):
    """Routes each token to its top k experts without noise (Appendix F with M = TopK).

    The gates are the softmax scores, masked and renormalized::

        G(x)_i = G_σ(x)_i M_i / Σ_j G_σ(x)_j M_j,   G_σ(x) = softmax(x·W_g)

    W_g starts with normal random values of standard deviation 0.1 · D^-1/2. With W_g = 0, every
    token would be routed to the same experts. Load is the number of routed tokens, which has no
    gradient. Only the importance loss balances the experts.

    Args:
        d_model: D, the width of x.
        num_experts: E, the number of experts.
        k: experts per token, 1 <= k <= E.

    Attributes:
        w_gate: [D, E] parameter W_g.

    Raises:
        ValueError: a size is below 1, or k is not between 1 and num_experts.
    """

    def __init__(self, d_model: int, num_experts: int, k: int) -> None:
        super().__init__(d_model, num_experts, k)
        self.w_gate = nn.Parameter(torch.empty(d_model, num_experts))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitializes W_g with random values."""
        nn.init.normal_(self.w_gate, std=0.1 * len(self.w_gate) ** -0.5)

    def forward(
        self, x: Tensor, ranks: Ranks | None = None, expert_index: Tensor | None = None
    ) -> Routing:
        """Routes x [T, D] to k experts per token, in order of decreasing logit.

        See `Gate.forward` for ranks and expert_index.
        """
        logits = self.logits(x, self.w_gate)
        kept = ops.noisy_topk_gating(only_given(logits, expert_index), None, None, self.k)
        return self.make_routing(kept.gates, kept.expert_index, ranks=ranks, logits=logits)
