"""How the gradients of replicas are averaged: in which dtype, how often, and when."""

import pytest
import torch
import torch.distributed as dist
from assertions import assert_exact, assert_same_bits
from one_process import D, mesh_of, rank_weight
from torch import nn
from torch.distributed.tensor import DTensor
from workers import on_ranks

from moe_ext import MoE
from moe_ext.distributed import Ranks, parallelize
from moe_ext.distributed import _gradient_averages as averages


class Scaled(nn.Module):
    """Has parameters whose gradients are the given number."""

    def __init__(self, *sizes, dtype=torch.float32):
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(size, dtype=dtype) for size in sizes)

    def forward(self, x):
        return sum((x.to(scale.dtype) * scale).sum() for scale in self.scales)


def record(patch):
    """Records the sizes of all later all-reduces of Python within the context of patch."""
    all_reduce, sizes = dist.all_reduce, []

    def recorded(tensor, *arguments, **options):
        sizes.append(tensor.numel())
        return all_reduce(tensor, *arguments, **options)

    patch.setattr(dist, "all_reduce", recorded)
    return sizes


@on_ranks(2)
def test_float16_does_not_overflow(group, rank):
    """The sum of two gradients of 40,000 is above 65,504, the largest number of float16."""
    model = Scaled(3, dtype=torch.float16)
    averages.average_gradients(model, [(param, Ranks(group)) for param in model.parameters()])
    model(torch.tensor([40_000.0, 60_000.0])[rank]).backward()
    assert_same_bits(model.scales[0].grad, torch.full((3,), 50_000.0).half())


@on_ranks(2)
def test_gradients_share_all_reduces(group, rank):
    """A gradient that is larger than a bucket has its own; other dtypes have other buckets."""
    model = Scaled(3, 5, 90, 4, 2)
    model.second = Scaled(7, dtype=torch.float64)
    copied = [(param, Ranks(group)) for param in model.parameters()]
    averages.average_gradients(model, copied)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(averages, "BUCKET_BYTES", 4 * 20)
        sizes = record(patch)
        for _ in range(2):
            model.zero_grad()
            (model(torch.tensor(rank + 1.0)) + model.second(torch.tensor(rank + 3.0))).backward()
        assert sizes == 2 * [3 + 5, 90, 4 + 2, 7]
    for param in model.scales:
        assert_exact(param.grad, torch.full_like(param, 1.5))
    assert_exact(model.second.scales[0].grad, torch.full((7,), 3.5, dtype=torch.float64))


@pytest.mark.parametrize("dense", ["ddp", "fsdp", "replicas"])
@on_ranks(4)
def test_the_dtype_of_the_sums(group, rank, dense):
    """The sum in bfloat16 would be rounded three times."""
    model, ranks = Scaled(8, dtype=torch.bfloat16), Ranks(group)
    values = torch.tensor([1.0, *[1.25 / 256] * 3])
    if dense == "replicas":
        copied = [(param, ranks) for param in model.parameters()]
        averages.average_gradients(model, copied, torch.float32)
        replica = model
    else:
        replica = parallelize(model, group, dense=dense, reduce_dtype=torch.float32)
    replica(values[rank]).backward()
    grad = model.scales[0].grad
    grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
    assert grad.dtype == torch.bfloat16
    assert_same_bits(grad, values.mean().bfloat16().expand(8))
    with pytest.raises(TypeError, match="^parallelize: reduce_dtype must be .*, got torch.int32"):
        parallelize(model, group, reduce_dtype=torch.int32)


@on_ranks(2)
def test_replicas_within_no_sync(group, rank):
    """Micro-batches add up their gradients; the last one averages them, once."""
    mesh = mesh_of(2, 1)
    grads = []
    for accumulates in (True, False):
        torch.manual_seed(2)
        layer = MoE(D, 4, 2, process_group=mesh).double().eval()
        nn.init.normal_(layer.gate.w_gate, generator=torch.Generator().manual_seed(5))
        model = parallelize(layer, mesh, find_unused_parameters=True)
        x = rank_weight(rank) * torch.randn(2, 6, D, dtype=torch.float64)
        with pytest.MonkeyPatch.context() as patch:
            if accumulates:
                with model.no_sync():
                    y, aux = model(x[0])
                    sizes = record(patch)
                    (y.square().sum() + aux.loss).backward()
                    assert layer.experts.weight_0.numel() not in sizes
            else:
                y, aux = model(x[0])
                (y.square().sum() + aux.loss).backward()
            y, aux = model(x[1])
            sizes = record(patch)
            (y.square().sum() + aux.loss).backward()
        assert sum(size >= layer.experts.weight_0.numel() for size in sizes) == 1
        grads.append([param.grad for param in layer.parameters() if param.grad is not None])
        for grad in grads[-1]:
            for peer in Ranks(group).gather_objects(grad):
                assert_same_bits(peer, grad)
    for grad, expected in zip(*grads, strict=True):
        assert_exact(grad, expected)
