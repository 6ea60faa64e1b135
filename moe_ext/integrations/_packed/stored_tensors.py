"""The tensors of a checkpoint in files: packed or not, read one at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path, PurePath
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moe_ext.checks import require, required
from moe_ext.formats import FormatName, dequantize
from moe_ext.formats._layouts import FP8_BLOCK, LAYOUTS
from moe_ext.integrations._packed.errors import errors_of_weight
from moe_ext.integrations._packed.gguf_package import GGUF_DTYPES, GGUF_FORMATS, gguf_package

__all__ = [
    "DTYPES",
    "Bytes",
    "Metadata",
    "Stored",
    "files_of_gguf",
    "read_gguf",
    "read_safetensors",
    "safetensors_header",
]


@dataclass(frozen=True)
class Bytes:
    """A tensor in a file: a range of bytes, its dtype and its shape."""

    path: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size of the tensor."""
        return prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        """Reads the tensor into memory of its own; a large one is in huge pages.

        A memory map of the file would have small pages, which the processor has to look up while
        it reads the weights of each token.
        """
        none = torch.empty(0, dtype=torch.uint8)
        data: Tensor = torch.ops.moe_ext._empty_rows(none, self.nbytes)
        with self.path.open("rb") as file:
            file.seek(self.start)
            num_read = file.readinto(data.numpy().data)
        rule = f"have {self.nbytes:,} bytes from byte {self.start:,} on"
        require(num_read == self.nbytes, str(self.path), rule, num_read)
        return data.view(self.dtype).view(self.shape)

    def expert(self, index: int) -> Bytes:
        """Returns one of the matrices that are stacked in the tensor."""
        one = replace(self, shape=self.shape[1:])
        return replace(one, start=self.start + index * one.nbytes)

    def meta(self) -> Tensor:
        """Returns a tensor on the meta device with the dtype and shape."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class Stored:
    """A weight in a file.

    Attributes:
        codes: the codes, or the numbers of a weight that is not packed.
        scales: the scales of a format that has them in another tensor.
        format: the format of `moe_ext.formats`; None for numbers, and for other formats.
        ggml_type: the name of a GGUF format that `moe_ext.formats` does not have.
    """

    codes: Bytes
    scales: Bytes | None = None
    format: FormatName | None = None
    ggml_type: str | None = None

    @property
    def kind(self) -> str:
        """The format or the dtype, as in messages."""
        return self.format or self.ggml_type or str(self.codes.dtype).removeprefix("torch.")

    @property
    def _in_blocks(self) -> bool:
        """Whether the codes have the shape [..., out, in/32, 16] of gpt-oss."""
        return self.scales is not None and len(self.codes.shape) == len(self.scales.shape) + 1 > 2

    def expert(self, index: int) -> Stored:
        """Returns one of the matrices that are stacked."""
        scales = self.scales and self.scales.expert(index)
        return replace(self, codes=self.codes.expert(index), scales=scales)

    def packed(self, meta: bool = False) -> tuple[Tensor, Tensor | None]:
        """Reads codes [..., out, n] and scales as `moe_ext.formats.dequantize` takes them.

        Args:
            meta: return tensors on the meta device instead.
        """
        codes = self.codes.meta() if meta else self.codes.read()
        codes = codes.flatten(-2) if self._in_blocks else codes
        if self.scales is None:
            return codes, None
        scales = self.scales.meta() if meta else self.scales.read()
        if scales.numel() == prod(codes.shape[:-2]) and codes.shape[-2] > 1:  # one for the matrix
            blocks = scales.reshape(*codes.shape[:-2], 1, 1)
            is_block = self.format == "fp8" and max(codes.shape[-2:]) <= FP8_BLOCK
            scales = blocks if is_block else blocks.expand(*codes.shape[:-1], 1)
        return codes, scales

    def check(self, name: str) -> None:
        """Requires that codes and scales fit the format; reads nothing."""
        if self.format is not None:
            with errors_of_weight(name):
                LAYOUTS[self.format].check(self.format, *self.packed(meta=True))

    def read(self, dtype: torch.dtype) -> Tensor:
        """Reads the weight: a packed one dequantized in a dtype, another one as it is."""
        if self.format is not None:
            codes, scales = self.packed()
            return dequantize(codes, scales, format=self.format, dtype=dtype)
        if self.ggml_type is not None:
            gguf = gguf_package()
            kind = gguf.GGMLQuantizationType[self.ggml_type]
            data = gguf.dequantize(self.codes.read().numpy(), kind)
            return torch.from_numpy(data).to(dtype)
        return self.codes.read()


# safetensors

DTYPES = {
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "U8": torch.uint8,
}


def safetensors_header(path: Path) -> tuple[bytes, dict[str, Bytes]]:
    """Returns the bytes before the tensors of a safetensors file, and its tensors by name."""
    try:
        # Checks the header and the size of the file. For "pt", it would map the file into memory.
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from error
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        file.seek(0)
        header = file.read(8 + size)
    tensors = {}
    for name, entry in json.loads(header[8:]).items():
        if name != "__metadata__":
            own = entry["dtype"]
            rule = f"have a dtype of {', '.join(DTYPES)}"
            dtype = required(DTYPES.get(own), f"{path}: {name}", rule, own)
            start = len(header) + entry["data_offsets"][0]
            tensors[name] = Bytes(path, start, dtype, tuple(entry["shape"]))
    return header, tensors


def read_safetensors(folder: Path) -> dict[str, Stored]:
    """Returns the weights of all safetensors files of a folder, by the names of transformers.

    Codes and scales are one weight, with the name that the weight has if it is not packed.

    Raises:
        ValueError: a file is incomplete, or the scales of a weight are missing.
    """
    files = _files_of(folder)
    tensors: dict[str, Bytes] = {}
    for path in files:
        tensors |= safetensors_header(path)[1]
    return dict(_weights(tensors))


def _files_of(folder: Path) -> list[Path]:
    """Returns the safetensors files that belong to the checkpoint of a folder."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        wrong = [name for name in names if Path(name).name != name]
        require(not wrong, str(index), "name files of its folder", wrong)
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [path.name for path in files if not path.exists()]
    require(bool(files), str(folder), "have a safetensors file", "none")
    require(not missing, str(folder), "have all files of its index", f"no {missing}")
    return files


