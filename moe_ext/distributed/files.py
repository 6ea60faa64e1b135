"""Files that are written whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

__all__ = ["atomic_file", "sync_folder", "write_text"]


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file that replaces `path` at the end of the block: temporary, fsync, rename.

    Another process, or this one after a crash, sees the old file or the new one, whole. If the
    block raises, the old file stays and the temporary one is removed. Of a link what it leads to is
    replaced. What is there and is no file, as a pipe, is written to.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    path = Path(os.path.realpath(path))
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp's files are private
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)  # the rename itself


def write_text(path: Path, text: str) -> None:
    """Writes a text by `atomic_file`."""
    with atomic_file(path) as file:
        file.write(text.encode())


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk, as fsync does for a file's content."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
