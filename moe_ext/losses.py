"""The losses of the paper (Section 4, Appendices A and F) and of later routers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from moe_ext import ops
from moe_ext._ragged import offsets_of
from moe_ext.checks import (
    require,
    require_at_least,
    require_bool,
    require_floating,
    require_mask,
    require_shape,
    require_tensor,
    required,
)
from moe_ext.ops import cv_squared
from moe_ext.ranks.collectives import Ranks
from moe_ext.routing import Routing

__all__ = [
    "ImportanceLoss",
    "LoadLoss",
    "RouterLoss",
    "SwitchLoss",
    "ZLoss",
    "add_loss",
    "batchwise_loss",
    "cv_squared",
    "importance_loss",
    "load_loss",
]


def importance_loss(importance: Tensor, weight: float) -> Tensor:
    """Computes L_importance = weight · CV(Importance(X))² (Eq. 7), a scalar.

    Args:
        importance: [E], the gates of each expert, summed over the whole batch.
        weight: w_importance, the scale of the loss, at least 0.

    Raises:
        ValueError: weight is negative, or importance is empty or does not have one dimension.
        TypeError: importance is not a floating-point tensor.
    """
    return _balance_loss("importance_loss", "importance", importance, weight)


def load_loss(load: Tensor, weight: float) -> Tensor:
    """Computes L_load = weight · CV(Load(X))² (Appendix A), a scalar.

    Args:
        load: [E], the estimated tokens of each expert, summed over the whole batch.
        weight: w_load, the scale of the loss, at least 0.

    Raises:
        ValueError: weight is negative, or load is empty or does not have one dimension.
        TypeError: load is not a floating-point tensor.
    """
    return _balance_loss("load_loss", "load", load, weight)


def _balance_loss(owner: str, name: str, values: Tensor, weight: float) -> Tensor:
    """Computes weight · CV(values)² of importance or load; errors begin with owner."""
    require_tensor(owner, **{name: values})
    weights = require_at_least(0, owner, weight=weight)
    fits = values.dim() == 1 and values.shape[0] > 0
    require(fits, f"{owner}: {name}", "have shape [E] with E of at least 1", tuple(values.shape))
    require_floating(owner, values, name)
    return ops.weighted_cv_squared([values], weights)


def batchwise_loss(scores: Tensor, threshold: Tensor, mask: Tensor) -> Tensor:
    """Computes L_batchwise, the loss that trains the thresholds (Appendix F), a scalar.

    The loss sums over the tokens j and the experts i. M_threshold selects the scores X_ji > T_i::

        L_batchwise = Σ_j Σ_i (M_threshold(X_j, T)_i - M_batchwise(X)_ji) (X_ji - T_i)

    No term is negative. A term is 0 where the two masks agree. The derivative ∂L/∂T_i is the number
    of tokens of expert i in M_batchwise, minus its number of tokens in M_threshold.

    Args:
        scores: X, [..., num_tokens, E].
        threshold: T, [..., E], one threshold for each expert.
        mask: M_batchwise(X), bool, in the shape of scores.

    Raises:
        ValueError: the shapes of scores, threshold and mask do not match.
        TypeError: scores, threshold or mask is not a tensor, or mask is not bool.
    """
    owner = "batchwise_loss"
    require_tensor(owner, scores=scores, threshold=threshold)
    shape = tuple(scores.shape)
    require(len(shape) >= 2, f"{owner}: scores", "have shape [..., num_tokens, E]", shape)
    require_shape(owner, shape[:-2] + shape[-1:], threshold=threshold)
    require_mask(owner, mask, shape)
    excess = scores - threshold.unsqueeze(-2)
    return (((excess > 0).to(excess.dtype) - mask.to(excess.dtype)) * excess).sum()


def add_loss(y: Tensor, loss: Tensor) -> Tensor:
    """Returns y; the backward pass through y includes `loss`, as if it were in the training loss.

    For modules that can return only y: in `torch.nn.Sequential`, in a stage of a pipeline, under
    activation checkpointing, in a model of transformers. The value of the training loss stays
    without `loss`. The gradient of `loss` is 1, so scale `loss` as you scale the training loss:
    pass ``aux.loss / n`` to accumulate n micro-batches, ``scaler.scale(aux.loss)`` with a
    `torch.amp.GradScaler`. If the training loss does not depend on y, `loss` has no effect.

    Args:
        y: the output of a layer, floating point.
        loss: a scalar, such as `loss` of `MoEAux`.

    Raises:
        ValueError: loss is not a scalar.
        TypeError: y or loss is not a tensor.

    Example:
        >>> from moe_ext import MoE
        >>> layer = MoE(16, 4, 2)
        >>> y, aux = layer(torch.randn(5, 16))
        >>> add_loss(y, aux.loss).square().mean().backward()  # the gradients of both losses
    """
    require_tensor("add_loss", y=y, loss=loss)
    require_shape("add_loss", (), loss=loss)
    same: Tensor = _AddLoss.apply(y, loss)
    if not same.is_nested:  # no autograd view, so that it can be changed in place
        same = torch.ops.aten._unsafe_view(same, same.shape)
    return same


class _AddLoss(Function):
    @staticmethod
    def forward(y: Tensor, loss: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.like = inputs[1].detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones_like(ctx.like)


class RouterLoss:
    """Defines a loss of the routing decisions, for ``MoE(losses=[...])``.

    A loss is a function of sums over tokens or sequences. `MoE` sums the sums of all its losses
    over the ranks, with one all-reduce. So the loss covers the whole batch on any number of
    ranks. The whole batch is the tokens of one forward pass on all ranks that balance together; see
    balance in `moe_ext.distributed.ExpertParallel`. With gradient accumulation, each micro-batch is
    such a batch. Derive a custom loss from this class and define `sums` and `value`:

        >>> class EntropyLoss(RouterLoss):
        ...     name = "router_entropy"
        ...
        ...     def sums(self, routing, tokens_per_expert, sequence_offsets):
        ...         p = routing.probabilities()
        ...         return -torch.special.xlogy(p, p).sum(), p.new_tensor(len(p))
        ...
        ...     def value(self, entropy, num_tokens):
        ...         return entropy / num_tokens.clamp_min(1)

    Args:
        weight: the scale of the loss in `loss` of `MoEAux`, at least 0.

    Attributes:
        weight: the constructor argument. It may change between steps.
        name: the key of the unweighted loss in `losses` of `MoEAux`. It differs between the
            losses of a layer.

    Raises:
        ValueError: weight is negative.
    """

    name: str

    def __init__(self, weight: float) -> None:
        self.weight = weight

    @property
    def weight(self) -> float:
        """The scale of the loss in `loss` of `MoEAux`; at least 0."""
        return self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        (self._weight,) = require_at_least(0, type(self).__name__, weight=weight)

    def sums(
        self, routing: Routing, tokens_per_expert: Tensor, sequence_offsets: Tensor
    ) -> tuple[Tensor, ...]:
        """Computes the sums over this rank's tokens that the loss depends on.

        Args:
            routing: the routing decision for T tokens.
            tokens_per_expert: [E] int64, the number of this rank's tokens for each expert.
            sequence_offsets: [S + 1] int64; sequence s has the tokens sequence_offsets[s] to
                sequence_offsets[s + 1] - 1.

        Returns:
            Tensors in the dtype of routing.logits, with the same shapes on every rank.
        """
        raise NotImplementedError(f"{type(self).__name__} must define sums")

    def value(self, *sums: Tensor) -> Tensor:
        """Computes the unweighted loss, a scalar, from `sums`, summed over the ranks."""
        raise NotImplementedError(f"{type(self).__name__} must define value")

    def evaluate(self, routing: Routing, *sums: Tensor) -> Tensor:
        """Computes the unweighted loss, a scalar: `value` of the sums, unless a class overrides it.

        A loss of importance or load reads these from routing, where they cover all ranks already.
        """
        return self.value(*sums)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.weight})"


class _CVLoss(RouterLoss):
    """Computes CV² of a statistic that the routing decision has summed over the ranks."""

    def sums(
        self, routing: Routing, tokens_per_expert: Tensor, sequence_offsets: Tensor
    ) -> tuple[Tensor, ...]:
        """Returns no sums; see `RouterLoss.sums`."""
        return ()


class ImportanceLoss(_CVLoss):
    """Computes CV(Importance(X))² (Eq. 7), the paper's loss of experts with uneven gates.

    ``MoE(w_importance=w)`` is the short form of ``MoE(losses=[ImportanceLoss(w)])``. It computes
    both losses of the paper with one operator.

    Args:
        weight: w_importance. The paper uses 0.1.

    Raises:
        ValueError: weight is negative.
    """

    name = "importance_loss"

    def evaluate(self, routing: Routing, *sums: Tensor) -> Tensor:
        """Computes the unweighted loss, a scalar; see `RouterLoss.evaluate`."""
        return cv_squared(routing.importance)


class LoadLoss(_CVLoss):
    """Computes CV(Load(X))² (Appendix A), the paper's loss of experts with uneven load.

    ``MoE(w_load=w)`` is the short form; see `ImportanceLoss`.

    Args:
        weight: w_load. The paper uses 0.1.

    Raises:
        ValueError: weight is negative.
    """

    name = "load_loss"

    def evaluate(self, routing: Routing, *sums: Tensor) -> Tensor:
        """Computes the unweighted loss, a scalar; see `RouterLoss.evaluate`."""
        return cv_squared(routing.load)


class SwitchLoss(RouterLoss):
    """Computes E · Σ_i f_i P_i (Fedus et al. 2021, arXiv 2101.03961, Eqs. 4-6).

    The sums run over the T tokens of the batch, with k experts for each token::

        f_i = (number of tokens of expert i) / (k · T)        P_i = 1/T Σ_t p_i(x_t)
        p(x) = softmax(logits), or scores / Σ_j scores_j for a gate with `Routing.scores`

    f sums to 1 for any k, so the loss is 1 for uniform routing and at most E / k. The paper has
    k = 1. If k differs between tokens, k · T is the number of (token, expert) assignments. Only P
    has a gradient. For a noisy gate, f counts the noisy selection, and P has no noise.

    By default, f and P cover the whole batch; see `RouterLoss`. This is the loss of the global
    batch of Qiu et al. 2025 (arXiv 2501.11873) without gradient accumulation. With
    ``balance="local"``, f and P cover each rank's tokens.

    With per_sequence, f and P cover a single sequence, and the loss is the mean over the sequences
    with at least one token. This is the sequence-wise loss of DeepSeek-V3 (arXiv 2412.19437, Eqs.
    17-20). A sequence is the dimension before the last of x [..., T, D], without masked-out tokens,
    or a row of a nested tensor. An x [T, D] is one sequence. A sequence must not be divided between
    ranks.

    ``load_balancing_loss_func`` of transformers differs: it does not divide by k, and it averages f
    and P over all layers before their product.

    Args:
        weight: the scale of the loss in `loss` of `MoEAux`. The paper uses 0.01.
        per_sequence: whether to compute the loss of each sequence.

    Attributes:
        name: "switch_loss"; with per_sequence "switch_loss_per_sequence".

    Raises:
        ValueError: weight is negative; or in the forward pass, the gate returns no logits.
        TypeError: per_sequence is not a bool.
    """

    per_sequence: bool

    def __init__(self, weight: float, *, per_sequence: bool = False) -> None:
        super().__init__(weight)
        (self.per_sequence,) = require_bool("SwitchLoss", per_sequence=per_sequence)
        self.name = "switch_loss_per_sequence" if per_sequence else "switch_loss"

    def sums(
        self, routing: Routing, tokens_per_expert: Tensor, sequence_offsets: Tensor
    ) -> tuple[Tensor, ...]:
        """Sums the terms of f and P over this rank's tokens; see `RouterLoss.sums`."""
        p = routing.probabilities()
        if not self.per_sequence:
            return tokens_per_expert.to(p.dtype), p.sum(0), torch.ones_like(p[:, 0]).sum()
        num_tokens = sequence_offsets.diff()
        counts = _sum_of_sequences(_chosen(routing, p), sequence_offsets)
        losses = _switch_loss(counts, _sum_of_sequences(p, sequence_offsets), num_tokens)
        return losses.sum(), num_tokens.count_nonzero().to(p.dtype)

    def value(self, *sums: Tensor) -> Tensor:
        """Computes the unweighted loss, a scalar, from `sums`; see `RouterLoss.value`."""
        if not self.per_sequence:
            return _switch_loss(*sums)
        total, num_sequences = sums
        return total / num_sequences.clamp_min(1)

    def __repr__(self) -> str:
        more = ", per_sequence=True" if self.per_sequence else ""
        return f"{type(self).__name__}({self.weight}{more})"


