"""Samples of `combine`."""

import reference as ref
import torch
from samples import draw, wrong
from samples.dispatch import pairs_by_row
from samples.draw import K, R, T
from samples.row import Operator

from moe_ext import ops


def make_combine(dtype, D=3, gates_dtype=None, **sizes):
    routing = draw.routing(**sizes)
    gates = routing["gates"].to(gates_dtype or draw.wide(dtype))
    output = draw.normal(gates.numel(), D, dtype=dtype)
    slots = draw.only(routing, "inverse", "token_offsets")
    return dict(expert_output=output, gates=gates) | slots


def reference_combine(expert_output, gates, inverse, token_offsets=None):
    """Uses ref.combine with a single expert that has all rows."""
    pairs, D = pairs_by_row(inverse, token_offsets), expert_output.shape[1]
    by_token = list(draw.per_token(gates, token_offsets))
    padded = torch.nn.utils.rnn.pad_sequence(by_token, True) if by_token else gates.view(0, 1)
    y = ref.combine([expert_output], [pairs], padded, D)
    return y + 0 * (expert_output.sum() + gates.sum())  # differentiable even if empty


def plain_combine(expert_output, gates, inverse, token_offsets=None):
    slots = expert_output[inverse.flatten()] * gates.reshape(-1, 1)
    y = slots.new_zeros(len(draw.per_token(inverse, token_offsets)), slots.shape[1])
    return y.index_add(0, draw.token_of_slot(inverse, token_offsets), slots)


# fmt: off
TABLE = {
    "combine": Operator(
        function=ops.combine, make=make_combine, reference=reference_combine, plain=plain_combine,
        equations=("Eq. 1",),
        differentiable=("expert_output", "gates"), backward="_combine_backward",
        lacks={"half_types": "on CUDA the order of the sums of gates' gradients is the type's"},
        samples=[sizes | dict(D=D) for sizes in draw.EDGES + draw.RAGGED for D in (1, 5)],
        typical=draw.TYPICAL + draw.RAGGED[:1],
        limits=draw.shapes((20, 300, 17), (20, 300, 64), (35_000, 8, 2), (50_000, 64, 4)),
        large=[dict(T=1000, E=64, k=4, D=64)],
        precise=[dict(T=100, E=16, k=k, D=D) for k in (1, 2, 16) for D in (3, 29, 64)],
        bad=[
            *wrong.out_of_range("inverse", R),
            (ValueError, "", wrong.shorter("inverse")),
            (ValueError, "", wrong.shorter("gates")),
            (ValueError, "inverse", dict(inverse=torch.zeros(T, K).long()), 0),
            *wrong.token_offsets(),
        ],
        backward_bad=[
            (ValueError, "inverse", dict(inverse=torch.zeros(T, K).long()), 0),
            (ValueError, "grad_y", wrong.shorter("grad_y")),
            (ValueError, "gates", wrong.shorter("gates")),
        ],
    ),
}
