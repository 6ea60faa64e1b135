"""Samples of `experts`."""

import math
from itertools import pairwise, zip_longest

import reference as ref
import torch
from samples import draw, wrong
from samples.combine import plain_combine, reference_combine
from samples.dispatch import plain_dispatch
from samples.row import Operator

from moe_ext import ops

GATED = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu", "glu": "sigmoid"}
GATED |= {"geglu_tanh": "gelu_tanh"}
CLAMPED = ["clamped_swiglu", "interleaved_clamped_swiglu"]
ACTIVATIONS = ["relu", "relu_squared", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid", "identity"]
ACTIVATIONS += [*GATED, *CLAMPED]
# limit, alpha and offset; the limit clamps some of the samples.
ACTIVATION_ARGS = dict.fromkeys(CLAMPED, (0.75, 1.5, 0.25))


def make_linear(counts, D, F, device="cpu", dtype=torch.float64, bias=True):
    """Makes rows, and the weight and bias of one linear layer for each expert."""
    tensors = [
        draw.normal(sum(counts), D, device=device, dtype=dtype),
        draw.normal(len(counts), D, F, device=device, dtype=dtype) / math.sqrt(max(D, 1)),
    ]
    return [*tensors, draw.normal(len(counts), F, device=device, dtype=dtype)] if bias else tensors


def make_experts(counts, widths, activation, device="cpu", dtype=torch.float64):
    """Makes rows, and the weights and biases of experts with hidden layers."""
    weights, biases = [], []
    for i, (d_in, d_out) in enumerate(pairwise(widths)):
        d_out *= 2 if activation in [*GATED, *CLAMPED] and i < len(widths) - 2 else 1
        _, w, b = make_linear(counts, d_in, d_out, device, dtype)
        weights.append(w)
        biases.append(b)
    return draw.normal(sum(counts), widths[0], device=device, dtype=dtype), weights, biases


def make_layer(
    dtype, widths, counts=None, activation="relu", bias=False, even=False, gated=True,
    recompute=False, activation_args=None, ranks=None, dropout=False, **sizes,
):  # fmt: skip
    """Makes rows for `counts`, or the tokens of a routing, with gates if `gated`.

    Layer l has a low-rank adapter of ranks[l], or None.
    """
    routing = {} if counts else draw.routing(**sizes)
    x, weights, biases = make_experts(counts or [0] * sizes["E"], widths, activation, dtype=dtype)
    arguments = dict(
        x=x,
        weights=weights,
        biases=biases if bias else None,
        activation=activation,
        offsets=None if even else routing.get("offsets", draw.offsets_of(counts or [])),
        recompute=recompute,
    )
    if ranks:
        num_rows = None
        if dropout:
            num_rows = sum(counts) if counts else routing["inverse"].numel()
        pairs = zip(weights, ranks, strict=True)
        arguments |= dict(lora=[rank and make_lora(w, rank, num_rows) for w, rank in pairs])
    if activation in CLAMPED:
        arguments |= dict(activation_args=activation_args or ACTIVATION_ARGS[activation])
    if not counts:
        T = len(draw.per_token(routing["inverse"], routing["token_offsets"]))
        arguments |= dict(x=draw.normal(T, widths[0], dtype=dtype))
        arguments |= draw.only(routing, "inverse", "token_offsets")
        arguments |= dict(gates=routing["gates"].to(draw.wide(dtype))) if gated else {}
    return arguments


def make_lora(weight, rank, num_rows=None):
    """Makes an adapter as large as the weight [E, fan_in, width]; with num_rows, for dropout."""
    E, fan_in, width = weight.shape
    a = draw.normal(E, fan_in, rank, dtype=weight.dtype) / math.sqrt(max(fan_in, 1))
    b = draw.normal(E, rank, width, dtype=weight.dtype)
    return ops.LoRA(a, b, 0.5, None if num_rows is None else torch.rand(num_rows, fan_in) > 0.3)


def adapter_of(adapter, expert, counts):
    mask = adapter.mask if adapter.mask is None else adapter.mask.split(counts)[expert]
    return adapter._replace(a=adapter.a[expert], b=adapter.b[expert], mask=mask)


def layer_by(expert, combine):
    """Builds Eq. 1 from a function of one expert's rows and a function that combines them."""

    def layer(
        x, weights, biases=None, activation="relu", offsets=None, inverse=None, gates=None,
        token_offsets=None, recompute=False, activation_args=None, lora=None,
    ):  # fmt: skip
        rows = x if inverse is None else plain_dispatch(x, inverse, token_offsets)
        E = len(weights[0])
        counts = [len(rows) // E] * E if offsets is None else offsets.diff().tolist()
        parts = []
        for e, part in enumerate(rows.split(counts)):
            b = None if biases is None else [bias[e] for bias in biases]
            adapters = [a and adapter_of(a, e, counts) for a in lora or []]
            W = [w[e] for w in weights]
            parts.append(expert(part, W, b, activation, activation_args, adapters))
        out = torch.cat(parts)
        return out if gates is None else combine(out, gates, inverse, token_offsets).to(x.dtype)

    return layer


def reference_expert(rows, W, b, activation, args=None, lora=()):
    def with_adapter(w, adapter, r):
        if adapter is None:
            return w
        a = adapter.a if adapter.mask is None else adapter.a * adapter.mask[r][:, None]
        return w + adapter.scale * a @ adapter.b

    adapted = [[with_adapter(*pair, r) for pair in zip_longest(W, lora)] for r in range(len(rows))]
    out = [ref.E_i(x, W_r, b, activation, args) for x, W_r in zip(rows, adapted, strict=True)]
    if out:
        return torch.stack(out)
    parameters = sum(w.sum() for w in [*W, *(b or [])])
    return 0 * (rows @ W[0].new_zeros(rows.shape[1], W[-1].shape[1]) + parameters)


def plain_activation(z, activation, args=None):
    if activation in CLAMPED:
        interleaved = activation == "interleaved_clamped_swiglu"
        a, b = (z[..., 0::2], z[..., 1::2]) if interleaved else z.chunk(2, -1)
        limit, alpha, offset = args
        a, b = a.clamp(max=limit), b.clamp(-limit, limit)
        return a * torch.sigmoid(alpha * a) * (b + offset)
    if activation in GATED:
        a, factor = z.chunk(2, -1)
        return plain_activation(a, GATED[activation]) * factor
    if activation == "gelu_tanh":
        return torch.nn.functional.gelu(z, approximate="tanh")
    if activation == "relu_squared":
        return torch.nn.functional.relu(z).square()
    return z if activation == "identity" else getattr(torch.nn.functional, activation)(z)


def plain_expert(rows, W, b, activation, args=None, lora=()):
    for layer, (w, adapter) in enumerate(zip_longest(W, lora)):
        if layer:
            rows = plain_activation(rows, activation, args)
        z = rows @ w if b is None else rows @ w + b[layer]
        if adapter is not None:
            kept = rows if adapter.mask is None else rows.masked_fill(~adapter.mask, 0)
            z = z + adapter.scale * (kept @ adapter.a) @ adapter.b
        rows = z
    return rows


def with_lora(change):
    """Adds an adapter to the first weight, with changed matrices."""
    return lambda a: dict(lora=[ops.LoRA(*change(*make_lora(a["weights"][0], 2)[:2]))])


# fmt: off
TABLE = {
    "experts": Operator(
        function=ops.experts, make=make_layer,
        reference=layer_by(reference_expert, reference_combine),
        plain=layer_by(plain_expert, plain_combine),
        equations=("Eq. 1", "Sec. 3.2", "App. D", "arXiv 2106.09685"),
        differentiable=("x", "weights", "biases", "gates", "lora"), backward="_experts_backward",
        autocast=torch.bfloat16, products=True,
        lacks={"half_types": "hidden layers are rounded, and products are of the type itself"},
        samples=[
            dict(counts=counts, widths=widths, bias=bias)
            for counts in ([1], [3, 0, 4], [0, 0, 5, 0], [7, 1, 2, 1, 0, 6], [0, 0], [2] * 9)
            for widths in ((1, 1), (3, 5), (17, 33)) for bias in (False, True)
        ]
        + [
            dict(counts=counts, widths=(4, 6, 3), activation=activation, bias=bias)
            for activation in ACTIVATIONS for counts, bias in (([3, 0, 4], False), ([0, 0], True))
        ]
        + [
            dict(counts=[3, 0, 4], widths=widths, activation=activation, bias=True)
            for widths in ((4, 3), (4, 6, 5, 3)) for activation in ("relu", "swiglu")
        ]
        + [dict(counts=[3, 0], widths=widths) for widths in ((8, 0, 8), (8, 0), (0, 8))]
        + [dict(counts=[2, 2], widths=(4, 6, 3), even=True)]
        + [
            sizes | dict(widths=(4, 6, 3), recompute=recompute, gated=gated)
            for sizes in [dict(T=5, E=5, k=2), *draw.RAGGED]
            for recompute in (False, True) for gated in (False, True)
        ]
        + [
            draw.RAGGED[0] | dict(widths=widths, activation=activation, bias=True)
            for activation in ACTIVATIONS for widths in ((4, 6, 3), (4, 6, 5, 3))
        ]
        + [
            dict(counts=counts, widths=widths, ranks=ranks, bias=bias)
            for counts in ([3, 0, 4], [0, 0]) for bias in (False, True)
            for widths, ranks in (((3, 5), (2,)), ((4, 6, 3), (None, 9)), ((17, 33, 5), (16, None)))
        ]
        + [
            sizes | dict(widths=(4, 6, 5, 3), ranks=(3, None, 2), activation="swiglu", bias=True,
                         recompute=recompute, gated=gated, dropout=dropout)
            for sizes in [dict(T=5, E=5, k=2), draw.RAGGED[0]]
            for recompute, gated, dropout in ((False, True, False), (True, False, True),
                                              (False, False, True), (True, True, False))
        ],
        typical=[
            dict(counts=[3, 0, 4], widths=(3, 7), bias=True),
            dict(counts=[0, 0], widths=(3, 2)),
            dict(T=5, E=5, k=2, widths=(3, 4, 2), activation="tanh", gated=False),
            draw.RAGGED[0] | dict(widths=(3, 4, 2), activation="swiglu", bias=True),
            draw.RAGGED[0] | dict(widths=(3, 4, 3, 2), activation="gelu", recompute=True),
            draw.RAGGED[1] | dict(widths=(3, 4, 2), activation="reglu", recompute=True,
                                  gated=False),
            draw.RAGGED[2] | dict(widths=(3, 4, 2), recompute=True),
            draw.RAGGED[0] | dict(widths=(3, 4, 2), ranks=(2, 3), bias=True, activation="glu",
                                  dropout=True),
            dict(T=5, E=5, k=2, widths=(3, 4, 2), ranks=(None, 3), activation="silu",
                 recompute=True),
        ],
        limits=[
            *(dict(counts=[n // 2, 0, n - n // 2], widths=(2, 3), bias=True)
              for n in (66_000, 200_000)),
            # Every other expert is empty.
            *(dict(counts=[0, 1] * (n // 2) + [1], widths=(3, 2), bias=True) 
              for n in (1, 2, 3, 254, 255, 256, 257, 1000, 4096)),
        ],
        large=[
            dict(counts=[200, 0, 1, 300, 37], widths=(48, 80), bias=True),
            dict(T=2600, E=5, k=2, widths=(24, 40, 16), bias=True),
            dict(skewed=2600, E=5, widths=(24, 40, 16), bias=True),
            dict(skewed=2600, E=5, widths=(24, 40, 16), ranks=(8, 4), dropout=True),
        ],
        precise=[
            dict(counts=counts, widths=widths, bias=True)
            for counts in ([5, 0, 70], [130, 17, 1]) for widths in ((64, 32), (33, 65))
        ]
        + [
            dict(counts=[30, 0, 40], widths=(16, 27, 8), activation=activation, bias=True)
            for activation in ACTIVATIONS if activation not in CLAMPED
        ]
        + [  # Rounding moves no value across this limit, where the gradient jumps.
            dict(counts=[30, 0, 40], widths=(16, 27, 8), activation=activation, bias=True,
                 activation_args=(64, 1.5, 0.25))
            for activation in CLAMPED
        ]
        + [dict(T=150, E=5, k=2, widths=(24, 40, 16), bias=True)]
        + [dict(T=301, E=37, k=3, widths=(29, 43, 29), activation="glu", bias=True)]
        + [dict(skewed=2600, E=5, widths=(8, 12, 4), bias=bias) for bias in (False, True)]
        + [dict(T=50, E=7, k=2, widths=(33, 257, 18), activation="swiglu", bias=True)]
        + [dict(T=150, E=5, k=2, widths=(64, 96, 33), ranks=(16, 5), activation="glu", bias=True)]
        + [dict(skewed=700, E=5, widths=(16, 32, 8), ranks=(16, 8))],
        bad=[
            *wrong.numbers("activation", "rely", ", "),
            *(
                (ValueError, "activation_args",
                 dict(activation="clamped_swiglu", activation_args=args), text)
                for args, text in [
                    (None, "[]"), ((7.5, 1), "[7.5, 1]"), ((7.5, 1, 0, 1), "[7.5, 1, 0, 1]"),
                    ((0, 1, 0), "[0, 1, 0]"), ((-1.5, 1, 0), "[-1.5, 1, 0]"),
                    ((math.nan, 1, 0), "[nan, 1, 0]"), ((7.5, 1e39, 0), "[7.5, 1e+39, 0]"),
                    ((1e-50, 1, 0), "[1e-50, 1, 0]"), ((7.5, 1, math.inf), "[7.5, 1, inf]"),
                ]
            ),
            *wrong.numbers("activation_args", [7.5, 1, 0]),
            (ValueError, "offsets", wrong.shorter("offsets")),
            *wrong.vectors("offsets", [1, 2, 3, 7], [0, 5, 3, 7], [0, 1, 4, 8], [0, 1, 2, 3]),
            (ValueError, "offsets", dict(offsets=torch.tensor([0, 6, 4, 7])), 4),
            (ValueError, "offsets",
             dict(offsets=torch.zeros(1).long(), weights=[torch.ones(0, 3, 7)], biases=None)),
            (ValueError, r"weights\[0\]", wrong.first("weights", lambda w: w[0])),
            (ValueError, r"weights\[0\]", wrong.first("weights", lambda w: w[:, :2])),
            (TypeError, "x", wrong.first("weights", torch.Tensor.double), "float32"),
            (TypeError, "x", lambda a: dict(x=a["x"].bfloat16()), "bfloat16"),
            (TypeError, r"weights\[0\]", wrong.first("weights", torch.Tensor.long), "int64"),
            *(
                (exception, r"weights\[1\]",
                 lambda a, w=w: dict(weights=[*a["weights"], w], biases=None))
                for exception, w in [
                    (ValueError, torch.ones(3, 3, 7)), (ValueError, torch.ones(2, 7, 3)),
                    (TypeError, torch.ones(3, 7, 3).double()),
                ]
            ),
            (ValueError, r"weights\[0\]", lambda a: dict(  # 7 columns cannot be halved
                weights=[*a["weights"], torch.ones(3, 7, 3)], biases=None, activation="glu")),
            (ValueError, "weights and biases", lambda a: dict(biases=a["biases"] * 2)),
            (ValueError, "weights and biases", dict(weights=[], biases=None)),
            (ValueError, r"biases\[0\]", wrong.first("biases", lambda b: b[:, :2])),
            (ValueError, r"biases\[1\]", lambda a: dict(
                weights=[*a["weights"], torch.ones(3, 7, 3)], biases=a["biases"] * 2)),
            (TypeError, r"biases\[0\]", wrong.first("biases", torch.Tensor.double)),
            (TypeError, r"biases\[0\]", wrong.first("biases", torch.Tensor.to_sparse), "Sparse"),
            (ValueError, "inverse", dict(gates=torch.rand(4, 2))),
            (ValueError, "x", dict(inverse=torch.arange(6).view(3, 2))),
            (ValueError, "gates", dict(inverse=torch.arange(7)[:, None], gates=torch.rand(6, 1))),
            (ValueError, "inverse",
             dict(inverse=torch.arange(6).view(3, 2), token_offsets=torch.arange(4))),
            *(
                (ValueError, "token_offsets",
                 dict(inverse=torch.arange(7), token_offsets=torch.tensor(offsets)))
                for offsets in ([0, 1, 2, 3, 5, 4, 6, 7], [*range(7), 8], [1, *range(1, 8)])
            ),
            (ValueError, "rows", dict(offsets=None)),
            (ValueError, "lora_a", dict(lora=[None, None]), 2),
            (TypeError, "lora", dict(lora=[torch.ones(3, 3, 2)])),
            (ValueError, r"lora_a\[0\]", with_lora(lambda a, b: (a[:, :2], b))),
            (ValueError, r"lora_a\[0\]", with_lora(lambda a, b: (a[0], b))),
            (ValueError, r"lora_b\[0\]", with_lora(lambda a, b: (a, b[:, :1]))),
            (ValueError, r"lora_b\[0\]", with_lora(lambda a, b: (a, b[..., 1:]))),
            (TypeError, r"lora_a\[0\]", with_lora(lambda a, b: (a.double(), b))),
            (TypeError, r"lora_b\[0\]", with_lora(lambda a, b: (a, b.to_sparse())), "Sparse"),
            (TypeError, r"lora_masks\[0\]", with_lora(lambda a, b: (a, b, 1.0, torch.ones(7, 3)))),
            (ValueError, r"lora_masks\[0\]",
             with_lora(lambda a, b: (a, b, 1.0, torch.ones(6, 3).bool()))),
        ],
        backward_bad=[
            (ValueError, "offsets", dict(offsets=torch.zeros(0).long())),
            (ValueError, "offsets", lambda a: dict(offsets=a["offsets"][:2])),
            (ValueError, "grad_y", wrong.shorter("grad_y")),
            (ValueError, "grad_y", lambda a: dict(grad_y=a["grad_y"][:, :2])),
            (ValueError, "hidden", lambda a: dict(hidden=[a["grad_y"]])),
            (IndexError, "inverse", dict(inverse=torch.arange(1, 8)[:, None])),
        ],
    ),
}
