"""The layout in which the kernels read packed weights; csrc/packed.h describes it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_ext.checks import require, require_one_of, require_tensor
from moe_ext.formats._layouts import (
    FORMATS,
    FP8_BLOCK,
    LAYOUTS,
    Fields,
    FormatName,
    Packed,
    dequantize,
)

PANEL_OUTPUTS = 16
_INPUTS = 8  # whose codes are together
_ALIGNMENT = 64  # of a panel in bytes
_ROWS = 1024  # that are packed together, so that what is in between is small


class PackedWeight(NamedTuple):
    """The packed weights of a layer, in the layout that `moe_ext.ops.packed_experts` reads.

    `pack` makes it from the codes and scales of a file, and `unpack` restores these bit for bit.
    The memory is that of the file, except that scales of int4, int8 and fp8 are in float32, and
    those of gguf_q4_k in 8 bits instead of 6.

    Attributes:
        panels: uint8 [E, ceil(out / 16), bytes]; all codes and scales of 16 outputs.
        format: one of `FORMATS`.
        inputs: the number of inputs of the layer.
        outputs: the number of outputs of the layer.
        group: the number of inputs with one scale.
        scales: the dtype of the scales in the file; None for the GGUF formats.
        blocked: whether the file has one scale for a block of 128 x 128 numbers, as in fp8.
    """

    panels: Tensor
    format: FormatName
    inputs: int
    outputs: int
    group: int
    scales: torch.dtype | None = None
    blocked: bool = False

    @classmethod
    def pack(
        cls, codes: Tensor, scales: Tensor | None = None, *, format: FormatName
    ) -> PackedWeight:
        """Packs the weights of E experts, one at a time: the peak of memory is low.

        Args:
            codes: [E, out, n], as `dequantize` takes them.
            scales: [E, …], as `dequantize` takes them. A scale belongs to a multiple of 8 inputs,
                or to all inputs of a row.
            format: one of `FORMATS`.

        Raises:
            TypeError, ValueError: as for `dequantize`; or codes do not have 3 dimensions, or a
                scale belongs to another number of inputs.
        """
        weight = cls._layout(codes, scales, format)
        layout, blocked, shape = LAYOUTS[format], weight.blocked, codes.shape
        panels = weight.empty_panels(shape[0], codes.device)
        for e in range(shape[0]):
            own = None if scales is None else scales[e]
            if own is not None and blocked:
                own = own.repeat_interleave(FP8_BLOCK, 0)[: shape[1]]
            for first in range(0, shape[1], _ROWS):
                rows = slice(first, first + _ROWS)
                scales_of_rows = None if own is None else own[rows]
                part = weight._join(layout.split(codes[e, rows].contiguous(), scales_of_rows))
                panel = first // PANEL_OUTPUTS
                panels[e, panel : panel + len(part)] = part
        return weight._replace(panels=panels)

    def empty_panels(self, num_experts: int, device: torch.device | None = None) -> Tensor:
        """Returns uninitialized panels of this layout; on a CPU, large ones are in huge pages."""
        _, *rest = self.shape(num_experts)
        none = torch.empty(0, *rest, dtype=torch.uint8, device=device)
        panels: Tensor = torch.ops.moe_ext._empty_rows(none, num_experts)
        return panels

    @classmethod
    def _layout(cls, codes: Tensor, scales: Tensor | None, format: FormatName) -> PackedWeight:
        """Checks the arguments of `pack`, which may be on the meta device; packs nothing.

        The panels of the result are the codes.
        """
        require_one_of("PackedWeight: format", FORMATS, format)
        require_tensor("PackedWeight", codes=codes)
        shape = tuple(codes.shape)
        require(codes.dim() == 3, "PackedWeight: codes", "have the shape [E, out, n]", shape)
        layout = LAYOUTS[format]
        inputs, blocked = layout.check(format, codes, scales)
        group = layout.group or FP8_BLOCK
        if layout.group is None and scales is not None and not blocked:
            group = inputs // scales.shape[-1]
        rule = f"belong to a multiple of {_INPUTS} inputs, or to all of a row"
        whole = group % _INPUTS == 0 or group == inputs
        require(whole, "PackedWeight: scales", rule, f"{group} inputs")
        dtype = None if scales is None else scales.dtype
        return cls(codes, format, inputs, shape[1], group, dtype, blocked)

    def unpack(self) -> Packed:
        """Returns the codes and scales of the file, bit for bit."""
        layout = LAYOUTS[self.format]
        codes: list[Tensor] = []
        scales: list[Tensor] = []
        for panels in self.panels if len(self.panels) else self.panels.new_zeros(self.shape(1)):
            fields = self._split(panels)
            if self.blocked:
                fields = fields._replace(scales=fields.scales[::FP8_BLOCK])
            packed = layout.join(fields)
            codes.append(packed.codes)
            if packed.scales is not None:
                scales.append(packed.scales)
        own = None
        if self.scales is not None:  # exponents may be uint8 or float8_e8m0fnu in a file
            own = torch.stack(scales)[: len(self.panels)].view(self.scales)
        return Packed(torch.stack(codes)[: len(self.panels)], own)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the weights [E, out, in] in a dtype; see `moe_ext.formats.dequantize`."""
        codes, scales = self.unpack()
        return dequantize(codes, scales, format=self.format, dtype=dtype)

    def shape(self, num_experts: int) -> tuple[int, int, int]:
        """Returns the shape of panels for a number of experts."""
        num_panels = -(-self.outputs // PANEL_OUTPUTS)
        size = self._join(self._row()).shape[1]
        return num_experts, num_panels, size

    def _row(self) -> Fields:
        """Returns fields of one row that are zero."""
        layout = LAYOUTS[self.format]
        size = self.inputs // layout.block[0] * layout.block[1]
        # On the CPU also within torch.device("meta").
        codes = torch.zeros(1, size, dtype=layout.dtype, device="cpu")
        if self.scales is None:
            return layout.split(codes, None)
        num_groups = -(-self.inputs // self.group)
        return layout.split(codes, torch.zeros(1, num_groups, dtype=self.scales, device="cpu"))

    def _is_wide(self) -> bool:
        """Returns whether the scales of a panel are in float32."""
        return torch.float32 in LAYOUTS[self.format].scales

    def _bits(self) -> int:
        return len(LAYOUTS[self.format].values).bit_length() - 1

    def _join(self, fields: Fields) -> Tensor:
        """Makes the panels [panels, bytes] of the fields of an expert."""
        parts = _join_codes(fields.codes, self._bits())
        if self._is_wide():
            fields = fields._replace(scales=_widened(fields.scales))
        for numbers in fields[1:]:
            if numbers is not None:
                rows = numbers.contiguous().view(torch.uint8).unflatten(1, (numbers.shape[1], -1))
                parts.append(_in_panels(rows).transpose(1, 2).flatten(1))
        panels = torch.cat(parts, 1)
        return pad(panels, (0, -panels.shape[1] % _ALIGNMENT))

    def _split(self, panels: Tensor) -> Fields:
        """Undoes `_join`."""
        like = self._row()
        codes, rest = _split_codes(panels, self._bits(), self.inputs)
        fields: list[Tensor | None] = [codes[: self.outputs]]
        for numbers in like[1:]:
            if numbers is None:
                fields.append(None)
                continue
            narrow = self._is_wide()
            dtype = torch.float32 if narrow else numbers.dtype
            count = numbers.shape[1]
            size = PANEL_OUTPUTS * count * dtype.itemsize
            part, rest = rest[:, :size], rest[:, size:]
            rows = part.unflatten(1, (count, PANEL_OUTPUTS, -1)).transpose(1, 2)
            rows = rows.flatten(2).flatten(0, 1)
            own = rows[: self.outputs].contiguous().view(dtype)
            fields.append(_narrowed(own, numbers.dtype) if narrow else own)
        return Fields._make(fields)


def _in_panels(rows: Tensor) -> Tensor:
    """Returns rows [out, ...] as [panels, 16, ...]; the rows that do not exist are 0."""
    missing = rows.new_zeros(-len(rows) % PANEL_OUTPUTS, *rows.shape[1:])
    panels: Tensor = torch.cat([rows, missing]).unflatten(0, (-1, PANEL_OUTPUTS))
    return panels


def _join_codes(codes: Tensor, bits: int) -> list[Tensor]:
    """Returns the bytes of the codes [out, in] in each panel: [panels, bytes], once or twice."""
    units = pad(_in_panels(codes), (0, -codes.shape[1] % _INPUTS)).unflatten(2, (-1, _INPUTS))
    units = units.transpose(1, 2)  # [panels, units, 16, 8]
    if bits == 8:
        return [units.unflatten(3, (2, 4)).transpose(2, 3).flatten(1)]
    nibbles = units & 15
    parts = [(nibbles[..., :4] | nibbles[..., 4:] << 4).flatten(1)]
    if bits == 6:
        high = pad(units >> 4, (0, 0, 0, 0, 0, units.shape[1] % 2)).unflatten(1, (-1, 2))
        groups = high.transpose(2, 3).flatten(3).unflatten(3, (4, 4))
        first, second, third, fourth = groups.unbind(3)
        parts.append((first | second << 2 | third << 4 | fourth << 6).flatten(1))
    return parts


def _split_codes(panels: Tensor, bits: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Undoes `_join_codes`. Returns codes [16 · panels, in] and the other bytes of the panels."""
    num_units = -(-inputs // _INPUTS)
    low = (8 if bits == 8 else 4) * PANEL_OUTPUTS * num_units
    words, rest = panels[:, :low], panels[:, low:]
    if bits == 8:
        units = words.unflatten(1, (-1, 2, PANEL_OUTPUTS, 4)).transpose(2, 3).flatten(3)
    else:
        pairs = words.unflatten(1, (-1, PANEL_OUTPUTS, 4))
        units = torch.cat([pairs & 15, pairs >> 4], -1)
    if bits == 6:
        size = 4 * PANEL_OUTPUTS * ((num_units + 1) // 2)
        high = rest[:, :size].unflatten(1, (-1, PANEL_OUTPUTS, 4))
        rest = rest[:, size:]
        high = torch.stack([high >> shift & 3 for shift in (0, 2, 4, 6)], -2).flatten(3)
        high = high.unflatten(3, (2, _INPUTS)).transpose(2, 3).flatten(1, 2)[:, :num_units]
        units = units | high << 4
    return units.transpose(1, 2).flatten(2).flatten(0, 1)[:, :inputs], rest


def _widened(scales: Tensor) -> Tensor:
    """Returns scales in float32; exact for every bit pattern of bfloat16."""
    if scales.dtype == torch.bfloat16:
        return (scales.contiguous().view(torch.int16).int() << 16).view(torch.float32)
    return scales.float()


def _narrowed(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Undoes `_widened`."""
    bits = scales.view(torch.int32)
    if dtype == torch.bfloat16:
        return (bits >> 16).to(torch.int16).view(dtype)
    if dtype == torch.float8_e8m0fnu:
        return (bits >> 23).to(torch.uint8).view(dtype)
    return scales.to(dtype)
