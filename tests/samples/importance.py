"""Samples of `importance` and `importance_and_load`."""

import reference as ref
import torch
from samples import draw, wrong
from samples.draw import E
from samples.row import Operator

from moe_ext import ops


def make_importance(dtype, E, **sizes):
    routing = draw.routing(E=E, **sizes)
    return dict(
        gates=routing["gates"].to(dtype), expert_index=routing["expert_index"], num_experts=E
    )


def dense(gates, expert_index, num_experts):
    return gates.new_zeros(len(gates), num_experts).scatter(1, expert_index, gates)


def plain_importance_and_load(gates, expert_index, num_experts):
    ones = torch.ones_like(gates.detach())
    return tuple(dense(values, expert_index, num_experts).sum(0) for values in (gates, ones))


IMPORTANCE = dict(
    make=make_importance,
    equations=("Eq. 6",),
    differentiable=("gates",),
    twice_differentiable=True,
    samples=draw.EDGES + [dict(T=9, E=5, k=1, all_to=3), dict(T=5, E=3, k=0)],
    typical=draw.TYPICAL,
    limits=draw.shapes((3, 255, 2), (3, 256, 17), (3, 257, 64), (3, 1000, 1), (3, 4096, 4096)),
    large=draw.shapes((5000, 16, 4), (3000, 2000, 2)),
    precise=draw.shapes((10, 8, 2), (301, 37, 3), (5000, 8, 2)),
    bad=[
        *wrong.sizes("expert_index", axes=(0, 1)),
        *wrong.out_of_range("expert_index", E),
        *wrong.numbers("num_experts", 0, -1, 2**31, 2**62),
    ],
)


# fmt: off
TABLE = {
    "importance": Operator(
        function=ops.importance,
        reference=lambda **arguments: ref.Importance(dense(**arguments)),
        plain=lambda **arguments: dense(**arguments).sum(0),
        **IMPORTANCE,
    ),
    "importance_and_load": Operator(
        function=ops.importance_and_load, constant=(1,),
        reference=plain_importance_and_load, plain=plain_importance_and_load,
        **IMPORTANCE,
    ),
}
