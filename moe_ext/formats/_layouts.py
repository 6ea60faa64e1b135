"""The layouts of packed weights in files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_ext.checks import (
    require,
    require_floating,
    require_one_of,
    require_sizes,
    require_tensor,
)

#: The name of a packed format.
FormatName = Literal[
    "fp8",
    "gguf_mxfp4",
    "gguf_q4_0",
    "gguf_q4_k",
    "gguf_q6_k",
    "gguf_q8_0",
    "int4",
    "int8",
    "mxfp4",
    "nf4",
]
#: All names of packed formats.
FORMATS: tuple[FormatName, ...] = get_args(FormatName)
FP8_BLOCK = 128  # the rows and the columns of a block of fp8


class Packed(NamedTuple):
    """A packed weight [..., out, in].

    Attributes:
        codes: the codes, in the dtype and the order of the format's files.
        scales: the scales; None for the GGUF formats, whose scales are among the codes.
    """

    codes: Tensor
    scales: Tensor | None = None


def dequantize(
    codes: Tensor,
    scales: Tensor | None = None,
    *,
    format: FormatName,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Returns the weight of packed codes, bit for bit as the reference package of the format.

    Values are computed in float32 and then rounded to dtype.

    Args:
        codes: [..., out, n] in the dtype of the format; see the table of this module. The blocks
            [..., out, in/32, 16] of gpt-oss are ``blocks.flatten(-2)``.
        scales: the scales of the format, with the leading dimensions of codes and a floating-point
            dtype; uint8 or float8_e8m0fnu for mxfp4. None for the GGUF formats.
        format: one of `FORMATS`.
        dtype: the floating-point dtype of the result.

    Returns:
        The weight [..., out, in].

    Raises:
        TypeError: an argument is not a tensor or has a wrong dtype.
        ValueError: the format is unknown, a shape does not fit it, scales are missing or not
            expected, or a scale of the microscaling formats is 255, which stands for no number.
    """
    require_one_of("dequantize: format", FORMATS, format)
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dequantize: dtype must be a floating-point dtype, got {dtype!r}")
    layout = LAYOUTS[format]
    inputs, blocked = layout.check(format, codes, scales)
    weight = codes.new_empty((*codes.shape[:-1], inputs), dtype=dtype)
    table = torch.tensor(layout.values, device=codes.device)
    results, blocks = _row_blocks(weight), _row_blocks(codes)
    scales_of: Iterable[Tensor | None] = repeat(None, len(blocks))
    if scales is not None:
        scales_of = _row_blocks(scales, 1 if blocked else FP8_BLOCK)
    for result, block, own in zip(results, blocks, scales_of, strict=True):
        fields = layout.split(block, own)
        scale = _floats(fields.scales, fields.factors)
        values = table[fields.codes.int()] * _over_groups(scale, inputs, blocked)
        if fields.minima is not None:
            minima = _floats(fields.minima, fields.factors_of_minima)
            values -= _over_groups(minima, inputs, blocked)
        result.copy_(values)
    return weight


