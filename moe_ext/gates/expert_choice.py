"""Expert choice: each expert selects its tokens (arXiv 2202.09368)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.types import Device

from moe_ext import ops
from moe_ext._argument_names import explains_names
from moe_ext.gates._batchwise import mask_over_ranks
from moe_ext.gates._slots import (
    experts_of_rows,
    experts_of_selected,
    routing_of_slots,
    several,
    values_of_slots,
)
from moe_ext.gates.gate import Gate
from moe_ext.ops._balanced_gating import rows_per_expert
from moe_ext.ranks.collectives import Ranks
from moe_ext.routing import Routing

__all__ = ["ExpertChoiceGate"]


class ExpertChoiceGate(Gate):
    """Lets each expert select the m tokens with its largest scores (Zhou et al. 2022).

    The scores are S = softmax(x·W_g) over the experts. Expert i gets the m = k·T/E tokens of the
    batch with the largest S(x)_i (`moe_ext.gates.rows_per_expert`). The gates are these scores, not
    renormalized (arXiv 2202.09368, Eq. 1 with capacity factor k)::

        G(x)_i = S(x)_i if x is among the m tokens of expert i, else 0

    A token has k experts on average, and 0 to E in an extreme case. The output of a token without
    experts is 0. All experts have the same load, so that no balancing loss is needed.

    The gate is not causal: the experts of a token depend on all other tokens of the batch, also on
    later tokens. Evaluation mode does not change this. So a language model with this gate can see
    the future, and it cannot decode token by token. `BalancedGate` has thresholds for evaluation.

    With several ranks, an expert selects from the tokens of all ranks.

    W_g starts at zero, so all scores are equal. A fixed pseudo-random function then assigns tokens
    to experts (`moe_ext.ops.batchwise_topm`). The metric share_without_expert is the fraction of
    tokens without experts.

    Args:
        d_model: D, the width of x.
        num_experts: E, the number of experts.
        k: mean number of experts per token, 1 <= k <= E. The paper calls it capacity factor.
        device, dtype: of the parameters; None: torch's defaults.

    Attributes:
        w_gate: [D, E] parameter W_g.

    Raises:
        ValueError: a size is below 1, or k is not between 1 and num_experts.
        TypeError: dtype is not floating point.
    """

    routes_by_batch: ClassVar[bool] = True

    @explains_names
    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, num_experts, k)
        factory = self._factory(device, dtype)
        self.w_gate: nn.Parameter = nn.Parameter(torch.zeros(d_model, num_experts, **factory))

    def reset_parameters(self) -> None:
        """Sets W_g to zero, its initial value."""
        self._set_to_zero()

    def forward(self, x: Tensor, ranks: Ranks | None = None) -> Routing:
        """Routes x [T, D]; the experts of each token are in index order.

        See `Gate.forward` for ranks.
        """
        ranks = several(ranks)
        logits = self.logits(x, self.w_gate)
        scores = torch.softmax(logits, dim=-1)
        num_tokens = scores.shape[0]
        # NaN rows are selected first: otherwise they would silently get the output 0.
        ranked = scores.detach().nan_to_num(nan=torch.inf)
        if ranks is None:
            m = rows_per_expert(self.k, num_tokens, self.num_experts)
            selected = ops.batchwise_topm(ranked.unsqueeze(0), m)
            expert_index, token_offsets = experts_of_selected(selected.row_index, num_tokens)
        else:
            own_size = torch.tensor([num_tokens], device=scores.device)
            mask, _ = mask_over_ranks(ranked, self.k, own_size, 0, ranks)
            expert_index, token_offsets = experts_of_rows(mask)
        gates = values_of_slots(scores, expert_index, token_offsets)
        routing = routing_of_slots(self.num_experts, gates, expert_index, token_offsets, [], ranks)
        return routing._replace(equal_load=ranks is None, logits=logits)
