"""Writes a model, or the adapters of a model, as a GGUF file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext.checks import require
from moe_ext.formats import FormatName, PackedWeight, quantize
from moe_ext.formats._layouts import LAYOUTS
from moe_ext.integrations._packed.gguf_fields import add_config, add_tokenizer, architecture_of
from moe_ext.integrations._packed.gguf_names import GGUFNames, names_of_experts, without_first
from moe_ext.integrations._packed.gguf_package import (
    DTYPE_NAMES,
    FORMAT_NAMES,
    GGUF_DTYPES,
    gguf_package,
)
from moe_ext.integrations._packed.merged import MergedExperts, MergedModel
from moe_ext.integrations._transformers.experts import by_outputs

__all__ = ["write_gguf_adapter", "write_gguf_model"]

_FLOAT_FORMATS = {"gguf_bf16": torch.bfloat16, "gguf_f16": torch.float16, "gguf_f32": torch.float32}

# The products for which llama.cpp ignores adapters (src/models/deepseek2.cpp).
_WITHOUT_ADAPTERS = {"deepseek2": (".attn_q_a.", ".attn_q_b.", ".attn_q.", ".attn_kv_a_mqa.")}


class _Entry(NamedTuple):
    """A tensor of a GGUF file."""

    name: str
    type: str  # of GGUF
    shape: tuple[int, ...]  # of the numbers, or of the bytes of packed rows
    read: Callable[[], Tensor]


def write_gguf_model(model: MergedModel, path: Path, format: str, source: Path | None) -> str:
    """Writes a model with its adapters merged.

    Args:
        model: the model.
        path: the file.
        format: of the experts: "gguf" for their present one, or another one of `save`.
        source: the folder or GGUF file of the tokenizer; None: there is none.

    Returns:
        What the file has, for a message.
    """
    architecture = architecture_of(model.config)
    entries = [*_entries(model, architecture, format)]
    with _writer(path, architecture) as writer:
        add_config(writer, model.config)
        note = add_tokenizer(writer, source, model.config.vocab_size)
        writer.add_quantization_version(2)
        _write(writer, entries)
    return note


def write_gguf_adapter(model: MergedModel, path: Path) -> None:
    """Writes the active adapters of a model, in the format of llama.cpp."""
    architecture = architecture_of(model.config)
    pairs = [*_pairs(model, architecture)]
    require(bool(pairs), "model", "have active adapters", "none")
    first = pairs[0][1]
    alpha = float(first.scale * first.a.shape[2])  # llama.cpp divides it by the rank of each pair
    entries = []
    for name, pair in pairs:
        # Without alpha, llama.cpp takes 1 for the scale.
        factor = pair.scale * pair.a.shape[2] / alpha if alpha else pair.scale
        own = {"lora_a": pair.a.mT, "lora_b": pair.b.mT * factor}
        for suffix, value in own.items():
            value = value if "_exps." in name else value[0]
            shape = tuple(value.shape)
            entries.append(_Entry(f"{name}.{suffix}", "F32", shape, value.contiguous))
    with _writer(path, architecture) as writer:
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", alpha)
        _write(writer, entries)


@contextmanager
def _writer(path: Path, architecture: str) -> Iterator[Any]:
    """Opens a writer of gguf; the file gets its name at the end."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    writer = gguf_package().GGUFWriter(temporary, architecture)
    try:
        yield writer
        writer.close()
        os.replace(temporary, path)
    finally:
        writer.close()
        temporary.unlink(missing_ok=True)


def _write(writer: Any, entries: list[_Entry]) -> None:
    """Writes the header, and then one tensor after the other."""
    types = gguf_package().GGMLQuantizationType
    for entry in entries:
        dtype = GGUF_DTYPES.get(entry.type, torch.uint8)
        kind = torch.int16 if dtype == torch.bfloat16 else dtype  # numpy has no bfloat16
        numpy = torch.empty(0, dtype=kind).numpy().dtype
        size = torch.empty(entry.shape, dtype=dtype, device="meta").nbytes
        writer.add_tensor_info(entry.name, entry.shape, numpy, size, types[entry.type])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for entry in entries:
        value = entry.read().to(GGUF_DTYPES.get(entry.type, torch.uint8)).contiguous()
        writer.write_tensor_data(value.view(-1).view(torch.uint8).numpy())


