"""Samples of `dispatch_plan` and `dispatch`."""

import reference as ref
import torch
from samples import draw, wrong
from samples.draw import E, K, R, T
from samples.row import NO_GRADIENT, Operator

from moe_ext import ops


def make_plan(dtype, E, **sizes):
    return dict(expert_index=draw.routing(E=E, **sizes)["expert_index"], num_experts=E)


def reference_plan(expert_index, num_experts):
    slots = expert_index if expert_index.dim() == 2 else expert_index[:, None]
    batches = ref.dispatch(slots, num_experts)
    permutation = [t * slots.shape[1] + j for batch in batches for t, j in batch]
    counts = torch.tensor([len(batch) for batch in batches], dtype=torch.int64)
    permutation, offsets = torch.tensor(permutation, dtype=torch.int64), draw.offsets_of(counts)
    return permutation, permutation.argsort().view(expert_index.shape), counts, offsets


def plain_plan(expert_index, num_experts):
    slots = expert_index.flatten()
    permutation, counts = slots.sort(stable=True).indices, slots.bincount(minlength=num_experts)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return permutation, permutation.argsort().view(expert_index.shape), counts, offsets


def make_dispatch(dtype, D=3, **sizes):
    routing = draw.routing(**sizes)
    T = len(draw.per_token(routing["inverse"], routing["token_offsets"]))
    return dict(x=draw.normal(T, D, dtype=dtype)) | draw.only(routing, "inverse", "token_offsets")


def pairs_by_row(inverse, token_offsets):
    """Returns the (token, slot number) pair of every row."""
    rows = {}
    for t, slots in enumerate(draw.per_token(inverse, token_offsets)):
        rows |= {int(row): (t, j) for j, row in enumerate(slots)}
    return [rows[row] for row in range(len(rows))]


def reference_dispatch(x, inverse, token_offsets=None):
    pairs = pairs_by_row(inverse, token_offsets)
    return (
        torch.stack([x[t] for t, _ in pairs]) if pairs else x.new_zeros(0, x.shape[1]) + 0 * x[:0]
    )


def plain_dispatch(x, inverse, token_offsets=None):
    return x[draw.token_of_slot(inverse, token_offsets)][inverse.flatten().argsort()]


# fmt: off
TABLE = {
    "dispatch_plan": Operator(
        function=ops.dispatch_plan, make=make_plan, reference=reference_plan, plain=plain_plan,
        equations=("Eq. 1",),
        lacks=NO_GRADIENT | dict.fromkeys(("half_types", "nan"), "its numbers are integers"),
        samples=draw.EDGES + draw.RAGGED + [dict(T=9, E=5, k=1, all_to=3)],
        typical=draw.TYPICAL + draw.RAGGED[:1],
        limits=[
            *draw.shapes((100, 1, 1), (100, 255, 2), (100, 256, 17), (100, 257, 64), (50, 1000, 1)),
            # 65,535 rows and more
            *draw.shapes((20, 4096, 4), (21_845, 8, 3), (32_768, 8, 2), (50_000, 64, 4)),
        ],
        large=draw.shapes((1000, 64, 4)),
        precise=draw.shapes((1000, 64, 4), (301, 37, 3)),
        bad=[*wrong.out_of_range("expert_index", E),
             *wrong.numbers("num_experts", -1, 2**31, 2**62)],
    ),
    "dispatch": Operator(
        function=ops.dispatch, make=make_dispatch,
        reference=reference_dispatch, plain=plain_dispatch,
        equations=("Eq. 1",),
        differentiable=("x",), backward="_dispatch_backward",
        samples=[sizes | dict(D=D) for sizes in draw.EDGES + draw.RAGGED for D in (1, 7, 64)],
        typical=draw.TYPICAL + draw.RAGGED[:1],
        limits=draw.shapes((20, 300, 64), (35_000, 8, 2), (50_000, 64, 4)),
        large=[dict(T=1000, E=64, k=4, D=64)],
        precise=[dict(T=50, E=16, k=8, D=9), dict(T=301, E=37, k=3, D=29)],
        free=dict(type=("x",)),
        bad=[
            *wrong.out_of_range("inverse", R),
            (ValueError, "", wrong.shorter("inverse")),
            (ValueError, "inverse", dict(inverse=torch.zeros(T, K).long()), 0),
            *wrong.token_offsets(),
        ],
        backward_bad=[
            (IndexError, "inverse", wrong.last("inverse", R), R),
            (TypeError, "inverse", lambda a: dict(inverse=a["inverse"].float()), "float32"),
        ],
    ),
}
