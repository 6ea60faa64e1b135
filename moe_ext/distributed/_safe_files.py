"""Reads the files of a checkpoint without running code that they name."""

import io
import pickle
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.serialization import get_unsafe_globals_in_checkpoint
from torch.utils._pytree import tree_map

from moe_ext.checks import is_whole
from moe_ext.files import read_file

_MAX_METADATA = 2**30  # bytes; a tensor needs about 500
_PLAIN = "tensors, numbers, texts and containers of these"
_METADATA = "torch.distributed.checkpoint.metadata"
# The names that torch writes to .metadata, without torch's dtypes.
_NAMES = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *((_METADATA, name) for name in ("BytesStorageMetadata", "TensorStorageMetadata")),
    *((_METADATA, name) for name in ("ChunkStorageMetadata", "TensorProperties")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
}


def _memory_format(cls: type, name: str) -> _MEM_FORMAT_ENCODING:
    """Returns the member of the enumeration; takes the place of getattr."""
    if cls is not _MEM_FORMAT_ENCODING:
        raise ValueError(f"it must not name an attribute of {cls!r:.100}")
    return _MEM_FORMAT_ENCODING[name]


# The unpickler in C allocates as much memory as the file asks for.
class _MetadataUnpickler(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.0 to 3.11.3 for enumerations
            return _memory_format
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _NAMES:
            raise ValueError(f"it must not name {module}.{name}")
        return super().find_class(module, name)

    def _load_build(self) -> None:
        if isinstance(self.stack[-2], type):  # type: ignore[attr-defined]
            raise ValueError("it must not change a class")
        super().load_build()  # type: ignore[misc]

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        **pickle._Unpickler.dispatch,
        pickle.BUILD[0]: _load_build,
    }
    del dispatch[pickle.BYTEARRAY8[0]]  # allocates as many bytes as the file asks for


def read_metadata(folder: Path) -> Metadata:
    """Reads the file .metadata of a checkpoint in the format of torch.distributed.checkpoint.

    Raises:
        ValueError: the file is not such metadata, or names a file outside of the folder.
    """
    path = folder / ".metadata"
    content = read_file(path, _MAX_METADATA)
    names = {file.name for file in folder.iterdir() if file.suffix == ".distcp"}
    try:
        metadata = _MetadataUnpickler(io.BytesIO(content)).load()
        _check(metadata, names)
    except Exception as error:  # a corrupted pickle raises almost any error
        raise ValueError(f"{path} must hold the metadata of a checkpoint: {why(error)}") from error
    assert isinstance(metadata, Metadata)
    return metadata


def _check(metadata: Any, names: Collection[str]) -> None:
    """Reads every entry of the metadata once; raises an error if one is not as torch writes it."""
    for name, entry in metadata.state_dict_metadata.items():
        key = metadata.planner_data[name]
        if not isinstance(key, tuple) or len(key) < 2 or not all(isinstance(k, str) for k in key):
            raise ValueError(f"the key of {name!r} must be texts, got {key!r:.100}")
        if isinstance(entry, TensorStorageMetadata):
            sizes = [entry.size, *(size for c in entry.chunks for size in (c.offsets, c.sizes))]
            known = all(isinstance(size, torch.Size) for size in sizes)
            if not known or not isinstance(entry.properties.dtype, torch.dtype):
                raise ValueError(f"{name!r} must have a size and a dtype, got {entry!r:.100}")
        elif not isinstance(entry, BytesStorageMetadata):
            raise ValueError(f"{name!r} must be a tensor or bytes, got {entry!r:.100}")
    for index, place in metadata.storage_data.items():
        if not isinstance(index, MetadataIndex) or place.relative_path not in names:
            raise ValueError(
                f"it must name files of the checkpoint, got {place.relative_path!r:.100}"
            )
        if not (is_whole(place.offset) and is_whole(place.length)):
            raise ValueError(f"{index.fqn!r} must have an offset and a length, got {place!r:.100}")


def unpickled(path: Path) -> Any:
    """Reads tensors, numbers, texts and containers of these from a file of ``torch.save``.

    Raises:
        ValueError: the file is corrupted, or holds another class, which
            ``torch.serialization.add_safe_globals`` has not registered.
    """
    try:
        if classes := get_unsafe_globals_in_checkpoint(path):
            raise ValueError(f"it must hold {_PLAIN}, got {', '.join(classes)}")
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a corrupted file raises almost any error
        raise ValueError(f"{path} cannot be read: {why(error)}") from error


def why(error: Exception) -> str:
    """Returns in a few words why a file of torch cannot be read."""
    if match := re.search(r"(?i)unsupported .*?(?= was not| whose|\n|$)", str(error)):
        return match[0]  # torch's advice to trust the file is left out
    if isinstance(error, ValueError | RuntimeError):
        return str(error).partition("\n")[0].partition(". ")[0]
    return "it is corrupted"


def _saved(value: Any) -> tuple[bytes, list[str]]:
    """Returns the bytes of a value, and the classes in it that `unpickled` refuses."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file.getvalue(), get_unsafe_globals_in_checkpoint(file)


def _python_number(value: Any) -> Any:
    """Converts a number of NumPy; returns all other values."""
    return value.item() if type(value).__module__ == "numpy" and value.shape == () else value


def pickled(name: str, value: Any) -> bytes:
    """Returns the bytes that `unpickled` reads.

    Raises:
        ValueError: value contains an object that `unpickled` refuses; the message has the name.
    """
    content, classes = _saved(value)
    if classes:
        content, classes = _saved(tree_map(_python_number, value))
    if classes:
        raise ValueError(
            f"{name} must hold {_PLAIN}, got {', '.join(sorted(classes))}; "
            "torch.serialization.add_safe_globals registers other classes"
        )
    return content
