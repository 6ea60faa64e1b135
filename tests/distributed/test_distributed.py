"""Experts sharded over ranks: the sharding does not change the result (Sec. 3)."""

import inspect
import math
from functools import partial

import pytest
import torch
from assertions import assert_exact, assert_same_bits
from one_process import (
    RANKS,
    D,
    assert_equals_one_process,
    draw_parameters,
    mesh_of,
    sharing,
    tokens_of,
)
from pairwise import pairwise
from torch import nn
from workers import on_ranks

from moe_ext import (
    BalancedGate,
    ExpertChoiceGate,
    HierarchicalBalancedGate,
    HierarchicalMoE,
    HierarchicalNoisyTopKGate,
    MoE,
    ReLUGate,
    SharedExpert,
    SoftmaxGate,
    SwitchLoss,
    TopKGate,
    ZLoss,
)
from moe_ext.distributed import ExpertParallel, ExpertPlacement
from moe_ext.gates import HierarchicalGate


def gated(gate, **options):
    return MoE(D, gate.num_experts, gate.k, gate=gate, w_load=0.0, **options)


KINDS = {
    "flat": lambda **options: MoE(D, 5, 2, **options),
    "k=1": lambda **options: MoE(D, 5, 1, **options),
    "topk": lambda **options: gated(TopKGate(D, 7, 3), **options),
    "groups and bias": lambda **options: gated(
        TopKGate(
            D,
            8,
            3,
            score="sigmoid",
            renormalize=False,
            scale=2.5,
            num_groups=4,
            groups_per_token=2,
            logit_bias=True,
            bias_update_rate=0.1,
        ),
        **options,
    ),
    "softmax": lambda **options: MoE(D, 4, 4, gate=SoftmaxGate(D, 4), **options),
    "swiglu": lambda **options: MoE(D, 6, 2, activation="swiglu", bias=True, **options),
    "hierarchical": lambda **options: HierarchicalMoE(D, 3, 4, (2, 3), **options),
    "one group each": lambda **options: HierarchicalMoE(D, 4, 2, (1, 2), **options),
    "one expert each": lambda **options: HierarchicalMoE(D, 4, 1, (2, 1), **options),
    "balanced": lambda **options: gated(BalancedGate(D, 5, 2), **options),
    "hierarchical balanced": lambda **options: gated(
        HierarchicalBalancedGate(D, 3, 4, 2), **options
    ),
    "one balanced group each": lambda **options: gated(
        HierarchicalBalancedGate(D, 4, 3, (1, 2), detach_scores=False), **options
    ),
    "a single balanced group": lambda **options: gated(
        HierarchicalBalancedGate(D, 1, 4, (1, 2)), **options
    ),
    "losses": lambda **options: MoE(
        D, 5, 2, w_load=0.1, losses=[SwitchLoss(0.3), ZLoss(0.2)], **options
    ),
    "balanced losses": lambda **options: gated(
        BalancedGate(D, 5, 2), losses=[SwitchLoss(0.3), ZLoss(0.2)], **options
    ),
    "shared": lambda **options: MoE(
        D, 5, 2, shared_expert=SharedExpert(D, [4], gated=True), **options
    ),
    "expert choice": lambda **options: gated(ExpertChoiceGate(D, 5, 2), **options),
    "relu": lambda **options: gated(ReLUGate(D, 5, 2, l1_weight=0.3), **options),
    "few": lambda **options: MoE(D, 2, 2, **options),  # fewer experts than ranks
    "zero computation": lambda **options: MoE(
        D,
        4,
        3,
        num_identity_experts=2,
        num_null_experts=1,
        **options,
    ),
    "balanced zero computation": lambda **options: MoE(
        D, 4, 2, gate=BalancedGate(D, 6, 2), num_identity_experts=2, w_load=0.0, **options
    ),
    "capacity by position": lambda **options: MoE(
        D, 5, 2, capacity_factor=0.7, losses=[SwitchLoss(0.3)], **options
    ),
    "capacity by score": lambda **options: gated(
        TopKGate(D, 7, 3, renormalize=False), capacity_factor=0.7, drop="score", **options
    ),
    "capacity with ties": lambda **options: MoE(  # all gates are 1
        D, 2, 1, capacity_factor=0.7, drop="score", **options
    ),
    "capacity of some": lambda **options: MoE(
        D,
        4,
        2,
        num_identity_experts=1,
        num_null_experts=1,
        capacity_factor=0.5,
        drop="score",
        **options,
    ),
    "balanced capacity": lambda **options: gated(
        BalancedGate(D, 5, 2), capacity_factor=0.5, **options
    ),
}


