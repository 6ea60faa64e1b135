"""Writes the merged weights of a model as floats in safetensors files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from moe_ext.files import atomic_file, write_text
from moe_ext.integrations._packed.merged import MergedModel
from moe_ext.integrations._packed.stored_tensors import DTYPES

__all__ = ["write_floats"]

_INDEX = "model.safetensors.index.json"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class _FileGroup(NamedTuple):
    """Tensors of a model that are written together, and their tensors in files."""

    names: list[str]
    files: dict[str, Tensor]  # on the meta device

    @property
    def nbytes(self) -> int:
        """The size of the tensors."""
        return sum(file.nbytes for file in self.files.values())


def write_floats(
    model: MergedModel, folder: Path, dtype: torch.dtype, shard_size: int
) -> list[Path]:
    """Writes the safetensors files, the configuration, and the index.

    Holds the float weights of one layer, or of the experts of one parameter, at a time.

    Args:
        model: the model.
        folder: the folder.
        dtype: the dtype. Weights that transformers keeps in float32 stay so.
        shard_size: the largest size of a file in bytes, unless one group of tensors is larger.

    Returns:
        The files.
    """
    shards: list[list[_FileGroup]] = [[]]
    for group in _groups(model, dtype):
        size = sum(g.nbytes for g in shards[-1])
        if shards[-1] and size + group.nbytes > shard_size:
            shards.append([])
        shards[-1].append(group)
    count = len(shards)
    index: dict[str, str] = {}
    written = []
    for i, groups in enumerate(shards):
        name = f"model-{i + 1:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors"
        _write(model, folder / name, groups, dtype)
        index |= dict.fromkeys([file for group in groups for file in group.files], name)
        written.append(folder / name)
    if count > 1:
        total = sum(group.nbytes for groups in shards for group in groups)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
        write_text(folder / _INDEX, text)
        written.append(folder / _INDEX)
    config = model.config
    config.dtype = dtype
    config.architectures = [type(model.skeleton).__name__]
    config.save_pretrained(folder)
    model.model.generation_config.save_pretrained(folder)
    return [*written, folder / "config.json", folder / "generation_config.json"]


def _write(model: MergedModel, path: Path, groups: list[_FileGroup], dtype: torch.dtype) -> None:
    """Writes one safetensors file."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for group in groups:
        for name, tensor in group.files.items():
            start, end = end, end + tensor.nbytes
            header[name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": [*tensor.shape],
                "data_offsets": [start, end],
            }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with atomic_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for group in groups:
            state = {name: _value(model, name, dtype) for name in group.names}
            files = revert_weight_conversion(model.skeleton, state)
            del state
            for name in group.files:
                file.write(files.pop(name).contiguous().view(-1).view(torch.uint8).numpy().data)


def _groups(model: MergedModel, dtype: torch.dtype) -> Iterator[_FileGroup]:
    """Groups the tensors whose conversions to those of files do not depend on others."""
    groups: dict[str, list[str]] = {}
    for name in model.tensors:
        layer = re.match(r".*?\.\d+\.", name)
        key = name if model.owner(name) is not None or layer is None else layer[0]
        groups.setdefault(key, []).append(name)
    for names in groups.values():
        state = {
            name: model.tensors[name].detach().to(_dtype_of(model, name, dtype)) for name in names
        }
        yield _FileGroup(names, revert_weight_conversion(model.skeleton, state))


def _value(model: MergedModel, name: str, dtype: torch.dtype) -> Tensor:
    dtype, owner = _dtype_of(model, name, dtype), model.owner(name)
    if owner is None:
        return model.weight(name).to(dtype)
    return owner.parameter(name.rpartition(".")[2], dtype)


def _dtype_of(model: MergedModel, name: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of a tensor in a file."""
    own = model.tensors[name].dtype
    if not own.is_floating_point:
        return own
    kept = model.skeleton._keep_in_fp32_modules_strict or ()
    return torch.float32 if any(re.search(rf"\b{word}\b", name) for word in kept) else dtype
