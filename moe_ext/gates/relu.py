"""ReLU routing: a token has as many experts as positive scores (arXiv 2412.14711)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.types import Device

from moe_ext._argument_names import explains_names
from moe_ext.checks import require_at_least, require_positive
from moe_ext.gates._logits import widened
from moe_ext.gates._slots import experts_of_rows, several, sums_of_slots, values_of_slots
from moe_ext.gates.adaptive import AdaptiveGate
from moe_ext.ranks.collectives import Ranks
from moe_ext.routing import Routing

__all__ = ["ReLUGate"]


class ReLUGate(AdaptiveGate):
    """Routes each token to all experts with a positive score: the router of ReMoE.

    The gates are the scores (Wang et al. 2024, arXiv 2412.14711, Eq. 5)::

        G(x) = ReLU(x·W_g)

    A token has 0 to E experts. The output of a token without experts is 0. The gates are continuous
    in x and W_g. They do not sum to 1. A token's experts do not depend on other tokens, so the gate
    is causal. The host synchronizes with the device to count the experts.

    The gate's own loss is an L1 regularization that also balances the experts (Eqs. 10 and 11)::

        loss = λ/T Σ_t Σ_e f_e G(x_t)_e         f_e = E/(k·T) · (number of tokens of expert e)

    f has no gradient. The sums run over the T tokens of one forward pass on all ranks. λ adapts so
    that a token has k experts on average: call `update_gates` once in each optimizer step. S is the
    sparsity, the share of zeros in the scores of all tokens in training mode since the last update
    (Eqs. 7 and 8)::

        λ ← λ · l1_growth^sign((1 - k/E) - S)

    The paper has one λ for all layers, which adapts to their mean sparsity. Here each gate has its
    own λ, so that each layer has k experts per token on average. λ absorbs the factor 1/L that the
    loss of the paper has with L layers.

    The scores have no bias. If the tokens are symmetric around 0, half of the scores are positive
    for any W_g, and λ grows without end. So the tokens need a mean that differs from 0.

    W_g starts with normal random values of standard deviation 0.1 · D^-1/2. With W_g = 0, no token
    would have an expert, and W_g would have no gradient. At first, a token has about E/2 experts.
    With the default options, this phase takes about 100 steps, and needs the memory for these
    experts. Of the losses of `MoE`, the gate needs none: set w_importance and w_load to 0.

    The metric sparsity is the share of zeros in the scores, l1_weight is λ, and
    share_without_expert is the fraction of tokens without experts.

    Args:
        d_model: D, the width of x.
        num_experts: E, the number of experts.
        k: mean number of experts per token, 1 <= k <= E.
        l1_weight: λ at the start. The default is the paper's.
        l1_growth: the factor by which an update changes λ. The default is the paper's. With
            1, λ is constant.
        device, dtype: of the parameters; None: torch's defaults.

    Attributes:
        w_gate: [D, E] parameter W_g.
        l1_weight: scalar buffer λ. It is at least float32, also after ``gate.bfloat16()``, and
            never rounds to 0 or infinity.
        tokens_since_update: [E + 1] int64, the tokens of each expert since the last update,
            followed by the number of all tokens. With ``MoE(process_group=...)`` and
            balance="global", it counts the tokens of all ranks. It is not in the state_dict.

    Raises:
        ValueError: a size is below 1, k is not between 1 and num_experts, l1_weight is not positive
            and finite, or l1_growth is not finite and at least 1.
        TypeError: dtype is not floating point.
    """

    l1_weight: Tensor
    initial_l1_weight: float
    l1_growth: float

    @explains_names
    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int,
        *,
        l1_weight: float = 1e-8,
        l1_growth: float = 1.2,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, num_experts, k, num_counts=num_experts + 1, device=device)
        factory = self._factory(device, dtype)
        (self.initial_l1_weight,) = require_positive("ReLUGate", l1_weight=l1_weight)
        (self.l1_growth,) = require_at_least(1, "ReLUGate", l1_growth=l1_growth)
        self.w_gate: nn.Parameter = nn.Parameter(torch.empty(d_model, num_experts, **factory))
        self.register_buffer("l1_weight", widened(torch.empty((), **factory)))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reinitializes W_g with random values; sets λ to its start and the counts to zero."""
        nn.init.normal_(self.w_gate, std=0.1 * len(self.w_gate) ** -0.5)
        self.l1_weight.fill_(self.initial_l1_weight)
        assert self.tokens_since_update is not None
        self.tokens_since_update.zero_()

    def forward(self, x: Tensor, ranks: Ranks | None = None) -> Routing:
        """Routes x [T, D]; the experts of each token are in index order.

        See `Gate.forward` for ranks.
        """
        ranks = several(ranks)
        logits = self.logits(x, self.w_gate)
        # NaN scores are selected too: otherwise NaN rows would silently get the output 0.
        expert_index, token_offsets = experts_of_rows(~(logits <= 0))
        gates = values_of_slots(logits, expert_index, token_offsets)
        slots = gates, expert_index, token_offsets
        importance, *counts = sums_of_slots(self.num_experts, *slots, ranks)
        load, num_tokens, num_without = (value.detach() for value in counts)
        self.count(torch.cat([load, num_tokens.unsqueeze(0)]))
        num_scores = self.num_experts * num_tokens
        num_tokens = num_tokens.clamp_min(1)
        f = load * (self.num_experts / self.k) / num_tokens
        # A copy, because `update` may write the buffer before the backward pass reads it.
        l1_weight = self.l1_weight.to(gates.dtype, copy=True)
        metrics = {
            "sparsity": (num_scores - load.sum()) / num_scores.clamp_min(1),
            "l1_weight": l1_weight,
            "share_without_expert": num_without / num_tokens,
        }
        return Routing(
            gates,
            expert_index,
            importance,
            load,
            token_offsets,
            loss=l1_weight * (f * importance).sum() / num_tokens,
            metrics=metrics,
            logits=logits,
            scores=torch.relu(logits),
        )

    def update(self, counts: Tensor) -> None:
        """Multiplies λ by l1_growth, 1 or 1 / l1_growth; see `AdaptiveGate.update`."""
        (growth,) = require_at_least(1, "ReLUGate", l1_growth=self.l1_growth)
        num_selected, num_tokens = counts[:-1].sum(), counts[-1]
        # Below the target sparsity, more than k·T scores are positive. This is exact in int64.
        direction = torch.sign(num_selected - self.k * num_tokens).to(self.l1_weight.dtype)
        limits = torch.finfo(self.l1_weight.dtype)
        # From 0 or infinity, λ could never return.
        self.l1_weight.mul_(growth**direction).clamp_(limits.tiny, limits.max)

    def extra_repr(self) -> str:
        """Returns the arguments that the text of the module shows."""
        options = f"l1_weight={self.initial_l1_weight}, l1_growth={self.l1_growth}"
        return f"{super().extra_repr()}, {options}"
