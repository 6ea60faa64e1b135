"""Packed experts: bits of the exact arithmetic, and the error bound of the integer arithmetic."""

import math

import pytest
import torch
from assertions import assert_all_same_bits, assert_same_bits, gradients, raises
from operators import sample
from samples import draw
from samples.packed_experts import pack

from moe_ext import ops
from moe_ext.formats import FORMATS

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INTEGER = sorted({*FORMATS} - {"fp8", "nf4"})


def layer(T, dtype, format, d_model=256, d_output=72, group=None):
    """Makes the arguments of a mixture of one linear layer with 4 experts and k = 2."""
    routing = draw.routing(T=T, E=4, k=2)
    weight = draw.normal(4, d_model, d_output, dtype=torch.float32) / d_model**0.5
    return dict(
        x=draw.normal(T, d_model, dtype=dtype),
        weights=[pack(weight, format, group)],
        biases=[draw.normal(4, d_output, dtype=dtype)],
        **draw.only(routing, "offsets", "inverse"),
    )


def with_numbers(arguments):
    """Replaces packed weights by the numbers that they stand for."""
    dtype = arguments["x"].dtype
    return arguments | dict(weights=[w.dequantize(dtype).mT for w in arguments["weights"]])


@pytest.mark.guarantee("Determinism")
@pytest.mark.parametrize("T", [1, 3, 40])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_results_are_those_of_experts(format, dtype, T):
    """Bitwise, with few rows and many, in forward and backward."""
    arguments = layer(T, dtype, format)
    results = []
    for function, given in [
        (ops.packed_experts, arguments),
        (ops.experts, with_numbers(arguments)),
    ]:
        x = given["x"].clone().requires_grad_()
        y = function(**given | dict(x=x))
        results.append([y.detach(), *gradients([y], [x], [torch.ones_like(y)])])
    for packed, dense in zip(*results, strict=True):
        assert_same_bits(packed, dense)


@pytest.mark.parametrize("arithmetic", ["exact", "integer"])
@pytest.mark.parametrize("activation", ["relu", "swiglu"])
@pytest.mark.parametrize("T", [1, 40])
def test_threads_share_few_blocks(T, activation, arithmetic, threads):
    """The bits are those of one thread, also if the last panel is not whole."""
    for dtype in DTYPES[: 2 if arithmetic == "integer" else 4]:
        given = sample(
            "packed_experts", dtype=dtype, counts=[0, T], widths=(256, 288, 300), bias=True,
            formats=["gguf_q4_0", "int8"], activation=activation, arithmetic=arithmetic,
        )  # fmt: skip
        threads(1)
        expected = ops.packed_experts(**given)
        for number in (2, 3, 8):
            threads(number)
            assert_same_bits(ops.packed_experts(**given), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_threads_share_a_linear_layer(format, dtype, threads):
    """By columns of the gradient of its input; the bits are those of the numbers."""
    given = layer(9, dtype, format, d_model=512, d_output=300)
    x = given["x"].requires_grad_()
    threads(1)
    y = ops.experts(**with_numbers(given))
    dy = draw.normal(*y.shape, dtype=dtype)
    expected = gradients([y], [x], [dy])
    for number in (1, 2, 3, 8):
        threads(number)
        assert_all_same_bits(gradients([ops.packed_experts(**given)], [x], [dy]), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("format", "group"), [*((format_, None) for format_ in INTEGER), ("int4", 64), ("int8", 24)]
)
def test_error_of_integer_arithmetic(format, group, dtype):
    """At most the bound of the documentation; each row by itself."""
    arguments = layer(9, dtype, format, d_model=240 if group == 24 else 256, group=group)
    (weight,) = arguments["weights"]
    inverse, biases = arguments["inverse"], arguments["biases"]
    actual = ops.packed_experts(**arguments, arithmetic="integer")
    exact = with_numbers(arguments | dict(x=arguments["x"].double(), biases=[biases[0].double()]))
    expected = ops.experts(**exact)
    rows = ops.dispatch(exact["x"], inverse)
    expert = torch.repeat_interleave(arguments["offsets"].diff())
    segment = math.gcd(32, weight.group)
    largest = rows.unflatten(1, (-1, segment)).abs().amax(-1)  # [R, segments]
    sums = exact["weights"][0].abs().unflatten(1, (-1, segment)).sum(2)[expert]
    bound = torch.einsum("rs,rso->ro", largest, sums) / 254
    rounding = torch.finfo(dtype).eps * expected.abs() + 1e-5
    assert ((actual - expected).abs() <= bound * 1.0001 + rounding).all()
    assert ((actual - expected).abs() > 1e-4 * bound).any()  # it is not the exact arithmetic
    for t in range(3):
        one = ops.packed_experts(
            rows[inverse[t, 0] : inverse[t, 0] + 1].to(dtype),
            [weight._replace(panels=weight.panels[expert[inverse[t, 0]]][None])],
            [biases[0][expert[inverse[t, 0]]][None]],
            arithmetic="integer",
        )
        assert_same_bits(one[0], actual[inverse[t, 0]])


def test_integer_arithmetic_has_no_gradient():
    arguments = sample("packed_experts", dtype=torch.float32, counts=[3, 0, 4], widths=(3, 7))
    arguments |= dict(arithmetic="integer")
    ops.packed_experts(**arguments)
    with raises(ValueError, "packed_experts", "arithmetic", "integer"):
        ops.packed_experts(**arguments | dict(x=arguments["x"].requires_grad_()))


@pytest.mark.parametrize(
    ("changes", "exception", "argument", "value"),
    [
        (dict(formats="fp8"), ValueError, r"formats\[0\]", "fp8"),
        (dict(formats="nf4", widths=(64, 7)), ValueError, r"formats\[0\]", "nf4"),
        (dict(dtype=torch.float64), TypeError, "x", "float64"),
    ],
)
def test_integer_arithmetic_refuses(changes, exception, argument, value):
    sizes = dict(dtype=torch.float32, counts=[3, 0, 4], widths=(3, 7)) | changes
    arguments = sample("packed_experts", **sizes)
    with raises(exception, "packed_experts", argument, value):
        ops.packed_experts(**arguments, arithmetic="integer")


def test_a_row_with_nan_or_infinity_is_nan_alone():
    arguments = layer(9, torch.float32, "mxfp4")
    arguments["x"][2, 5], arguments["x"][4, 7] = torch.nan, torch.inf
    actual = ops.packed_experts(**arguments, arithmetic="integer")
    rows = arguments["inverse"]
    bad = torch.zeros(len(actual), dtype=torch.bool)
    bad[rows[[2, 4]].flatten()] = True
    assert actual[bad].isnan().all() and actual[~bad].isfinite().all()


@pytest.mark.parametrize("name", ["experts", "packed_experts"])
@pytest.mark.parametrize(
    ("changes", "argument", "kind"),
    [(dict(lora=1.0), "lora", "float"), (dict(lora=[None, 2]), "lora", "int")]
    + [(dict(x=[1.0]), "x", "list")],
)
def test_adapters_refuse(name, changes, argument, kind):
    sizes = dict(dtype=torch.float32, counts=[3, 0, 4], widths=(3, 7), ranks=(2,))
    arguments = sample(name, **sizes) | changes
    with raises(TypeError, name, argument, kind):
        getattr(ops, name)(**arguments)


def test_codes_have_no_gradient():
    (weight,) = layer(1, torch.float32, "mxfp4")["weights"]
    with pytest.raises(RuntimeError, match="floating point"):
        weight.panels.requires_grad_()
