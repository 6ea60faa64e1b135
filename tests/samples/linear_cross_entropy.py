"""Samples of `linear_cross_entropy`."""

import math

import reference as ref
import torch
from samples import draw, wrong
from samples.draw import E, T
from samples.row import Operator

from moe_ext import ops


def make_loss(dtype, T, D, V, bias=False, ignored=0, **options):
    """Makes T targets, of which the first ones are ignored."""
    target = torch.randint(V, (T,))
    target[:ignored] = options.get("ignore_index", -100)
    return options | dict(
        input=draw.normal(T, D, dtype=dtype),
        linear_weight=draw.normal(V, D, dtype=dtype) / math.sqrt(max(D, 1)),
        target=target,
        linear_bias=draw.normal(V, dtype=dtype) if bias else None,
    )


def loss_by(losses):
    """Reduces the losses of the tokens that are not ignored."""

    def loss(
        input, linear_weight, target, linear_bias=None, reduction="mean", ignore_index=-100,
        label_smoothing=0.0, z_loss=0.0, softcap=None, recompute=False,
    ):  # fmt: skip
        kept = target != ignore_index
        options = label_smoothing, z_loss
        nll = losses(input, linear_weight, target, linear_bias, softcap, kept, *options)
        nll = nll.to(draw.wide(nll.dtype))
        if reduction == "none":
            return nll
        return nll.sum() / (kept.sum() if reduction == "mean" else 1)

    return loss


def reference_losses(X, W, y, b, c, kept, eps, z):
    none = 0 * (X.sum() + W.sum() + (0 if b is None else b.sum()))  # differentiable even if empty
    losses = [
        ref.CrossEntropy(ref.Logits(x, W, b, c), int(target), eps, z) if keep else none
        for x, target, keep in zip(X, y, kept, strict=True)
    ]
    return torch.stack(losses) + none if losses else X.new_zeros(0) + none


def plain_losses(X, W, y, b, c, kept, eps, z):
    logits = torch.nn.functional.linear(X, W, b)
    logits = logits if c is None else c * torch.tanh(logits / c)
    y = torch.where(kept, y, -100)
    loss = torch.nn.functional.cross_entropy(logits, y, reduction="none", label_smoothing=eps)
    return loss + z * logits.logsumexp(1).square() * kept


# fmt: off
TABLE = {
    "linear_cross_entropy": Operator(
        function=ops.linear_cross_entropy, make=make_loss,
        reference=loss_by(reference_losses), plain=loss_by(plain_losses),
        equations=("App. C.1",),
        differentiable=("input", "linear_weight", "linear_bias"),
        backward="_linear_cross_entropy_backward",
        autocast=torch.bfloat16, products=True,
        lacks={"half_types": "products are of the type itself"},
        samples=[
            dict(T=T, D=D, V=V, reduction=reduction, recompute=recompute)
            for T, D, V in ((1, 1, 1), (5, 3, 7), (20, 9, 40))
            for reduction in ("none", "mean", "sum") for recompute in (False, True)
        ]
        + [
            dict(T=7, D=4, V=9, ignored=ignored, reduction=reduction, recompute=recompute) | options
            for options in [
                dict(bias=True), dict(label_smoothing=0.3), dict(z_loss=0.2), dict(softcap=1.5),
                dict(bias=True, label_smoothing=0.1, z_loss=0.05, softcap=2, ignore_index=3),
                dict(label_smoothing=1.0),
            ]
            for reduction in ("none", "mean") for recompute in (False, True) for ignored in (0, 2)
        ]
        + [dict(T=0, D=3, V=4, bias=True, reduction=reduction) for reduction in ("none", "sum")]
        + [dict(T=3, D=0, V=4, bias=True), dict(T=3, D=2, V=4, reduction="sum", ignored=3)],
        typical=[
            dict(T=T, D=3, V=E, bias=True, reduction="none", label_smoothing=0.1),
            dict(T=7, D=3, V=9, bias=True, ignored=2, z_loss=0.1, softcap=3),
            dict(T=6, D=4, V=5, reduction="sum", recompute=True),
            dict(T=0, D=3, V=4, reduction="sum"),
        ],
        # With many classes, the CPU goes over all tokens for each tile of classes. It keeps the
        # exponentials in the gradient of the weight if T <= D, or else those of at most 256 tokens
        # and 64 MiB. It recomputes them with 280,000 classes or without a reduction.
        limits=[
            dict(T=T, D=D, V=V, bias=True, ignored=9, label_smoothing=0.1, reduction=reduction)
            for T, D, V, reduction in (
                (60, 5, 60_000, "none"), (60, 64, 20_000, "mean"), (700, 3, 20_000, "sum"),
                (70, 3, 280_000, "sum"),
            )
        ]
        + [dict(T=n, D=2, V=3, bias=True) for n in draw.MANY]
        + [dict(T=3, D=2, V=V, reduction=reduction) for V in (511, 512, 513, 1025, 65_537)
           for reduction in ("none", "mean")],
        large=[dict(T=500, D=24, V=1200, bias=True, reduction=reduction, recompute=recompute)
               for reduction, recompute in (("none", False), ("mean", False), ("sum", True))],
        precise=[
            dict(T=150, D=64, V=600, bias=True),
            dict(T=70, D=33, V=65, reduction="none", z_loss=1e-3),
            dict(T=301, D=29, V=37, label_smoothing=0.1, softcap=5.0, reduction="sum"),
        ],
        bad=[
            *wrong.out_of_range("target", E),
            *wrong.sizes("linear_weight", axes=(1,)),
            (ValueError, "linear_weight", lambda a: dict(
                linear_weight=a["linear_weight"][:0], linear_bias=None)),
            *wrong.doubles("linear_weight"),
            *wrong.sizes("linear_bias", "target"),
            *wrong.numbers("reduction", "average"),
            *wrong.numbers("label_smoothing", -0.1, 1.1, math.nan),
            *wrong.numbers("z_loss", -0.1, math.nan, 1e39),
            *wrong.numbers("softcap", 0, -1, math.nan),
        ],
        backward_bad=[
            *wrong.sizes("grad_loss", "lse"),
            (ValueError, "gradients", lambda a: dict(gradients=[a["input"]])),
            (ValueError, "gradients", lambda a: dict(
                gradients=[a["input"][:1], a["linear_weight"], a["linear_bias"]])),
            (ValueError, "needs", dict(needs=[True])),
            *wrong.out_of_range("target", E),
        ],
    ),
}
