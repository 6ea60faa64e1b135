"""Samples of `lstm`."""

import math

import reference as ref
import torch
from samples import draw, wrong
from samples.draw import T
from samples.row import Operator

from moe_ext import ops


def make_lstm(
    dtype, B, S, D=3, U=4, P=None, bias=True, state=True, lengths=None, reverse=False
):  # fmt: skip
    """Makes sentences; with P, a projection."""
    width = P or U
    scale = 1 / math.sqrt(max(D + width, 1))
    return dict(
        x=draw.normal(B, S, D, dtype=dtype),
        weight_input=draw.normal(4 * U, D, dtype=dtype) * scale,
        weight_recurrent=draw.normal(4 * U, width, dtype=dtype) * scale,
        bias=draw.normal(4 * U, dtype=dtype) if bias else None,
        projection=draw.normal(P, U, dtype=dtype) / math.sqrt(max(U, 1)) if P else None,
        m_0=draw.normal(B, width, dtype=dtype) if state else None,
        c_0=draw.normal(B, U, dtype=dtype) if state else None,
        lengths=None if lengths is None else torch.tensor(lengths, dtype=torch.int64),
        reverse=reverse,
    )


def state_of(x, weight_input, weight_recurrent, m_0, c_0, lengths):
    """Returns m_0, c_0 and lengths, also those that are None."""
    B, S, _ = x.shape
    m = x.new_zeros(B, weight_recurrent.shape[1]) if m_0 is None else m_0
    c = x.new_zeros(B, weight_input.shape[0] // 4) if c_0 is None else c_0
    return m, c, torch.full((B,), S, device=x.device) if lengths is None else lengths


def reference_lstm(
    x, weight_input, weight_recurrent, bias=None, projection=None, m_0=None, c_0=None,
    lengths=None, reverse=False,
):  # fmt: skip
    m_0, c_0, lengths = state_of(x, weight_input, weight_recurrent, m_0, c_0, lengths)
    b = weight_input.new_zeros(len(weight_input)) if bias is None else bias
    weights = [weight_input, weight_recurrent, b, *([] if projection is None else [projection])]
    none = 0 * sum(v.sum() for v in (x, m_0, c_0, *weights))  # differentiable even if empty
    y, last_m, last_c = x.new_zeros(*x.shape[:2], m_0.shape[1]) + none, m_0 + none, c_0 + none
    for n, length in enumerate(lengths.tolist()):
        tokens = [*range(length)][::-1] if reverse else range(length)
        outputs, m, c = ref.LSTM(x[n, [*tokens]], *weights[:3], projection, m_0[n], c_0[n])
        position, index = torch.tensor(n), torch.tensor([*tokens], dtype=torch.int64)
        if length:
            y = y.index_put((position, index), torch.stack(outputs))
        last_m, last_c = last_m.index_put((position,), m), last_c.index_put((position,), c)
    return y, last_m, last_c


def plain_lstm(
    x, weight_input, weight_recurrent, bias=None, projection=None, m_0=None, c_0=None,
    lengths=None, reverse=False,
):  # fmt: skip
    m, c, lengths = state_of(x, weight_input, weight_recurrent, m_0, c_0, lengths)
    linear, steps, outputs = torch.nn.functional.linear, range(x.shape[1]), {}
    for t in steps[::-1] if reverse else steps:
        z = linear(x[:, t], weight_input, bias) + linear(m, weight_recurrent)
        i, f, j, o = z.chunk(4, 1)
        next_c = f.sigmoid() * c + i.sigmoid() * j.tanh()
        r = o.sigmoid() * next_c.tanh()
        next_m = r if projection is None else linear(r, projection)
        active = (t < lengths)[:, None]
        m, c = torch.where(active, next_m, m), torch.where(active, next_c, c)
        outputs[t] = m * active
    return torch.stack([outputs[t] for t in steps], 1), m, c


def make_cell(dtype, B, U):
    return dict(gates=draw.normal(B, 4 * U, dtype=dtype), c_0=draw.normal(B, U, dtype=dtype))


def reference_cell(gates, c_0):
    """Uses ref.LSTM with one token, whose product with the identity matrix is the gates."""
    if c_0.numel() == 0:
        return c_0 + gates.sum(), c_0 + gates.sum()
    U = c_0.shape[1]
    W, zeros = torch.eye(4 * U, dtype=c_0.dtype), c_0.new_zeros(4 * U, U)
    rows = [
        ref.LSTM(z[None], W, zeros, c_0.new_zeros(4 * U), None, c_0.new_zeros(U), c)[1:]
        for z, c in zip(gates, c_0, strict=True)
    ]
    return tuple(torch.stack(values) for values in zip(*rows, strict=True))


def plain_cell(gates, c_0):
    i, f, j, o = gates.chunk(4, 1)
    c = f.sigmoid() * c_0 + i.sigmoid() * j.tanh()
    return o.sigmoid() * c.tanh(), c


# fmt: off
TABLE = {
    "lstm_cell": Operator(
        function=ops.lstm_cell, make=make_cell, reference=reference_cell, plain=plain_cell,
        equations=("Sec. 3.1", "App. C.1"),
        differentiable=("gates", "c_0"), backward="_lstm_cell_backward",
        samples=[dict(B=B, U=U) for B, U in ((1, 1), (3, 5), (4, 33), (0, 3), (2, 0))],
        typical=[dict(B=4, U=5), dict(B=3, U=17), dict(B=0, U=3)],
        limits=[dict(B=n, U=2) for n in draw.MANY],
        large=[dict(B=300, U=70)],
        precise=[dict(B=100, U=64), dict(B=33, U=29)],
        bad=[
            (ValueError, "gates", wrong.shorter("gates", 1), [4, 19]),
            *wrong.sizes("c_0"), *wrong.doubles("c_0"),
        ],
        backward_bad=[
            (ValueError, "grad_h", wrong.shorter("grad_h", 1)),
            (ValueError, "grad_c", wrong.shorter("grad_c", 1)),
        ],
    ),
    "lstm": Operator(
        function=ops.lstm, make=make_lstm, reference=reference_lstm, plain=plain_lstm,
        equations=("App. C.1",),
        differentiable=("x", "weight_input", "weight_recurrent", "bias", "projection", "m_0",
                        "c_0"),
        backward="_lstm_backward",
        autocast=torch.bfloat16, products=True,
        units=8,  # The error of plain torch over many steps depends on the processor.
        lacks={
            "half_types": "products are of the type itself, and each m_t is rounded",
        },
        samples=[
            dict(B=B, S=S, D=D, U=U, P=P, state=state, bias=state, reverse=reverse)
            for B, S, D, U, P in (
                (1, 1, 1, 1, 1), (1, 1, 1, 1, None), (2, 3, 4, 5, 3), (2, 3, 4, 5, None),
                (5, 4, 3, 16, 16), (3, 2, 5, 18, 20), (2, 2, 3, 132, 7),
            )
            for state in (False, True) for reverse in (False, True)
        ]
        + [
            dict(B=5, S=4, P=P, lengths=lengths, state=state, reverse=reverse)
            for lengths in ([4, 2, 0, 4, 1], [1, 1, 2, 2, 0], [0] * 5, [3] * 5)
            for P in (3, None) for state in (False, True) for reverse in (False, True)
        ]
        + [dict(B=0, S=3, P=2), dict(B=2, S=0, P=2), dict(B=2, S=3, D=0, P=2)],
        typical=[
            dict(B=T, S=3, P=2, lengths=[2, 3, 0, 1]),
            dict(B=3, S=2, U=5, P=5, bias=False, state=False, reverse=True),
            dict(B=2, S=2, lengths=[1, 2], reverse=True),
            dict(B=0, S=2, P=3),
        ],
        limits=[
            *(dict(B=n, S=1, D=2, U=2, P=1) for n in draw.MANY),
            *(dict(B=2, S=2, D=2, U=U, P=2) for U in (127, 128, 129, 255, 256, 257, 1000)),
            dict(B=1, S=2000, D=2, U=2, P=1),
        ],
        large=[
            dict(B=40, S=20, D=24, U=150, P=32, reverse=True),
            dict(B=40, S=20, D=24, U=150, P=32, lengths=[(7 * n) % 21 for n in range(40)]),
            dict(B=17, S=9, D=24, U=64),
        ],
        precise=[
            dict(B=30, S=12, D=64, U=150, P=32), dict(B=30, S=12, D=33, U=40),
            dict(B=3, S=30, D=29, U=37, P=43, reverse=True),
            dict(B=14, S=9, D=16, U=32, P=16, lengths=2 * [9, 0, 3, 9, 1, 8, 5]),
        ],
        bad=[
            *wrong.sizes("weight_input", axes=(0, 1)),
            (ValueError, "weight_recurrent", wrong.shorter("weight_recurrent")),
            (ValueError, "projection", wrong.shorter("weight_recurrent", 1), [2, 4]),
            *wrong.sizes("bias"),
            *wrong.sizes("projection", "m_0", "c_0", axes=(0, 1)),
            (ValueError, "weight_recurrent", dict(projection=None), [16, 2]),
            *wrong.doubles("weight_input", "weight_recurrent", "bias", "projection", "m_0", "c_0"),
            *wrong.sizes("lengths"),
            *wrong.out_of_range("lengths", 4),
        ],
        backward_bad=[
            (ValueError, "grad_m", wrong.shorter("grad_m", 1)),
            (ValueError, "grad_m_n", wrong.shorter("grad_m_n", 1)),
            (ValueError, "grad_c_n", wrong.shorter("grad_c_n", 1)),
            (ValueError, "m", wrong.shorter("m", 1)),
            (ValueError, "gates", wrong.shorter("gates", 1)),
            (ValueError, "cells", wrong.shorter("cells", 1)),
            (ValueError, "needs", dict(needs=[True])),
            (ValueError, "needs", lambda a: dict(
                projection=None, weight_recurrent=a["weight_recurrent"].new_zeros(16, 4),
                m=a["m"].new_zeros(4, 3, 4), m_0=None, grad_m=None, grad_m_n=None)),
            *wrong.out_of_range("lengths", 4),
        ],
    ),
}
