"""Attention over the source sentence (App. G)."""

import math

import torch
from torch import Tensor, nn

from moe_ext.checks import require_one_of, require_sizes
from moe_ext.experts import uniform_
from moe_ext.ops import accumulation_dtype

ATTENTION_KINDS = ("product", "gnmt")


class Attention(nn.Module):
    """Averages the source vectors x_i with weights that depend on the target vector y_j (App. G).

    The equations are::

        A(x_i, y_j) = Σ_d V_d tanh((x_i U)_d) tanh((y_j W)_d)       kind = "product"
        A(x_i, y_j) = Σ_d V_d tanh((x_i U)_d + (y_j W)_d)           kind = "gnmt"
        p_j = softmax(A(·, y_j))          context_j = Σ_i p_ji x_i

    The softmax is over the source tokens of the sentence. The scores A(x_i, y_j) are not scaled.
    "product" is the function of the paper and needs only GEMMs. "gnmt" is the function of Wu et al.
    (2016) and stores a [B, T, S, A] tensor.

    All weights are initialised uniformly with variance 1 / fan_in.

    The attributes u, w and v are U [d_source, A], W [d_target, A] and V [A], with A = units.

    Example:
        >>> attention = Attention(d_source=64, d_target=32, units=16)
        >>> x, mask = torch.randn(8, 20, 64), torch.ones(8, 20, dtype=torch.bool)
        >>> context, weights = attention(torch.randn(8, 5, 32), attention.keys(x), x, mask)
        >>> context.shape, weights.shape
        (torch.Size([8, 5, 64]), torch.Size([8, 5, 20]))
    """

    def __init__(self, d_source: int, d_target: int, units: int, kind: str = "product") -> None:
        super().__init__()
        require_sizes("Attention", d_source=d_source, d_target=d_target, units=units)
        require_one_of("Attention: kind", ATTENTION_KINDS, kind)
        self.kind = kind
        self.u = nn.Parameter(torch.empty(d_source, units))
        self.w = nn.Parameter(torch.empty(d_target, units))
        self.v = nn.Parameter(torch.empty(units))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.u, self.w, self.v):
            uniform_(weight, len(weight))

    def keys(self, source: Tensor) -> Tensor:
        """Computes the keys [B, S, A] of source [B, S, d_source], used by all target steps."""
        keys = source @ self.u
        return keys.tanh() * self.v if self.kind == "product" else keys

    def forward(
        self, target: Tensor, keys: Tensor, source: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Computes the context and the attention weights of each target token.

        target is y [B, T, d_target], and source is x [B, S, d_source], with its `keys` [B, S, A].
        The mask [B, S] is False at padding. Every sentence has at least one token. The result has
        the contexts [B, T, d_source] and the weights p [B, T, S], which are 0 at padding.
        """
        query = target @ self.w
        if self.kind == "product":
            scores = query.tanh() @ keys.mT
        else:
            scores = (query.unsqueeze(2) + keys.unsqueeze(1)).tanh() @ self.v
        scores = scores.masked_fill(~mask.unsqueeze(1), -math.inf)
        weights = torch.softmax(scores, 2, dtype=accumulation_dtype(scores))
        return weights.to(source.dtype) @ source, weights
