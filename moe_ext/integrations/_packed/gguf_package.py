"""The package gguf, and its names of packed formats and of dtypes."""

from __future__ import annotations

from typing import Any

import torch

from moe_ext.formats import FormatName

__all__ = ["DTYPE_NAMES", "FORMAT_NAMES", "GGUF_DTYPES", "GGUF_FORMATS", "gguf_package"]

GGUF_FORMATS: dict[str, FormatName] = {
    "MXFP4": "gguf_mxfp4",
    "Q4_0": "gguf_q4_0",
    "Q4_K": "gguf_q4_k",
    "Q6_K": "gguf_q6_k",
    "Q8_0": "gguf_q8_0",
}
GGUF_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FORMAT_NAMES: dict[str, str] = {format: name for name, format in GGUF_FORMATS.items()}
DTYPE_NAMES = {dtype: name for name, dtype in GGUF_DTYPES.items()}


def gguf_package() -> Any:
    """Returns the package gguf.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise ImportError(f"GGUF files need gguf (pip install gguf), got: {error}") from error
    return gguf
