"""Parameters that are panels of packed weights: made of floats, and named in a state_dict."""

from __future__ import annotations

import re
from typing import Literal

import torch
from torch import Tensor

from moe_ext.formats import FORMATS, FormatName, PackedWeight, quantize
from moe_ext.formats._layouts import LAYOUTS

__all__ = ["NO_INTEGERS", "Arithmetic", "pack_floats", "panels_name", "parsed_name"]

Arithmetic = Literal["exact", "integer"]
NO_INTEGERS: frozenset[FormatName] = frozenset({"fp8", "nf4"})  # whose numbers are no integers
_ROWS = 128  # that are quantized together: whole panels, and whole blocks of fp8


def pack_floats(
    name: str, weight: Tensor, format: FormatName, group: int | None = None
) -> PackedWeight:
    """Quantizes a weight [E, in, out]; see `QuantizedExperts.from_experts`.

    Raises:
        ValueError: it does not fit the format, or is not finite. The message begins with the name.
    """
    num_experts, inputs, outputs = weight.shape
    dtype = torch.float32 if weight.dtype == torch.float64 else weight.dtype

    def packed(rows: Tensor) -> PackedWeight:
        return PackedWeight.pack(*quantize(rows[None], format, group), format=format)

    try:
        # A format may read the scales of a single row in another way than those of several.
        rows = torch.zeros(min(outputs, 2), inputs, dtype=dtype, device="cpu")
        layout = packed(rows)._replace(outputs=outputs)
        panels = layout.empty_panels(num_experts, weight.device)
        for e in range(0 if weight.is_meta else num_experts):
            first = 0
            for rows in weight[e].mT.split(_ROWS):  # so that what is in between is small
                part = packed(rows.to(dtype)).panels[0]
                panels[e, first : first + len(part)] = part
                first += len(part)
    except ValueError as error:
        raise ValueError(f"{name} cannot be packed in {format}: {error}") from None
    return layout._replace(panels=panels)


# The names of panels in a state_dict


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_DTYPES = {_text(dtype): dtype for layout in LAYOUTS.values() for dtype in layout.scales}
_NAME = re.compile(
    rf"weight_(\d+)_({'|'.join(LAYOUTS)})_(\d+)x(\d+)_g(\d+)(?:_({'|'.join(_DTYPES)}))?(_blocks)?"
)


def panels_name(layer: int, weight: PackedWeight) -> str:
    """Returns the name of the panels of a layer, such as weight_0_mxfp4_128x64_g32_uint8."""
    name = f"weight_{layer}_{weight.format}_{weight.outputs}x{weight.inputs}_g{weight.group}"
    if weight.scales is not None:
        name += f"_{_text(weight.scales)}"
    return name + "_blocks" * weight.blocked


def parsed_name(name: str, panels: Tensor) -> tuple[int, PackedWeight] | None:
    """Undoes `panels_name`; None for other names."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    layer, name, outputs, inputs, group, scales, blocks = match.groups()
    format = next(known for known in FORMATS if known == name)
    sizes = int(inputs), int(outputs), int(group)
    dtype = None if scales is None else _DTYPES[scales]
    return int(layer), PackedWeight(panels, format, *sizes, dtype, blocks is not None)
