"""Checks the parts that a MoE layer is given: gate, experts, shared expert and losses."""

import inspect
from collections.abc import Sequence
from typing import cast

from torch import nn

from moe_ext._compiled import uncompiled
from moe_ext.checks import require
from moe_ext.experts import Experts, ModuleExperts
from moe_ext.gates import Gate, HierarchicalGate
from moe_ext.losses import RouterLoss
from moe_ext.shared import SharedExpert


def checked_gate(gate: object, **sizes: int) -> Gate:
    # Check the module inside torch.compile's wrapper, but return the wrapper.
    inner = uncompiled(gate)
    if not isinstance(inner, Gate):
        raise TypeError(f"MoE: gate must derive from moe_ext.Gate, got {type(inner).__name__}")
    signature = inspect.signature(inner.forward)
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise TypeError(f"MoE: gate must have forward(x, ranks=None), got {signature}") from error
    for name, expected in sizes.items():
        given = getattr(inner, name)
        require(given == expected, f"MoE: gate.{name}", f"be {expected}", given)
    return cast(Gate, gate)


def checked_losses(losses: Sequence[RouterLoss]) -> tuple[RouterLoss, ...]:
    wrong: list[object] = [losses]
    if isinstance(losses, Sequence):
        wrong = [loss for loss in losses if not isinstance(loss, RouterLoss)]
    if wrong:
        kind = type(wrong[0]).__name__
        raise TypeError(f"MoE: losses must be a sequence of moe_ext.RouterLoss, got {kind}")
    names = [loss.name for loss in losses]
    require(len({*names}) == len(names), "MoE: losses", "have different names", names)
    return tuple(losses)


def checked_experts(experts: object, **sizes: int) -> Experts:
    if isinstance(experts, nn.ModuleList | Sequence):
        experts = ModuleExperts(experts)
    inner = uncompiled(experts)
    if not isinstance(inner, Experts):
        raise TypeError(
            "MoE: experts must derive from moe_ext.Experts or be a sequence of modules, "
            f"got {type(inner).__name__}"
        )
    for name, expected in sizes.items():
        given = getattr(inner, name)
        rule = f"be {expected}" + (" on this rank" if name == "num_experts" else "")
        require(given in (None, expected), f"MoE: experts.{name}", rule, given)
    return cast(Experts, experts)


def checked_shared_expert(shared_expert: object, d_model: int) -> nn.Module | None:
    if not isinstance(shared_expert, nn.Module | None):
        kind = type(shared_expert).__name__
        raise TypeError(f"MoE: shared_expert must be a module or None, got {kind}")
    if isinstance(shared_expert, SharedExpert):
        width, rule = shared_expert.expert.d_model, f"be d_model = {d_model}"
        require(width == d_model, "MoE: shared_expert.expert.d_model", rule, width)
    return shared_expert


def is_hierarchical(gate: nn.Module) -> bool:
    """Returns whether a gate has two levels; it may be in torch.compile's wrapper."""
    return isinstance(uncompiled(gate), HierarchicalGate)