class ZLoss(RouterLoss):
    """Computes 1/T Σ_t (log Σ_i exp(logits_ti))² (Zoph et al. 2022, arXiv 2202.08906, Eq. 5).

    The loss keeps logits small, so that their softmax rounds less. T counts the tokens of the whole
    batch; see `RouterLoss`. For a noisy gate, the logits are without noise.

    Args:
        weight: the scale of the loss in `loss` of `MoEAux`. The paper uses 0.001.

    Raises:
        ValueError: weight is negative; or in the forward pass, the gate returns no logits.
    """

    name = "z_loss"

    def sums(
        self, routing: Routing, tokens_per_expert: Tensor, sequence_offsets: Tensor
    ) -> tuple[Tensor, ...]:
        """Sums the squares over this rank's tokens, and counts these; see `RouterLoss.sums`."""
        logits = required(routing.logits, "ZLoss: logits", "be set by the gate")
        # torch.compile does not support torch.logsumexp for the number of tokens of a mask.
        highest = logits.detach().amax(-1, keepdim=True)
        log_sum = (logits - highest).exp().sum(-1).log() + highest.squeeze(-1)
        squares = log_sum.square()
        return squares.sum(), torch.ones_like(squares).sum()

    def value(self, *sums: Tensor) -> Tensor:
        """Computes the unweighted loss, a scalar, from `sums`; see `RouterLoss.value`."""
        squares, num_tokens = sums
        return squares / num_tokens.clamp_min(1)


