"""Atomic writes of files, and bounded reads."""

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

__all__ = ["atomic_file", "read_file", "require_regular", "sync_folder", "write_text"]


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file that atomically replaces `path` at the end of the with block.

    A reader always sees either the complete old file or the complete new file, even after a crash.
    If the block raises, the old file stays and the temporary file is deleted. A file that is
    replaced keeps its permissions. If path is a symbolic link, its target is replaced. If path is
    not a regular file, such as a pipe or a device, it is opened directly.

    Raises:
        OSError: path cannot be written.
    """
    permissions = None
    try:
        handle = os.open(path, os.O_WRONLY)
    except FileNotFoundError:
        pass
    else:
        with os.fdopen(handle, "wb") as file:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                yield file
                return
            permissions = status.st_mode & 0o777
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    # The system applies the umask.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, permissions or 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            if permissions is not None:
                os.fchmod(handle, permissions)
            os.fsync(handle)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
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
        kind = kinds.get(stat.S_IFMT(status.st_mode), "a device or socket")
        raise ValueError(f"{path} must be a regular file, got {kind}")
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
    """Calls fsync on a folder, which makes renames in it durable, if the file system can do it.

    Raises:
        OSError: the folder cannot be opened, or fsync fails.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(handle)