# The tensors of a model


def _entries(model: MergedModel, architecture: str, format: str) -> Iterator[_Entry]:
    names = GGUFNames(architecture, model.config)
    for name, tensor in model.tensors.items():
        owner = model.owner(name)
        if owner is not None:
            path, _, key = name.rpartition(".")
            yield from _packed_entries(path, key, owner, format)
            continue
        for target, part in _targets_of(model, names, name):
            value = part(tensor)
            shape, own = tuple(value.shape), model.weight(name, merge=False).dtype
            flat = len(shape) == 1 or name.endswith("bias") or ".ffn_gate_inp." in target
            require(own in DTYPE_NAMES, name, f"have a dtype of {[*DTYPE_NAMES]}", own)
            read = partial(_read_dense, model, name, part)
            kind = "F32" if flat else DTYPE_NAMES[own]
            if format != "gguf" and target.endswith("_exps.weight"):  # experts in floating point
                kind, shape = _stored_as(name, format, shape)
                if format not in _FLOAT_FORMATS:
                    read = partial(_quantize_dense, model, name, part, format, shape)
            yield _Entry(target, kind, shape, read)


def _read_dense(model: MergedModel, name: str, part: Callable[[Tensor], Tensor]) -> Tensor:
    return part(model.weight(name))


def _quantize_dense(
    model: MergedModel,
    name: str,
    part: Callable[[Tensor], Tensor],
    format: str,
    shape: tuple[int, ...],
) -> Tensor:
    """Returns the codes of experts in floating point, which are quantized one at a time."""
    whole = torch.empty(shape, dtype=torch.uint8)
    for rows, target in zip(_read_dense(model, name, part), whole, strict=True):
        target.copy_(quantize(rows.float(), cast(FormatName, format)).codes)
    return whole