def _switch_loss(counts: Tensor, probabilities: Tensor, num_tokens: Tensor) -> Tensor:
    """Computes E · Σ_i f_i P_i from sums over tokens, [..., E], and numbers of tokens [...]."""
    f = counts / counts.sum(-1, keepdim=True).clamp_min(1)
    p = probabilities / num_tokens.unsqueeze(-1).clamp_min(1)
    return counts.shape[-1] * (f * p).sum(-1)


def _chosen(routing: Routing, like: Tensor) -> Tensor:
    """Returns a matrix like `like` [T, E]: 1 for the chosen experts of each token, else 0."""
    chosen = torch.zeros_like(like, requires_grad=False)
    if routing.token_offsets is None:
        return chosen.scatter(1, routing.expert_index, 1)
    token = ops.token_index(routing.expert_index, routing.token_offsets)
    return chosen.index_put((token, routing.expert_index), chosen.new_ones(()))


def _sum_of_sequences(values: Tensor, sequence_offsets: Tensor) -> Tensor:
    """Sums values [T, E] over the tokens of each sequence, [S, E], in a fixed order."""
    ones = values.new_ones(values.shape[:1])
    rows = torch.arange(values.shape[0], device=values.device)
    return ops.combine(values, ones, rows, sequence_offsets)


