"""Random packed weights, in the layouts of moe_ext and of GGUF."""

from typing import NamedTuple

import torch
from torch import Tensor

from moe_ext.formats import Packed

FP8_BLOCK = 128  # the rows and the columns with one scale


class BlockFormat(NamedTuple):
    """How a format holds numbers: a block has some inputs in some bytes."""

    inputs: int
    bytes: int
    deviation: float  # the standard deviation of random codes whose scale is 1


BLOCKS = {
    "mxfp4": BlockFormat(32, 17, 2.9),
    "gguf_q4_0": BlockFormat(32, 18, 4.6),
    "gguf_q8_0": BlockFormat(32, 34, 74),
    "gguf_q4_k": BlockFormat(256, 144, 258),
    "gguf_q6_k": BlockFormat(256, 210, 1370),
    "fp8": BlockFormat(1, 1, 114),
    "int4": BlockFormat(32, 16, 4.6),
    "nf4": BlockFormat(64, 32, 0.52),
}


class RandomWeight(NamedTuple):
    """Random weights [E, out, in] with a variance of about 1 / in."""

    packed: Packed  # in the layout of moe_ext.formats
    blocks: Tensor | None = None  # in the layout of GGUF, uint8 [E, out, n]; None if it has none

    @classmethod
    def draw(cls, format: str, num_experts: int, outputs: int, inputs: int) -> "RandomWeight":
        block = BLOCKS[format]
        size = num_experts * outputs * inputs // block.inputs * block.bytes
        words = torch.empty(-(-size // 8), dtype=torch.int64).random_(-(2**63), None)
        codes = words.view(torch.uint8)[:size].view(num_experts, outputs, -1)
        scale = 1 / (block.deviation * inputs**0.5)

        def scales(*sizes: int) -> Tensor:
            return (0.5 + torch.rand(num_experts, *sizes)) * scale

        if format == "fp8":
            codes -= (codes & 127 == 127).to(torch.uint8)  # no NaN
            own = scales(-(-outputs // FP8_BLOCK), -(-inputs // FP8_BLOCK))
            return cls(Packed(codes.view(torch.float8_e4m3fn), own))
        own = scales(outputs, inputs // block.inputs)
        if format == "int4":
            return cls(Packed(codes.view(torch.int32), own.bfloat16()))
        if format == "nf4":
            return cls(Packed(codes, own))
        blocks = codes.unflatten(-1, (-1, block.bytes))
        if format == "mxfp4":
            blocks[..., 0] = (127 + own.log2().round()).to(torch.uint8)
            return cls(native_mxfp4(blocks), codes)
        # In Q4_K, the scale and the minimum, which makes the mean 0.
        factors = [own, 7.5 * own] if format == "gguf_q4_k" else [own]
        half = torch.stack(factors, -1).half().view(torch.uint8)
        at = block.bytes - 2 if format == "gguf_q6_k" else 0
        blocks[..., at : at + half.shape[-1]] = half
        return cls(Packed(codes), codes)


def native_mxfp4(blocks: Tensor) -> Packed:
    """Returns blocks of GGUF as codes and scales of mxfp4, whose nibbles have another order."""
    codes = blocks[..., 1:]
    values = torch.cat([codes & 15, codes >> 4], -1)
    return Packed((values[..., ::2] | values[..., 1::2] << 4).flatten(-2), blocks[..., 0])
