"""Checks the parts of a `MoE`: its gate, experts and losses, and the experts that a call gives."""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from moe_ext._compiled import uncompiled
from moe_ext.checks import refuse, require
from moe_ext.experts import Experts, ModuleExperts
from moe_ext.gates import Gate
from moe_ext.losses import RouterLoss
from moe_ext.shared import SharedExpert


def checked_gate(gate: object, for_flat_gates: Mapping[str, object], **sizes: int) -> Gate:
    """Checks the gate of a layer; see `MoE`.

    Args:
        gate: a `Gate`, or torch.compile's wrapper of one.
        for_flat_gates: options that a gate with `shares_groups` cannot have, by name.
        sizes: what the gate's attributes must be.
    """
    # Check the module inside torch.compile's wrapper, but return the wrapper.
    inner = uncompiled(gate)
    if not isinstance(inner, Gate):
        raise TypeError(f"MoE: gate must derive from moe_ext.Gate, got {type(inner).__name__}")
    for name, value in for_flat_gates.items():
        rule = "be left out with a hierarchical gate"
        require(not (value and inner.shares_groups), f"MoE: {name}", rule, value)
    for name, expected in sizes.items():
        given = getattr(inner, name)
        require(given == expected, f"MoE: gate.{name}", f"be {expected}", given)
    return cast(Gate, gate)


def checked_losses(losses: Sequence[RouterLoss]) -> tuple[RouterLoss, ...]:
    """Checks the losses of a layer and returns them as a tuple."""
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
    """Checks the experts of a layer; makes `ModuleExperts` of a sequence of modules.

    sizes: what the attributes of the experts must be, unless they are None.
    """
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
    """Checks the shared expert of a layer."""
    if not isinstance(shared_expert, nn.Module | None):
        kind = type(shared_expert).__name__
        raise TypeError(f"MoE: shared_expert must be a module or None, got {kind}")
    if isinstance(shared_expert, SharedExpert):
        width, rule = shared_expert.expert.d_model, f"be d_model = {d_model}"
        require(width == d_model, "MoE: shared_expert.expert.d_model", rule, width)
    return shared_expert


def checked_index(gate: Gate, expert_index: Tensor, num_tokens: int) -> Tensor:
    """Checks the given experts of each token and returns them as int64 [T, K]."""
    name = "MoE: expert_index"
    rule = f"be None for {type(uncompiled(gate)).__name__}, whose forward does not take it"
    require(gate.replays, name, rule, tuple(expert_index.shape))
    k, num_experts = gate.k, gate.num_experts
    if expert_index.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must have dtype int64 or int32, got {expert_index.dtype}")
    shape = tuple(expert_index.shape)
    rule = f"have shape [..., k = {k}] with one row for each token of x"
    require(len(shape) > 0 and shape[-1] == k, name, rule, shape)
    expert_index = expert_index.reshape(-1, k).long()
    if torch.compiler.is_compiling():
        torch._check(expert_index.shape[0] == num_tokens)
        return expert_index
    require(expert_index.shape[0] == num_tokens, name, rule, shape)
    # A check on CUDA would make the host synchronize with the device.
    if expert_index.device.type == "cpu" and not is_fake(expert_index) and len(expert_index):
        low, high = expert_index.min().item(), expert_index.max().item()
        rule = f"be at least 0 and below gate.num_experts = {num_experts}"
        within = low >= 0 and high < num_experts
        require(within, name, rule, low if low < 0 else high)
        same = (expert_index.sort(1).values.diff(dim=1) == 0).any(1)
        if same.any():
            rule = "have different experts for each token"
            refuse(name, rule, expert_index[same][0].tolist())
    return expert_index
