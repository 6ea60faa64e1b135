"""QuantizedExperts: equal to experts with the dequantized weights; dtypes, memory, errors."""

import copy
import re

import pytest
import torch
from assertions import MIB, assert_all_same_bits, assert_same_bits, peak_mib
from expert_kinds import RANDOM, make_experts, make_packed
from layers import D, E, layer_of, make_x
from torch.optim.swa_utils import AveragedModel
from torch.utils.flop_counter import FlopCounterMode

from moe_ext import FeedForwardExperts, MoE, QuantizedExperts, TopKGate, count_parameters, ops
from moe_ext.formats import FORMATS, PackedWeight, dequantize, quantize


def run(experts, x, **arguments):
    """Returns the output and the gradients of x, the gates and the biases."""
    leaves = [x, *(experts.biases or ())]
    if "gates" in arguments:
        leaves.append(arguments["gates"])
    for leaf in leaves:
        leaf.requires_grad_()
    y = experts(x, **arguments)
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return [y, *torch.autograd.grad(y, leaves, weight)]


# Values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("format", FORMATS)
def test_equals_dequantized_experts(format, dtype):
    """For rows with and without offsets, and for tokens with their gates."""
    quantized = make_packed(format).to(dtype)
    experts = quantized.dequantize(dtype)
    rows = torch.randn(24, quantized.d_model, dtype=dtype)
    offsets = torch.tensor([0, 7, 7, 23, 24])
    for given in (offsets, None):
        arguments = {"x": rows, "offsets": given}
        assert_all_same_bits(run(quantized, **arguments), run(experts, **arguments))
    index = torch.rand(11, 4).topk(2).indices
    plan = ops.dispatch_plan(index, 4)
    for recompute in (False, True):
        arguments = {
            "x": torch.randn(11, quantized.d_model, dtype=dtype),
            "offsets": plan.offsets,
            "inverse": plan.inverse,
            "gates": torch.rand(11, 2),
            "recompute": recompute,
        }
        assert_all_same_bits(run(quantized, **arguments), run(experts, **arguments))


