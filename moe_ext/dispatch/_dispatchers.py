"""The ways in which tokens reach their experts: on this rank, by an all-to-all, or by groups."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext._compiled import eager, uncompiled
from moe_ext._ragged import offsets_of
from moe_ext.checks import refuse
from moe_ext.dispatch._exchange import Exchange
from moe_ext.dispatch._group_exchange import GroupExchange
from moe_ext.dispatch._mixture import mixture
from moe_ext.dispatch._sharding import ExpertSharding
from moe_ext.gates import Gate, HierarchicalGate
from moe_ext.ops._dtypes import cast as cast_to
from moe_ext.ranks._agreement import require_same
from moe_ext.ranks.collectives import Ranks
from moe_ext.routing import Routing

__all__ = ["Dispatcher", "LocalDispatcher", "make_dispatcher"]

_Mixture = tuple[Tensor, Routing, Tensor]


class Dispatcher(ABC):
    """Defines how tokens reach their experts and how the outputs return; a `MoE` holds one.

    Args:
        num_experts: E, the number of experts with weights: the first ones of the gate's experts.
        sharding: how ranks share the experts; None: this rank has all of them.

    Attributes:
        num_experts, sharding: the constructor arguments.
        local_experts: the indices of this rank's experts.
        balanced: the ranks that balance their tokens together; None: only this rank.
        sends_tokens: whether tokens are sent to other ranks. A call then takes ``meanwhile``.
    """

    sends_tokens: bool = False
    _agrees = True  # a dispatcher that exchanges tokens begins with False

    def __init__(self, num_experts: int, sharding: ExpertSharding | None = None) -> None:
        self.num_experts = num_experts
        self.sharding = sharding
        self.local_experts: range = range(num_experts)
        self.balanced: Ranks | None = None
        if sharding is not None:
            self.local_experts, self.balanced = sharding.local_experts, sharding.balanced

    def require_same(self, x: Tensor, options: Callable[[], Mapping[str, object]]) -> None:
        """Raises ValueError unless the ranks that exchange tokens agree; compares them once.

        Ranks that disagree would hang, crash, or train with different numbers of experts.

        Args:
            x: the tokens of the first forward pass.
            options: returns the options of the layer.
        """
        if not self._agrees:
            self._compare(x, options)
            self._agrees = True

    @eager
    def _compare(self, x: Tensor, options: Callable[[], Mapping[str, object]]) -> None:
        assert self.sharding is not None
        has_gradients = torch.is_grad_enabled()
        call_options = {
            "the dtype of x": x.dtype,
            "the gradient mode": has_gradients,
            "x.requires_grad": has_gradients and x.requires_grad,
        }
        require_same("MoE", {**options(), **call_options}, self.sharding.layout.expert_parallel)

    @abstractmethod
    def __call__(
        self,
        x: Tensor,
        gate: Callable[..., Routing],
        experts: Callable[..., Tensor],
        *,
        dtype: torch.dtype | None = None,
        **how: Any,
    ) -> _Mixture:
        """Computes Σ_i G(x)_i E_i(x) [T, d_output], the routing and tokens_per_expert [E].

        A dropped slot, or a slot of an expert without weights, adds nothing to the output.

        Args:
            x: [T, D]. ``x.requires_grad`` must agree on all ranks; otherwise backward deadlocks.
            gate: a function with the arguments of the gate's `forward`.
            experts: the experts of this rank.
            dtype: tokens are cast to it for the experts; None: no cast.
            how: fused, see `moe_ext.Experts`, and recompute, see `moe_ext.ops.experts`. With
                sends_tokens also meanwhile, a function that is called while they are sent.
        """


class LocalDispatcher(Dispatcher):
    """Computes tokens on this rank, with all experts."""

    def __call__(
        self,
        x: Tensor,
        gate: Callable[..., Routing],
        experts: Callable[..., Tensor],
        *,
        dtype: torch.dtype | None = None,
        **how: Any,
    ) -> _Mixture:
        """Routes the tokens first, then computes them; see `Dispatcher.__call__`."""
        routing = gate(x, self.balanced)
        if dtype is not None:
            x = cast_to(x, dtype)
        num_choices = routing.importance.shape[0]
        if routing.kept is None and num_choices == self.num_experts:
            y, tokens_per_expert = self._mix(x, routing, experts, **how)
        else:
            computed = _computed_slots(routing, self.num_experts)
            y, _ = self._mix(x, computed, experts, **how)
            plan = ops.dispatch_plan(routing.expert_index, num_choices)
            tokens_per_expert = plan.tokens_per_expert
        return y, routing, tokens_per_expert

    def _mix(
        self, x: Tensor, routing: Routing, experts: Callable[..., Tensor], **how: Any
    ) -> tuple[Tensor, Tensor]:
        """Returns the mixture of all slots, and tokens_per_expert."""
        plan = ops.dispatch_plan(routing.expert_index, self.num_experts)
        how["equal_load"] = routing.equal_load
        y = mixture(experts, x, routing.gates, plan, routing.token_offsets, **how)
        return y, plan.tokens_per_expert


class _ExchangeDispatcher(LocalDispatcher):
    """Routes tokens on this rank and sends them to the owners of their experts."""

    sends_tokens = True

    def __init__(self, num_experts: int, sharding: ExpertSharding, exchange: Exchange) -> None:
        super().__init__(num_experts, sharding)
        self._exchange = exchange
        self._agrees = False

    def _mix(
        self, x: Tensor, routing: Routing, experts: Callable[..., Tensor], **how: Any
    ) -> tuple[Tensor, Tensor]:
        y, tokens_per_expert = self._exchange(x, routing, experts, **how)
        return _without_view(y), tokens_per_expert


class _GroupDispatcher(Dispatcher):
    """Sends tokens to the owners of their groups, which route them within the groups.

    The experts compute a token before its rank knows all of its routing decision. So the decision
    cannot drop slots.
    """

    sends_tokens = True

    def __init__(self, num_experts: int, sharding: ExpertSharding, exchange: GroupExchange) -> None:
        super().__init__(num_experts, sharding)
        self._exchange = exchange
        self._agrees = False

    def __call__(
        self,
        x: Tensor,
        gate: Callable[..., Routing],
        experts: Callable[..., Tensor],
        **options: Any,
    ) -> _Mixture:
        y, routing, tokens_per_expert = self._exchange(x, gate, experts, self.balanced, **options)
        if routing.kept is not None:
            rule = 'return Routing.kept = None with placement="groups"'
            refuse("MoE: gate", rule, f"a mask {tuple(routing.kept.shape)}")
        return _without_view(y), routing, tokens_per_expert


def make_dispatcher(sharding: ExpertSharding | None, gate: Gate, num_experts: int) -> Dispatcher:
    """Makes the dispatcher of a layer; the gate then has the groups of this rank only.

    Args:
        sharding: how ranks share the experts; None: this process has all of them.
        gate: the gate of the layer.
        num_experts: see `Dispatcher`.

    Raises:
        ValueError: the gate has the groups of one rank only already.
    """
    if sharding is None:
        return LocalDispatcher(num_experts)
    if sharding.group_exchange is not None:
        assert sharding.local_groups is not None
        cast(HierarchicalGate, uncompiled(gate)).keep_groups(sharding.local_groups)
        return _GroupDispatcher(num_experts, sharding, sharding.group_exchange)
    if sharding.exchange is not None:
        return _ExchangeDispatcher(num_experts, sharding, sharding.exchange)
    return LocalDispatcher(num_experts, sharding)


def _without_view(y: Tensor) -> Tensor:
    """Returns y, which the caller can modify in place: it is no view of an autograd function."""
    owned: Tensor = torch.ops.aten._unsafe_view(y, y.shape)
    return owned


def _computed_slots(routing: Routing, num_experts: int) -> Routing:
    """Returns a routing decision with only the slots that the first num_experts experts compute.

    Slots that are not kept are left out. Synchronizes with the device to count the other slots.
    """
    is_computed = routing.expert_index < num_experts
    if routing.kept is not None:
        is_computed = is_computed & routing.kept
    if routing.token_offsets is None:
        token_offsets = offsets_of(is_computed.sum(1))
    else:
        token_offsets = offsets_of(is_computed)[routing.token_offsets]
    slot = is_computed.reshape(-1).nonzero().squeeze(1)
    return routing._replace(
        gates=routing.gates.reshape(-1).index_select(0, slot),
        expert_index=routing.expert_index.reshape(-1).index_select(0, slot),
        token_offsets=token_offsets,
        equal_load=False,
        kept=None,
    )
