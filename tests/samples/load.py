"""Samples of `load`."""

import math
from itertools import pairwise

import reference as ref
import torch
from samples import draw, wrong
from samples.draw import E, K, T
from samples.row import Operator

from moe_ext import ops


def make_load(dtype, T, E, k, groups=None, detach=False):
    clean, raw, noise = draw.normal(3, T, E)
    stddev = ref.Softplus(raw) + 1e-2
    order = (clean + noise * stddev).sort(descending=True)
    threshold = torch.nn.functional.pad(order.values, (0, 2), value=-math.inf)
    threshold = threshold[:, max(k - 1, 0) :][:, :2]
    return dict(
        clean_logits=clean.to(dtype),
        noise_stddev=stddev.to(draw.wide(dtype)),
        threshold=threshold.to(draw.wide(dtype)),
        expert_index=order.indices[:, :k].contiguous(),
        detach_threshold=detach,
        group_offsets=None if groups is None else torch.tensor(groups),
    )


def plain_load(
    clean_logits, noise_stddev, threshold, expert_index, detach_threshold=False, group_offsets=None
):
    """Uses the given thresholds. test_load.py compares these and P(x, i) with ref.Load."""
    threshold = threshold.detach() if detach_threshold else threshold
    inside = torch.zeros_like(clean_logits, dtype=torch.bool).scatter(1, expert_index, True)
    bound = torch.where(inside, threshold[:, 1:], threshold[:, :1])
    P = ref.Phi((clean_logits - bound) / noise_stddev)
    if expert_index.shape[1] == clean_logits.shape[1]:
        P = torch.ones_like(clean_logits, dtype=threshold.dtype)
    if group_offsets is None:
        return P.sum(0)
    return torch.stack([P[begin:end].sum(0) for begin, end in pairwise(group_offsets.tolist())])


# fmt: off
TABLE = {
    "load": Operator(
        function=ops.load, make=make_load, reference=plain_load, plain=plain_load,
        equations=("Eq. 10", "App. B"),
        differentiable=("clean_logits", "noise_stddev", "threshold"), backward="_load_backward",
        autocast=torch.float32, lacks={"nan": "test_load.py has it"},
        samples=[sizes | dict(detach=detach) for sizes in draw.EDGES for detach in (False, True)]
        + [
            dict(T=7, E=6, k=2, groups=groups, detach=detach) for detach in (False, True)
            for groups in ([0, 7], [0, 3, 7], [0, 0, 2, 2, 7, 7], list(range(8)))
        ]
        + [dict(T=0, E=4, k=2, groups=[0, 0, 0]), dict(T=5, E=0, k=0)],
        typical=[dict(T=T, E=E, k=K, groups=[0, 3, T]), *draw.TYPICAL],
        limits=draw.shapes((3, 255, 2), (3, 256, 17), (3, 257, 64), (3, 1000, 1), (3, 4096, 4095),
                      *((n, 4, 2) for n in draw.MANY)),
        large=[dict(T=3000, E=64, k=4, groups=groups)
               for groups in (None, [0, 3, 3, 1000, 1001, 3000])],
        precise=draw.shapes((1, 64, 4), (300, 8, 2), (301, 37, 3), (3000, 16, 15)),
        bad=[
            *wrong.sizes("noise_stddev", "threshold", axes=(0, 1)),
            *wrong.sizes("expert_index"),
            *wrong.out_of_range("expert_index", E), wrong.TWICE,
            *wrong.vectors("group_offsets", [1, T], [0, 3, 2, T], [0, T + 1], [0, T - 1], [T], []),
            *wrong.doubles("threshold"),
        ],
        backward_bad=[
            (ValueError, "grad_load", lambda a: dict(grad_load=a["grad_load"][0])),
            (ValueError, "grad_load", wrong.shorter("grad_load")),
            (ValueError, "threshold", wrong.shorter("threshold")),
        ],
    ),
}