def quantize(weight: Tensor, format: FormatName, group: int | None = None) -> Packed:
    """Packs a weight with the rounding rule that is standard for the format.

    The results of gguf_mxfp4, gguf_q4_0, gguf_q8_0, int4, int8 and nf4 are bitwise identical to
    those of the reference packages. A scale of int4, int8 and fp8 is the largest magnitude of its
    group, divided by 7.5, 127.5 and 448. The rule of mxfp4 is that of its specification: the scale
    is the largest power of two that is at most a quarter of the largest magnitude. Values are
    rounded to the nearest, ties to even codes.

    Args:
        weight: [..., out, in], finite. The scales of int4 and int8 get its dtype.
        format: one of `FORMATS`, but not gguf_q4_k or gguf_q6_k, which have no standard rule.
        group: the number of inputs with one scale, in int4 (None: 32) and int8 (None: all). In fp8,
            None gives blocks of 128 x 128, and a number is for one row, as in int8. The other
            formats have a fixed group.

    Returns:
        The codes and scales, as `dequantize` takes them.

    Raises:
        TypeError: weight is not a floating-point tensor.
        ValueError: the format is unknown or has no standard rule, the weight is not finite, or its
            shape or the group does not fit the format.
    """
    standard = [name for name in FORMATS if LAYOUTS[name].encode is not None]
    require_one_of("quantize: format", standard, format)
    require_tensor("quantize", weight=weight)
    require_floating("quantize", weight, "weight")
    shape = tuple(weight.shape)
    require(weight.dim() >= 2, "quantize: weight", "have the shape [..., out, in]", shape)
    require(weight.numel() > 0, "quantize: weight", "have values", shape)
    require(bool(weight.isfinite().all()), "quantize: weight", "be finite", "NaN or infinity")
    layout = LAYOUTS[format]
    if group is None and format == "int4":
        group = 32
    if group is not None:
        require_sizes("quantize", group=group)
        rule = f"be {layout.group} for {format}"
        require(layout.group in (None, group), "quantize: group", rule, group)
    multiple = max(layout.block[0], layout.group or group or 1)
    rule = f"have a multiple of {multiple} inputs for {format}"
    require(shape[-1] % multiple == 0, "quantize: weight", rule, shape)
    assert layout.encode is not None
    encoded = [layout.encode(block, group) for block in _row_blocks(weight.detach())]
    codes, scales = zip(*encoded, strict=True)
    lead = (*shape[:-2], -1)
    packed = torch.cat(codes).unflatten(0, lead)
    return Packed(packed, None if scales[0] is None else torch.cat(scales).unflatten(0, lead))


# What the formats have in common


def _row_blocks(matrices: Tensor, size: int = FP8_BLOCK) -> list[Tensor]:
    """Splits each matrix of [..., rows, columns] into blocks of rows, small enough for a cache."""
    return [
        block.contiguous()
        for matrix in matrices.reshape(-1, *matrices.shape[-2:]).unbind()
        for block in matrix.split(size)
    ]


class Fields(NamedTuple):
    """Some rows in the form that all formats share: w = values[code] · scale - minimum.

    Numbers have the dtype of the file. With factors, a block of groups shares a factor, and the
    scale is the factor times an integer; the same holds for the minimum.
    """

    codes: Tensor  # [rows, in] uint8
    scales: Tensor  # [rows, groups], or [1, groups]: the same for all rows
    minima: Tensor | None = None  # [rows, groups]
    factors: Tensor | None = None  # [rows, blocks]
    factors_of_minima: Tensor | None = None  # [rows, blocks]

    def apply(self, function: Callable[[Tensor], Tensor]) -> Fields:
        """Applies a function to every tensor."""
        return Fields._make(None if field is None else function(field) for field in self)


