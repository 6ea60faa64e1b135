"""Noisy top-k gating (Section 2.1) with the smooth load of Appendix A."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.types import Device

from moe_ext import ops
from moe_ext._argument_names import explains_names
from moe_ext.gates._noisy import NoisyGate
from moe_ext.ranks.collectives import Ranks
from moe_ext.routing import Routing

__all__ = ["NoisyTopKGate"]


class NoisyTopKGate(NoisyGate):
    """Selects the top k of noisy logits (Eqs. 3-5); adds noise only in training mode.

    W_g and W_noise start at zero ("no signal and some noise"). Training begins with uniformly
    random routing. In evaluation mode, all logits of an untrained gate tie. Then the experts with
    the lowest indices are selected.

    With k = 1, the weight G(x)_i of the chosen expert is always 1. The task loss then has no
    gradient for W_g and W_noise; only the balancing losses train them.

    Args:
        d_model: D, the width of x.
        num_experts: E, the number of experts.
        k: experts per token, 1 <= k <= E.
        noise_epsilon: minimum standard deviation of the noise.
        detach_threshold: whether to block the gradient of the load through the thresholds (see
            `moe_ext.ops.load`).
        generator: source of the noise. None: torch's global generator. torch.utils.checkpoint
            replays only the global generator. torch.compile(fullgraph=True) does not support a
            custom generator. A torch.cuda.CUDAGraph needs register_generator_state for it.
        device, dtype: of the parameters; None: torch's defaults.

    Attributes:
        w_gate: [D, E] parameter W_g.
        w_noise: [D, E] parameter W_noise.

    Raises:
        ValueError: a size is below 1, k is not between 1 and num_experts, or noise_epsilon is
            negative.
        TypeError: an option has the wrong type.
    """

    replays: ClassVar[bool] = True
    _sums_later: bool = True

    @explains_names
    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int,
        *,
        noise_epsilon: float = 1e-2,
        detach_threshold: bool = False,
        generator: torch.Generator | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, num_experts, k, noise_epsilon, detach_threshold, generator)
        remedy = (
            "use k of at least 2, or TopKGate(d_model, num_experts, 1, renormalize=False) as gate"
        )
        self._warn_if_untrained(self.k, num_experts, remedy)
        factory = self._factory(device, dtype)
        self.w_gate: nn.Parameter = nn.Parameter(torch.zeros(d_model, num_experts, **factory))
        self.w_noise: nn.Parameter = nn.Parameter(torch.zeros(d_model, num_experts, **factory))

    def forward(
        self, x: Tensor, ranks: Ranks | None = None, expert_index: Tensor | None = None
    ) -> Routing:
        """Routes x [T, D] to k experts per token, in order of decreasing (noisy) logit.

        With expert_index, the load in training mode is still the load of the experts that the gate
        itself selects. See `Gate.forward` for ranks and expert_index.
        """
        self._require_tokens(x)
        clean_logits, raw, noise = self._noisy_logits(x, self.w_gate, self.w_noise)
        settings = raw, noise, self.k, self.noise_epsilon
        given = clean_logits
        if expert_index is not None:
            given = _only_given(clean_logits, expert_index, self.k)
        own = selection = ops.noisy_topk_gating(given, *settings)
        load = None
        if self.training:
            if expert_index is not None:
                own = ops.noisy_topk_gating(clean_logits, *settings)
            load = self._load(clean_logits, own)
        return self.make_routing(
            selection.gates, selection.expert_index, load=load, ranks=ranks, logits=clean_logits
        )


def _only_given(logits: Tensor, expert_index: Tensor, k: int) -> Tensor:
    """Sets the logits [T, E] of experts that are not in expert_index [T, k] to -inf.

    A top-k selection then selects exactly the given experts, with unchanged gates.

    Raises:
        ValueError, TypeError, IndexError: expert_index is wrong; see `moe_ext.ops.topk_routing`.
    """
    checked = ops.topk_routing(logits.detach(), k, expert_index=expert_index)
    given = torch.zeros_like(logits, dtype=torch.bool).scatter(1, checked.expert_index, True)
    return torch.where(given, logits, -torch.inf)
