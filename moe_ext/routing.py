"""The routing decision: what a gate tells the dispatch, the losses and the experts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_ext.checks import required

__all__ = ["Routing"]


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
            logits = required(self.logits, "Routing: logits", "be set by the gate")
            return torch.softmax(logits, dim=-1)
        total = self.scores.sum(-1, keepdim=True)
        return self.scores / torch.where(total > 0, total, 1)
