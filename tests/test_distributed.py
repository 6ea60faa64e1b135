"""Experts spread over processes: the layout does not change the result (Sec. 3)."""

import pytest
import torch
import torch.distributed as dist
from conftest import assert_exact, assert_same_bits
from workers import Workers

import moe_ext.gates
import moe_ext.hierarchical
from moe_ext import (
    BalancedGate,
    HierarchicalBalancedGate,
    HierarchicalMoE,
    MoE,
    SoftmaxGate,
    TopKGate,
)

D = 6


@pytest.fixture(scope="module")
def workers():
    processes = Workers()
    yield processes
    processes.close()


def layer_of(kind, process_group=None, **options):
    """A layer in float64 whose gate is away from its start, the same in every process."""
    torch.manual_seed(1)
    options = {"hidden_sizes": (7,), "process_group": process_group} | options
    if kind == "flat":
        layer = MoE(D, 5, 2, **options)
    elif kind == "k=1":
        layer = MoE(D, 5, 1, **options)
    elif kind == "topk":
        layer = MoE(D, 7, 3, gate=TopKGate(D, 7, 3), w_load=0.0, **options)
    elif kind == "softmax":
        layer = MoE(D, 4, 4, gate=SoftmaxGate(D, 4), **options)
    elif kind == "swiglu":
        layer = MoE(D, 6, 2, activation="swiglu", bias=True, **options)
    elif kind == "hierarchical":
        layer = HierarchicalMoE(D, 3, 4, (2, 3), **options)
    elif kind == "balanced":
        layer = MoE(D, 5, 2, gate=BalancedGate(D, 5, 2), w_load=0.0, **options)
    elif kind == "hierarchical balanced":
        gate = HierarchicalBalancedGate(D, 3, 4, 2)
        layer = MoE(D, 12, 4, gate=gate, w_load=0.0, **options)
    elif kind == "few":  # fewer experts than processes
        layer = MoE(D, 2, 2, **options)
    layer = layer.double()
    generator = torch.Generator().manual_seed(2)
    for name, param in layer.named_parameters():
        if not name.startswith("experts."):
            torch.nn.init.normal_(param, generator=generator)
    return layer


KINDS = [
    "flat",
    "k=1",
    "topk",
    "softmax",
    "swiglu",
    "hierarchical",
    "balanced",
    "hierarchical balanced",
    "few",
]


def fix_noise(patch, counts, rank=None):
    """The gates' noise becomes a table by token: a process reads the rows of its own."""
    first = sum(counts[:rank]) if rank is not None else 0
    number = counts[rank] if rank is not None else sum(counts)
    calls = iter(range(100))

    def standard_normal(like, generator):
        table = torch.Generator().manual_seed(next(calls))
        per_token = 2 if next_is_secondary() else 1
        noise = torch.randn(
            sum(counts) * per_token, like.shape[1], dtype=like.dtype, generator=table
        )
        return noise[first * per_token :][: number * per_token]

    asked = iter(range(100))

    def next_is_secondary():
        return next(asked) % 2 == 1

    patch.setattr(moe_ext.gates, "standard_normal", standard_normal)
    patch.setattr(moe_ext.hierarchical, "standard_normal", standard_normal)


def tokens_of(counts):
    x = torch.randn(sum(counts), D, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    weight = torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view_as(x)
    return x, weight


def rank_weight(rank):
    return 1 + rank / 2


def step_of_process(group, rank, kind, counts, options):
    """y, aux and gradients of one process."""
    with pytest.MonkeyPatch.context() as patch:
        fix_noise(patch, counts, rank)
        layer = layer_of(kind, group, **options)
        x, weight = (t.split(counts)[rank] for t in tokens_of(counts))
        x = x.clone().requires_grad_()
        y, aux = layer(x)
        loss = rank_weight(rank) * ((y * weight).sum() + aux.loss)
        loss.backward()
    size = dist.get_world_size(group)
    grads = {}
    for name, param in layer.named_parameters():
        assert param.grad is not None, name
        if not name.startswith("experts."):
            dist.all_reduce(param.grad, group=group)
            param.grad /= size
        grads[name] = param.grad
    return {
        "y": y.detach(),
        "x": x.grad,
        "grads": grads,
        "loss": aux.loss.detach(),
        "importance": aux.importance.detach(),
        "load": aux.load.detach(),
        "expert_index": aux.expert_index,
        "tokens_per_expert": aux.tokens_per_expert,
        "experts": layer.placement.experts_of(rank),
    }


def step_of_all(kind, counts, options):
    with pytest.MonkeyPatch.context() as patch:
        fix_noise(patch, counts)
        layer = layer_of(kind, **options)
        x, weight = tokens_of(counts)
        x.requires_grad_()
        y, aux = layer(x)
        parts = (y * weight).split(counts)
        losses = [rank_weight(rank) * (part.sum() + aux.loss) for rank, part in enumerate(parts)]
        (sum(losses) / len(counts)).backward()
    return layer, x, y, aux


COUNTS = [[9], [5, 8], [4, 0, 6], [3, 7, 0, 5]]


@pytest.mark.parametrize("exchange", ["rows", "tokens"])
@pytest.mark.parametrize("num_chunks", [1, 2])
@pytest.mark.parametrize("counts", COUNTS, ids=len)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_one_process(workers, kind, counts, num_chunks, exchange):
    layer, x, y, aux = step_of_all(kind, counts, {})
    options = {"exchange": exchange, "num_chunks": num_chunks}
    parts = workers.run(len(counts), step_of_process, kind, counts, options)
    same = assert_same_bits if exchange == "rows" else assert_exact
    same(torch.cat([part["y"] for part in parts]), y)
    assert torch.equal(torch.cat([part["expert_index"] for part in parts]), aux.expert_index)
    assert torch.equal(sum(part["tokens_per_expert"] for part in parts), aux.tokens_per_expert)
    assert_exact(torch.cat([part["x"] for part in parts]) / len(counts), x.grad)
    for part in parts:
        assert_exact(part["loss"], aux.loss)
        assert_exact(part["importance"], aux.importance)
        assert_exact(part["load"], aux.load)
        experts = part["experts"]
        for name, param in layer.named_parameters():
            expected = param.grad
            if name.startswith("experts."):
                expected = expected[experts.start : experts.stop]
            assert_exact(part["grads"][name], expected)
