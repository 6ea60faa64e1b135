"""Strictly balanced gating (App. F): in training, every expert gets the same number of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.types import Device

from moe_ext import ops
from moe_ext._argument_names import explains_names
from moe_ext._ragged import select_segments
from moe_ext.checks import require_bool
from moe_ext.gates._batchwise import mask_over_ranks
from moe_ext.gates._logits import logits
from moe_ext.gates._slots import (
    Agreement,
    experts_of_rows,
    experts_of_selected,
    routing_of_slots,
    several,
)
from moe_ext.gates.gate import Gate
from moe_ext.gates.hierarchical_gate import HierarchicalGate, PrimarySelection, SecondarySelection
from moe_ext.losses import batchwise_loss
from moe_ext.ops._balanced_gating import rows_per_expert
from moe_ext.ranks.collectives import Ranks
from moe_ext.routing import Routing

__all__ = [
    "BalancedGate",
    "HierarchicalBalancedGate",
    "StrictlyBalancedGate",
    "balanced_gates",
    "batchwise_masks",
    "rows_per_expert",
]


class _Batch(NamedTuple):
    """Holds a batchwise mask and the scores that it selects, in B blocks of N rows.

    Attributes:
        scores: [B, N, E].
        mask: [B, N, E] bool.
        mth_score: [G, E], the lowest selected score of each expert in each group of rows.
        group: [B] int64, the group of each block; None: block g is group g.
    """

    scores: Tensor
    mask: Tensor
    mth_score: Tensor
    group: Tensor | None = None

    def agreement(self, threshold: Tensor) -> Agreement:
        """Compares scores > threshold with the mask; threshold is [G · E]."""
        threshold = threshold.to(self.scores.dtype).view(self.mth_score.shape)
        if self.group is not None:
            threshold = threshold.index_select(0, self.group)
        passes = self.scores > threshold.unsqueeze(-2)
        return Agreement(
            batchwise_loss(self.scores, threshold, self.mask),
            (passes != self.mask).count_nonzero(),
            passes.count_nonzero() + self.mask.count_nonzero(),
        )


class _Mask(NamedTuple):
    """Holds a mask over N rows and E experts as a list of (row, expert) pairs.

    Attributes:
        expert_index: [R] int64, the selected experts, sorted by row, then by expert.
        row_offsets: [N + 1] int64; row n has the entries row_offsets[n] to row_offsets[n + 1] - 1.
        batch: the mask with its scores; None for a threshold mask.
    """

    expert_index: Tensor
    row_offsets: Tensor
    batch: _Batch | None = None


def _by_threshold(scores: Tensor, threshold: Tensor) -> _Mask:
    """Selects the experts with scores [N, E] above the threshold; synchronizes with the device.

    NaN scores are selected too: otherwise NaN rows would silently get the output 0.
    """
    return _Mask(*experts_of_rows(~(scores <= threshold)))


@torch.no_grad()
def _initialize(
    threshold: Tensor, initialized: Tensor, mth_score: Tensor, ranks: Ranks | None = None
) -> None:
    """Sets threshold just below mth_score in the first batch where all these scores are finite.

    With ranks, the scores of all of them must be finite; each has other thresholds.

    The threshold and batchwise masks then agree on this batch. The margin of 16 eps covers
    rounding: on CUDA, the GEMM of evaluation mode may round differently. A threshold in half
    precision is rounded down. Later batches write the old threshold again, because reading the flag
    `initialized` on the host would synchronize.
    """
    finite = mth_score.isfinite().all()
    if ranks is not None:
        (failed,) = ranks.sum((~finite).to(mth_score.dtype))
        finite = failed == 0
    start = mth_score * (1 - 16 * torch.finfo(mth_score.dtype).eps)
    start = torch.nextafter(start, torch.full_like(start, -torch.inf))  # lowers a score of 0 too
    limits = torch.finfo(threshold.dtype)
    least = limits.tiny * limits.eps  # the smallest positive number
    lower = (start * (1 - limits.eps) - least).to(threshold.dtype)
    rounded = start.to(threshold.dtype)
    start = torch.where(rounded < mth_score, rounded, lower)
    # `Module.type` makes numbers of the flag.
    keep = initialized.bool() | ~finite
    threshold.copy_(torch.where(keep, threshold, start.view_as(threshold)))
    initialized.logical_or_(finite)


class StrictlyBalancedGate(Gate):
    """Implements the batchwise mask and the thresholds of both strictly balanced gates (App. F).

    Args:
        d_model, num_experts, k, detach_scores: see `BalancedGate`.

    Attributes:
        w_gate: [D, E] parameter W_g, or [D, a] of the primary gate.
        threshold: [E] parameter, the threshold of each expert, or [a] of each group.
        batchwise: whether to select by the batchwise mask in evaluation mode too.

    Raises:
        ValueError, TypeError: see `BalancedGate`.
    """

    routes_by_batch: ClassVar[bool] = True
    w_gate: Tensor
    threshold: Tensor
    initialized: Tensor
    detach_scores: bool

    def __init__(self, d_model: int, num_experts: int, k: int, detach_scores: bool) -> None:
        super().__init__(d_model, num_experts, k)
        (self.detach_scores,) = require_bool(type(self).__name__, detach_scores=detach_scores)
        self.batchwise = False

    def reset_parameters(self) -> None:
        """Sets all parameters and buffers to zero, their initial values."""
        self._set_to_zero()

    def extra_repr(self) -> str:
        """Returns the arguments that the text of the module shows."""
        return f"{super().extra_repr()}, detach_scores={self.detach_scores}"

    def _select(self, x: Tensor, k: int, ranks: Ranks | None) -> tuple[Tensor, Tensor, _Mask]:
        """Selects k columns of w_gate for each token of x: logits [T, E], gates [R] and mask."""
        logits = self.logits(x, self.w_gate)
        scores = self._scores(logits)
        if self.training or self.batchwise:
            mask = self._by_batch(scores, k, ranks)
        else:
            mask = _by_threshold(scores, self.threshold)
        return logits, ops.selected_softmax(logits, mask.expert_index, mask.row_offsets), mask

    def _scores(self, logits: Tensor) -> Tensor:
        """Computes G_σ = softmax(logits), the scores by which the masks select."""
        return torch.softmax(logits.detach() if self.detach_scores else logits, dim=-1)

    def _by_batch(
        self,
        scores: Tensor,
        k: int,
        ranks: Ranks | None,
        group_sizes: Tensor | None = None,
        first_group: int = 0,
    ) -> _Mask:
        """Computes M_batchwise(X, m) for scores [R, E] of G equally large groups of rows.

        A row has k experts on average. group_sizes [G] is the number of this rank's rows in each
        group; None means a single group. Ties depend on first_group, the number of the first one.
        """
        num_rows, num_experts = scores.shape
        num_groups = 1 if group_sizes is None else len(group_sizes)
        if ranks is not None:
            if group_sizes is None:
                group_sizes = torch.tensor([num_rows], device=scores.device)
            mask, mth_score = mask_over_ranks(scores.detach(), k, group_sizes, first_group, ranks)
            group = torch.repeat_interleave(group_sizes, output_size=num_rows)
            batch = _Batch(scores.unsqueeze(1), mask.unsqueeze(1), mth_score, group)
            return _Mask(*experts_of_rows(mask), batch)

        num_rows //= max(num_groups, 1)
        scores = scores.view(num_groups, num_rows, num_experts)
        m = rows_per_expert(k, num_rows, num_experts)
        first_expert = first_group * num_experts
        row_index, mth_score = ops.batchwise_topm(scores.detach(), m, first_expert, num_experts)
        mask = torch.zeros_like(scores, dtype=torch.bool).scatter(1, row_index.mT, True)
        selected = experts_of_selected(row_index, num_rows)
        return _Mask(*selected, _Batch(scores, mask, mth_score))

    def _agreement(self, mask: _Mask) -> Agreement | None:
        """Compares the masks of `threshold`, which the first batch in training mode sets."""
        if mask.batch is None:
            return None
        if self.training:
            _initialize(self.threshold, self.initialized, mask.batch.mth_score)
        return mask.batch.agreement(self.threshold)


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
        device, dtype: of the parameters; None: torch's defaults.

    Attributes:
        w_gate: [D, E] parameter W_g.
        threshold: [E] parameter, the threshold of each expert's score.
        batchwise: whether to use M_batchwise in evaluation mode too (`batchwise_masks`).

    Raises:
        ValueError: a size is below 1, or k is not between 1 and num_experts.
        TypeError: an option has the wrong type.
    """

    @explains_names
    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int,
        *,
        detach_scores: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, num_experts, k, detach_scores)
        factory = self._factory(device, dtype)
        self.w_gate: nn.Parameter = nn.Parameter(torch.zeros(d_model, num_experts, **factory))
        self.threshold: nn.Parameter = nn.Parameter(torch.zeros(num_experts, **factory))
        self.register_buffer("initialized", torch.tensor(False, device=device))

    def forward(self, x: Tensor, ranks: Ranks | None = None) -> Routing:
        """Routes x [T, D]; the experts of each token are in index order.

        See `Gate.forward` for ranks.
        """
        ranks = several(ranks)
        gate_logits, gates, mask = self._select(x, self.k, ranks)
        agreement = self._agreement(mask)
        agreements = [] if agreement is None else [agreement]
        slots = gates, mask.expert_index, mask.row_offsets
        routing = routing_of_slots(self.num_experts, *slots, agreements, ranks)
        return routing._replace(logits=gate_logits)


