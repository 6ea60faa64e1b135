"""Writes a model in the files and formats of its checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from moe_ext.checks import refuse, require
from moe_ext.files import atomic_file
from moe_ext.integrations._packed.checkpoint import Checkpoint
from moe_ext.integrations._packed.found_tensors import Place, Read
from moe_ext.integrations._packed.layer_tensors import LayerTensors
from moe_ext.integrations._packed.merged import MergedExperts, MergedModel
from moe_ext.integrations._packed.requantize import requantized
from moe_ext.integrations._packed.stored_tensors import (
    Bytes,
    Stored,
    read_gguf,
    safetensors_header,
)
from moe_ext.integrations._transformers.experts import experts_modules

__all__ = ["rewrite"]


def rewrite(
    model: MergedModel, checkpoint: Checkpoint, dtype: torch.dtype, target: Path, merge: bool
) -> list[Path]:
    """Writes the files of a checkpoint again, with the present weights; see `save`.

    Args:
        model: the model.
        checkpoint: the checkpoint.
        dtype: the dtype in which the checkpoint was loaded.
        target: the new folder.
        merge: whether adapters are merged, and changed weights are quantized again.

    Returns:
        The files.
    """
    for name in model.experts:
        rule = "have the experts of the checkpoint"
        require(name in checkpoint.experts, name, rule, "experts that quantize_experts packed")
    source = checkpoint.path
    tensors = _SourceTensors(model, checkpoint, dtype, merge)
    written = []
    if checkpoint.is_gguf:
        by_path: dict[Path, list[Bytes]] = {}
        for stored in read_gguf(source)[1].values():
            by_path.setdefault(stored.codes.path, []).append(stored.codes)
    else:
        files = sorted(path for path in source.iterdir() if path.is_file())
        paths = [path for path in files if path.suffix == ".safetensors"]
        by_path = {path: list(safetensors_header(path)[1].values()) for path in paths}
        for path in files:
            if path not in by_path:
                shutil.copyfile(path, target / path.name)
                written.append(target / path.name)
    for path, entries in by_path.items():
        written.append(target / path.name)
        with path.open("rb") as old, atomic_file(target / path.name) as new:
            for entry in sorted(entries, key=lambda entry: entry.start):
                if entry.nbytes == 0:
                    continue
                _copy(old, new, entry.start)  # the header, or the padding
                for part in tensors.tensors_at(entry):
                    new.write(part.contiguous().view(-1).view(torch.uint8).numpy().data)
                old.seek(entry.start + entry.nbytes)
            _copy(old, new)
    return written


def _copy(old: BinaryIO, new: BinaryIO, end: int | None = None) -> None:
    """Copies the bytes of a file from its position up to another one."""
    if end is None:
        shutil.copyfileobj(old, new)
    else:
        new.write(old.read(end - old.tell()))


_Position = tuple[Path, int]  # the file and the first byte of a tensor
_Quantized = tuple[Tensor, Tensor | None]  # codes and scales


def _start(tensor: Bytes) -> _Position:
    return tensor.path, tensor.start


class _ExpertPlace(NamedTuple):
    """Where the values of a range of bytes are in packed experts."""

    module: str  # of the experts
    layer: int
    tensors: LayerTensors
    part: int  # of the rows of the layer
    stored: Stored
    expert: int | None  # None: all


class _SourceTensors:
    """The present values of the tensors of a checkpoint.

    Args:
        model: the model.
        checkpoint, dtype, merge: see `rewrite`.
    """

    def __init__(
        self, model: MergedModel, checkpoint: Checkpoint, dtype: torch.dtype, merge: bool
    ) -> None:
        self._model = model
        self._dtype = dtype
        self._merge = merge
        self._packed: dict[_Position, _ExpertPlace] = {}
        self._biases: dict[_Position, _ExpertPlace] = {}
        for name, own in checkpoint.experts.items():
            for layer, tensors in enumerate(own.weights):
                for place in _places(name, layer, tensors):
                    self._packed[_start(place.stored.codes)] = place
                    if place.stored.scales is not None:
                        self._packed[_start(place.stored.scales)] = place
            for layer, tensors in enumerate(own.biases or ()):
                self._biases |= {_start(p.stored.codes): p for p in _places(name, layer, tensors)}
        self._dense: dict[_Position, tuple[str, Place]] = {}
        for name, places in checkpoint.places.items():
            for stored_place in places:
                for part in filter(None, (stored_place.stored.codes, stored_place.stored.scales)):
                    self._dense[_start(part)] = name, stored_place
        self._state: dict[str, Tensor] = {}
        self._adapted = {f"{path}.weight" for path in model.linear if merge}
        self._names: dict[str, str] = {}  # in the model, of weights that are computed when needed
        # The parameters of the module of each weight that is converted late.
        self._float_experts: dict[str, tuple[str, ...]] = {}
        # The parameters of the last module, and its weights.
        self._converted: tuple[tuple[str, ...], dict[str, Tensor]] = (), {}
        self._read_state(checkpoint.is_gguf)
        written = {
            self._state[name].data_ptr() for name in checkpoint.places if name in self._state
        }
        for name, value in self._state.items():
            rule = "be a weight of the checkpoint"
            require(value.data_ptr() in written, name, rule, "a weight that its files do not have")
        self._last: tuple[object, _Quantized | None] = None, None  # with the place of the weight

    def _read_state(self, is_gguf: bool) -> None:
        """Finds the present weights outside packed experts, by the names of the checkpoint."""
        model = self._model
        late = self._adapted | model.packed_linear()
        whole = model.skeleton.state_dict()
        if not is_gguf:  # whose files have the weights as they are
            for path in experts_modules(model.skeleton):
                if path in model.experts:
                    continue
                names = tuple(name for name in whole if name.rpartition(".")[0] == path)
                own = {name: whole.pop(name) for name in names}
                converted = revert_weight_conversion(model.model, own)
                self._float_experts |= dict.fromkeys(converted, names)
        state = {
            # Has the shape, and an address of its own, but no values.
            name: torch.empty(1).expand(weight.shape)
            if name in late
            else model.weight(name, merge=False)
            for name, weight in whole.items()
            if model.owner(name) is None
        }
        if is_gguf:
            self._state, self._names = state, {name: name for name in late}
            return
        self._state = revert_weight_conversion(model.model, state)
        # A weight that the checkpoint has under another name is merged when it is written.
        renamed = {value.data_ptr(): name for name, value in self._state.items()}
        for name in late:
            renamed_to = renamed.get(state[name].data_ptr())
            if renamed_to is None or self._state[renamed_to].shape != state[name].shape:
                rule = "be one tensor of the checkpoint, to merge its adapters"
                refuse(name, rule, "a part of another one")
            self._names[renamed_to] = name

    def _present(self, name: str) -> Tensor:
        """Returns a present weight; converts those of one module of float experts at a time."""
        names = self._float_experts.get(name)
        if names is None:
            return self._state[name]
        if self._converted[0] != names:
            self._converted = (), {}  # frees those of the last module
            own = {key: self._model.weight(key, merge=False) for key in names}
            self._converted = names, revert_weight_conversion(self._model.model, own)
        return self._converted[1][name]

    def tensors_at(self, entry: Bytes) -> Iterator[Tensor]:
        """Returns the tensor of a range of bytes, in one or more parts."""
        start = _start(entry)
        if start in self._packed:
            yield from self._expert_tensors(self._packed[start], start)
        elif start in self._biases:
            place = self._biases[start]
            bias = self._experts(place).biases[place.layer]
            own = place.tensors.own_rows(bias, place.part)
            own = own if place.expert is None else own[place.expert]
            yield _kept(f"the biases of {place.module}", own, place.stored, self._dtype)
        elif start in self._dense:
            name, part = self._dense[start]
            yield from self._dense_tensors(name, part, entry)
        else:  # a tensor that the model does not have
            yield entry.read()

    def _expert_tensors(self, place: _ExpertPlace, start: _Position) -> Iterator[Tensor]:
        experts = self._experts(place)
        weight = experts.packed(place.layer)
        assert weight is not None
        is_codes = start == _start(place.stored.codes)
        for e in range(experts.num_experts) if place.expert is None else [place.expert]:
            stored = place.stored.expert(e) if place.expert is None else place.stored
            if self._merge and experts.change(place.layer, e) is not None:
                make = partial(self._quantize_expert, experts, place, e, stored)
                quantized = self._once((place.module, place.layer, place.part, e), make)
                assert quantized is not None
                codes, scales = quantized
            else:
                codes, scales = place.tensors.unpack(weight, place.part, e)
            yield codes if is_codes or scales is None else scales

    def _once(self, key: object, make: Callable[[], _Quantized | None]) -> _Quantized | None:
        """Keeps the last result, because codes and scales are two tensors of a file."""
        if self._last[0] != key:
            self._last = key, make()
        return self._last[1]

    @staticmethod
    def _quantize_expert(
        experts: MergedExperts, place: _ExpertPlace, expert: int, stored: Stored
    ) -> _Quantized:
        whole = experts.weight(place.layer, expert)
        rows = place.tensors.own_rows(whole[None], place.part)[0]
        return requantized(place.module, rows, stored)

    def _dense_tensors(self, name: str, place: Place, entry: Bytes) -> Iterator[Tensor]:
        known = name in self._state or name in self._float_experts
        require(known, "model", f"have the weight {name}", "none")
        stored, part = place
        late = self._names.get(name)
        is_merged = late is not None
        if is_merged and late not in self._adapted:  # a packed linear layer, which is frozen
            yield entry.read()
            return

        def value() -> Tensor:
            whole = self._present(name) if late is None else self._model.weight(late)
            return whole if part is None else part(whole)

        if stored.format is None and stored.ggml_type is None:
            yield _kept(name, value(), stored, self._dtype)
            return

        def make() -> _Quantized | None:
            present, same = value(), False
            if not is_merged:
                same = _is_same(present, stored.read, self._dtype)
            rule = "be unchanged, because it is packed in the checkpoint; format='merged' quantizes"
            require(same or self._merge, name, rule, "another value")
            return None if same else requantized(name, present.float(), stored)

        start = _start(stored.codes)
        quantized = self._once(start, make)
        if quantized is None:
            yield entry.read()
        else:
            codes, scales = quantized
            yield codes if _start(entry) == start or scales is None else scales

    def _experts(self, place: _ExpertPlace) -> MergedExperts:
        experts = self._model.experts.get(place.module)
        if experts is None or experts.packed(place.layer) is None:
            refuse(place.module, "have packed experts as in the checkpoint", "other experts")
        return experts


def _places(module: str, layer: int, tensors: LayerTensors) -> Iterator[_ExpertPlace]:
    """Yields the place of each tensor of a layer."""
    for p, part in enumerate(tensors.parts):
        stack = part if isinstance(part, list) else [part]
        for e, stored in enumerate(stack):
            index = e if isinstance(part, list) else None
            yield _ExpertPlace(module, layer, tensors, p, stored, index)


def _is_same(value: Tensor, read: Read, dtype: torch.dtype) -> bool:
    """Returns whether a value is the one of the file, as read in its own dtype or in another one.

    A model that was loaded in bfloat16 may be in float32 now.
    """
    numbers = (read(own).to(value.dtype) for own in dict.fromkeys((value.dtype, dtype)))
    return any(torch.equal(value, n) for n in numbers)


def _kept(name: str, value: Tensor, stored: Stored, dtype: torch.dtype) -> Tensor:
    """Returns the numbers of the file if the value is the same, else the value; see `_is_same`."""
    numbers = stored.codes.read()
    shape, value = tuple(numbers.shape), value.detach()
    require(tuple(value.shape) == shape, name, f"have shape {shape}", tuple(value.shape))

    def read(dtype: torch.dtype) -> Tensor:
        return numbers.to(dtype) if numbers.is_floating_point() else numbers

    return numbers if _is_same(value, read, dtype) else value.to(numbers.dtype)