def layer_of(kind, process_group=None, **options):
    """Makes a float64 layer with a random gate; it is the same on every rank."""
    torch.manual_seed(1)
    layer = KINDS[kind](**sharing(process_group, {"hidden_sizes": (7,)} | options))
    return draw_parameters(layer, but="experts.")


def call(layer, x, part, masked=False, replayed=False):
    """Calls the layer, with a masked token after each token, and with given experts."""
    given = {}
    if replayed:
        scores = torch.rand(30, layer.gate.num_experts, generator=torch.Generator().manual_seed(6))
        given["expert_index"] = scores.argsort(1)[part, : layer.k]
    if not masked:
        return layer(x, **given)
    mask = torch.tensor([True, False]).expand(len(x), 2)
    given = {name: torch.stack([index, 0 * index], 1) for name, index in given.items()}
    y, aux = layer(torch.stack([x, torch.full_like(x, math.nan)], 1), mask, **given)
    assert y[:, 1].count_nonzero() == 0
    return y[:, 0], aux


HOW = {
    "rows": {"exchange": "rows", "placement": "experts"},
    "tokens": {"exchange": "tokens", "placement": "experts"},
    "groups": {"placement": "groups"},
}
GATES = {kind: make().gate for kind, make in KINDS.items()}
# The kinds whose secondary gates ranks can share, and those whose gate takes given experts.
GROUPED = {kind for kind, gate in GATES.items() if isinstance(gate, HierarchicalGate)}
REPLAYED = {
    kind for kind, gate in GATES.items() if "expert_index" in inspect.signature(gate.forward).parameters
}


@pytest.mark.guarantee("Sharding does not change the result")
@pytest.mark.equation("Sec. 3.1", "arXiv 2401.06066", "arXiv 2202.09368", "arXiv 2412.14711")
@pytest.mark.equation("arXiv 2101.03961", "arXiv 2410.07348", "arXiv 2509.01322")
@pairwise(
    kind=KINDS,
    ranks=RANKS,
    how=HOW,
    num_chunks=[1, 2, 3],
    recompute=[False, True],
    masked=[False, True],
    replayed=[False, True],
    allowed=lambda kind, how, replayed, **_: (
        (how != "groups" or kind in GROUPED) and (not replayed or kind in REPLAYED)
    ),
)
def test_equals_one_process(workers, kind, ranks, how, num_chunks, recompute, masked, replayed):
    """The outputs are bitwise identical if the rows of a token meet in the order of its slots."""
    aux = assert_equals_one_process(
        workers,
        ranks,
        partial(layer_of, kind),
        partial(call, masked=masked, replayed=replayed),
        tokens_of(RANKS[ranks]),
        same_bits=how == "rows",
        num_chunks=num_chunks,
        recompute=recompute,
        **HOW[how],
    )
    assert aux.kept is None or not aux.kept.all()


def call_with_sequences(layer, x, part, masked):
    """Calls a layer with losses of sequences; a masked sequence has no real tokens."""
    mask = torch.rand(30, 7, generator=torch.Generator().manual_seed(3)) < 0.7
    mask[0] = False
    return layer(x, mask[part] if masked else None)


@pytest.mark.equation("arXiv 2101.03961", "arXiv 2202.08906", "arXiv 2412.19437")
@pairwise(ranks=RANKS, masked=[False, True], recompute=[False, True])
def test_losses_equal_one_process(workers, ranks, masked, recompute):
    """The losses of the batch and of each sequence, with their gradients."""
    losses = [SwitchLoss(0.3), SwitchLoss(0.2, per_sequence=True), ZLoss(0.1)]
    make = partial(layer_of, "topk", losses=losses)
    called = partial(call_with_sequences, masked=masked)
    x = tokens_of(RANKS[ranks], 7)
    assert_equals_one_process(workers, ranks, make, called, x, recompute=recompute)


def layer_of_modules(process_group=None, **options):
    """Makes a layer whose experts are modules of different sizes."""
    torch.manual_seed(7)
    modules = [nn.Sequential(nn.Linear(D, 3 + e), nn.Tanh(), nn.Linear(3 + e, D)) for e in range(4)]
    if process_group is not None:
        local = ExpertPlacement(4, process_group.size()).experts_of(process_group.rank())
        modules = modules[local.start : local.stop]
    return gated(TopKGate(D, 4, 2), experts=modules, **sharing(process_group, options)).double()


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_any_modules_as_experts(workers, num_chunks):
    x = tokens_of(RANKS["2"])
    assert_equals_one_process(workers, "2", layer_of_modules, call, x, num_chunks=num_chunks)


