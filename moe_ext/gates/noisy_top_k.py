"""Noisy top-k gating, Section 2.1, with the smooth load of Appendix A."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_ext.distributed.ranks import Ranks
from moe_ext.gates._logits import widened
from moe_ext.gates._noisy import NoisyGate
from moe_ext.gates.gate import Routing

__all__ = ["NoisyTopKGate"]


class NoisyTopKGate(NoisyGate):
    """Noisy top-k gating (Eqs. 3-5), with noise in training mode only.

    Both matrices start at zero ("no signal and some noise"): training begins with uniformly random
    routing; in evaluation mode the untrained gate ties everywhere and picks the lowest indices.

    With k = 1 the kept gate is 1 whatever the logits, so that the task's gradient to the gate is
    zero: the balancing losses alone train it.

    Args:
        d_model: D, the width of x.
        num_experts: E.
        k: experts kept per token, 1 <= k <= E.
        noise_epsilon: floor of the noise's standard deviation.
        detach_threshold: keep Load's gradient out of the thresholds (see `moe_ext.ops.load`).
        generator: source of the noise; None is torch's global one, which torch.utils.checkpoint
            replays. A generator of one's own is not replayed when a forward pass is recomputed,
            torch.compile(fullgraph=True) does not take it, and a torch.cuda.CUDAGraph has to be
            told of it by register_generator_state.

    Raises:
        ValueError: a size is below 1, k is not between 1 and num_experts, or noise_epsilon is
            negative.
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int,
        *,
        noise_epsilon: float = 1e-2,
        detach_threshold: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(d_model, num_experts, k, noise_epsilon, detach_threshold, generator)
        self.w_gate = nn.Parameter(torch.zeros(d_model, num_experts))
        self.w_noise = nn.Parameter(torch.zeros(d_model, num_experts))

    def forward(self, x: Tensor, ranks: Ranks | None = None) -> Routing:
        """x [T, D] to the k kept gates of each token, in order of decreasing (noisy) logit."""
        clean_logits, kept = self._select(widened(x), self.w_gate, self.w_noise, self.k)
        load = self._load(clean_logits, kept) if self.training else None
        return self.make_routing(kept.gates, kept.expert_index, load=load, ranks=ranks)
