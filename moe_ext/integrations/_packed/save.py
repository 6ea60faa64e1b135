"""Writes a model with packed experts in the files and formats of its checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from moe_ext.checks import require
from moe_ext.files import atomic_file
from moe_ext.integrations._packed.checkpoint import Checkpoint
from moe_ext.integrations._packed.layer_tensors import LayerTensors
from moe_ext.integrations._packed.stored_tensors import Bytes, Stored, safetensors_header
from moe_ext.quantized import QuantizedExperts

__all__ = ["save"]


def save(model: nn.Module, folder: str | Path) -> None:
    """Writes a model of `load` to a new folder, in the files and formats of its checkpoint.

    The packed experts are written from memory, with the bytes that were loaded. A dense weight that
    did not change is copied from the checkpoint, which must still exist. A dense weight of floats
    that changed is written in the dtype of the checkpoint. So the files of a model that did not
    change have the same bytes. Adapters are not written. The other files of the folder are copied
    too, such as those of the tokenizer, but not its folders. The function reads and writes one
    tensor at a time.

    Args:
        model: the model.
        folder: the new folder.

    Raises:
        ValueError: the model is not from `load`, its checkpoint is a GGUF file, or a dense weight
            that is packed in the checkpoint has changed.
    """
    checkpoint = getattr(getattr(model, "hf_quantizer", None), "checkpoint", None)
    require(checkpoint is not None, "save: model", "come from load", type(model).__name__)
    assert checkpoint is not None
    rule = "come from safetensors files; saving to GGUF is not supported"
    require(not checkpoint.is_gguf, "save: model", rule, checkpoint.path.name)
    source, target = checkpoint.path, Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    require(not target.samefile(source), "save: folder", "differ from the loaded one", str(target))
    tensors = _Tensors(model, checkpoint)
    for path in sorted(each for each in source.iterdir() if each.is_file()):
        if path.suffix != ".safetensors":
            shutil.copyfile(path, target / path.name)
            continue
        header, entries = safetensors_header(path)
        with atomic_file(target / path.name) as file:
            file.write(header)
            for entry in sorted(entries.values(), key=lambda entry: entry.start):
                if entry.nbytes == 0:
                    continue
                for part in tensors.of(entry):
                    file.write(part.contiguous().view(-1).view(torch.uint8).numpy().data)


_Start = tuple[Path, int]  # the file and the first byte of a tensor


def _start(tensor: Bytes) -> _Start:
    return tensor.path, tensor.start


class _Place(NamedTuple):
    """Where the values of a range of bytes are in a model."""

    module: str  # of the experts
    layer: int
    tensors: LayerTensors
    part: int  # of the rows of the layer
    stored: Stored
    expert: int | None  # None: all


class _Tensors:
    """The present values of the tensors of a checkpoint."""

    def __init__(self, model: Any, checkpoint: Checkpoint) -> None:
        self._model = model
        self._packed: dict[_Start, _Place] = {}
        self._biases: dict[_Start, _Place] = {}
        for name, own in checkpoint.experts.items():
            for layer, tensors in enumerate(own.weights):
                for place in _places(name, layer, tensors):
                    self._packed[_start(place.stored.codes)] = place
                    if place.stored.scales is not None:
                        self._packed[_start(place.stored.scales)] = place
            for layer, tensors in enumerate(own.biases or ()):
                self._biases |= {_start(p.stored.codes): p for p in _places(name, layer, tensors)}
        self._dense: dict[_Start, tuple[str, Stored]] = {}
        for name, stored in checkpoint.weights.items():
            for each in filter(None, (stored.codes, stored.scales)):
                self._dense[_start(each)] = name, stored
        experts = tuple(f"{name}.packed." for name in checkpoint.experts)
        state = {
            name: value
            for name, value in model.state_dict().items()
            if not name.startswith(experts or ".")
        }
        self._state: dict[str, Tensor] = revert_weight_conversion(model, state)
        self._same: set[str] = set()  # the packed dense weights that did not change

    def of(self, entry: Bytes) -> Iterator[Tensor]:
        """Returns the tensor of a range of bytes, in one or more parts."""
        start = _start(entry)
        if start in self._packed:
            place = self._packed[start]
            weight = self._experts(place).weights[place.layer]
            indices = range(len(weight.panels)) if place.expert is None else [place.expert]
            for e in indices:
                codes, scales = place.tensors.unpack(weight, place.part, e)
                is_codes = start == _start(place.stored.codes)
                yield codes if is_codes or scales is None else scales
        elif start in self._biases:
            place = self._biases[start]
            biases = self._experts(place).biases
            assert biases is not None
            own = place.tensors.own_rows(biases[place.layer].detach(), place.part)
            yield from _kept(own if place.expert is None else own[place.expert], place.stored)
        elif start in self._dense:
            name, stored = self._dense[start]
            require(name in self._state, "save: model", f"have the weight {name}", "none")
            if stored.format is None:
                yield from _kept(self._state[name], stored)
            else:
                if name not in self._same:
                    value = self._state[name]
                    is_same = torch.equal(stored.read(value.dtype), value)
                    rule = "be unchanged, because it is packed in the checkpoint"
                    require(is_same, f"save: {name}", rule, "another value")
                    self._same.add(name)
                yield entry.read()
        else:  # a tensor that the model does not have
            yield entry.read()

    def _experts(self, place: _Place) -> QuantizedExperts:
        experts: QuantizedExperts | None = self._model.get_submodule(place.module).quantized
        rule = "have packed experts as in the checkpoint"
        require(experts is not None, f"save: {place.module}", rule, "other experts")
        assert experts is not None
        return experts


def _places(module: str, layer: int, tensors: LayerTensors) -> Iterator[_Place]:
    """Yields the place of each tensor of a layer."""
    for p, part in enumerate(tensors.parts):
        stack = part if isinstance(part, list) else [part]
        for e, stored in enumerate(stack):
            index = e if isinstance(part, list) else None
            yield _Place(module, layer, tensors, p, stored, index)


def _kept(value: Tensor, stored: Stored) -> Iterator[Tensor]:
    """Yields the numbers of the file if the value is the same in its dtype, else the value."""
    numbers = stored.codes.read()
    shape = tuple(value.shape)
    require(shape == numbers.shape, "save: a weight", f"have shape {tuple(numbers.shape)}", shape)
    is_same = torch.equal(numbers.to(value.dtype), value)
    yield numbers if is_same else value.detach().to(numbers.dtype)
