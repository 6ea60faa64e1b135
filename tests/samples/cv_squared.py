"""Samples of `weighted_cv_squared`."""

import reference as ref
import torch
from samples.row import Operator

from moe_ext import ops


def make_cv_squared(dtype, sizes, offset=0.1):
    """Draws one vector of each size; the weights are 1, 2, …, except that the second is 0."""
    values = [(torch.rand(E, dtype=torch.float64) + offset).to(dtype) for E in sizes]
    return dict(values=values, weights=[0.0 if j == 1 else j + 1.0 for j in range(len(sizes))])


def sum_of(term):
    return lambda values, weights: sum(w * term(v) for v, w in zip(values, weights, strict=True))


# fmt: off
TABLE = {
    "weighted_cv_squared": Operator(
        function=ops.weighted_cv_squared, make=make_cv_squared,
        reference=sum_of(ref.CV_squared),
        plain=sum_of(lambda v: v.var(correction=0) / v.mean() ** 2),
        equations=("Eq. 7", "Eq. 11"),
        differentiable=("values",), backward="_weighted_cv_squared_backward",
        samples=[dict(sizes=sizes) for sizes in ([1], [2], [5, 3], [33, 256], [256, 1, 7])]
        + [dict(sizes=[4, 2, 40], offset=1000)],
        typical=[dict(sizes=[5]), dict(sizes=[40, 3, 7])],
        limits=[dict(sizes=[E]) for E in (255, 256, 257, 4096)],
        large=[dict(sizes=[100_000])],
        precise=[dict(sizes=[8]), dict(sizes=[4096]), dict(sizes=[64, 2, 64], offset=1000)],
        bad=[
            (ValueError, "values", dict(values=[torch.ones(0)]), "0"),
            (ValueError, "weights", dict(weights=[1.0, 2.0]), "2 for 1"),
        ],
    ),
}
