"""Ranks whose layers disagree: an error names the first difference on all ranks."""

import pytest
import torch
from torch import nn
from workers import on_ranks

from moe_ext import HierarchicalMoE, ImportanceLoss, MoE, TopKGate
from moe_ext.distributed import ExpertParallel, Ranks, parallelize

D = 4

# The options of rank 1 that differ from those of rank 0, and the beginning of the difference.
OPTIONS = [
    ({"k": 3}, "k must be equal on all ranks, got 2 on rank 0 and 3 on rank 1"),
    ({"num_experts": 7}, "num_experts must be equal on all ranks, got 6 on rank 0 and 7 on rank 1"),
    ({"d_model": 5}, "d_model must be"),
    ({"recompute": True}, "recompute must be"),
    ({"w_load": 0.5}, "w_load must be"),
    ({"num_null_experts": 1}, r"gate must be .*num_experts=6.*num_experts=7"),
    ({"capacity_factor": 1.0}, "capacity must be"),
    ({"gate": "other"}, r"gate must be .*, got NoisyTopKGate\(.*\) on rank 0 and TopKGate\("),
    ({"activation": "swiglu"}, "experts must be .* with relu: weight_0.* with swiglu: weight_0"),
    (
        {"hidden_sizes": [4]},
        r"experts must be .* \[4, 3\] torch.float32, .* \[4, 4\] torch.float32",
    ),
    ({"expert_dtype": torch.float64}, "experts must be .*float32.*float64"),
    ({"exchange": "tokens"}, "parallel must be .*exchange='rows'.* and .*exchange='tokens'"),
    ({"num_chunks": 3}, "parallel must be .*num_chunks=1 .*num_chunks=3"),
    ({"balance": "local"}, "parallel must be .*balance='global'.*balance='local'"),
]


def layer_of(group, d_model=D, num_experts=6, k=2, gate=None, **options):
    names = {"exchange", "num_chunks", "balance"} & options.keys()
    parallel = ExpertParallel(group, **{name: options.pop(name) for name in names})
    if gate is not None:
        options |= {"gate": TopKGate(d_model, num_experts, k), "w_load": 0.1}
    options = {"hidden_sizes": [3]} | options
    return MoE(d_model, num_experts, k, parallel=parallel, **options)


@on_ranks(2)
def test_other_options_of_a_layer_are_named(group, rank):
    for options, message in OPTIONS:
        layer = layer_of(group, **(options if rank == 1 else {}))
        with pytest.raises(ValueError, match=f"^parallelize: {message}"):
            parallelize(layer, group)
        named = message.replace(" must", " of the layer 1.moe must", 1)
        with pytest.raises(ValueError, match=f"^parallelize: {named}"):
            model = nn.Sequential(nn.Linear(D, D), nn.ModuleDict({"moe": layer}))
            parallelize(model, group)
        with pytest.raises(ValueError, match=f"^MoE: {message}"):
            layer(torch.randn(5, layer.d_model))
    layer = HierarchicalMoE(D, 4, 2, (2 - rank, 1 + rank), process_group=group)
    with pytest.raises(ValueError, match="^MoE: gate must be equal on all ranks"):
        layer(torch.randn(5, D))


@on_ranks(2)
def test_a_gate_that_one_rank_freezes_is_named(group, rank):
    layer = layer_of(group)
    layer.gate.requires_grad_(rank == 0)
    message = r"the trained parameters of the gate must .*, got \['w_gate', .*\] on rank 0 and \[\]"
    with pytest.raises(ValueError, match=f"^MoE: {message}"):
        layer(torch.randn(5, D))


@on_ranks(2)
def test_another_number_of_layers_is_named(group, rank):
    layers = nn.ModuleList(layer_of(group) for _ in range(1 + rank))
    message = (
        "d_model of the layer 1 must be equal on all ranks, got nothing on rank 0 and 4 on rank 1"
    )
    with pytest.raises(ValueError, match=f"^parallelize: {message}"):
        parallelize(layers, group)


@on_ranks(2)
def test_another_first_call_is_named(group, rank):
    layer = layer_of(group)
    x = torch.randn(5, D)
    with pytest.raises(ValueError, match="^MoE: the dtype of x must be equal on all ranks"):
        layer(x.double() if rank == 0 else x)
    with pytest.raises(ValueError, match="^MoE: x.requires_grad must be .* True .* and False"):
        layer(x.clone().requires_grad_(rank == 0))
    with (
        pytest.raises(ValueError, match="the gradient mode must"),
        torch.set_grad_enabled(rank == 0),
    ):
        layer(x)
    y, _ = layer(x)
    assert y.isfinite().all()


class Addressed(ImportanceLoss):
    """A loss whose text has its address, which differs between ranks."""

    __repr__ = object.__repr__


@on_ranks(2)
def test_the_first_call_alone_compares(group, rank):
    layer = layer_of(group, losses=[Addressed(0.1)])
    gather_objects, calls = Ranks.gather_objects, []

    def counted(*arguments):
        calls.append(arguments)
        return gather_objects(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "gather_objects", counted)
        for _ in range(3):
            layer(torch.randn(2, D))
    assert len(calls) == 1