class HierarchicalBalancedGate(HierarchicalGate, StrictlyBalancedGate):
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
        detach_scores, device, dtype: see `BalancedGate`.

    Attributes:
        w_gate: [D, a] parameter of the primary gate.
        w_gate_secondary: [a, D, b] parameter of the secondary gates.
        threshold: [a] parameter, the threshold of each group.
        threshold_secondary: [a, b] parameter, the threshold of each expert.
        batchwise: whether to use M_batchwise in evaluation mode too (`batchwise_masks`).

    Raises:
        ValueError: a size is below 1, k1 is not between 1 and a, or k2 not between 1 and b.
        TypeError: an option has the wrong type.
    """

    secondary_parameters: ClassVar[tuple[str, ...]] = ("w_gate_secondary", "threshold_secondary")
    initialized_secondary: Tensor

    @explains_names
    def __init__(
        self,
        d_model: int,
        num_groups: int,
        experts_per_group: int,
        k: int | tuple[int, int],
        *,
        detach_scores: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, num_groups, experts_per_group, k, detach_scores)
        factory = self._factory(device, dtype)
        self.w_gate: nn.Parameter = nn.Parameter(torch.zeros(d_model, num_groups, **factory))
        self.threshold: nn.Parameter = nn.Parameter(torch.zeros(num_groups, **factory))
        self.register_buffer("initialized", torch.tensor(False, device=device))
        self.w_gate_secondary: nn.Parameter = nn.Parameter(
            torch.zeros(num_groups, d_model, experts_per_group, **factory)
        )
        self.threshold_secondary: nn.Parameter = nn.Parameter(
            torch.zeros(num_groups, experts_per_group, **factory)
        )
        self.register_buffer("initialized_secondary", torch.tensor(False, device=device))

    def select_groups(self, x: Tensor, ranks: Ranks | None) -> PrimarySelection:
        """Selects the groups of each token, in order of their number.

        See `HierarchicalGate.select_groups`.
        """
        _, gates, mask = self._select(x, self.k_of_levels[0], several(ranks))
        details = self._agreement(mask)
        return PrimarySelection(gates, mask.expert_index, mask.row_offsets, details=details)

    def select_experts(
        self, x: Tensor, primary: PrimarySelection, local: slice | None, ranks: Ranks | None
    ) -> SecondarySelection:
        """Selects the experts of each slot, in order of their number.

        See `HierarchicalGate.select_experts`.
        """
        ranks = several(ranks)
        groups = self.groups if local is None else self.groups[local]
        w_gate, threshold = (self._rows_of(name, local) for name in self.secondary_parameters)
        batchwise = self.training or self.batchwise
        # The rows of X^(1), X^(2), …: one for each slot.
        plan = ops.dispatch_plan(primary.group_index, len(groups))
        equal = batchwise and ranks is None and len(groups) > 0
        (gate_logits,) = logits(
            x,
            w_gate,
            offsets=None if equal else plan.offsets,
            inverse=plan.inverse,
            token_offsets=primary.token_offsets,
        )
        scores = self._scores(gate_logits)
        if batchwise:
            sizes = plan.tokens_per_expert
            mask = self._by_batch(scores, self.k_of_levels[1], ranks, sizes, groups.start)
        else:
            # torch.export bounds the number of selected experts by b times the bound on the rows.
            # The product must not overflow int64.
            torch._check(primary.group_index.shape[0] < 2**40)
            group = primary.group_index.index_select(0, plan.permutation)
            mask = _by_threshold(scores, threshold.index_select(0, group))

        gates = ops.selected_softmax(gate_logits, mask.expert_index, mask.row_offsets)
        # Reorder from rows to slots; each slot has the experts of its row.
        slot_offsets, source = select_segments(mask.row_offsets, plan.inverse, gates.shape[0])
        place = torch.arange(source.shape[0], device=x.device)
        primary_gates = ops.dispatch(primary.gates.unsqueeze(1), place, slot_offsets).squeeze(1)
        return SecondarySelection(
            primary_gates * gates.index_select(0, source),
            mask.expert_index.index_select(0, source),
            slot_offsets,
            mask.batch,
        )

    def statistics(self, details: Sequence[Any], ranks: Ranks | None) -> tuple[Tensor, ...]:
        """Returns how the masks of the secondary gates agree; empty for threshold masks.

        The first batch in training mode sets the thresholds. See `HierarchicalGate.statistics`.
        """
        batches: list[_Batch] = [batch for batch in details if batch is not None]
        if not batches:
            return ()
        threshold, initialized = self.threshold_secondary, self.initialized_secondary
        ranks = several(ranks)
        # Several ranks have already synchronized with the device, and may read the flag.
        if self.training and (ranks is None or not initialized):
            mth_score = torch.cat([batch.mth_score for batch in batches])
            _initialize(threshold, initialized, mth_score, ranks)
        parts = threshold.split([len(batch.mth_score) for batch in batches])
        agreements = [b.agreement(part) for b, part in zip(batches, parts, strict=True)]
        return tuple(torch.stack(column).sum(0) for column in zip(*agreements, strict=True))

    def routing(
        self,
        primary: PrimarySelection,
        secondary: SecondarySelection,
        statistics: tuple[Tensor, ...],
        ranks: Ranks | None,
    ) -> Routing:
        """Makes the `Routing` of both levels. See `HierarchicalGate.routing`."""
        assert primary.token_offsets is not None
        assert secondary.slot_offsets is not None
        expert_index = secondary.expert_index(primary.group_index, self.experts_per_group)
        token_offsets = secondary.slot_offsets.index_select(0, primary.token_offsets)
        agreements = [primary.details, Agreement(*statistics)] if statistics else []
        slots = secondary.gates, expert_index, token_offsets
        return routing_of_slots(self.num_experts, *slots, agreements, several(ranks))


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
