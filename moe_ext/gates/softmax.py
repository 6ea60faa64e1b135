"""Gates without noise: the softmax over all experts, and the top k by any score."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.types import Device

from moe_ext import ops
from moe_ext._argument_names import explains_names
from moe_ext.checks import require_at_least, require_bool, require_positive, require_sizes
from moe_ext.gates._logits import widened
from moe_ext.gates.adaptive import AdaptiveGate
from moe_ext.gates.gate import Gate
from moe_ext.ranks.collectives import Ranks
from moe_ext.routing import Routing

__all__ = ["SoftmaxGate", "TopKGate"]


class SoftmaxGate(Gate):
    """Routes every token to every expert with the gates G(x) = softmax(x·W_g) (Eq. 2).

    Args:
        d_model: D, the width of x.
        num_experts: E, the number of experts.
        device, dtype: of the parameters; None: torch's defaults.

    Attributes:
        w_gate: [D, E] parameter W_g.

    Raises:
        ValueError: d_model or num_experts is below 1.
        TypeError: dtype is not floating point.
    """

    @explains_names
    def __init__(
        self,
        d_model: int,
        num_experts: int,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, num_experts, num_experts)
        factory = self._factory(device, dtype)
        self.w_gate: nn.Parameter = nn.Parameter(torch.zeros(d_model, num_experts, **factory))

    def reset_parameters(self) -> None:
        """Sets all parameters and buffers to zero, their initial values."""
        self._set_to_zero()

    def forward(self, x: Tensor, ranks: Ranks | None = None) -> Routing:
        """Routes x [T, D] to all E experts, in index order; see `Gate.forward` for ranks."""
        logits = self.logits(x, self.w_gate)
        gates = torch.softmax(logits, dim=-1)
        expert_index = torch.arange(self.num_experts, device=x.device).expand(x.shape[0], -1)
        return self.make_routing(gates, expert_index, ranks=ranks, logits=logits)

    def extra_repr(self) -> str:
        """Returns the arguments that the text of the module shows."""
        return f"d_model={self.d_model}, num_experts={self.num_experts}"


class TopKGate(AdaptiveGate):
    """Routes each token to its top k experts without noise.

    The default is Appendix F with M = TopK: the softmax scores, masked and renormalized::

        G(x)_i = G_σ(x)_i M_i / Σ_j G_σ(x)_j M_j,   G_σ(x) = softmax(x·W_g)

    The options are those of later models, such as the groups and the sigmoid of DeepSeek-V3
    (arXiv 2412.19437). `moe_ext.ops.topk_routing` has their equations.

    With bias_update_rate u, a selection bias b balances the experts without a loss
    (arXiv 2408.15664). The gate selects by the scores plus b; b does not enter the gates. In
    training mode, the gate counts the tokens of each expert. Call `update_gates` once in each
    optimizer step::

        b_i ← b_i + u · sign(mean(count) - count_i)

    With k = 1 and renormalize, the gate of every token is constant, as in `NoisyTopKGate`.

    W_g starts with normal random values of standard deviation 0.1 · D^-1/2. With W_g = 0, every
    token would be routed to the same experts. Load is the number of routed tokens, which has no
    gradient. Of the losses of `MoE`, only the importance loss balances the experts.

    Args:
        d_model: D, the width of x.
        num_experts: E, the number of experts.
        k: experts per token, 1 <= k <= E.
        score, renormalize, scale: how gates follow from the logits, see
            `moe_ext.ops.topk_routing`.
        num_groups, groups_per_token, group_score_k: in which groups of experts a token selects, see
            `moe_ext.ops.topk_routing`.
        logit_bias: whether the logits are x·W_g + b_g.
        bias_update_rate: u; None: no selection bias. With 0, the selection bias does not change.
        device, dtype: of the parameters; None: torch's defaults.

    Attributes:
        w_gate: [D, E] parameter W_g.
        b_gate: [E] parameter b_g, initially 0; None without logit_bias.
        selection_bias: [E] buffer b, initially 0; None without bias_update_rate. It is at least
            float32, also after ``gate.bfloat16()``.
        tokens_since_update: [E] int64, the tokens of each expert since the last update; None
            without bias_update_rate. In a ``MoE(process_group=...)`` with balance="global", they
            are the tokens of all ranks. It is not in the state_dict.

    Raises:
        ValueError: a size is below 1, k is not between 1 and num_experts, or another option is out
            of range.
        TypeError: an option has the wrong type.
    """

    replays: ClassVar[bool] = True
    _sums_later: bool = True
    selection_bias: Tensor | None
    renormalize: bool
    scale: float
    num_groups: int
    groups_per_token: int
    group_score_k: int

    @explains_names
    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int,
        *,
        score: ops.Score = "softmax",
        renormalize: bool = True,
        scale: float = 1.0,
        num_groups: int = 1,
        groups_per_token: int = 1,
        group_score_k: int = 2,
        logit_bias: bool = False,
        bias_update_rate: float | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        adapts = bias_update_rate is not None
        num_counts = num_experts if adapts else 0
        super().__init__(d_model, num_experts, k, num_counts=num_counts, device=device)
        if adapts:
            self._sums_later = False  # forward counts the tokens of all ranks
        factory = self._factory(device, dtype)
        self.score: ops.Score = score
        self.renormalize, logit_bias = require_bool(
            "TopKGate", renormalize=renormalize, logit_bias=logit_bias
        )
        (self.scale,) = require_positive("TopKGate", scale=scale)
        self.num_groups, self.groups_per_token, self.group_score_k = require_sizes(
            "TopKGate",
            num_groups=num_groups,
            groups_per_token=groups_per_token,
            group_score_k=group_score_k,
        )
        self.bias_update_rate: float | None = None
        if bias_update_rate is not None:
            self.bias_update_rate = self._checked_rate(bias_update_rate)
        self._route(torch.empty(0, num_experts, device="meta"))  # checks the options
        if self.renormalize:
            remedy = "use k of at least 2, or renormalize=False"
            self._warn_if_untrained(self.k, num_experts, remedy)
        self.w_gate: nn.Parameter = nn.Parameter(torch.empty(d_model, num_experts, **factory))
        self.b_gate: nn.Parameter | None = (
            nn.Parameter(torch.empty(num_experts, **factory)) if logit_bias else None
        )
        self.register_buffer(
            "selection_bias", widened(torch.empty(num_experts, **factory)) if adapts else None
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reinitializes W_g with random values; sets biases and counts to zero."""
        nn.init.normal_(self.w_gate, std=0.1 * len(self.w_gate) ** -0.5)
        for value in (self.b_gate, self.selection_bias, self.tokens_since_update):
            if value is not None:
                value.zero_()

    def forward(
        self, x: Tensor, ranks: Ranks | None = None, expert_index: Tensor | None = None
    ) -> Routing:
        """Routes x [T, D] to k experts per token, in order of decreasing biased score.

        The gates of a given expert_index are in its order. See `Gate.forward` for ranks and
        expert_index.
        """
        logits = self.logits(x, self.w_gate)
        if self.b_gate is not None:
            logits = logits + self.b_gate.to(logits.dtype)
        selected = self._route(logits, self.selection_bias, expert_index)
        score = _SCORES.get(self.score)
        scores = None if score is None else score(logits)
        routing = self.make_routing(*selected, ranks=ranks, logits=logits, scores=scores)
        self.count(routing.load)
        return routing

    def _route(
        self, logits: Tensor, bias: Tensor | None = None, expert_index: Tensor | None = None
    ) -> ops.TopKRouting:
        return ops.topk_routing(
            logits,
            self.k,
            None if bias is None else bias.to(logits.dtype),
            self.score,
            self.renormalize,
            self.scale,
            self.num_groups,
            self.groups_per_token,
            self.group_score_k,
            expert_index,
        )

    def update(self, counts: Tensor) -> None:
        """Raises the bias of experts below the mean count; see `AdaptiveGate.update`."""
        assert self.selection_bias is not None
        assert self.bias_update_rate is not None
        rate = self._checked_rate(self.bias_update_rate)
        below_mean = torch.sign(counts.sum() - len(counts) * counts)  # exact in int64
        self.selection_bias.add_(rate * below_mean.to(self.selection_bias.dtype))

    @staticmethod
    def _checked_rate(bias_update_rate: float) -> float:
        return require_at_least(0, "TopKGate", bias_update_rate=bias_update_rate)[0]

    def extra_repr(self) -> str:
        """Returns the arguments that the text of the module shows."""
        shown = super().extra_repr()
        for name, default in _DEFAULTS.items():
            if vars(self)[name] != default:
                shown += f", {name}={vars(self)[name]!r}"
        return shown + (", logit_bias=True" if self.b_gate is not None else "")


def _sqrt_softplus(logits: Tensor) -> Tensor:
    """Computes sqrt(softplus(logits)); the gradient is 0 where softplus underflows."""
    tiny = torch.finfo(logits.dtype).tiny
    return nn.functional.softplus(logits).clamp_min(tiny).sqrt()


# The scores that are not a softmax.
_SCORES: dict[ops.Score, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "sqrt_softplus": _sqrt_softplus,
}
_DEFAULTS: dict[str, Any] = {
    "score": "softmax",
    "renormalize": True,
    "scale": 1.0,
    "num_groups": 1,
    "groups_per_token": 1,
    "group_score_k": 2,
    "bias_update_rate": None,
}
