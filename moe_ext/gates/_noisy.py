"""What the flat and the hierarchical noisy gate share: a level's selection and its load."""

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext.checks import require_at_least
from moe_ext.gates._logits import logits, matmul, zero_
from moe_ext.gates.gate import Gate


class NoisyGate(Gate):
    """A gate that adds noise to its logits in training.

    Args:
        d_model, num_experts, k: see `Gate`.
        noise_epsilon, detach_threshold, generator: see `NoisyTopKGate`.
    """

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
        require_at_least(0, type(self).__name__, noise_epsilon=noise_epsilon)
        self.noise_epsilon = noise_epsilon
        self.detach_threshold = detach_threshold
        self.generator = generator

    def reset_parameters(self) -> None:
        """Sets all parameters and buffers to zero, as they are in a new gate."""
        zero_(self)

    def _select(
        self,
        x: Tensor,
        w_gate: Tensor,
        w_noise: Tensor,
        k: int,
        plan: ops.DispatchPlan | None = None,
    ) -> tuple[Tensor, ops.TopKSelection]:
        """The clean logits of each token of x, and the k gates that are kept.

        With a plan, those of each of its rows, by the matrices of the row's group.
        """

        def product(x: Tensor, weight: Tensor) -> Tensor:
            if plan is None:
                return matmul(x, weight)
            return ops.experts(x, [weight], offsets=plan.offsets, inverse=plan.inverse)

        clean_logits = logits(x, w_gate, product)
        raw_noise_stddev = noise = None
        if self.training:
            raw_noise_stddev, noise = logits(x, w_noise, product), self.draw_noise(clean_logits)
            if plan is not None:
                # Drawn by slots: a token's noise does not depend on the groups of the others.
                noise = ops.dispatch(noise, plan.inverse.reshape(-1, 1))
        kept = ops.noisy_topk_gating(clean_logits, raw_noise_stddev, noise, k, self.noise_epsilon)
        return clean_logits, kept

    def _load(
        self, clean_logits: Tensor, kept: ops.TopKSelection, group_offsets: Tensor | None = None
    ) -> Tensor:
        """Load(X) of a selection made in training; see `moe_ext.ops.load`."""
        return ops.load(
            clean_logits,
            kept.noise_stddev,
            kept.threshold,
            kept.expert_index,
            self.detach_threshold,
            group_offsets,
        )

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, noise_epsilon={self.noise_epsilon}, "
            f"detach_threshold={self.detach_threshold}"
        )
