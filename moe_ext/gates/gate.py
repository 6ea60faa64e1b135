"""The interface between a gate and `MoE`: `Gate` and its result, `Routing`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from moe_ext import ops
from moe_ext.checks import require, require_floating, require_k, require_not_nested, require_sizes
from moe_ext.distributed.ranks import Ranks
from moe_ext.gates._logits import logits

__all__ = ["Gate", "Routing"]


class Routing(NamedTuple):
    """Holds a gate's routing decision for T tokens.

    A slot is one of the R (token, expert) assignments. Slots are ordered by token.

    Attributes:
        gates: [T, K], or [R] with token_offsets; float32 or float64. The weight of each slot.
        expert_index: int64, in the shape of gates. The expert of each slot.
        importance: [E], the sum of each expert's gates (Eq. 6).
        load: [E], the expected number of tokens per expert (Appendix A). Without noise, it is the
            number of routed tokens, which has no gradient.
        token_offsets: [T + 1] int64; token t has the slots token_offsets[t] to
            token_offsets[t + 1] - 1. None: each token has K slots.
        equal_load: whether every expert has exactly R / E tokens. `MoE` then needs no token counts.
        loss: scalar, the gate's own loss, which `MoE` adds to its loss. None: no loss.
        metrics: scalars by name that describe the routing, for `metrics` of `MoEAux`.
        load_factors: Load_primary(X) [a], Load_i(X^(i)) [a, b] and ``|X^(i)|`` [a] of a groups with
            b experts each. Only a hierarchical noisy gate sets these factors of load, because each
            factor is a sum over tokens and load is not.
        logits: [T, E], the router's logits x·W_g, without noise, in at least float32. Losses such
            as `ZLoss` need them. None: the gate does not compute a logit for every expert.
        scores: [T, E], non-negative scores of the experts, if these are not softmax(logits). See
            `probabilities`.
        kept: bool, in the shape of gates. False: the slot is dropped, so that no expert computes
            it. Importance, load and losses count it. None: no slot is dropped.
    """

    gates: Tensor
    expert_index: Tensor
    importance: Tensor
    load: Tensor
    token_offsets: Tensor | None = None
    equal_load: bool = False
    loss: Tensor | None = None
    metrics: dict[str, Tensor] = {}  # noqa: RUF012  (never changed)
    load_factors: tuple[Tensor, ...] | None = None
    logits: Tensor | None = None
    scores: Tensor | None = None
    kept: Tensor | None = None

    def probabilities(self) -> Tensor:
        """Computes p(x) [T, E]: softmax(logits), or with scores, scores / Σ_j scores_j.

        A token whose scores are all 0 has probabilities of 0.

        Raises:
            ValueError: logits and scores are None.
        """
        if self.scores is None:
            require(self.logits is not None, "Routing: logits", "be set by the gate", None)
            assert self.logits is not None
            return torch.softmax(self.logits, dim=-1)
        total = self.scores.sum(-1, keepdim=True)
        return self.scores / torch.where(total > 0, total, 1)


class Gate(nn.Module):
    """Routes tokens to experts; the base class of all gates.

    Derive a custom gate from this class. Call ``super().__init__(d_model, num_experts, k)`` and
    define `forward`. The method `make_routing` builds the `Routing` that `forward` returns:

        >>> class RoundRobinGate(Gate):
        ...     def forward(self, x, ranks=None):
        ...         t = torch.arange(len(x), device=x.device)[:, None]
        ...         expert_index = (t + torch.arange(self.k, device=x.device)) % self.num_experts
        ...         gates = torch.full_like(expert_index, 1 / self.k, dtype=torch.float32)
        ...         return self.make_routing(gates, expert_index, ranks=ranks)

    Args:
        d_model: D, the width of x.
        num_experts: E, the number of experts.
        k: experts per token, 1 <= k <= E; the mean if the number differs between tokens.

    Attributes:
        d_model: the constructor argument.
        num_experts: the constructor argument.
        k: the constructor argument.
        generator: source of the noise; None: torch's global generator.
        experts_per_group: number of consecutive experts that must stay on one rank.
        routes_by_batch: whether a token's experts depend on the other tokens of the batch. With
            several ranks, `MoE` then requires ``balance="global"``; otherwise the ranks' gates
            would diverge.

    Raises:
        ValueError: a size is below 1, or k is not between 1 and num_experts.
    """

    routes_by_batch: ClassVar[bool] = False
    experts_per_group: int = 1
    generator: torch.Generator | None = None
    d_model: int
    num_experts: int
    k: int

    def __init__(self, d_model: int, num_experts: int, k: int) -> None:
        super().__init__()
        name = type(self).__name__
        self.d_model, self.num_experts = require_sizes(
            name, d_model=d_model, num_experts=num_experts
        )
        self.k = require_k(name, k, self.num_experts)

    def forward(self, x: Tensor, ranks: Ranks | None = None) -> Routing:
        """Routes the tokens x [T, D].

        A gate whose forward has a third argument ``expert_index=None`` can replay a routing
        decision: with expert_index [T, K] int64, it must route each token to the given experts. The
        gates are those of the current parameters. `MoE.forward` then accepts expert_index too.

        Args:
            x: [T, D]; T may be 0.
            ranks: the ranks that balance their tokens together. Importance, load, loss and metrics
                must then cover the tokens of all of them. None: only this rank.

        Returns:
            The `Routing` of this rank's tokens.
        """
        raise NotImplementedError(f"{type(self).__name__} must define forward(x, ranks=None)")

    if TYPE_CHECKING:
        __call__ = forward

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """Computes x · weight in at least float32, also under autocast.

        Args:
            x: [T, D].
            weight: [D, E].

        Returns:
            [T, E]. On the CPU, a row is bitwise independent of the other rows. On CUDA, a row may
            depend on the number of rows.
        """
        self._require_tokens(x)
        return logits(x, weight)

    def _require_tokens(self, x: Tensor) -> None:
        """Requires that x is a floating-point tensor [T, D]."""
        name = type(self).__name__
        require_not_nested(name, x=x)
        if x.dim() != 2 or x.shape[1] != self.d_model:
            rule = f"have shape [T, d_model = {self.d_model}]"
            require(False, f"{name}: x", rule, tuple(x.shape))
        require_floating(name, x)

    def draw_noise(self, like: Tensor) -> Tensor:
        """Draws standard normal noise in the shape and dtype of `like` from `generator`.

        All noise of the gates in moe_ext comes from this method. Override it to replay noise.
        """
        if self.generator is None:
            return torch.randn_like(like)
        return torch.empty_like(like).normal_(generator=self.generator)

    def make_routing(
        self,
        gates: Tensor,
        expert_index: Tensor,
        *,
        load: Tensor | None = None,
        ranks: Ranks | None = None,
        logits: Tensor | None = None,
        scores: Tensor | None = None,
    ) -> Routing:
        """Makes a `Routing` from gates [T, K]; sums importance and load over the ranks.

        Args:
            gates: [T, K].
            expert_index: [T, K] int64, the expert of each gate.
            load: [E], the load of this rank's tokens; None: the number of routed tokens.
            ranks: the ranks to sum over; see `forward`.
            logits, scores: see `Routing`.
        """
        if load is None:
            importance, load = ops.importance_and_load(gates, expert_index, self.num_experts)
        else:
            importance = ops.importance(gates, expert_index, self.num_experts)
        if ranks is not None:
            importance, load = ranks.sum(importance, load)
        return Routing(gates, expert_index, importance, load, logits=logits, scores=scores)

    def extra_repr(self) -> str:
        """Returns the arguments that the text of the module shows."""
        return self._sizes()

    def _sizes(self) -> str:
        return f"d_model={self.d_model}, num_experts={self.num_experts}, k={self.k}"
