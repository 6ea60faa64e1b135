"""Atomic writes, file locks, and reading of compressed text."""

import codecs
import gzip
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from moe_ext.distributed.files import atomic_file, sync_folder, write_text
from moe_ext.lab.packages import require_package

__all__ = [
    "READ_ERRORS",
    "Locked",
    "atomic_file",
    "file_fingerprint",
    "file_lock",
    "open_plain",
    "plain_lines",
    "sync_folder",
    "write_json",
    "write_text",
]

# Exceptions from reading a file that is missing, truncated or not of the format in its name.
READ_ERRORS = (OSError, EOFError, lzma.LZMAError, zlib.error)


def open_plain(file: Path) -> IO[bytes]:
    """Opens a file for reading as bytes; decompresses .gz and .xz files."""
    if file.suffix == ".gz":
        return cast(IO[bytes], gzip.open(file))
    return lzma.open(file) if file.suffix == ".xz" else file.open("rb")


def plain_lines(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yields each line without its line end; removes a byte order mark from the first line."""
    for number, line in enumerate(lines):
        yield (line if number else line.removeprefix(codecs.BOM_UTF8)).rstrip(b"\r\n")


def file_fingerprint(file: Path) -> str:
    """Returns the file's name, size and modification time as text."""
    status = file.stat()
    return f"{file.name} {status.st_size} {status.st_mtime_ns}"


class Locked(Exception):
    """Raised by ``file_lock`` if another process holds the lock."""


@contextmanager
def file_lock(path: Path, *, wait: bool) -> Iterator[None]:
    """Holds an exclusive lock on a file, so that only one process runs the body.

    Args:
        path: the lock file.
        wait: whether to block until the lock is free.

    Raises:
        Locked: another process holds the lock and wait is False.
        ImportError: filelock is not installed.
    """
    filelock = require_package("file_lock", "filelock", "train")
    lock = filelock.FileLock(path, timeout=-1 if wait else 0)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise Locked(str(path)) from None
    try:
        yield
    finally:
        lock.release()


def write_json(path: Path, data: Any) -> None:
    """Writes data to a JSON file atomically."""
    write_text(path, json.dumps(data, indent=1) + "\n")
