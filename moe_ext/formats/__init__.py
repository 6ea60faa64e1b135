"""Packed formats of published weights: small codes, and one scale for a group of values.

A weight matrix has the shape [out, in] here, as in the files; leading dimensions such as the
experts are kept. In every format, a value is

    w = values[code] · scale - minimum

in float32, where `values` is a table of the format and the minimum is absent in most formats.
`dequantize` computes it bit for bit as the reference package of the format:

    ==========  ==================================  ===========================  ==================
    format      codes                               scales                       reference
    ==========  ==================================  ===========================  ==================
    mxfp4       uint8 [out, in/2], low bits first   [out, in/32]                 transformers
    fp8         float8_e4m3fn [out, in]             [out/128, in/128], [out, n]  torch
    int4        int32 [out, in/8], low bits first   [out, n]                     compressed-tensors
    int8        int8 [out, in]                      [out, n]                     compressed-tensors
    nf4         uint8 [out, in/2], high bits first  [out, in/64]                 bitsandbytes
    gguf_mxfp4  uint8 [out, 17·in/32]               among the codes              gguf
    gguf_q4_0   uint8 [out, 18·in/32]               among the codes              gguf
    gguf_q8_0   uint8 [out, 34·in/32]               among the codes              gguf
    gguf_q4_k   uint8 [out, 144·in/256]             among the codes              gguf
    gguf_q6_k   uint8 [out, 210·in/256]             among the codes              gguf
    ==========  ==================================  ===========================  ==================

A scale of [out, n] belongs to in/n inputs of one row. Scales among the codes are passed as None.
mxfp4 and gguf_mxfp4 are the microscaling format of the Open Compute Project (arXiv 2310.10537), nf4
is the format of QLoRA (arXiv 2305.14314).
"""

from moe_ext.formats._layouts import FORMATS, FormatName, Packed, dequantize, quantize
from moe_ext.formats._panels import PackedWeight

__all__ = ["FORMATS", "FormatName", "Packed", "PackedWeight", "dequantize", "quantize"]
