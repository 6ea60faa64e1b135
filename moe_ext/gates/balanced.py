"""Strictly balanced gating (App. F): in training, every expert gets the same number of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_ext import ops
from moe_ext.checks import require_k_of_levels
from moe_ext.distributed._batchwise import mask_over_ranks
from moe_ext.distributed.ranks import Ranks
from moe_ext.gates._logits import logits, widened, zero_
from moe_ext.gates._slots import (
    Agreement,
    Mask,
    experts_of_rows,
    experts_of_selected,
    routing_of_slots,
    several,
)
from moe_ext.gates.gate import Gate, Routing
from moe_ext.losses import batchwise_loss
from moe_ext.ops._balanced_gating import rows_per_expert

__all__ = [
    "BalancedGate",
    "HierarchicalBalancedGate",
    "StrictlyBalancedGate",
    "balanced_gates",
    "batchwise_masks",
    "rows_per_expert",
]


def _by_threshold(scores: Tensor, threshold: Tensor) -> Mask:
    """Selects the experts with scores [N, E] above the threshold; synchronizes with the device.

    NaN scores are selected too: otherwise NaN rows would silently get the output 0.
    """
    return Mask(*experts_of_rows(~(scores <= threshold)))


def _agreement(scores: Tensor, threshold: Tensor, mask: Tensor) -> Agreement:
    """Compares the batchwise mask with scores > threshold; shapes as in `batchwise_loss`."""
    passes = scores > threshold.unsqueeze(-2)
    return Agreement(
        batchwise_loss(scores, threshold, mask),
        (passes != mask).count_nonzero(),
        passes.count_nonzero() + mask.count_nonzero(),
    )


@torch.no_grad()
def _initialize(threshold: Tensor, initialized: Tensor, mth_score: Tensor) -> None:
    """Sets threshold just below mth_score in the first batch where all these scores are finite.

    The threshold and batchwise masks then agree on this batch. The margin of 16 eps covers
    rounding: on CUDA, the GEMM of evaluation mode may round differently. Later batches write the
    old threshold again, because reading the flag `initialized` on the host would synchronize.
    """
    finite = mth_score.isfinite().all()
    start = mth_score * (1 - 16 * torch.finfo(mth_score.dtype).eps)
    start = torch.nextafter(start, torch.full_like(start, -torch.inf))  # lowers a score of 0 too
    threshold.copy_(torch.where(initialized | ~finite, threshold, start.view_as(threshold)))
    initialized.logical_or_(finite)


class StrictlyBalancedGate(Gate):
    """Implements the batchwise mask and the thresholds of both strictly balanced gates.

    Attributes:
        batchwise: whether to select by the batchwise mask in evaluation mode too.
    """

    routes_by_batch: ClassVar[bool] = True

    def __init__(self, d_model: int, num_experts: int, k: int, detach_scores: bool) -> None:
        super().__init__(d_model, num_experts, k)
        self.detach_scores = detach_scores
        self.batchwise = False

    def reset_parameters(self) -> None:
        """Sets all parameters and buffers to zero, their initial values."""
        zero_(self)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, detach_scores={self.detach_scores}"

    def _scores(self, logits: Tensor) -> Tensor:
        """Computes G_σ = softmax(logits), the scores by which the masks select."""
        return torch.softmax(logits.detach() if self.detach_scores else logits, dim=-1)

    def _by_batch(
        self,
        scores: Tensor,
        k: int,
        threshold: Tensor,
        initialized: Tensor,
        ranks: Ranks | None,
        group_sizes: Tensor | None = None,
    ) -> Mask:
        """Computes M_batchwise(X, m) for scores [R, E] of G equally large groups of rows.

        A row has k experts on average. In training mode, the first batch sets threshold and the
        flag `initialized`. With several ranks, group_sizes [G] is the number of this rank's rows in
        each group; None means a single group.
        """
        num_rows, num_experts = scores.shape
        num_groups = threshold.numel() // num_experts
        if ranks is not None:
            if group_sizes is None:
                group_sizes = torch.tensor([num_rows], device=scores.device)
            mask, mth_score = mask_over_ranks(scores.detach(), k, group_sizes, ranks)
            if self.training and mth_score is not None:
                _initialize(threshold, initialized, mth_score)
            group = torch.repeat_interleave(group_sizes, output_size=num_rows)
            bound = threshold.to(scores.dtype).view(num_groups, num_experts).index_select(0, group)
            agreement = _agreement(scores.unsqueeze(1), bound, mask.unsqueeze(1))
            return Mask(*experts_of_rows(mask), agreement)

        num_rows //= num_groups
        scores = scores.view(num_groups, num_rows, num_experts)
        m = rows_per_expert(k, num_rows, num_experts)
        row_index, mth_score = ops.batchwise_topm(scores.detach(), m)
        if self.training:
            _initialize(threshold, initialized, mth_score)
        mask = torch.zeros_like(scores, dtype=torch.bool).scatter(1, row_index.mT, True)
        bound = threshold.to(scores.dtype).view(num_groups, num_experts)
        agreement = _agreement(scores, bound, mask)
        return Mask(*experts_of_selected(row_index, num_rows), agreement)


class BalancedGate(StrictlyBalancedGate):
    """Lets each expert select its tokens: a softmax gate without noise (Appendix F).

    The gates are the softmax scores, masked and renormalized::

        G(x)_i = G_σ(x)_i M_i / Σ_j G_σ(x)_j M_j,   G_σ(x) = softmax(x·W_g)

    Training mode uses M_batchwise: expert i gets the m = k·T/E tokens of the batch with the largest
    G_σ(x)_i (`rows_per_expert`). A token has k experts on average, and 0 to E in an extreme case.
    The output of a token without experts is 0. Load is constant, so w_load has no effect.

    Evaluation mode uses M_threshold: it selects the experts with G_σ(x)_i > threshold_i,
    independently of the other tokens. The host then synchronizes with the device to count the
    selected experts.

    The gate's own loss, L_batchwise / T for T tokens, trains the thresholds. They are 0 until the
    first training batch sets them just below the m-th largest score of each expert. An untrained
    gate in evaluation mode therefore selects all experts (Eq. 2). Thresholds have the scale of a
    softmax over E experts: train them with a separate learning rate well below 1 / E.

    The first batch writes the threshold parameter in place. `torch.func.functional_call` and
    `fully_shard` substitute another tensor and lose this initialization. Without a process_group,
    each rank initializes its thresholds from its own batch; DistributedDataParallel does not remove
    this difference between ranks. Layers with a process_group under
    `moe_ext.distributed.parallelize` have neither problem.

    W_g starts at zero, so all scores are equal. A fixed pseudo-random function then assigns tokens
    to experts (`moe_ext.ops.batchwise_topm`).

    The metric share_without_expert is the fraction of tokens without experts. With the batchwise
    mask, mask_disagreement is
    ``|M_threshold xor M_batchwise| / (|M_threshold| + |M_batchwise|)``.

    Args:
        d_model: D, the width of x.
        num_experts: E, the number of experts.
        k: mean number of experts per token, 1 <= k <= E.
        detach_scores: whether L_batchwise trains only the thresholds, not W_g and earlier layers.

    Attributes:
        w_gate: [D, E] parameter W_g.
        threshold: [E] parameter, the threshold of each expert's score.
        batchwise: whether to use M_batchwise in evaluation mode too (`batchwise_masks`).

    Raises:
        ValueError: a size is below 1, or k is not between 1 and num_experts.
    """

    initialized: Tensor

    def __init__(
        self, d_model: int, num_experts: int, k: int, *, detach_scores: bool = True
    ) -> None:
        super().__init__(d_model, num_experts, k, detach_scores)
        self.w_gate = nn.Parameter(torch.zeros(d_model, num_experts))
        self.threshold = nn.Parameter(torch.zeros(num_experts))
        self.register_buffer("initialized", torch.tensor(False))

    def forward(self, x: Tensor, ranks: Ranks | None = None) -> Routing:
        """Routes x [T, D]; the experts of each token are in index order.

        See `Gate.forward` for ranks.
        """
        ranks = several(ranks)
        gate_logits = self.logits(x, self.w_gate)
        scores = self._scores(gate_logits)
        if self.training or self.batchwise:
            mask = self._by_batch(scores, self.k, self.threshold, self.initialized, ranks)
        else:
            mask = _by_threshold(scores, self.threshold)
        gates = ops.selected_softmax(gate_logits, mask.expert_index, mask.row_offsets)
        routing = routing_of_slots(
            self.num_experts, gates, mask.expert_index, mask.row_offsets, [mask], ranks
        )
        return routing._replace(logits=gate_logits)


class HierarchicalBalancedGate(StrictlyBalancedGate):
    """Applies strictly balanced gating on two levels: a groups of b experts each (App. B, F).

    Expert i · b + j is expert j of group i. Its gate is G_H(x)_ij = G_primary(x)_i · G_i(x)_j. Each
    factor is computed as in `BalancedGate`.

    In training mode, group i selects m1 = k1·T/a tokens X^(i) of the batch. Each of its experts
    selects m2 = k2·m1/b of these tokens. The gates of a token sum to less than 1 if a group selects
    the token but none of the group's experts does. A secondary gate G_i sees only X^(i); the two
    levels compute T · (a + k1 · b) logits.

    In evaluation mode, thresholds select on both levels. See `BalancedGate` for their
    initialization and training. The metrics cover both levels together.

    Args:
        d_model: D, the width of x.
        num_groups: a, the number of groups.
        experts_per_group: b, the number of experts in each group.
        k: (k1, k2), the mean number of groups per token and of experts per chosen group. A single
            number k means (k, k).
        detach_scores: see `BalancedGate`.

    Attributes:
        w_gate: [D, a] parameter of the primary gate.
        w_gate_secondary: [a, D, b] parameter of the secondary gates.
        threshold: [a] parameter, the threshold of each group.
        threshold_secondary: [a, b] parameter, the threshold of each expert.
        batchwise: whether to use M_batchwise in evaluation mode too (`batchwise_masks`).

    Raises:
        ValueError: a size is below 1, k1 is not between 1 and a, or k2 not between 1 and b.
    """

    initialized: Tensor
    initialized_secondary: Tensor

    def __init__(
        self,
        d_model: int,
        num_groups: int,
        experts_per_group: int,
        k: int | tuple[int, int],
        *,
        detach_scores: bool = True,
    ) -> None:
        name = type(self).__name__
        k1, k2 = require_k_of_levels(name, k, d_model, num_groups, experts_per_group)
        super().__init__(d_model, num_groups * experts_per_group, k1 * k2, detach_scores)
        self.num_groups = num_groups
        self.experts_per_group = experts_per_group
        self.k_of_levels = k1, k2
        self.w_gate = nn.Parameter(torch.zeros(d_model, num_groups))
        self.threshold = nn.Parameter(torch.zeros(num_groups))
        self.register_buffer("initialized", torch.tensor(False))
        self.w_gate_secondary = nn.Parameter(torch.zeros(num_groups, d_model, experts_per_group))
        self.threshold_secondary = nn.Parameter(torch.zeros(num_groups, experts_per_group))
        self.register_buffer("initialized_secondary", torch.tensor(False))

    def forward(self, x: Tensor, ranks: Ranks | None = None) -> Routing:
        """Routes x [T, D]; the experts of each token are in index order.

        See `Gate.forward` for ranks.
        """
        ranks = several(ranks)
        a, b = self.num_groups, self.experts_per_group
        k1, k2 = self.k_of_levels
        batchwise = self.training or self.batchwise
        x = widened(x)
        primary_logits = self.logits(x, self.w_gate)
        scores = self._scores(primary_logits)
        if batchwise:
            groups = self._by_batch(scores, k1, self.threshold, self.initialized, ranks)
        else:
            groups = _by_threshold(scores, self.threshold)

        # The rows of X^(1), X^(2), …: one for each slot (token, chosen group).
        plan = ops.dispatch_plan(groups.expert_index, a)

        equal = batchwise and ranks is None

        def product(x: Tensor, weight: Tensor) -> Tensor:
            return ops.experts(
                x,
                [weight],
                offsets=None if equal else plan.offsets,
                inverse=plan.inverse,
                token_offsets=groups.row_offsets,
            )

        secondary_logits = logits(x, self.w_gate_secondary, product)
        scores = self._scores(secondary_logits)
        if batchwise:
            experts = self._by_batch(
                scores,
                k2,
                self.threshold_secondary,
                self.initialized_secondary,
                ranks,
                plan.tokens_per_expert,
            )
        else:
            # torch.export bounds the number of selected experts by b times the bound on the rows.
            # The product must not overflow int64.
            torch._check(groups.expert_index.shape[0] < 2**40)
            group = groups.expert_index.index_select(0, plan.permutation)
            experts = _by_threshold(scores, self.threshold_secondary.index_select(0, group))

        primary_gates = ops.selected_softmax(
            primary_logits, groups.expert_index, groups.row_offsets
        )
        secondary_gates = ops.selected_softmax(
            secondary_logits, experts.expert_index, experts.row_offsets
        )
        # Reorder from rows to slots; each slot has the experts of its row.
        first = experts.row_offsets[:-1].index_select(0, plan.inverse)
        num_experts = experts.row_offsets.diff().index_select(0, plan.inverse)
        slot_offsets = F.pad(num_experts.cumsum(0), (1, 0))
        slot = torch.repeat_interleave(num_experts, output_size=secondary_gates.shape[0])
        place = torch.arange(slot.shape[0], device=x.device)
        source = place + (first - slot_offsets[:-1]).index_select(0, slot)
        primary_gates = ops.dispatch(primary_gates.unsqueeze(1), place, slot_offsets).squeeze(1)
        gates = primary_gates * secondary_gates.index_select(0, source)
        expert_index = groups.expert_index.index_select(0, slot) * b
        expert_index = expert_index + experts.expert_index.index_select(0, source)
        token_offsets = slot_offsets.index_select(0, groups.row_offsets)
        return routing_of_slots(
            self.num_experts, gates, expert_index, token_offsets, [groups, experts], ranks
        )

    def extra_repr(self) -> str:
        return (
            f"d_model={self.d_model}, num_groups={self.num_groups}, "
            f"experts_per_group={self.experts_per_group}, k={self.k_of_levels}, "
            f"detach_scores={self.detach_scores}"
        )


def balanced_gates(model: nn.Module) -> list[StrictlyBalancedGate]:
    """Returns the strictly balanced gates of a model, flat and hierarchical."""
    return [module for module in model.modules() if isinstance(module, StrictlyBalancedGate)]


@contextmanager
def batchwise_masks(model: nn.Module) -> Iterator[None]:
    """Makes the strictly balanced gates of a model use the batchwise mask within the context.

    In evaluation mode, the experts of a token then depend on the other tokens of the batch. Use
    this context to measure the effect of the thresholds.

    Args:
        model: any module that contains strictly balanced gates.
    """
    gates = balanced_gates(model)
    before = [gate.batchwise for gate in gates]
    for gate in gates:
        gate.batchwise = True
    try:
        yield
    finally:
        for gate, value in zip(gates, before, strict=True):
            gate.batchwise = value
