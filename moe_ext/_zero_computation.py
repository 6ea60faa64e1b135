"""Slots that no expert computes: dropped slots, and slots of identity and null experts."""

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext._ragged import offsets_of
from moe_ext.checks import require
from moe_ext.routing import Routing


def computed_slots(routing: Routing, num_experts: int) -> Routing:
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


def add_identity(y: Tensor, x: Tensor, routing: Routing, experts: range) -> Tensor:
    """Computes y + (Σ_i g_i) x over the chosen experts i in the range (arXiv 2410.07348, Sec. 3.1).

    The sum is rounded once, to the dtype of y.

    Args:
        y: [T, D], the output of the other experts.
        x: [T, D], the tokens.
        routing: the routing decision.
        experts: the identity experts.

    Raises:
        ValueError: y does not have the width of x.
    """
    shape = [*y.shape]
    rule = f"return [T, d_model = {x.shape[1]}] with num_identity_experts > 0"
    require(shape[1] == x.shape[1], "MoE: experts", rule, shape)
    index, gates = routing.expert_index, routing.gates
    chosen = (index >= experts.start) & (index < experts.stop)
    if routing.kept is not None:
        chosen = chosen & routing.kept
    gates = torch.where(chosen, gates, 0)
    slot = torch.arange(gates.numel(), device=gates.device).view_as(gates)
    # Unlike a sum of torch, it has the same order for any number of tokens.
    total = ops.combine(gates.reshape(-1, 1), torch.ones_like(gates), slot, routing.token_offsets)
    return (y + total * x).to(y.dtype)
