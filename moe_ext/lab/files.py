"""Files that are written whole or not at all, and files that may be compressed."""

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

# What reading a file that is missing, cut off or not what its name says may raise.
READ_ERRORS = (OSError, EOFError, lzma.LZMAError, zlib.error)


def open_plain(file: Path) -> IO[bytes]:
    """What a file holds; of a .gz or .xz what it was before it was compressed."""
    if file.suffix == ".gz":
        return cast(IO[bytes], gzip.open(file))
    return lzma.open(file) if file.suffix == ".xz" else file.open("rb")


def plain_lines(lines: Iterable[bytes]) -> Iterator[bytes]:
    """A file's lines without their ends, and without the byte order mark it may begin with."""
    for number, line in enumerate(lines):
        yield (line if number else line.removeprefix(codecs.BOM_UTF8)).rstrip(b"\r\n")


def file_fingerprint(file: Path) -> str:
    """What changes with a file: its name, size and time."""
    status = file.stat()
    return f"{file.name} {status.st_size} {status.st_mtime_ns}"


class Locked(Exception):
    """Another process holds the lock."""


@contextmanager
def file_lock(path: Path, *, wait: bool) -> Iterator[None]:
    """Holds a lock that only one process at a time can have.

    Args:
        path: of the lock file.
        wait: whether to wait for a process that holds the lock.

    Raises:
        Locked: another process holds the lock, and wait is False.
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
    """`write_text` of the data as JSON."""
    write_text(path, json.dumps(data, indent=1) + "\n")