def _stored_as(name: str, format: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Returns the type of GGUF and the shape of experts [E, out, in] in a format."""
    if format in _FLOAT_FORMATS:
        return DTYPE_NAMES[_FLOAT_FORMATS[format]], shape
    own = cast(FormatName, format)
    *outer, inputs = shape
    block = LAYOUTS[own].block
    rule = f"have a multiple of {block[0]} inputs for {own}"
    require(inputs % block[0] == 0, name, rule, inputs)
    return FORMAT_NAMES[own], (*outer, inputs // block[0] * block[1])


def _targets_of(
    model: MergedModel, names: GGUFNames, name: str
) -> list[tuple[str, Callable[[Tensor], Tensor]]]:
    """Returns the name of each tensor of GGUF that a weight becomes, and its values of the weight.

    The weight is one outside packed experts.
    """
    base, _, last = name.rpartition(".")
    plain: Any = model.skeleton.get_submodule(base)
    if hasattr(plain, "is_concatenated"):  # experts in floating point
        parts = names_of_experts(base, last)
        return [(part, partial(_rows_of, plain, i, len(parts))) for i, part in enumerate(parts)]
    whole = [target for target in names.whole(name) if target.endswith((".weight", ".bias"))]
    if not whole:
        raise ValueError(f"{name} must have a name in {names.architecture} of GGUF, got none")
    halves = names.halves(name)
    return halves if halves else [(whole[0], without_first)]


def _rows_of(plain: Any, part: int, parts: int, value: Tensor) -> Tensor:
    """Returns the rows of gate or up, [E, rows, ...], of a parameter of transformers."""
    return _own_rows(by_outputs(plain, value), plain, part, parts)


def _own_rows(value: Tensor, plain: Any, part: int, parts: int) -> Tensor:
    """Returns the rows of gate or up of [E, rows, ...]."""
    if parts == 1:
        return value
    return value.chunk(parts, 1)[part] if plain.is_concatenated else value[:, part::parts]


def _packed_entries(path: str, key: str, owner: MergedExperts, format: str) -> Iterator[_Entry]:
    """Yields the tensors of a parameter of packed experts."""
    names, plain = names_of_experts(path, key), owner.plain
    for part, target in enumerate(names):
        if key.endswith("_bias"):
            bias = owner.biases[owner.names.index(key.removesuffix("_bias"))]
            rows = _own_rows(bias, plain, part, len(names))
            yield _Entry(target, "F32", tuple(rows.shape), partial(_same, rows))
            continue
        layer = owner.names.index(key)
        own = _format_of(path, owner, layer, format)
        outputs, inputs = _size(owner, key)
        sizes = owner.num_experts, outputs // len(names), inputs
        kind, shape = _stored_as(f"{path}.{key}", own, sizes)
        read = partial(_read_experts, owner, layer, part, len(names), own, shape)
        yield _Entry(target, kind, shape, read)


def _same(value: Tensor) -> Tensor:
    return value


def _size(owner: MergedExperts, key: str) -> tuple[int, int]:
    """Returns the outputs and inputs of a weight."""
    outputs, inputs = by_outputs(owner.plain, owner.plain.get_parameter(key)).shape[1:]
    return outputs, inputs


def _format_of(path: str, owner: MergedExperts, layer: int, format: str) -> str:
    """Returns the format in a GGUF file of a weight of packed experts."""
    if format != "gguf":
        return format
    packed = owner.packed(layer)
    own = "floats" if packed is None else packed.format
    own = "gguf_mxfp4" if own == "mxfp4" else own
    choices = ", ".join(f"'{name}'" for name in FORMAT_NAMES if LAYOUTS[name].encode is not None)
    rule = f"have a format of GGUF (pass format={choices}, 'gguf_bf16', 'gguf_f16' or 'gguf_f32')"
    require(own in FORMAT_NAMES, path, rule, own)
    can_write = LAYOUTS[own].encode is not None or not owner.is_adapted
    rule = f"have no adapters, because {own} has no rule of rounding (pass format={choices})"
    require(can_write, path, rule, "adapters")
    return own


def _read_experts(
    owner: MergedExperts, layer: int, part: int, parts: int, format: str, shape: tuple[int, ...]
) -> Tensor:
    """Returns the rows of a part of all experts, packed in a format or as floats."""
    dtype = _FLOAT_FORMATS.get(format, torch.uint8)
    whole = torch.empty(shape, dtype=dtype)
    packed = owner.packed(layer)
    for expert, target in enumerate(whole):
        change = owner.change(layer, expert)
        if packed is not None and change is None and dtype == torch.uint8:
            same = _same_codes(packed._replace(panels=packed.panels[expert : expert + 1]), format)
            if same is not None:
                target.copy_(_own_rows(same, owner.plain, part, parts)[0])
                continue
        rows = _own_rows(owner.weight(layer, expert)[None], owner.plain, part, parts)[0]
        target.copy_(
            rows if dtype != torch.uint8 else quantize(rows, cast(FormatName, format)).codes
        )
    return whole


def _same_codes(weight: PackedWeight, format: str) -> Tensor | None:
    """Returns the codes of packed weights in a format of the same values; None in other formats."""
    codes, scales = weight.unpack()
    if weight.format == format:
        return codes
    if (weight.format, format) == ("mxfp4", "gguf_mxfp4"):
        assert scales is not None
        fields = LAYOUTS["mxfp4"].split(codes[0], scales[0])
        return LAYOUTS["gguf_mxfp4"].join(fields).codes[None]
    return None


# The tensors of adapters


def _pairs(model: MergedModel, architecture: str) -> Iterator[tuple[str, ops.LoRA]]:
    """Yields the name of each tensor of GGUF with adapters, and A and B."""
    names = GGUFNames(architecture, model.config)
    for path, owner in model.experts.items():
        for layer, key in enumerate(owner.names):
            pair = owner.pair(layer)
            targets = names_of_experts(path, key)
            for part, target in enumerate(targets if pair is not None else ()):
                assert pair is not None
                rows = _own_rows(pair.b.mT, owner.plain, part, len(targets))
                yield target, pair._replace(b=rows.mT)
    for path in model.linear:
        entries = _targets_of(model, names, f"{path}.weight")
        rule = "be one tensor of GGUF, to have adapters there (merge them: format='gguf')"
        require(len(entries) == 1, path, rule, [name for name, _ in entries])
        pair = model.pair(path)
        assert pair is not None
        target = entries[0][0]
        ignored = [name for name in _WITHOUT_ADAPTERS.get(architecture, ()) if name in target]
        rule = "have no adapters, which llama.cpp would ignore there (merge them: format='gguf')"
        require(not ignored, path, rule, "adapters")
        yield target, pair
