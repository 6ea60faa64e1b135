"""Samples of `noisy_topk_gating`."""

import math

import reference as ref
import torch
from samples import draw, wrong
from samples.draw import E
from samples.row import Operator

from moe_ext import ops


def make_gating(dtype, T, E, k, noisy=True, ties=False):
    clean, raw, noise = draw.normal(3, T, E, dtype=dtype)
    if ties:
        clean = torch.randint(0, 3, (T, E)).to(dtype)
    if not noisy:
        raw = noise = None
    return dict(clean_logits=clean, raw_noise_stddev=raw, noise=noise, k=k)


def reference_gating(clean_logits, raw_noise_stddev, noise, k, noise_epsilon=1e-2):
    """Computes the five outputs."""
    T, E = clean_logits.shape
    if noise is None:
        H_X, stddev = clean_logits, clean_logits.new_empty(0, E)
    else:
        rows = zip(clean_logits, raw_noise_stddev, noise, strict=True)
        H_X = [ref.H(*row, noise_epsilon) for row in rows]
        stddev = ref.Softplus(raw_noise_stddev) + noise_epsilon
    index = torch.tensor([ref.top_k(h, k) for h in H_X], dtype=torch.int64).reshape(T, k)
    gates, threshold, threshold_index = [], [], []
    for h, chosen in zip(H_X, index, strict=True):
        order = ref.top_k(h, E)
        gates.append(ref.G(h, k)[chosen])
        # kth_excluding of any expert outside the top k, and of any expert inside.
        outside = ref.kth_excluding(h, k, order[-1]) if k < E else h[order[k - 1]]
        threshold.append(torch.stack([outside, ref.kth_excluding(h, k, order[0])]))
        threshold_index.append([order[k - 1], order[k] if k < E else -1])
    empty = clean_logits.new_empty
    return (
        torch.stack(gates) if T else empty(0, k),
        index,
        torch.stack(threshold) if T else empty(0, 2),
        torch.tensor(threshold_index, dtype=torch.int64).reshape(T, 2),
        stddev,
    )


def plain_gating(clean_logits, raw_noise_stddev, noise, k, noise_epsilon=1e-2):
    E = clean_logits.shape[1]
    H, stddev = clean_logits, clean_logits.new_empty(0, E)
    if noise is not None:
        zero = torch.zeros_like(raw_noise_stddev)
        stddev = torch.logaddexp(raw_noise_stddev, zero) + noise_epsilon
        H = clean_logits + noise * stddev
    top, index = torch.nn.functional.pad(H, (0, 1), value=-math.inf).topk(k + 1)
    threshold_index = torch.where(index < E, index, -1)[:, k - 1 :]
    return torch.softmax(top[:, :k], -1), index[:, :k], top[:, k - 1 :], threshold_index, stddev


# fmt: off
TABLE = {
    "noisy_topk_gating": Operator(
        function=ops.noisy_topk_gating, make=make_gating,
        reference=reference_gating, plain=plain_gating,
        equations=("Eq. 3", "Eq. 4", "Eq. 5", "App. A"),
        differentiable=("clean_logits", "raw_noise_stddev"), backward="_noisy_topk_gating_backward",
        autocast=torch.float32,
        lacks={
            **dict.fromkeys(
                ("half_types", "rounded_once"),
                "a logit's gradient is rounded for each path that it comes by",
            ),
            "nan": "it ranks last, see the tests of ties",
        },
        samples=[sizes | dict(noisy=noisy) for sizes in draw.EDGES for noisy in (True, False)]
        + [dict(T=9, E=8, k=k, noisy=False, ties=True) for k in (1, 3, 7, 8)],
        typical=[*draw.TYPICAL, dict(T=5, E=6, k=2, noisy=False)],
        limits=[
            dict(T=3, E=E, k=k, noisy=False)
            for E in (1, 2, 3, 17, 64, 255, 256, 257, 1000, 4096)
            for k in sorted({1, 2, 17, 64, E}) if k <= E
        ] + draw.shapes(*((n, 4, 2) for n in draw.MANY)),
        large=draw.shapes((1000, 64, 4)),
        precise=draw.shapes((200, 8, 1), (200, 8, 2), (200, 64, 17), (301, 37, 3)),
        bad=[
            *wrong.sizes("raw_noise_stddev", "noise", axes=(0, 1)),
            *wrong.numbers("k", -1, 0, E + 1, 1000),
            *wrong.numbers("noise_epsilon", -0.1, math.nan, math.inf, 1e39),  # infinite in float32
            (ValueError, "raw_noise_stddev and noise", dict(noise=None)),
            (ValueError, "raw_noise_stddev and noise", dict(raw_noise_stddev=None)),
            *wrong.doubles("noise"),
        ],
        backward_bad=[
            (IndexError, "threshold_index", wrong.last("threshold_index", -2), -2),
            (IndexError, "threshold_index", wrong.last("threshold_index", E), E),
            *wrong.out_of_range("expert_index", E),
            (ValueError, "grad_gates", wrong.shorter("grad_gates")),
            (ValueError, "noise", wrong.shorter("noise")),
            (ValueError, "grad_noise_stddev", dict(noise=None, raw_noise_stddev=None)),
            (ValueError, "gates", lambda a: dict(gates=a["gates"][:, :0]), 0),
        ],
    ),
}
