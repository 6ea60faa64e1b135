"""Strictly balanced gating, Appendix F: in training every expert gets equally many tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_ext import ops
from moe_ext.checks import require_k_of_levels
from moe_ext.distributed.ranks import Ranks
from moe_ext.gates._logits import logits, widened, zero_
from moe_ext.gates.gate import Gate, Routing
from moe_ext.losses import batchwise_loss

__all__ = [
    "BalancedGate",
    "HierarchicalBalancedGate",
    "StrictlyBalancedGate",
    "balanced_gates",
    "batchwise_masks",
    "rows_per_expert",
]


class _Agreement(NamedTuple):
    """How the threshold mask compares with the batchwise one.

    Attributes:
        loss: L_batchwise.
        num_differing: how many pairs of a token and an expert only one of the masks selects.
        num_selected: how many the one selects and how many the other, together.
    """

    loss: Tensor
    num_differing: Tensor
    num_selected: Tensor


class _Mask(NamedTuple):
    """What a mask selects of N rows and E experts.

    Attributes:
        expert_index: [R] int64, the experts of the first row, ascending, of the second, …
        row_offsets: [N + 1] int64, where each row's begin and end.
        agreement: with the other mask, where the batchwise one has been computed.
    """

    expert_index: Tensor
    row_offsets: Tensor
    agreement: _Agreement | None = None


def rows_per_expert(k: int, num_rows: int, num_experts: int) -> int:
    """m = k·T/E: the nearest whole number, a half rounded up; at least 1, but 0 of no rows.

    Args:
        k: experts per row, on average.
        num_rows: T, or the size of a group of a hierarchical mixture.
        num_experts: E.
    """
    return max(min(1, num_rows), (2 * k * num_rows + num_experts) // (2 * num_experts))


def _by_threshold(scores: Tensor, threshold: Tensor) -> _Mask:
    """M_threshold(x, T)_i = 1 where x_i > T_i, for scores [N, E]; waits for the device to count.

    And where x_i is NaN: a row without an expert would be 0.
    """
    return _Mask(*_experts_of_rows(~(scores <= threshold)))


def _several(ranks: Ranks | None) -> Ranks | None:
    """None where there is nothing to communicate."""
    return None if ranks is None or ranks.size == 1 else ranks


def _experts_of_rows(mask: Tensor) -> tuple[Tensor, Tensor]:
    """expert_index and row_offsets of `_Mask`, for a mask [N, E]."""
    return mask.nonzero()[:, 1].contiguous(), F.pad(mask.sum(1).cumsum(0), (1, 0))


def _agreement(scores: Tensor, threshold: Tensor, mask: Tensor) -> _Agreement:
    """Of the batchwise mask with that of the thresholds; shapes as in `batchwise_loss`."""
    passes = scores > threshold.unsqueeze(-2)
    return _Agreement(
        batchwise_loss(scores, threshold, mask),
        (passes != mask).count_nonzero(),
        passes.count_nonzero() + mask.count_nonzero(),
    )


@torch.no_grad()
def _initialize(threshold: Tensor, initialized: Tensor, mth_score: Tensor) -> None:
    """Thresholds just below the first batch's m-th scores, where the two masks agree: by some
    roundings, as on CUDA another product than training's makes the scores of evaluation.

    Of a batch whose scores are not finite they stay as they are, and wait for the next. The flag's
    value is not waited for: every batch writes, the same thresholds after the first.
    """
    finite = mth_score.isfinite().all()
    start = mth_score * (1 - 16 * torch.finfo(mth_score.dtype).eps)
    start = torch.nextafter(start, torch.full_like(start, -torch.inf))  # below 0, too
    threshold.copy_(torch.where(initialized | ~finite, threshold, start.view_as(threshold)))
    initialized.logical_or_(finite)


class StrictlyBalancedGate(Gate):
    """What the flat and the hierarchical gate share: the batchwise mask and its thresholds.

    Attributes:
        batchwise: choose by the batchwise mask in evaluation, too.
    """

    routes_by_batch: ClassVar[bool] = True

    def __init__(self, d_model: int, num_experts: int, k: int, detach_scores: bool) -> None:
        super().__init__(d_model, num_experts, k)
        self.detach_scores = detach_scores
        self.batchwise = False

    def reset_parameters(self) -> None:
        """Sets all parameters and buffers to zero, as they are in a new gate."""
        zero_(self)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, detach_scores={self.detach_scores}"

    def _scores(self, logits: Tensor) -> Tensor:
        """G_σ, what the masks look at."""
        return torch.softmax(logits.detach() if self.detach_scores else logits, dim=-1)

    def _by_batch(
        self,
        scores: Tensor,
        k: int,
        threshold: Tensor,
        initialized: Tensor,
        ranks: Ranks | None,
        group_sizes: Tensor | None = None,
    ) -> _Mask:
        """M_batchwise(X, m) of the rows [R, E] of G groups of equally many, one after the other.

        Over several ranks a group's size is its share of the rows here, and group_sizes [G]
        says what it is; None is one group.
        """
        num_rows, num_experts = scores.shape
        num_groups = threshold.numel() // num_experts
        if ranks is not None:
            from moe_ext.distributed._batchwise import mask_over_ranks

            if group_sizes is None:
                group_sizes = torch.tensor([num_rows], device=scores.device)
            mask, mth_score = mask_over_ranks(scores.detach(), k, group_sizes, ranks)
            if self.training and mth_score is not None:
                _initialize(threshold, initialized, mth_score)
            group = torch.repeat_interleave(group_sizes, output_size=num_rows)
            bound = threshold.to(scores.dtype).view(num_groups, num_experts).index_select(0, group)
            agreement = _agreement(scores.unsqueeze(1), bound, mask.unsqueeze(1))
            return _Mask(*_experts_of_rows(mask), agreement)

        num_rows //= num_groups
        scores = scores.view(num_groups, num_rows, num_experts)
        m = rows_per_expert(k, num_rows, num_experts)
        row_index, mth_score = ops.batchwise_topm(scores.detach(), m)
        if self.training:
            _initialize(threshold, initialized, mth_score)
        mask = torch.zeros_like(scores, dtype=torch.bool).scatter(1, row_index.mT, True)
        bound = threshold.to(scores.dtype).view(num_groups, num_experts)
        agreement = _agreement(scores, bound, mask)
        # From the rows of each expert to the experts of each row, by the counting sort that
        # otherwise goes the other way. An entry's place is (g·E + e)·m + i.
        first_row = num_rows * torch.arange(num_groups, device=scores.device)
        row = row_index + first_row[:, None, None]
        plan = ops.dispatch_plan(row.view(-1), num_groups * num_rows)
        expert_index = plan.permutation // max(m, 1) % num_experts
        return _Mask(expert_index, plan.offsets, agreement)

    def _routing(
        self,
        gates: Tensor,
        expert_index: Tensor,
        token_offsets: Tensor,
        masks: list[_Mask],
        ranks: Ranks | None,
    ) -> Routing:
        """The result, with what the masks of all levels report."""
        slots = gates.unsqueeze(1), expert_index.unsqueeze(1)
        agreements = [mask.agreement for mask in masks if mask.agreement is not None]
        parts = [
            ops.importance(*slots, self.num_experts),
            ops.importance(torch.ones_like(slots[0]), slots[1], self.num_experts),
            gates.new_full((), token_offsets.shape[0] - 1),
            (token_offsets.diff() == 0).count_nonzero().to(gates.dtype),
        ]
        for column in zip(*agreements, strict=True):
            parts.append(torch.stack(column).sum(0).to(gates.dtype))
        sums = parts if ranks is None else ranks.sum(*parts)
        importance, load, num_tokens, num_without, *agreement = sums
        num_tokens = num_tokens.clamp_min(1)
        metrics = {"share_without_expert": num_without / num_tokens}
        loss = None
        if agreements:
            total = _Agreement(*agreement)
            loss = total.loss / num_tokens
            metrics["mask_disagreement"] = total.num_differing / total.num_selected.clamp_min(1)
        return Routing(
            gates,
            expert_index,
            importance,
            load,
            token_offsets,
            equal_load=len(agreements) > 0 and ranks is None,
            loss=loss,
            metrics=metrics,
        )


class BalancedGate(StrictlyBalancedGate):
    """A softmax gate without noise whose experts choose their tokens (Appendix F).

        G(x)_i = G_σ(x)_i M_i / Σ_j G_σ(x)_j M_j,   G_σ(x) = softmax(x·W_g)

    Training masks by M_batchwise: expert i gets the m = k·T/E tokens of the batch with the largest
    G_σ(x)_i (`rows_per_expert`), so that a token has k experts on average, of 0 … E. One that has
    none has no gate, and its output is 0. Load is then a constant: w_load has nothing to act on.

    Evaluation masks by M_threshold: the experts with G_σ(x)_i > threshold_i, whatever else is in
    the batch; that takes reading how many they are from the device. The thresholds are trained by
    L_batchwise / T, which the result carries as its loss, from the first training batch on, whose
    m-th scores they start at. Before it they are 0: an untrained gate is the softmax gate of Eq. 2,
    all experts for every token. They live on the scale of a softmax over E experts: give them a
    learning rate of their own, well below 1 / E.

    That first batch writes the parameter in place: where another tensor stands for it, as under
    `torch.func.functional_call` and `fully_shard`, the start is lost. Each rank starts at its
    own batch unless the layer has a process_group: DistributedDataParallel, which averages
    gradients alone, keeps that difference. `moe_ext.distributed.parallelize` sees to both.

    W_g starts at zero. Then all scores are equal, and each expert gets tokens of its own by a fixed
    pseudo-random choice (`moe_ext.ops.batchwise_topm`).

    The metrics: mask_disagreement, |M_threshold xor M_batchwise| / (|M_threshold| + |M_batchwise|),
    where the batchwise mask is in use, and share_without_expert, of the tokens.

    Args:
        d_model: D, the width of x.
        num_experts: E.
        k: experts per token on average, 1 <= k <= E.
        detach_scores: L_batchwise trains the thresholds alone, not W_g and what is below it.

    Attributes:
        threshold: [E] parameter.
        batchwise: choose by M_batchwise in evaluation, too (`batchwise_masks`).

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
        """x [T, D] to the gates [R] of the chosen experts of each token, in the experts' order."""
        ranks = _several(ranks)
        gate_logits = self.logits(x, self.w_gate)
        scores = self._scores(gate_logits)
        if self.training or self.batchwise:
            mask = self._by_batch(scores, self.k, self.threshold, self.initialized, ranks)
        else:
            mask = _by_threshold(scores, self.threshold)
        gates = ops.selected_softmax(gate_logits, mask.expert_index, mask.row_offsets)
        return self._routing(gates, mask.expert_index, mask.row_offsets, [mask], ranks)


