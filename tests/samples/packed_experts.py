"""Samples of `packed_experts`: those of `experts`, with quantized weights."""

import torch
from samples import draw, wrong
from samples.combine import plain_combine, reference_combine
from samples.experts import CLAMPED, layer_by, make_layer, plain_expert, reference_expert
from samples.row import Operator

from moe_ext import ops
from moe_ext.formats import FORMATS, PackedWeight, quantize

# Formats without a rule for quantization: their random codes, with scales near 1 / 64.
RANDOM = {"gguf_q4_k": (144, slice(0, 4)), "gguf_q6_k": (210, slice(208, 210))}
WIDTHS = {"gguf_q4_k": 256, "gguf_q6_k": 256, "nf4": 64, "int8": 7, "fp8": 7}


def pack(weight, format, group=None):
    """Packs a weight [E, in, out]."""
    weight = weight.mT.float()
    if format not in RANDOM:
        return PackedWeight.pack(*quantize(weight, format, group), format=format)
    size, factors = RANDOM[format]
    blocks = torch.randint(256, (*weight.shape[:-1], weight.shape[-1] // 256, size))
    blocks = blocks.to(torch.uint8)
    factor = torch.rand(*blocks.shape[:-1], (factors.stop - factors.start) // 2) / 2048
    blocks[..., factors] = factor.half().view(torch.uint8)
    return PackedWeight.pack(blocks.flatten(-2), format=format)


def make_packed(dtype, widths, formats="int8", group=None, **sizes):
    arguments = make_layer(dtype, widths, **sizes)
    formats = [formats] * len(arguments["weights"]) if isinstance(formats, str) else formats
    pairs = zip(arguments["weights"], formats, strict=True)
    return arguments | dict(weights=[pack(weight, format, group) for weight, format in pairs])


def on_numbers(layer):
    """Applies a layer to the numbers that the codes stand for, in the dtype of x."""

    def function(x, weights, **arguments):
        return layer(x, [weight.dequantize(x.dtype).mT for weight in weights], **arguments)

    return function


def replaced(**changes):
    """Changes the first weight."""
    return lambda a: dict(weights=[a["weights"][0]._replace(**changes), *a["weights"][1:]])


# fmt: off
TABLE = {
    "packed_experts": Operator(
        function=ops.packed_experts, make=make_packed,
        reference=on_numbers(layer_by(reference_expert, reference_combine)),
        plain=on_numbers(layer_by(plain_expert, plain_combine)),
        equations=("Eq. 1", "Sec. 3.2"),
        differentiable=("x", "biases", "gates", "lora"), backward="_packed_experts_backward",
        autocast=torch.bfloat16, products=True,
        lacks={"half_types": "hidden layers are rounded, and products are of the type itself"},
        samples=[
            dict(counts=counts, widths=(width, width, 3), formats=format, bias=True)
            for format in FORMATS for width in [WIDTHS.get(format, 32)]
            for counts in ([3, 0, 4], [1], [0, 0])
        ]
        + [
            dict(counts=[3, 0, 4], widths=(64, 17), formats=format, group=group)
            for format, group in [("int4", 8), ("int8", 16), ("int8", 64), ("fp8", 32)]
        ]
        + [
            dict(T=5, E=5, k=2, widths=(32, 64, 33), formats=["mxfp4", "nf4"], gated=gated,
                 activation=activation, bias=True, recompute=recompute)
            for gated, recompute in ((True, False), (True, True), (False, False))
            for activation in ("swiglu", "interleaved_clamped_swiglu", "relu")
        ]
        + [draw.RAGGED[0] | dict(widths=(3, 5, 2), formats=["fp8", "int8"], activation="tanh")]
        + [draw.RAGGED[0] | dict(widths=(64, 32, 2), formats=["nf4", "mxfp4"], ranks=ranks)
           for ranks in ((4, 17), (None, 2))],
        typical=[
            dict(counts=[3, 0, 4], widths=(3, 7), bias=True),
            dict(counts=[0, 0], widths=(3, 2), formats="fp8"),
            dict(T=5, E=5, k=2, widths=(3, 4, 2), activation="tanh", gated=False),
            draw.RAGGED[0] | dict(widths=(32, 4, 2), activation="swiglu", bias=True,
                                  formats=["mxfp4", "fp8"]),
            draw.RAGGED[2] | dict(widths=(3, 4, 2), ranks=(2, 3), activation="tanh",
                                  recompute=True),
        ],
        limits=[
            dict(counts=[33_000, 0, 33_000], widths=(2, 3), bias=True),
            # Every other expert is empty.
            *(
                dict(counts=[0, 1] * (n // 2) + [1], widths=(3, 2), bias=True)
                for n in (3, 257, 1000)
            ),
        ],
        large=[
            dict(counts=[200, 0, 1, 300, 37], widths=(64, 80), bias=True, formats="nf4"),
            dict(T=2600, E=5, k=2, widths=(32, 64, 16), bias=True, formats=["mxfp4", "int4"]),
        ],
        precise=[
            dict(counts=[5, 0, 70, 2], widths=(width, 256, 33), formats=format, bias=True,
                 activation="glu")
            for format in FORMATS for width in [256 if format in WIDTHS else 96]
        ]
        + [
            dict(T=43, E=7, k=3, widths=(width, 2 * width, 29), formats=format)
            for format, width in [("gguf_q8_0", 32), ("nf4", 64), ("fp8", 137)]
        ]
        + [
            dict(counts=[9, 17], widths=(1040, 40), formats=format, group=16)
            for format in ("int8", "int4")
        ],
        bad=[
            *wrong.numbers("activation", "rely", ", "),
            (ValueError, "offsets", wrong.shorter("offsets")),
            (TypeError, r"weights\[0\]", lambda a: dict(weights=[a["weights"][0].panels])),
            (TypeError, r"weights\[0\]", lambda a: replaced(
                panels=a["weights"][0].panels.float())(a), "float32"),
            (ValueError, r"weights\[0\]", lambda a: replaced(
                panels=a["weights"][0].panels[..., 1:])(a)),
            (ValueError, r"formats\[0\]", replaced(format="mxfp"), "mxfp"),
            (ValueError, r"groups\[0\]", replaced(format="mxfp4"), 3),
            (ValueError, r"groups\[0\]", replaced(group=2), 2),
            (ValueError, r"groups\[0\]", replaced(group=0), 0),
            (ValueError, r"columns\[0\]", replaced(outputs=-1), -1),
            (ValueError, "weights and biases", lambda a: dict(biases=a["biases"] * 2)),
            (ValueError, "weights and biases", dict(weights=[], biases=None)),
            (ValueError, r"biases\[0\]", wrong.first("biases", lambda b: b[:, :2])),
            (TypeError, r"biases\[0\]", wrong.first("biases", torch.Tensor.double)),
            (ValueError, "inverse", dict(gates=torch.rand(4, 2))),
            *(
                (ValueError, "activation_args", dict(activation=activation, activation_args=(1, 2)))
                for activation in CLAMPED
            ),
        ],
        backward_bad=[
            (ValueError, "offsets", lambda a: dict(offsets=a["offsets"][:2])),
            (ValueError, "grad_y", wrong.shorter("grad_y")),
            (ValueError, "hidden", lambda a: dict(hidden=[a["grad_y"]])),
            (ValueError, "groups", dict(groups=[])),
            (ValueError, "formats", lambda a: dict(formats=a["formats"] * 2)),
        ],
    ),
}
