"""Atomic writes of files, and bounded reads."""

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

__all__ = ["atomic_file", "read_file", "require_regular", "sync_folder", "write_text"]


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file that atomically replaces `path` at the end of the with block.

    A reader always sees either the complete old file or the complete new file, even after a crash.
    If the block raises, the old file stays and the temporary file is deleted. If path is a symbolic
    link, its target is replaced. If path is not a regular file, such as a pipe, it is opened
    directly.
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
        os.chmod(temporary, 0o644)  # mkstemp creates files with mode 0600
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)  # makes the rename durable


def require_regular(path: Path, *, follow: bool = True) -> int:
    """Requires that a path is a regular file, not a folder, a pipe or a device; returns its size.

    Args:
        path: the path.
        follow: whether a symbolic link to a regular file is one too.

    Raises:
        OSError: the path does not exist or is not accessible.
        ValueError: the path is not a regular file.
    """
    status = path.stat() if follow else path.lstat()
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFLNK: "a link"}
        found = kinds.get(stat.S_IFMT(status.st_mode), "a device or socket")
        raise ValueError(f"{path} must be a regular file, got {found}")
    return status.st_size


def read_file(path: Path, limit: int) -> bytes:
    """Reads a regular file of at most `limit` bytes.

    Raises:
        OSError: the file cannot be read.
        ValueError: the path is not a regular file, or the file is larger.
    """
    size = require_regular(path)
    if size > limit:
        raise ValueError(f"{path} must have at most {limit:,} bytes, got {size:,}")
    with path.open("rb") as file:
        return file.read(size)


def write_text(path: Path, text: str) -> None:
    """Writes a text to the file path atomically."""
    with atomic_file(path) as file:
        file.write(text.encode())


def sync_folder(folder: Path) -> None:
    """Calls fsync on a folder, which makes renames in it durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
