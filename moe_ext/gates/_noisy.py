"""Selects experts and computes the load on one level of a flat or hierarchical noisy gate."""

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext.checks import require_at_least, require_bool
from moe_ext.gates._logits import logits
from moe_ext.gates.gate import Gate


class NoisyGate(Gate):
    """Adds noise to the logits in training mode; the base class of both noisy gates.

    Args:
        d_model, num_experts, k: see `Gate`.
        noise_epsilon, detach_threshold, generator: see `NoisyTopKGate`.
    """

    noise_epsilon: float
    detach_threshold: bool

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int,
        noise_epsilon: float,
        detach_threshold: bool,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__(d_model, num_experts, k)
        name = type(self).__name__
        (self.noise_epsilon,) = require_at_least(0, name, noise_epsilon=noise_epsilon)
        (self.detach_threshold,) = require_bool(name, detach_threshold=detach_threshold)
        if not isinstance(generator, torch.Generator | None):
            kind = type(generator).__name__
            raise TypeError(f"{name}: generator must be a torch.Generator or None, got {kind}")
        self.generator = generator

    def reset_parameters(self) -> None:
        """Sets all parameters and buffers to zero, their initial values."""
        self._set_to_zero()

    def _select(
        self,
        x: Tensor,
        w_gate: Tensor,
        w_noise: Tensor,
        k: int,
        plan: ops.DispatchPlan | None = None,
        token_offsets: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> tuple[Tensor, ops.TopKSelection]:
        """Returns the clean logits x · w_gate and the selection of the k largest noisy logits.

        See `_noisy_logits` for the other arguments.
        """
        terms = self._noisy_logits(x, w_gate, w_noise, plan, token_offsets, noise)
        return terms[0], ops.noisy_topk_gating(*terms, k, self.noise_epsilon)

    def _noisy_logits(
        self,
        x: Tensor,
        w_gate: Tensor,
        w_noise: Tensor,
        plan: ops.DispatchPlan | None = None,
        token_offsets: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns clean_logits, raw_noise_stddev and noise of `moe_ext.ops.noisy_topk_gating`.

        In training mode, x · w_noise gives the standard deviation of the noise. A dispatch plan
        assigns tokens to groups, with token_offsets as in `moe_ext.ops.dispatch`. The results then
        have one row for each (token, group) assignment, and w_gate and w_noise have one matrix for
        each group. Noise is in slot order, so that it does not depend on other tokens' groups; it
        is drawn here if it is None.
        """
        rows = {}
        if plan is not None:
            rows = {
                "offsets": plan.offsets,
                "inverse": plan.inverse,
                "token_offsets": token_offsets,
            }
        if not self.training:
            (clean_logits,) = logits(x, w_gate, **rows)
            return clean_logits, None, noise
        clean_logits, raw_noise_stddev = logits(x, w_gate, w_noise, **rows)
        noise = self.draw_noise(clean_logits) if noise is None else noise
        if plan is not None:
            noise = ops.dispatch(noise, plan.inverse.reshape(-1, 1))
        return clean_logits, raw_noise_stddev, noise

    def _load(
        self,
        clean_logits: Tensor,
        selection: ops.TopKSelection,
        group_offsets: Tensor | None = None,
    ) -> Tensor:
        """Computes Load(X) of a selection in training mode by `moe_ext.ops.load`.

        The operator describes clean_logits and group_offsets.
        """
        return ops.load(
            clean_logits,
            selection.noise_stddev,
            selection.threshold,
            selection.expert_index,
            self.detach_threshold,
            group_offsets,
        )

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, noise_epsilon={self.noise_epsilon}, "
            f"detach_threshold={self.detach_threshold}"
        )