class HierarchicalBalancedGate(StrictlyBalancedGate):
    """Strictly balanced gating on two levels: of a groups, then of each one's b experts.

    G_H(x)_ij = G_primary(x)_i · G_i(x)_j, each factor as in `BalancedGate`, for the a · b experts
    numbered i · b + j. In training each group takes m1 = k1·T/a tokens of the batch, X^(i), and
    each of its experts m2 = k2·m1/b of those. The gates of a token whose group has no expert for it
    sum to less than 1. A secondary gate sees X^(i) alone, so that T · (a + k1 · b) logits are made.

    In evaluation thresholds choose on both levels. What `BalancedGate` says of the thresholds, the
    start and the metrics holds for the two levels together.

    Args:
        d_model: D, the width of x.
        num_groups: a.
        experts_per_group: b.
        k: (k1, k2), groups per token and experts per chosen group, on average; a number is both.
        detach_scores: see `BalancedGate`.

    Attributes:
        threshold: [a] parameter.
        threshold_secondary: [a, b] parameter.
        batchwise: choose by M_batchwise in evaluation, too (`batchwise_masks`).

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
        """x [T, D] to the gates [R] of the chosen experts of each token, in the experts' order."""
        ranks = _several(ranks)
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

        # The rows of X^(1), X^(2), …, one for each slot (token, chosen group).
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
            group = groups.expert_index.index_select(0, plan.permutation)
            experts = _by_threshold(scores, self.threshold_secondary.index_select(0, group))

        primary_gates = ops.selected_softmax(
            primary_logits, groups.expert_index, groups.row_offsets
        )
        secondary_gates = ops.selected_softmax(
            secondary_logits, experts.expert_index, experts.row_offsets
        )
        # From the order of the rows to that of the slots, each slot with its row's experts.
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
        return self._routing(gates, expert_index, token_offsets, [groups, experts], ranks)

    def extra_repr(self) -> str:
        return (
            f"d_model={self.d_model}, num_groups={self.num_groups}, "
            f"experts_per_group={self.experts_per_group}, k={self.k_of_levels}, "
            f"detach_scores={self.detach_scores}"
        )


def balanced_gates(model: nn.Module) -> list[StrictlyBalancedGate]:
    """The strictly balanced gates in a model, flat or hierarchical."""
    return [module for module in model.modules() if isinstance(module, StrictlyBalancedGate)]


@contextmanager
def batchwise_masks(model: nn.Module) -> Iterator[None]:
    """Makes the strictly balanced gates of a model select by the batchwise mask in the context.

    In evaluation the other tokens of the batch then have a say in what a token's experts are: to
    see what the thresholds cost.

    Args:
        model: any module with such gates in it.
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
