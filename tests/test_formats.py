"""Packed formats: results are bitwise identical to those of the reference packages; errors.

`PackedWeight` restores the bytes of files.
"""

import itertools
import sys

import gguf
import pytest
import torch
from optional import Optional

from moe_ext.formats import FORMATS, PackedWeight, dequantize, quantize
from moe_ext.formats._layouts import LAYOUTS

bitsandbytes = Optional("bitsandbytes.functional")
compressed_tensors = Optional("compressed_tensors.quantization.lifecycle.forward")
compressors = Optional("compressed_tensors.compressors.pack_quantized.helpers")
quantization = Optional("compressed_tensors.quantization")
mxfp4 = Optional("transformers.integrations.mxfp4")

# NumPy warns of the infinite and NaN scales that the tests contain.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

GGUF = {
    "gguf_mxfp4": gguf.GGMLQuantizationType.MXFP4,
    "gguf_q4_0": gguf.GGMLQuantizationType.Q4_0,
    "gguf_q4_k": gguf.GGMLQuantizationType.Q4_K,
    "gguf_q6_k": gguf.GGMLQuantizationType.Q6_K,
    "gguf_q8_0": gguf.GGMLQuantizationType.Q8_0,
}


def same_bits(a, b):
    """Compares bits; every NaN equals every NaN."""
    bits = {2: torch.int16, 4: torch.int32}[a.itemsize]
    same = (a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())
    return a.dtype == b.dtype and a.shape == b.shape and bool(same.all())


def random_bytes(*shape):
    return torch.randint(256, shape, dtype=torch.uint8)


