"""Quantizes a changed weight again, as the tensor of a file is."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ext.formats import quantize
from moe_ext.formats._layouts import FP8_BLOCK, LAYOUTS
from moe_ext.integrations._packed.gguf_package import gguf_package
from moe_ext.integrations._packed.stored_tensors import Stored

__all__ = ["requantized"]


def requantized(name: str, weight: Tensor, stored: Stored) -> tuple[Tensor, Tensor | None]:
    """Returns codes and scales of a weight in the format, the shapes and the dtypes of a file.

    Args:
        name: the weight, as in errors.
        weight: [out, in] in float32, or [..., out, in] for the formats of GGUF.
        stored: the tensor of the file.

    Raises:
        ValueError: the format has no rule of rounding, or cannot hold the weight.
    """
    try:
        codes, scales = _quantized(weight, stored)
    except ValueError as error:
        reason = str(error).removeprefix("quantize: ")
        raise ValueError(f"{name} cannot be written in {stored.kind}: {reason}") from None
    scales = None if scales is None or stored.scales is None else scales.view(stored.scales.shape)
    return codes.reshape(stored.codes.shape), scales


def _quantized(weight: Tensor, stored: Stored) -> tuple[Tensor, Tensor | None]:
    format = stored.format
    if format is None:
        assert stored.ggml_type is not None
        return _by_gguf(weight, stored.ggml_type), None
    own, scales = stored.packed(meta=True)
    if scales is None or format == "mxfp4":
        return quantize(weight, format)
    assert stored.scales is not None
    inputs, blocked = LAYOUTS[format].check(format, own, scales)
    group = None if blocked else inputs // scales.shape[-1]
    dtype = stored.scales.dtype
    if not blocked and len(weight) > 1 and stored.scales.nbytes == dtype.itemsize:
        weight, group = weight.reshape(1, -1), weight.numel()  # one scale for the matrix
    if format == "fp8":
        return _fp8(weight, group, dtype)
    return quantize(weight.to(dtype), format, group)


def _fp8(weight: Tensor, group: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantizes in fp8 by the scales as the file has them."""
    codes, scales = quantize(weight, "fp8", group)
    assert scales is not None
    if dtype == torch.float32:
        return codes, scales
    if dtype == torch.float8_e8m0fnu:  # exponents, rounded up so that no code overflows
        scales = scales.where(scales > 0, 1).log2().ceil().exp2()
    scales = scales.to(dtype)
    wide = scales.float()
    if group is None:
        wide = wide.repeat_interleave(FP8_BLOCK, 0)[: len(weight)]
    wide = wide.repeat_interleave(group or FP8_BLOCK, 1)[:, : weight.shape[1]]
    return (weight / wide.where(wide != 0, 1)).clamp(-448, 448).to(torch.float8_e4m3fn), scales


def _by_gguf(weight: Tensor, kind: str) -> Tensor:
    """Quantizes in a format of GGUF that `moe_ext.formats` does not have."""
    gguf = gguf_package()
    try:
        data = gguf.quantize(weight.float().numpy(), gguf.GGMLQuantizationType[kind])
    except (NotImplementedError, gguf.quants.QuantError) as error:
        raise ValueError(f"the package gguf has no rule of rounding for it: {error!r}") from None
    return torch.from_numpy(data)