def _router_losses(
    losses: Sequence[RouterLoss],
    routing: Routing,
    tokens_per_expert: Tensor,
    sequence_offsets: Tensor,
    ranks: Ranks | None,
) -> dict[str, Tensor]:
    """Computes the unweighted losses by name, over the tokens of all ranks.

    See `RouterLoss.sums` for the arguments. ranks: the ranks that balance together; None: only this
    rank.
    """
    parts = [loss.sums(routing, tokens_per_expert, sequence_offsets) for loss in losses]
    sums = iter([tensor for part in parts for tensor in part])
    if ranks is not None:
        sums = iter(ranks.sum(*sums))
    return {
        loss.name: loss.evaluate(routing, *(next(sums) for _ in part))
        for loss, part in zip(losses, parts, strict=True)
    }


def _sequence_offsets(x: Tensor, mask: Tensor | None) -> Tensor:
    """Returns the offsets [S + 1] of the sequences of x [..., T, D] among its real tokens.

    mask: [..., T] bool, True at real tokens; None: all tokens are real.
    """
    *leading, length = x.shape[:-1] or (1,)
    num_sequences = math.prod(leading)
    if mask is None:
        return torch.arange(num_sequences + 1, device=x.device) * length
    num_tokens = mask.reshape(num_sequences, length).sum(1)
    return offsets_of(num_tokens)
