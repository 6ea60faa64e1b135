"""The tensors in files that form the weights of experts."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from moe_ext.checks import require
from moe_ext.formats import FormatName, PackedWeight
from moe_ext.formats._layouts import FP8_BLOCK
from moe_ext.integrations._packed.stored_tensors import Stored

__all__ = ["LayerTensors"]


@dataclass(frozen=True)
class LayerTensors:
    """The tensors in files that form one weight [E, out, in] of all experts, or a bias [E, out].

    Attributes:
        parts: the weights whose rows form those of the layer, such as gate and up. Each is a
            stack [E, out, in], or a list of E matrices.
        interleaved: whether the rows of the parts alternate, instead of following each other.
    """

    parts: tuple[Stored | list[Stored], ...]
    interleaved: bool = False

    @property
    def stored(self) -> list[Stored]:
        """All tensors."""
        return [
            tensor for part in self.parts for tensor in (part if isinstance(part, list) else [part])
        ]

    @property
    def kind(self) -> str:
        """The formats of the tensors, or their dtypes."""
        return " and ".join(sorted({tensor.kind for tensor in self.stored}))

    @property
    def format(self) -> FormatName | None:
        """The format, if all tensors have the same."""
        formats = {tensor.format for tensor in self.stored}
        return formats.pop() if len(formats) == 1 else None

    def num_experts(self) -> list[int]:
        """Returns the number of experts of each part."""
        return [len(p) if isinstance(p, list) else p.codes.shape[0] for p in self.parts]

    def layout(self) -> PackedWeight:
        """Returns the layout of the packed weight of one expert, without reading it.

        Raises:
            ValueError, TypeError: the tensors cannot be packed.
        """
        assert self.format is not None
        codes, scales = self._expert(0, meta=True)
        own = None if scales is None else scales[None]
        return PackedWeight._layout(codes[None], own, self.format)

    def pack(self) -> PackedWeight:
        """Reads and packs the weight, one expert at a time."""
        layout = self.layout()
        format, num_experts = layout.format, self.num_experts()[0]
        panels = layout.empty_panels(num_experts)
        for e in range(num_experts):
            codes, scales = self._expert(e)
            own = None if scales is None else scales[None]
            panels[e] = PackedWeight.pack(codes[None], own, format=format).panels[0]
        return layout._replace(panels=panels)

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """Reads the weight [E, out, in] or bias [E, out] and dequantizes it."""
        return self._join([_stacked(part, dtype) for part in self.parts], 1)

    def _expert(self, index: int, meta: bool = False) -> tuple[Tensor, Tensor | None]:
        """Returns codes [out, n] and scales of an expert."""
        own = [p[index] if isinstance(p, list) else p.expert(index) for p in self.parts]
        codes, scales = zip(*(tensor.packed(meta) for tensor in own), strict=True)
        if scales[0] is None:
            return self._join(codes, 0), None
        rows = [len(code) for code in codes]
        blocked = any(len(s) != n for s, n in zip(scales, rows, strict=True))
        mixed = self.interleaved or any(n % FP8_BLOCK for n in rows[:-1])
        if blocked and len(rows) > 1 and mixed:
            # A block of the joined rows would have rows of several parts.
            scales = tuple([_by_row(s, n) for s, n in zip(scales, rows, strict=True)])
            rule = f"have a multiple of {FP8_BLOCK} inputs"
            inputs = codes[0].shape[1]
            require(inputs % FP8_BLOCK == 0 or inputs < FP8_BLOCK, "fp8 weights", rule, inputs)
        return self._join(codes, 0), self._join(scales, 0)

    def _join(self, parts: Any, dim: int) -> Tensor:
        if len(parts) == 1:
            return parts[0]  # type: ignore[no-any-return]
        if self.interleaved:
            return torch.stack(tuple(parts), dim + 1).flatten(dim, dim + 1)
        return torch.cat(tuple(parts), dim)

    def unpack(self, weight: PackedWeight, part: int, index: int) -> tuple[Tensor, Tensor | None]:
        """Undoes `pack` for one expert of a part: returns codes and scales as in the file."""
        packed = weight._replace(panels=weight.panels[index : index + 1]).unpack()
        own = self.parts[part]
        stored = own[index] if isinstance(own, list) else own.expert(index)
        codes = self.own_rows(packed.codes, part).reshape(stored.codes.shape)
        if packed.scales is None or stored.scales is None:
            return codes, None
        shape = stored.scales.shape
        if weight.blocked:
            first, rows = self._rows(part)
            scales = packed.scales[0, first // FP8_BLOCK : -(-(first + rows) // FP8_BLOCK)]
        else:
            scales = self.own_rows(packed.scales, part)[0]
            if prod(shape) == 1:  # one for the matrix was repeated for each row
                scales = scales[:1]
            elif shape[0] < len(scales):  # so was one for a block
                scales = scales[::FP8_BLOCK]
        return codes, scales.reshape(shape)

    def own_rows(self, whole: Tensor, part: int) -> Tensor:
        """Returns the rows of a part of [E, out, ...]."""
        if self.interleaved and len(self.parts) > 1:
            return whole[:, part :: len(self.parts)]
        first, rows = self._rows(part)
        return whole[:, first : first + rows]

    def _rows(self, part: int) -> tuple[int, int]:
        """Returns the first row of a part, and their number."""
        sizes = [
            own[0].codes.shape[0] if isinstance(own, list) else own.codes.shape[1]
            for own in self.parts
        ]
        return sum(sizes[:part]), sizes[part]


def _stacked(part: Stored | list[Stored], dtype: torch.dtype) -> Tensor:
    """Reads the tensors [E, ...] of a part."""
    if not isinstance(part, list):
        return part.read(dtype)
    if len(part) == 1:  # without a copy
        return part[0].read(dtype)[None]
    return torch.stack([tensor.read(dtype) for tensor in part])


def _by_row(scales: Tensor, rows: int) -> Tensor:
    """Returns the scales of blocks of fp8 as one for each row."""
    return scales if len(scales) == rows else scales.repeat_interleave(FP8_BLOCK, 0)[:rows]