_UNSUPPORTED = {
    ".weight_g_idx": "have no order of groups",
    ".weight_global_scale": "have no global scale",
    ".weight_zero_point": "have no zero points",
}


def _weights(tensors: dict[str, Bytes]) -> Iterator[tuple[str, Stored]]:
    """Joins the tensors that belong to a weight; see `read_safetensors`."""
    used: set[str] = set()

    def scales_of(name: str, *names: str) -> Bytes:
        present = [candidate for candidate in names if candidate in tensors]
        require(bool(present), name, "have scales", f"no tensor {' or '.join(names)}")
        used.add(present[0])
        return tensors[present[0]]

    weights: dict[str, Stored] = {}
    for name, codes in tensors.items():
        for suffix, rule in _UNSUPPORTED.items():
            require(not name.endswith(suffix), name.removesuffix(suffix), rule, name)
        if name.endswith("_blocks"):
            base = name.removesuffix("_blocks")
            weights[base] = Stored(codes, scales_of(name, f"{base}_scales"), "mxfp4")
        elif name.endswith(".weight_packed"):
            base = name.removesuffix("_packed")
            used.add(f"{base}_shape")
            format: FormatName = "int4" if codes.dtype == torch.int32 else "mxfp4"
            weights[base] = Stored(codes, scales_of(name, f"{base}_scale"), format)
        elif codes.dtype in (torch.float8_e4m3fn, torch.int8):
            scales = scales_of(name, f"{name}_scale_inv", f"{name}_scale")
            eight_bits: FormatName = "int8" if codes.dtype == torch.int8 else "fp8"
            if eight_bits == "fp8" and scales.dtype == torch.uint8:  # exponents, as bytes
                scales = replace(scales, dtype=torch.float8_e8m0fnu)
            weights[name] = Stored(codes, scales, eight_bits)
        else:
            weights[name] = Stored(codes)
    return ((name, weight) for name, weight in weights.items() if name not in used)


# GGUF


class Metadata:
    """The fields of a GGUF file."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields
        self.architecture: str = fields["general.architecture"].contents()

    def get(self, key: str) -> Any:
        """Returns the value of a field of the architecture, or None."""
        field = self._fields.get(f"{self.architecture}.{key}")
        return None if field is None else field.contents()

    def token(self, key: str) -> int | None:
        """Returns a token id, such as that of "eos", or None."""
        field = self._fields.get(f"tokenizer.ggml.{key}_token_id")
        return None if field is None else int(field.contents())


_Path = TypeVar("_Path", bound=PurePath)


def files_of_gguf(path: _Path) -> list[_Path]:
    """Returns all parts of a split file, such as ``-00001-of-00003.gguf``, or the file itself."""
    match = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    if match is None:
        return [path]
    names = [f"{match[1]}-{i + 1:05}-of-{match[2]}.gguf" for i in range(int(match[2]))]
    return [path.with_name(name) for name in names]


def read_gguf(path: Path) -> tuple[Metadata, dict[str, Stored]]:
    """Returns the metadata and the weights of a GGUF file, by the names in the file.

    The other parts of a split file must be in its folder.

    Raises:
        ValueError: a file is incomplete.
        ImportError: the package gguf is not installed.
    """
    gguf = gguf_package()
    weights: dict[str, Stored] = {}
    metadata = None
    for part in files_of_gguf(path):
        try:
            reader = gguf.GGUFReader(part)
            metadata = metadata or Metadata(reader.fields)
        except (ValueError, LookupError, OverflowError) as error:
            raise ValueError(f"{part} is not a complete GGUF file: {error}") from error
        for tensor in reader.tensors:
            kind = tensor.tensor_type.name
            dtype = GGUF_DTYPES.get(kind, torch.uint8)
            shape = tuple(int(size) for size in reversed(tensor.shape))
            if kind not in GGUF_DTYPES:
                size, num_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
                shape = (*shape[:-1], shape[-1] // size * num_bytes)
            format = GGUF_FORMATS.get(kind)
            ggml_type = None if format or kind in GGUF_DTYPES else kind
            codes = Bytes(part, int(tensor.data_offset), dtype, shape)
            weights[tensor.name] = Stored(codes, None, format, ggml_type)
    assert metadata is not None
    return metadata, weights