@pytest.mark.parametrize("format", sorted(GGUF))
def test_gguf_codes(format):
    """Random bytes have every fp16 scale: subnormal, infinite and NaN."""
    values, size = gguf.GGML_QUANT_SIZES[GGUF[format]]
    codes = random_bytes(3, 64, 512 // values * 4 * size)
    if format == "gguf_mxfp4":
        codes.view(-1, size)[:, 0] = torch.arange(3 * 64 * 64) % 255  # every exponent
    weight = dequantize(codes, format=format)
    assert same_bits(weight, torch.from_numpy(gguf.dequantize(codes.numpy(), GGUF[format])))
    half = dequantize(codes, format=format, dtype=torch.bfloat16)
    assert same_bits(half, weight.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_codes(dtype):
    codes = random_bytes(2, 255, 3 * 16)
    scales = torch.arange(255, dtype=torch.uint8)[None, :, None].repeat(2, 1, 3)
    weight = dequantize(codes, scales, format="mxfp4", dtype=dtype)
    expected = mxfp4.convert_moe_packed_tensors(codes.unflatten(-1, (3, 16)), scales, dtype=dtype)
    assert same_bits(weight, expected.mT.contiguous())
    typed = scales.view(torch.float8_e8m0fnu)
    assert same_bits(weight, dequantize(codes, typed, format="mxfp4", dtype=dtype))


@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_fp8_codes(scale):
    """All codes, NaN too, with a scale for each row, group and block; the last block is cut."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(300, 1).view(torch.float8_e4m3fn)
    rows = torch.rand(300, 2).mul(300).exp2().to(scale)
    expected = codes.float() * rows.float().repeat_interleave(128, 1)
    assert same_bits(dequantize(codes, rows, format="fp8"), expected)
    row = rows[:, :1]
    assert same_bits(dequantize(codes, row, format="fp8"), codes.float() * row.float())
    codes, blocks = codes[:, :200], rows[:3]
    expected = codes.float() * torch.kron(blocks.float(), torch.ones(128, 128))[:300, :200]
    assert same_bits(dequantize(codes, blocks, format="fp8"), expected)


def test_the_last_block_of_fp8_may_have_one_row():
    codes = torch.randn(129, 192).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 2)
    expected = codes.float() * torch.kron(scales, torch.ones(128, 128))[:129, :192]
    assert same_bits(dequantize(codes, scales, format="fp8"), expected)


def test_the_blocks_of_fp8_may_have_a_single_row():
    weight = torch.randn(1, 200)
    packed = quantize(weight, "fp8")
    scales = packed.scales.repeat_interleave(128, 1)[:, :200]
    assert same_bits(dequantize(*packed, format="fp8"), packed.codes.float() * scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("format", "bits", "group"),
    [("int4", 4, 32), ("int4", 4, 128), ("int8", 8, 512), ("int8", 8, 128)],
)
def test_integers(format, bits, group, dtype):
    weight = torch.randn(24, 512, dtype=dtype)
    weight[3, :128] = 0
    strategy = "channel" if group == 512 else "group"
    size = None if group == 512 else group
    args = quantization.QuantizationArgs(
        num_bits=bits, strategy=strategy, group_size=size, symmetric=True
    )
    groups = weight.unflatten(-1, (-1, group))
    scales, _ = quantization.utils.calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    codes = compressed_tensors.quantize(weight, scales, None, args, dtype=torch.int8)
    packed = quantize(weight, format, group)
    assert same_bits(packed.scales, scales)
    assert torch.equal(packed.codes, compressors.pack_to_int32(codes, 4) if bits == 4 else codes)
    expected = compressed_tensors.dequantize(codes, scales, None, args)
    assert same_bits(dequantize(*packed, format=format, dtype=dtype), expected)


def test_nf4():
    weight = torch.randn(2, 24, 512)
    weight[0, 3, :64] = 0
    codes, state = bitsandbytes.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    packed = quantize(weight, "nf4")
    assert torch.equal(packed.codes.flatten(), codes.flatten())
    assert same_bits(packed.scales.flatten(), state.absmax)
    expected = bitsandbytes.dequantize_4bit(codes, state)
    assert same_bits(dequantize(*packed, format="nf4"), expected)
    state.dtype = torch.bfloat16
    expected = bitsandbytes.dequantize_4bit(codes, state)
    assert same_bits(dequantize(*packed, format="nf4", dtype=torch.bfloat16), expected)


def weights_to_quantize():
    """Returns rows of many scales, with zeros, ties and neighbours of powers of two."""
    weight = torch.randn(64, 512) * torch.logspace(-30, 4, 64)[:, None]
    weight[0] = 0
    weight[1, ::2] = 0
    weight[2] = torch.arange(512).sub(256) / 8
    weight[3] = 8 - 2.0**-21
    weight[4, 1::3] = -weight[4, 0]
    return weight


@pytest.mark.parametrize("format", ["gguf_mxfp4", "gguf_q4_0", "gguf_q8_0"])
def test_gguf_quantize(format):
    weight = weights_to_quantize()
    expected = torch.from_numpy(gguf.quantize(weight.numpy(), GGUF[format]))
    assert torch.equal(quantize(weight, format).codes, expected)


def test_mxfp4_quantize_takes_the_nearest_value():
    weight = weights_to_quantize().double()
    packed = quantize(weight, "mxfp4")
    largest = weight.unflatten(-1, (-1, 32)).abs().amax(-1)
    exponents = torch.where(largest > 0, largest.log2().floor() - 2, -127)
    assert torch.equal(packed.scales.double() - 127, exponents)
    scales = exponents.exp2().repeat_interleave(32, -1).unsqueeze(-1)
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.double)
    errors = (weight.abs().unsqueeze(-1) - magnitudes * scales).abs()
    result = dequantize(*packed, format="mxfp4", dtype=torch.double)
    chosen = (result.abs().unsqueeze(-1) == magnitudes * scales).int().argmax(-1)
    assert torch.equal(errors.gather(-1, chosen.unsqueeze(-1)).squeeze(-1), errors.amin(-1))
    ties = (errors == errors.amin(-1, keepdim=True)).sum(-1) == 2
    assert ties.any() and (chosen[ties] % 2 == 0).all()
    assert torch.equal(result.signbit(), weight.signbit())


@pytest.mark.parametrize("group", [None, 64])
def test_fp8_quantize_takes_the_nearest_value(group):
    weight = torch.randn(2, 300, 192)
    packed = quantize(weight, "fp8", group)
    block = torch.ones(128, 128) if group is None else torch.ones(1, group)
    scales = torch.stack([torch.kron(part, block) for part in packed.scales])[:, :300, :192]
    assert packed.codes.float().abs().amax() == 448
    assert torch.equal(packed.codes.float(), (weight / scales).to(torch.float8_e4m3fn).float())
    assert quantize(torch.zeros(4, 64), "fp8").codes.float().eq(0).all()


@pytest.mark.parametrize("format", [f for f in FORMATS if f not in ("gguf_q4_k", "gguf_q6_k")])
def test_strides_do_not_matter(format):
    weight = torch.randn(3, 256, 130)
    packed, expected = quantize(weight.mT, format), quantize(weight.mT.contiguous(), format)
    parts = [(a, b) for a, b in zip(packed, expected, strict=True) if a is not None]
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in parts)
    strided = [a.mT.contiguous().mT for a, _ in parts]
    values = dequantize(*strided, format=format)
    assert same_bits(values, dequantize(*expected, format=format))


@pytest.mark.parametrize("format", FORMATS)
def test_leading_dimensions_are_kept(format):
    if format in ("gguf_q4_k", "gguf_q6_k"):
        size = {"gguf_q4_k": 144, "gguf_q6_k": 210}[format]
        codes, scales = torch.randint(60, (2, 3, 5, size), dtype=torch.uint8), None
    else:
        codes, scales = quantize(torch.randn(2, 3, 5, 256), format)
    whole = dequantize(codes, scales, format=format)
    assert whole.shape == (2, 3, 5, 256)
    for i, j in itertools.product(range(2), range(3)):
        part = dequantize(codes[i, j], None if scales is None else scales[i, j], format=format)
        assert same_bits(whole[i, j], part)
    assert dequantize(codes[:0], None if scales is None else scales[:0], format=format).shape == (
        *(0, 3, 5, 256),
    )


BYTES = torch.zeros(4, 16, dtype=torch.uint8)
ONES = torch.ones(4, 1)


INT8 = BYTES.view(torch.int8)


@pytest.mark.parametrize(
    ("error", "message", "format", "codes", "scales"),
    [
        (ValueError, "format must be one of fp8, .*, got 'q3'", "q3", BYTES, None),
        (TypeError, "codes must be a tensor, got list", "nf4", [1], None),
        (TypeError, "codes must have dtype torch.int8 .*, got torch.uint8", "int8", BYTES, ONES),
        (ValueError, r"have the shape \[..., out, n\], got \(16,\)", "gguf_q8_0", BYTES[0], None),
        (ValueError, r"a multiple of 34 elements .*, got \(4, 16\)", "gguf_q8_0", BYTES, None),
        (ValueError, "scales must be None for gguf_mxfp4", "gguf_mxfp4", BYTES[:, :0], ONES),
        (TypeError, "scales must be a tensor, got NoneType", "mxfp4", BYTES, None),
        (TypeError, "scales must have dtype torch.uint8 or .*32", "mxfp4", BYTES, ONES),
        (ValueError, r"have shape \(4, 1\), got \(4, 2\)", "mxfp4", BYTES, BYTES[:, :2]),
        (ValueError, "scales must be exponents below 255", "mxfp4", BYTES, BYTES[:, :1] + 255),
        (ValueError, "scales must have shape .* divisor of 16", "int8", INT8, torch.ones(4, 3)),
        (ValueError, "scales must be on cpu, got 'meta'", "int8", INT8, ONES.to("meta")),
    ],
)
def test_errors_of_dequantize(error, message, format, codes, scales):
    with pytest.raises(error, match=f"^dequantize: .*{message}"):
        dequantize(codes, scales, format=format)


def test_numbers_have_a_floating_point_dtype():
    with pytest.raises(TypeError, match="^dequantize: dtype must be a floating-point dtype"):
        dequantize(INT8, ONES, format="int8", dtype=torch.int8)


@pytest.mark.parametrize(
    ("error", "message", "format", "weight", "group"),
    [
        (TypeError, "weight must have a floating-point dtype", "int8", BYTES, None),
        (ValueError, "format must be one of .*, got 'gguf_q6_k'", "gguf_q6_k", ONES, None),
        (ValueError, "weight must have the shape", "int8", ONES[0], None),
        (ValueError, "weight must be finite", "int8", ONES / 0, None),
        (ValueError, r"a multiple of 64 inputs for nf4, got \(4, 1\)", "nf4", ONES, None),
        (ValueError, "group must be 32 for mxfp4, got 16", "mxfp4", torch.ones(4, 32), 16),
        (ValueError, "a multiple of 8 inputs for int4", "int4", torch.ones(4, 12), 4),
        (ValueError, "group must be at least 1, got 0", "int8", torch.ones(4, 32), 0),
    ],
)
def test_errors_of_quantize(error, message, format, weight, group):
    with pytest.raises(error, match=f"^quantize: .*{message}"):
        quantize(weight, format, group)


# The layout of the kernels


def files_of(format, outputs, inputs=512, num_experts=2):
    """Yields random codes and scales of a format: every dtype and shape of its scales."""
    layout = LAYOUTS[format]
    size = inputs // layout.block[0] * layout.block[1]
    codes = random_bytes(num_experts, outputs, size * layout.dtype.itemsize).view(layout.dtype)
    if format == "gguf_mxfp4":
        codes.view(-1, 17)[:, 0] %= 255
    if not layout.scales:
        yield codes, None
    for dtype in layout.scales:
        rows = [inputs // layout.group] if layout.group else [1, 4, 16]
        shapes = [(outputs, number) for number in rows]
        if format == "fp8":
            shapes.append((-(-outputs // 128), -(-inputs // 128)))
        for shape in shapes:
            scales = random_bytes(num_experts, *shape[:-1], shape[-1] * dtype.itemsize)
            if format == "mxfp4":
                scales %= 255
            yield codes, scales.view(dtype)


def equal_bytes(a, b):
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("outputs", [1, 16, 37, 300])
@pytest.mark.parametrize("format", FORMATS)
def test_packed_weights_restore_the_bytes_of_a_file(format, outputs):
    for codes, scales in files_of(format, outputs):
        packed = PackedWeight.pack(codes, scales, format=format)
        assert packed.panels.shape == packed.shape(2)
        assert (packed.outputs, packed.inputs) == (outputs, 512)
        restored = packed.unpack()
        assert equal_bytes(restored.codes, codes)
        if scales is None:
            assert restored.scales is None
        elif scales.dtype == torch.float16:  # computed in float32, in which a NaN may change
            assert same_bits(restored.scales, scales)
        else:
            assert equal_bytes(restored.scales, scales)
        weight = dequantize(codes, scales, format=format)
        assert same_bits(packed.dequantize(), weight)
        assert same_bits(packed.dequantize(torch.bfloat16), weight.bfloat16())


@pytest.mark.parametrize(
    ("format", "bits"),
    [("gguf_mxfp4", 4.25), ("gguf_q4_0", 4.5), ("gguf_q4_k", 4.625), ("gguf_q6_k", 6.5625)]
    + [("gguf_q8_0", 8.5), ("int4", 5), ("int8", 9), ("mxfp4", 4.25), ("nf4", 4.5), ("fp8", 9)],
)
def test_the_size_of_packed_weights(format, bits):
    """The scales of int4, int8 and fp8 are in float32, those of gguf_q4_k in 8 bits."""
    codes, scales = next(files_of(format, 512, 1024))
    if format in ("int4", "int8", "fp8"):
        scales = torch.ones(2, 512, 32)
    packed = PackedWeight.pack(codes, scales, format=format)
    assert packed.panels.nbytes == 2 * 512 * 1024 * bits / 8


@pytest.mark.parametrize(("format", "inputs"), [("int8", 17), ("fp8", 17), ("fp8", 200)])
def test_packed_weights_with_an_odd_number_of_inputs(format, inputs):
    weight = torch.randn(2, 5, inputs)
    codes, scales = quantize(weight, format)
    restored = PackedWeight.pack(codes, scales, format=format).unpack()
    assert equal_bytes(restored.codes, codes) and equal_bytes(restored.scales, scales)


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages of Linux")
def test_large_packed_weights_are_in_huge_pages():
    codes = torch.zeros(2, 2048, 4096, dtype=torch.int8)
    weight = PackedWeight.pack(codes, torch.ones(2, 2048, 1), format="int8")
    assert weight.panels.nbytes > 16e6 and weight.panels.data_ptr() % (2 << 20) == 0


@pytest.mark.parametrize("format", FORMATS)
def test_packed_weights_without_experts(format):
    for codes, scales in files_of(format, 5, num_experts=0):
        packed = PackedWeight.pack(codes, scales, format=format)
        assert packed.panels.shape == packed.shape(0)
        restored = packed.unpack()
        assert restored.codes.shape == codes.shape
        assert scales is None or restored.scales.shape == scales.shape
        assert packed.dequantize().shape == (0, 5, 512)


@pytest.mark.parametrize("format", FORMATS)
def test_strides_of_a_file_do_not_matter(format):
    for codes, scales in files_of(format, 5):
        parts = [part for part in (codes, scales) if part is not None]
        strided = [part.mT.contiguous().mT for part in parts]
        panels = PackedWeight.pack(*strided, format=format).panels
        assert torch.equal(panels, PackedWeight.pack(*parts, format=format).panels)


@pytest.mark.parametrize(
    ("error", "message", "format", "codes", "scales"),
    [
        (ValueError, "format must be one of fp8, .*, got 'q3'", "q3", BYTES, None),
        (TypeError, "codes must be a tensor, got list", "nf4", [1], None),
        (ValueError, r"codes must have the shape \[E, out, n\], got \(4, 16\)", "int8", INT8, ONES),
        (ValueError, "of 8 inputs.*, got '4 inputs'", "int8", INT8[None], torch.ones(1, 4, 4)),
        (TypeError, "torch.int8 for int8, got torch.uint8", "int8", BYTES[None], ONES[None]),
        (ValueError, "below 255, got 255", "mxfp4", BYTES[None], BYTES[None, :, :1] + 255),
    ],
)
def test_errors_of_packed_weights(error, message, format, codes, scales):
    with pytest.raises(error, match=f"^(PackedWeight|dequantize): .*{message}$"):
        PackedWeight.pack(codes, scales, format=format)
