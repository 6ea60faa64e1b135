"""Checks the experts of each token that router replay gives to a layer."""

import inspect

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from moe_ext._compiled import uncompiled
from moe_ext.checks import require
from moe_ext.gates import Gate


def checked_index(gate: Gate, expert_index: Tensor, num_tokens: int) -> Tensor:
    """Checks the given experts of each token and returns them as int64 [T, K]."""
    name, inner = "MoE: expert_index", uncompiled(gate)
    replays = "expert_index" in inspect.signature(inner.forward).parameters
    rule = f"be None for {type(inner).__name__}, whose forward does not take it"
    require(replays, name, rule, tuple(expert_index.shape))
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
            require(False, name, rule, expert_index[same][0].tolist())
    return expert_index