def _floats(numbers: Tensor, factors: Tensor | None) -> Tensor:
    """Returns scales or minima in float32, [rows, groups]."""
    floats = numbers.float()
    if factors is None:
        return floats
    return factors.float().repeat_interleave(numbers.shape[1] // factors.shape[1], 1) * floats


def _over_groups(numbers: Tensor, inputs: int, blocked: bool) -> Tensor:
    """Repeats the number of each group [rows, groups] for its inputs: [rows, in]."""
    group = FP8_BLOCK if blocked else inputs // max(numbers.shape[1], 1)
    return numbers.repeat_interleave(group, 1)[:, :inputs]


@dataclass(frozen=True)
class FormatLayout:
    """One format: how its files hold codes and scales."""

    values: tuple[float, ...]  # of each code
    dtype: torch.dtype  # of the codes in a file
    block: tuple[int, int]  # the number of inputs, and of the elements in a file that hold them
    split: Callable[[Tensor, Tensor | None], Fields]  # of the rows of one matrix and their scales
    join: Callable[[Fields], Packed]  # undoes split
    encode: Callable[[Tensor, int | None], Packed] | None  # of a weight and a group
    group: int | None = None  # the number of inputs with one scale; None: depends on the scales
    scales: tuple[torch.dtype, ...] = ()  # their dtypes; (): they are among the codes

    def check(self, format: str, codes: Tensor, scales: Tensor | None) -> tuple[int, bool]:
        """Returns the number of inputs, and whether a scale is that of a block of fp8.

        Raises TypeError or ValueError if codes or scales are not of this format.
        """
        require_tensor("dequantize", codes=codes)
        _require_dtype("codes", codes, (self.dtype,), format)
        shape = tuple(codes.shape)
        require(codes.dim() >= 2, "dequantize: codes", "have the shape [..., out, n]", shape)
        rule = f"have rows of a multiple of {self.block[1]} elements for {format}"
        require(shape[-1] % self.block[1] == 0, "dequantize: codes", rule, shape)
        inputs = shape[-1] // self.block[1] * self.block[0]
        if not self.scales:
            require(scales is None, "dequantize: scales", f"be None for {format}", "a tensor")
            return inputs, False
        require_tensor("dequantize", scales=scales)
        assert scales is not None
        _require_dtype("scales", scales, self.scales, format)
        device = str(scales.device)
        require(
            scales.device == codes.device, "dequantize: scales", f"be on {codes.device}", device
        )
        by_row, rule = _fits_rows(shape, inputs, self.group, tuple(scales.shape))
        blocked = False
        if format == "fp8":
            blocks = (*shape[:-2], -(-shape[-2] // FP8_BLOCK), -(-inputs // FP8_BLOCK))
            blocked = tuple(scales.shape) == blocks  # also if they could be those of a single row
            rule += f", or {blocks}"
        require(by_row or blocked, "dequantize: scales", rule, tuple(scales.shape))
        return inputs, blocked


def _require_dtype(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], format: str) -> None:
    if tensor.dtype not in dtypes:
        names = " or ".join(map(str, dtypes))
        raise TypeError(
            f"dequantize: {name} must have dtype {names} for {format}, got {tensor.dtype}"
        )


def _fits_rows(
    shape: tuple[int, ...], inputs: int, group: int | None, scales: tuple[int, ...]
) -> tuple[bool, str]:
    """Returns whether every row has a scale for each group of inputs, and the rule in words."""
    if group is not None:
        expected = (*shape[:-1], inputs // group)
        return scales == expected and inputs % group == 0, f"have shape {expected}"
    fits = len(scales) == len(shape) and scales[:-1] == shape[:-1]
    fits = fits and scales[-1] > 0 and inputs % scales[-1] == 0
    return fits, f"have shape {(*shape[:-1], 'a divisor of ' + str(inputs))}"


def _split(codes: Tensor, shifts: tuple[int, ...], dim: int = -1) -> Tensor:
    """Splits bytes into one code for each shift, along a new dimension before or after dim."""
    mask = (1 << 8 // len(shifts)) - 1
    return torch.stack([codes >> shift & mask for shift in shifts], dim)


def _low_first(codes: Tensor) -> Tensor:
    """Returns the codes of consecutive pairs in a byte, the first in its low bits."""
    return _split(codes.view(torch.uint8), (0, 4)).flatten(-2)


def _high_first(codes: Tensor) -> Tensor:
    return _split(codes, (4, 0)).flatten(-2)


def _bytes(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)


def _pairs(first: Tensor, second: Tensor) -> Tensor:
    """Joins two codes of 4 bits in a byte; first gets the low bits."""
    return first | second << 4


def _consecutive(codes: Tensor) -> Tensor:
    """Undoes `_low_first`."""
    return _pairs(codes[..., ::2], codes[..., 1::2])


def _exponents_of(scales: Tensor) -> Tensor:
    """Returns the exponents e of the microscaling formats, as numbers 2^(e - 127)."""
    exponents = scales.contiguous().view(torch.uint8)
    require(not bool((exponents == 255).any()), "dequantize: scales", "be exponents below 255", 255)
    return exponents.view(torch.float8_e8m0fnu)


def _powers(exponents: Tensor) -> Tensor:
    return _floats(_exponents_of(exponents), None)


def _numbers(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns bytes [..., n] as numbers of a dtype."""
    return codes.contiguous().view(dtype)


def _groups(weight: Tensor, size: int) -> Tensor:
    """Returns weight [rows, in] as [rows, in / size, size]."""
    groups: Tensor = weight.unflatten(-1, (-1, size))
    return groups


def _largest(groups: Tensor) -> Tensor:
    """Returns the largest magnitude of each group [..., group] as [..., 1]."""
    return groups.abs().amax(-1, keepdim=True)


# Formats whose scales are a tensor of their own

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _with_scales(
    codes_of: Callable[[Tensor], Tensor],
    file_codes: Callable[[Tensor], Tensor],
    scales_of: Callable[[Tensor], Tensor] = Tensor.contiguous,
    file_scales: Callable[[Tensor], Tensor] = Tensor.contiguous,
) -> dict[str, Any]:
    """Returns split and join of a layout, from functions for the codes and the scales."""

    def split(codes: Tensor, scales: Tensor | None) -> Fields:
        assert scales is not None
        return Fields(codes_of(codes), scales_of(scales))

    def join(fields: Fields) -> Packed:
        return Packed(file_codes(fields.codes), file_scales(fields.scales))

    return dict(split=split, join=join)


def _encode_integers(weight: Tensor, group: int | None, bits: int) -> Packed:
    limit = 1 << bits - 1
    groups = _groups(weight, group or weight.shape[1])
    scales = _largest(groups) / (limit - 0.5)
    scales = scales.where(scales != 0, torch.finfo(scales.dtype).eps)
    codes = (groups / scales).round().clamp(-limit, limit - 1).flatten(-2)
    scales = scales.squeeze(-1)
    if bits == 8:
        return Packed(codes.to(torch.int8), scales)
    nibbles = (codes + limit).to(torch.uint8)
    return Packed(_consecutive(nibbles).view(torch.int32), scales)


def _encode_fp8(weight: Tensor, group: int | None) -> Packed:
    inputs = weight.shape[1]
    size = group or FP8_BLOCK
    groups = _groups(pad(weight.float(), (0, -inputs % size)), size)
    scales = _largest(groups) / 448
    if group is None:
        scales = scales.amax(0, keepdim=True)
    codes = (groups / scales.where(scales != 0, 1)).flatten(-2)[:, :inputs]
    return Packed(codes.to(torch.float8_e4m3fn), scales.squeeze(-1))


def _encode_mxfp4(weight: Tensor, group: int | None) -> Packed:
    groups = _groups(weight.float(), 32)
    largest = _largest(groups)
    exponents = _exponents(largest, torch.frexp(largest).exponent - 1)
    magnitudes = groups.abs() / _powers(exponents)
    # The values are multiples of 0.5 up to 2, of 1 up to 4, and of 2 up to 6. Their codes count up.
    codes = torch.where(
        magnitudes < 2,
        (magnitudes * 2).round(),
        torch.where(magnitudes < 4, magnitudes.round() + 2, (magnitudes / 2).round() + 4),
    )
    codes = (codes.clamp(max=7) + 8 * groups.signbit()).to(torch.uint8).flatten(-2)
    return Packed(_consecutive(codes), exponents.squeeze(-1))


def _exponents(largest: Tensor, log2: Tensor) -> Tensor:
    """Returns the exponents of the microscaling formats, so that 4 · 2^(e - 127) is 2^log2."""
    return torch.where(largest > 0, log2 - 2 + 127, 0).clamp(0, 254).to(torch.uint8)


def _encode_nf4(weight: Tensor, group: int | None) -> Packed:
    groups = _groups(weight.float(), 64)
    scales = _largest(groups)
    table = groups.new_tensor(_NF4)
    scaled = (groups * (1 / scales.clamp(min=1e-38))).clamp(-1, 1)
    codes = torch.bucketize(scaled, (table[1:] + table[:-1]) / 2).to(torch.uint8).flatten(-2)
    return Packed(_pairs(codes[..., 1::2], codes[..., ::2]), scales.squeeze(-1))


# GGUF: blocks of bytes that hold both codes and scales


def _gguf(
    block: tuple[int, int],
    group: int,
    values: tuple[float, ...],
    split_blocks: Callable[[Tensor], Fields],
    join_blocks: Callable[[Fields], Tensor],
    encode: Callable[[Tensor, int | None], Packed] | None = None,
) -> FormatLayout:
    """Returns the layout of blocks of bytes [..., block[1]].

    The function split_blocks returns the fields [..., n] of blocks, and join_blocks takes them.
    """

    def split(codes: Tensor, _: Tensor | None) -> Fields:
        return split_blocks(codes.unflatten(-1, (-1, block[1]))).apply(lambda x: x.flatten(-2))

    def join(fields: Fields) -> Packed:
        num_blocks = fields.codes.shape[-1] // block[0]
        blocks = join_blocks(fields.apply(lambda x: x.unflatten(-1, (num_blocks, -1))))
        return Packed(blocks.flatten(-2))

    return FormatLayout(values, torch.uint8, block, split, join, encode, group)


def _halves(nibbles: Tensor) -> Tensor:
    """Returns the codes of bytes [..., n]: first the low bits of all bytes, then the high bits."""
    return _split(nibbles, (0, 4), -2).flatten(-2)


def _two_halves(codes: Tensor) -> Tensor:
    """Undoes `_halves`."""
    return _pairs(*codes.chunk(2, -1))


def _float16(scales: Tensor) -> Tensor:
    return _numbers(scales, torch.float16)


def _split_simple(
    size: int, bits: int, scales_of: Callable[[Tensor], Tensor] = _float16
) -> Callable[[Tensor], Fields]:
    """Returns split_blocks for blocks of a scale of `size` bytes and the codes of 32 values."""
    codes_of = _halves if bits == 4 else _bytes
    return lambda blocks: Fields(codes_of(blocks[..., size:]), scales_of(blocks[..., :size]))


def _join_simple(bits: int) -> Callable[[Fields], Tensor]:
    codes_of = _two_halves if bits == 4 else _bytes
    return lambda fields: torch.cat([_bytes(fields.scales), codes_of(fields.codes)], -1)


def _split_q4_k(blocks: Tensor) -> Fields:
    scale, minimum, bits, codes = blocks.split([2, 2, 12, 128], -1)
    # 6 bits for each of 8 scales and 8 minima. Of the last four, the upper two bits are those that
    # the first four leave free.
    scales, minima, rest = bits.split(4, -1)
    return Fields(
        codes=_halves(codes.unflatten(-1, (4, 32))).flatten(-2),
        scales=torch.cat([scales & 63, rest & 15 | scales >> 2 & 48], -1),
        minima=torch.cat([minima & 63, rest >> 4 | minima >> 2 & 48], -1),
        factors=_float16(scale),
        factors_of_minima=_float16(minimum),
    )


def _join_q4_k(fields: Fields) -> Tensor:
    codes, scales, minima, factors, factors_of_minima = fields
    assert minima is not None
    assert factors is not None
    assert factors_of_minima is not None
    first, last = zip(scales.chunk(2, -1), minima.chunk(2, -1), strict=True)
    high = [low | (rest >> 4) << 6 for low, rest in zip(first, last, strict=True)]
    rest = last[0] & 15 | (last[1] & 15) << 4
    nibbles = _two_halves(codes.unflatten(-1, (4, 64))).flatten(-2)
    return torch.cat([_bytes(factors), _bytes(factors_of_minima), *high, rest, nibbles], -1)


def _split_q6_k(blocks: Tensor) -> Fields:
    low, high, scales, scale = blocks.split([128, 64, 16, 2], -1)
    nibbles = _halves(low.unflatten(-1, (2, 64))).flatten(-2)
    pairs = _split(high.unflatten(-1, (2, 32)), (0, 2, 4, 6), -2).flatten(-3)
    return Fields(nibbles | pairs << 4, _numbers(scales, torch.int8), factors=_float16(scale))


def _join_q6_k(fields: Fields) -> Tensor:
    assert fields.factors is not None
    low = _two_halves((fields.codes & 15).unflatten(-1, (2, 128))).flatten(-2)
    first, second, third, fourth = (fields.codes >> 4).unflatten(-1, (2, 4, 32)).unbind(-2)
    high = (first | second << 2 | third << 4 | fourth << 6).flatten(-2)
    return torch.cat([low, high, _bytes(fields.scales), _bytes(fields.factors)], -1)


def _join_blocks(codes: Tensor, scales: Tensor, bits: int) -> Packed:
    """Joins codes [rows, blocks, 32] and scales [rows, blocks, 1]."""
    return Packed(_join_simple(bits)(Fields(codes, scales)).flatten(-2))


def _inverse(scales: Tensor) -> Tensor:
    """Returns 1 / scale; 0 if that is infinite, because such scales are 0 in float16."""
    inverse = 1 / scales
    return inverse.where(inverse.isfinite(), 0)


def _float16_scales(scales: Tensor) -> Tensor:
    """Returns scales [..., 1] in float16."""
    halves = scales.to(torch.float16)
    rule = "fit the float16 scales of the format"
    require(bool(halves.isfinite().all()), "quantize: weight", rule, "too large values")
    return halves


def _encode_q4_0(weight: Tensor, group: int | None) -> Packed:
    blocks = _groups(weight.float(), 32)
    scales = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -8
    codes = (blocks * _inverse(scales) + 8.5).trunc().clamp(0, 15)
    return _join_blocks(codes.to(torch.uint8), _float16_scales(scales), 4)


def _encode_q8_0(weight: Tensor, group: int | None) -> Packed:
    blocks = _groups(weight.float(), 32)
    scales = _largest(blocks) / 127
    scaled = blocks * _inverse(scales)
    codes = (scaled.abs() + 0.5).floor() * scaled.sign()
    return _join_blocks(codes.to(torch.int8), _float16_scales(scales), 8)


def _encode_gguf_mxfp4(weight: Tensor, group: int | None) -> Packed:
    blocks = _groups(weight.float(), 32)
    largest = _largest(blocks)
    exponents = _exponents(largest, largest.log2().floor())
    magnitudes = blocks.new_tensor(_E2M1)
    midpoints = (magnitudes[1:] + magnitudes[:-1]) / 2
    codes = torch.bucketize(blocks.abs() / _powers(exponents), midpoints)
    negative = (blocks < 0) & (codes > 0)
    return _join_blocks((codes + 8 * negative).to(torch.uint8), exponents, 4)


# The table of formats

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BYTES = torch.arange(256, dtype=torch.uint8)
# Quantiles of a normal distribution (arXiv 2305.14314, App. E).
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


def _offset(bits: int, offset: int) -> tuple[float, ...]:
    return tuple(float(code - offset) for code in range(1 << bits))


def _values(dtype: torch.dtype) -> tuple[float, ...]:
    return tuple(_BYTES.view(dtype).float().tolist())


LAYOUTS: dict[str, FormatLayout] = {
    "fp8": FormatLayout(
        values=_values(torch.float8_e4m3fn),
        dtype=torch.float8_e4m3fn,
        block=(1, 1),
        **_with_scales(_bytes, partial(_numbers, dtype=torch.float8_e4m3fn)),
        encode=_encode_fp8,
        scales=(*_FLOATS, torch.float8_e8m0fnu),
    ),
    "int4": FormatLayout(
        values=_offset(4, 8),
        dtype=torch.int32,
        block=(8, 1),
        **_with_scales(_low_first, lambda codes: _consecutive(codes).view(torch.int32)),
        encode=partial(_encode_integers, bits=4),
        scales=_FLOATS,
    ),
    "int8": FormatLayout(
        values=_values(torch.int8),
        dtype=torch.int8,
        block=(1, 1),
        **_with_scales(_bytes, partial(_numbers, dtype=torch.int8)),
        encode=partial(_encode_integers, bits=8),
        scales=_FLOATS,
    ),
    "mxfp4": FormatLayout(
        values=(*_E2M1, *(-value for value in _E2M1)),
        dtype=torch.uint8,
        block=(2, 1),
        **_with_scales(_low_first, _consecutive, _exponents_of, _bytes),
        encode=_encode_mxfp4,
        group=32,
        scales=(torch.uint8, torch.float8_e8m0fnu),
    ),
    "nf4": FormatLayout(
        values=_NF4,
        dtype=torch.uint8,
        block=(2, 1),
        **_with_scales(_high_first, lambda codes: _pairs(codes[..., 1::2], codes[..., ::2])),
        encode=_encode_nf4,
        group=64,
        scales=(torch.float32,),
    ),
    "gguf_mxfp4": _gguf(
        (32, 17),
        32,
        (*_E2M1, *(0.0 - value for value in _E2M1)),  # code 8 is +0
        _split_simple(1, 4, _exponents_of),
        _join_simple(4),
        _encode_gguf_mxfp4,
    ),
    "gguf_q4_0": _gguf(
        (32, 18), 32, _offset(4, 8), _split_simple(2, 4), _join_simple(4), _encode_q4_0
    ),
    "gguf_q8_0": _gguf(
        (32, 34),
        32,
        _values(torch.int8),
        _split_simple(2, 8),
        _join_simple(8),
        _encode_q8_0,
    ),
    "gguf_q4_k": _gguf((256, 144), 32, _offset(4, 0), _split_q4_k, _join_q4_k),
    "gguf_q6_k": _gguf((256, 210), 16, _offset(6, 32), _split_q6_k, _join_q6_k),
}