@pytest.mark.parametrize("format", [name for name in FORMATS if name not in RANDOM])
def test_weights_are_those_of_quantize(format):
    experts = make_experts()
    quantized = QuantizedExperts.from_experts(experts, format)
    for weight, packed in zip(experts.weights, quantized.weights, strict=True):
        codes, scales = quantize(weight.mT, format)
        restored = packed.unpack()
        assert torch.equal(restored.codes.view(torch.uint8), codes.view(torch.uint8))
        assert scales is None or torch.equal(restored.scales, scales)
        expected = dequantize(codes, scales, format=format, dtype=torch.bfloat16)
        assert_same_bits(packed.dequantize(torch.bfloat16), expected)
    assert_all_same_bits(
        quantized.dequantize().weights,
        [packed.dequantize().mT.contiguous() for packed in quantized.weights],
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_experts_of_any_dtype_are_quantized(dtype):
    experts = make_experts(dtype=dtype)
    quantized = QuantizedExperts.from_experts(experts, ["int4", "int8"], group=64)
    assert [weight.group for weight in quantized.weights] == [64, 64]
    scales = torch.float32 if dtype == torch.float64 else dtype
    assert {weight.scales for weight in quantized.weights} == {scales}
    assert {bias.dtype for bias in quantized.biases} == {dtype}
    for bias, copied in zip(experts.biases, quantized.biases, strict=True):
        assert_same_bits(copied, bias)
        assert copied.data_ptr() != bias.data_ptr()


def test_clamped_activations():
    options = {"activation": "interleaved_clamped_swiglu", "activation_args": (0.5, 1.702, 1)}
    quantized = QuantizedExperts.from_experts(make_experts(**options), "nf4")
    assert quantized.activation_args == (0.5, 1.702, 1.0)
    x = torch.randn(20, 64)
    assert_same_bits(quantized(x, None), quantized.dequantize()(x, None))


def test_integer_arithmetic():
    """For inference; it differs from the exact one by the rounding of x to 8 bits."""
    quantized = make_packed()
    x = torch.randn(20, 64)
    exact = quantized(x, None)
    quantized.arithmetic = "integer"
    assert "arithmetic=integer, formats" in repr(quantized)
    y = quantized(x, None)
    expected = ops.packed_experts(
        x, quantized.weights, quantized.biases, "swiglu", arithmetic="integer"
    )
    assert_same_bits(y, expected)
    assert 0 < (y - exact).abs().max() < 0.05 * exact.abs().max()
    parts = quantized.split([1, 3])
    assert_same_bits(torch.cat([parts[0](x[:5], None), parts[1](x[5:], None)]), y)
    with pytest.raises(ValueError, match="^packed_experts: arithmetic must be exact where a grad"):
        quantized(x.requires_grad_(), None)


def test_codes_of_a_file():
    """Biases are frozen; a bias is trained after requires_grad_."""
    codes, scales = quantize(torch.randn(4, 32, 64), "mxfp4")
    weight = PackedWeight.pack(codes, scales, format="mxfp4")
    quantized = QuantizedExperts([weight], [torch.randn(4, 32)])
    assert not any(param.requires_grad for param in quantized.parameters())
    assert quantized.weights[0].panels.data_ptr() == weight.panels.data_ptr()
    assert quantized.d_model == 64 and quantized.d_output == 32
    x = torch.randn(8, 64)
    quantized.bias_0.requires_grad_()
    quantized(x, None).sum().backward()
    assert_same_bits(quantized.bias_0.grad, torch.full((4, 32), 2.0))
    assert torch.equal(quantized.weights[0].unpack().codes, codes)


# In a layer


def test_an_expert_dtype_is_that_of_the_biases():
    """Without biases, the experts compute in the dtype of the tokens."""
    for bias, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        layer = MoE(64, 4, 2, hidden_sizes=[64], bias=bias, expert_dtype=torch.bfloat16)
        layer.experts = QuantizedExperts.from_experts(layer.experts, "mxfp4")
        twin = copy.deepcopy(layer).eval()
        twin.experts = layer.experts.dequantize(dtype)
        x = torch.randn(20, 64)
        y = layer.eval()(x)[0]
        assert y.dtype == torch.float32
        assert_same_bits(y, twin(x)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    quantized = make_packed()
    experts = quantized.dequantize()
    x = torch.randn(20, 64)
    with torch.autocast("cpu", dtype):
        y = quantized(x, None)
        assert y.dtype == dtype
        assert_same_bits(y, experts(x, None))


def test_export():
    layer = MoE(64, 4, 2, gate=TopKGate(64, 4, 2), experts=make_packed()).eval()
    free = ({0: torch.export.Dim("batch", min=2)},)
    program = torch.export.export(layer, (torch.randn(9, 64),), dynamic_shapes=free)
    x = torch.randn(14, 64)
    assert_same_bits(program.module()(x)[0], layer(x)[0])


# State


@pytest.mark.parametrize(
    "cast",
    [
        lambda module: module.half(),
        lambda module: module.bfloat16(),
        lambda module: module.double(),
        lambda module: module.to("cpu", torch.bfloat16),
        lambda module: module.to(torch.zeros((), dtype=torch.float16)),
    ],
)
def test_a_change_of_dtype_leaves_the_panels(cast):
    quantized = make_packed()
    before = [weight.panels.clone() for weight in quantized.weights]
    cast(quantized)
    assert_all_same_bits([weight.panels for weight in quantized.weights], before)
    dtype = quantized.bias_0.dtype
    assert dtype != torch.float32
    x = torch.randn(8, 64, dtype=dtype)
    assert_same_bits(quantized(x, None), quantized.dequantize(dtype)(x, None))


OTHER_FORMATS = {
    "format": lambda experts: QuantizedExperts.from_experts(experts, "int8"),
    "nf4": lambda experts: QuantizedExperts.from_experts(experts, "nf4"),
    "group": lambda experts: QuantizedExperts.from_experts(experts, "int4", group=32),
    "scales": lambda experts: QuantizedExperts.from_experts(experts.bfloat16(), "int4", group=64),
    "sizes": lambda _: QuantizedExperts.from_experts(make_experts(d_model=56), "int4", group=8),
}


@pytest.mark.parametrize("saved_format", OTHER_FORMATS)
def test_a_state_of_another_format_is_refused(saved_format):
    """Panels of int4 with groups of 64 have the shape of those of nf4."""
    experts = make_experts()
    quantized = QuantizedExperts.from_experts(experts, "int4", group=64)
    state = OTHER_FORMATS[saved_format](experts).state_dict()
    before = [weight.panels.clone() for weight in quantized.weights]
    with pytest.raises(RuntimeError, match=r"Missing.*weight_0_int4_256x64_g64_float32"):
        quantized.load_state_dict(state)
    assert_all_same_bits([weight.panels for weight in quantized.weights], before)
    if saved_format == "nf4":
        shapes, own_shapes = (
            [tensor.shape for tensor in some.values()] for some in (state, quantized.state_dict())
        )
        assert shapes == own_shapes


# Memory


@pytest.fixture(scope="module")
def large():
    """Eight experts of 2 MiB."""
    return FeedForwardExperts(8, 512, [512])


@pytest.mark.parametrize("format", ["mxfp4", "int8", "fp8", "gguf_q8_0"])
def test_peak_of_memory_of_from_experts(large, format):
    """The result, and less than two experts."""
    made = []
    peak = peak_mib(lambda: made.append(QuantizedExperts.from_experts(large, format)))
    result = sum(param.nbytes for param in made[0].parameters()) / MIB
    assert result < peak < result + 4


def test_peak_of_memory_of_dequantize(large):
    quantized = QuantizedExperts.from_experts(large, "mxfp4")
    peak = peak_mib(lambda: quantized.dequantize(torch.bfloat16))
    assert 8 <= peak < 8 + 2


def test_no_weight_is_written_to_memory(large):
    """Neither forward nor backward needs a matrix of weights, which would have 1 MiB."""
    quantized = QuantizedExperts.from_experts(large, "mxfp4")
    x = torch.randn(64, 512, requires_grad=True)

    def peak(experts):
        return peak_mib(lambda: torch.autograd.grad(experts(x, None).sum(), x))

    assert peak(quantized) < peak(quantized.dequantize().requires_grad_(False)) + 0.5


# Training around frozen experts


def test_averages_leave_the_panels():
    quantized = make_packed()
    average = AveragedModel(quantized)
    for _ in range(3):
        average.update_parameters(quantized)
    averaged = average.module.state_dict()
    assert_all_same_bits(averaged.values(), quantized.state_dict().values())


@pytest.mark.parametrize("format", ["mxfp4", "int8", "gguf_q4_k"])
def test_parameters_are_counted(format):
    """The numbers of weights count, not the bytes."""
    quantized = make_packed(format)
    layer = MoE(quantized.d_model, 4, 2, experts=quantized)
    expected = MoE(quantized.d_model, 4, 2, experts=quantized.dequantize())
    assert count_parameters(layer) == count_parameters(expected)
    assert count_parameters(quantized) == count_parameters(expected.experts)
    assert f"parameters={count_parameters(expected).total}," in repr(layer)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("trains", ["x", "bias"])
def test_operations_are_counted(trains, recompute):
    quantized = make_packed()
    counted = []
    for experts in (quantized, quantized.dequantize().requires_grad_(False)):
        x = torch.randn(12, 64, requires_grad=trains == "x")
        experts.bias_0.requires_grad_(trains == "bias")
        with FlopCounterMode(display=False) as counter:
            experts(x, None, recompute=recompute).sum().backward()
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1] > 2 * 12 * (64 * 256 + 128 * 64)


# Other


def test_the_text_of_a_module():
    quantized = QuantizedExperts.from_experts(make_experts(), ["mxfp4", "gguf_q8_0"])
    assert repr(quantized) == (
        "QuantizedExperts(4 x (64 -> 128 -> 64), activation=swiglu, bias=True, "
        "formats=mxfp4 gguf_q8_0, 71,680 bytes)"
    )


from_experts, from_state_dict = QuantizedExperts.from_experts, QuantizedExperts.from_state_dict
FILE = PackedWeight.pack(*quantize(torch.ones(4, 32, 64), "mxfp4"), format="mxfp4")
BACK = PackedWeight.pack(*quantize(torch.ones(4, 64, 32), "mxfp4"), format="mxfp4")
ERRORS = {
    "QuantizedExperts(FILE)": "weights must be a sequence of PackedWeight, got PackedWeight",
    "QuantizedExperts([FILE.panels])": "weights[0] must be a PackedWeight, got Tensor",
    "QuantizedExperts([])": "weights must have at least one layer, got 'none'",
    "QuantizedExperts([FILE, FILE])": "weights[0].outputs must be 1 x 64, for relu and weights[1], "
    "got 32",
    "QuantizedExperts([FILE, BACK], activation='swiglu')": "weights[0].outputs must be 2 x 32, for "
    "swiglu and weights[1], got 32",
    "QuantizedExperts([FILE._replace(panels=FILE.panels[:, :1])])": "weights[0].panels must have "
    "shape (4, 2, 576), got (4, 1, 576)",
    "QuantizedExperts([FILE._replace(panels=FILE.panels.int())])": "weights[0].panels must have "
    "dtype torch.uint8, got torch.int32",
    "QuantizedExperts([FILE._replace(format='q3')])": "weights[0].format must be one of fp8, ",
    "QuantizedExperts([FILE], activation='step')": "activation must be one of ",
    "QuantizedExperts([FILE], activation='clamped_swiglu')": "activation_args must be limit, ",
    "QuantizedExperts([FILE], arithmetic='int')": "arithmetic must be one of exact, integer, got ",
    "QuantizedExperts([FILE], [])": "biases must be None or have one tensor for each of 1 weights",
    "QuantizedExperts([FILE], [1])": "biases[0] must be a tensor, got int",
    "QuantizedExperts([FILE], [torch.zeros(4, 64)])": "biases[0] must have shape (4, 32), got ",
    "QuantizedExperts([FILE], [torch.zeros(4, 32).int()])": "biases[0] must have the same floating",
    "from_experts(FILE, 'int8')": "experts must be a FeedForwardExperts, got Pack",
    "from_experts(torch.nn.ReLU(), 'int8')": "experts must be a FeedForwardExperts, got ReLU",
    "from_experts(make_experts(), 'q3')": "format must be one of fp8, ",
    "from_experts(make_experts(), ['int8'])": "format must be a name, or one name "
    "for each of 2 layers, got ['int8']",
    "from_experts(make_experts(), 'mxfp4', group=32)": "group must be None without "
    "a layer in int4, int8 or fp8, got 32",
    "from_experts(make_experts(), 'int4', group=0)": "weight_0 cannot be packed in "
    "int4: quantize: group must be at least 1, got 0",
    "from_experts(make_experts(), 'int8', group=4)": "weight_0 cannot be packed in "
    "int8: PackedWeight: scales must belong to a multiple of 8 inputs, or to all of a row",
    "from_experts(make_experts(hidden=48), 'mxfp4')": "weight_1 cannot be packed "
    "in mxfp4: quantize: weight must have a multiple of 32 inputs for mxfp4",
    "from_experts(make_experts(), 'gguf_q4_k')": "weight_0 cannot be packed in "
    "gguf_q4_k: quantize: format must be one of ",
    "from_experts(infinite(), 'nf4')": "weight_1 cannot be packed in nf4: quantize:"
    " weight must be finite, got 'NaN or infinity'",
    "from_state_dict({'weight_0': FILE.panels})": "state_dict must have only names "
    "such as bias_0 and weight_0_mxfp4_128x64_g32_uint8, got 'weight_0'",
    "from_state_dict({'bias_0': FILE.panels})": "state_dict must have a weight, and"
    " a bias or none, for each layer, got ['bias_0']",
    "make_packed()(torch.ones(3, 64), [0])": "offsets must be a tensor, got list",
    "make_packed()([1], None)": "x must be a tensor, got list",
    "make_packed()(torch.ones(4, 64).bfloat16(), None)": "x must have the dtype of the "
    "biases, torch.float32, got torch.bfloat16; use torch.autocast, or cast x or the biases",
}


def infinite():
    experts = make_experts()
    experts.weight_1.detach()[2, 3, 4] = torch.inf
    return experts


@pytest.mark.parametrize("call", ERRORS)
def test_errors(call):
    """Errors name the class, the argument, the rule and the value."""
    message = f"^QuantizedExperts: {re.escape(ERRORS[call])}"
    with pytest.raises((TypeError, ValueError), match=message):
        eval(call)


def test_errors_of_x_do_not_speak_of_the_weights():
    for x in (torch.ones(4, 64, dtype=torch.int64), torch.ones(4, 60)):
        with pytest.raises((TypeError, ValueError)) as raised:
            make_packed()(x, None)
        assert "dtype of the weights" not in str(raised.value)
    layer = layer_of(TopKGate(D, E, 2), bias=True)
    layer.experts = QuantizedExperts.from_experts(layer.experts, "int8")
    with pytest.raises(TypeError, match="^QuantizedExperts: x must have the dtype of the biases"):
        layer(make_x(5, dtype=torch.bfloat16))
