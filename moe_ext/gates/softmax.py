"""Gates without noise: the softmax over all experts, and the top k by any score."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext import ops
from moe_ext.checks import require, require_at_least
from moe_ext.distributed.ranks import Ranks
from moe_ext.gates._logits import zero_
from moe_ext.gates.gate import Gate, Routing

__all__ = ["SoftmaxGate", "TopKGate", "update_selection_bias"]


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
    """Routes each token to its top k experts without noise.

    The default is Appendix F with M = TopK: the softmax scores, masked and renormalized::

        G(x)_i = G_σ(x)_i M_i / Σ_j G_σ(x)_j M_j,   G_σ(x) = softmax(x·W_g)

    The options are those of later models, such as the groups and the sigmoid of DeepSeek-V3
    (arXiv:2412.19437). `moe_ext.ops.topk_routing` has their equations.

    With bias_update_rate u, a selection bias b balances the experts without a loss
    (arXiv:2408.15664). The gate selects by the scores plus b; b does not enter the gates. In
    training mode, the gate counts the tokens of each expert. Call `update_selection_bias` once in
    each optimizer step::

        b_i ← b_i + u · sign(mean(count) - count_i)

    A token counts once, whatever recomputes its forward pass: both kinds of
    `torch.utils.checkpoint.checkpoint` do.

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

    Attributes:
        w_gate: [D, E] parameter W_g.
        b_gate: [E] parameter b_g, initially 0; None without logit_bias.
        selection_bias: [E] buffer b, initially 0; None without bias_update_rate. It is at least
            float32, also after ``gate.bfloat16()``.
        tokens_since_update: [E] int64, the tokens of each expert since the last update; None
            without bias_update_rate. With ``MoE(process_group=...)`` and balance="global", they are
            those of all ranks. It is not in the state_dict.

    Raises:
        ValueError: a size is below 1, k is not between 1 and num_experts, or another option is out
            of range.
    """

    selection_bias: Tensor | None
    tokens_since_update: Tensor | None = None

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
    ) -> None:
        super().__init__(d_model, num_experts, k)
        require_at_least(0, "TopKGate", bias_update_rate=bias_update_rate)
        self.score: ops.Score = score
        self.renormalize = renormalize
        self.scale = scale
        self.num_groups = num_groups
        self.groups_per_token = groups_per_token
        self.group_score_k = group_score_k
        self.bias_update_rate = bias_update_rate
        self._route(torch.empty(0, num_experts, device="meta"))  # checks the options
        self.w_gate = nn.Parameter(torch.empty(d_model, num_experts))
        self.b_gate = nn.Parameter(torch.empty(num_experts)) if logit_bias else None
        bias = None
        if bias_update_rate is not None:
            wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
            bias = torch.empty(num_experts, dtype=wide)
            # Not a buffer: DistributedDataParallel would replace it by the counts of rank 0.
            self.tokens_since_update = torch.empty_like(bias, dtype=torch.int64)
        self.register_buffer("selection_bias", bias)
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
        if self.training and self.tokens_since_update is not None:
            torch.ops.moe_ext._count_tokens_(self.tokens_since_update, routing.load)
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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TopKGate:
        """Moves the counts too, and keeps the selection bias in at least float32.

        In half precision, the steps of the bias would round to zero.
        """
        bias, counts = self.selection_bias, self.tokens_since_update
        super()._apply(fn, recurse)
        if bias is not None and counts is not None:
            assert self.selection_bias is not None
            device = self.selection_bias.device
            if self.selection_bias.dtype.itemsize < 4:
                self.selection_bias = bias.to(device)
            from_meta = counts.is_meta and device.type != "meta"
            self.tokens_since_update = (
                torch.zeros_like(counts, device=device) if from_meta else counts.to(device)
            )
        return self

    def extra_repr(self) -> str:
        shown = super().extra_repr()
        for name in _OPTIONS:
            default = inspect.signature(TopKGate).parameters[name].default
            if getattr(self, name) != default:
                shown += f", {name}={getattr(self, name)!r}"
        return shown + (", logit_bias=True" if self.b_gate is not None else "")


# The scores that are not a softmax.
_SCORES: dict[ops.Score, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "sqrt_softplus": lambda logits: nn.functional.softplus(logits).sqrt(),
}
_OPTIONS = (
    "score",
    "renormalize",
    "scale",
    "num_groups",
    "groups_per_token",
    "group_score_k",
    "bias_update_rate",
)


@torch.no_grad()
def update_selection_bias(model: nn.Module, process_group: ProcessGroup | None = None) -> None:
    """Updates the selection bias of every `TopKGate` from the tokens of each expert.

    Call it once in each optimizer step, on every rank, or let the optimizer call it::

        optimizer.register_step_post_hook(lambda *_: update_selection_bias(model))

    Count_i is the number of tokens that the gate has routed to expert i in training mode since the
    last update, over all micro-batches (arXiv:2408.15664)::

        b_i ← b_i + bias_update_rate · sign(mean(count) - count_i)

    The counts then start again from zero.

    Args:
        model: a module with such gates.
        process_group: the ranks whose counts are summed; None: only this rank. Pass all ranks that
            train, unless every layer with such a gate has the same ranks as its process_group and
            balance="global". If a layer has summed over some ranks already, all counts grow by the
            same factor, which does not change the update.

    Raises:
        ValueError: the model has no gate with a selection bias.
    """
    gates = [m for m in model.modules() if isinstance(m, TopKGate)]
    gates = [gate for gate in gates if gate.selection_bias is not None]
    rule = "contain a TopKGate with bias_update_rate"
    require(bool(gates), "update_selection_bias: model", rule, type(model).__name__)
    counts = [gate.tokens_since_update for gate in gates]
    totals = Ranks(process_group).sum(*(count for count in counts if count is not None))
    for gate, total in zip(gates, totals, strict=True):
        assert gate.selection_bias is not None and gate.bias_update_rate is not None
        assert gate.tokens_since_update is not None
        below_mean = torch.sign(total.sum() - len(total) * total)  # exact in int64
        step = gate.bias_update_rate * below_mean.to(gate.selection_bias.dtype)
        gate.selection_bias.add_(step)
        gate.tokens_since_update.zero_()
