"""Atomic writes, file locks, and bounded reads of text, compressed text and JSON."""

import codecs
import errno
import gzip
import json
import lzma
import math
import os
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import filelock

from moe_ext.files import atomic_file, read_file, require_regular, sync_folder, write_text
from moe_lab.errors import ConfigError

__all__ = [
    "MAX_JSON", "READ_ERRORS", "Locked", "atomic_file", "existing_file", "file_fingerprint",
    "file_lock", "from_json", "json_text", "open_plain", "output_file", "plain_lines", "read_file",
    "read_json", "read_lines", "reason_of", "require_regular", "sync_folder", "write_json",
    "write_text",
]  # fmt: skip

# Exceptions from reading a file that is missing, truncated or not of the format in its name.
READ_ERRORS = (OSError, EOFError, lzma.LZMAError, zlib.error)

MAX_LINE = (
    4 * 2**20
)  # bytes of a line before its end; bounds the memory for a file without line ends
MAX_JSON = 2**28  # bytes
MAX_PADDING = 2**20  # zero bytes at the end of a compressed file
_NOT_IN_JSON = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def existing_file(path: str | Path, rule: str) -> Path:
    """Returns the path; raises FileNotFoundError with the rule if there is no file."""
    if not Path(path).is_file():
        kind = "is not a file" if Path(path).exists() else "does not exist"
        raise FileNotFoundError(f"{rule}, got {path}, which {kind}")
    return Path(path)


def open_plain(file: Path) -> IO[bytes]:
    """Opens a file for reading as bytes; decompresses .gz and .xz files."""
    if file.suffix not in (".gz", ".xz"):
        return file.open("rb")
    with file.open("rb") as packed:  # Python's decompressors read padding byte by byte
        packed.seek(max(0, os.fstat(packed.fileno()).st_size - MAX_PADDING))
        end = packed.read(MAX_PADDING)
    if len(end) == MAX_PADDING and not end.strip(b"\0"):
        raise OSError(errno.EINVAL, f"it ends in {MAX_PADDING:,} zero bytes or more", str(file))
    return cast(IO[bytes], gzip.open(file)) if file.suffix == ".gz" else lzma.open(file)


def reason_of(error: Exception) -> str:
    """Returns why a file cannot be read, from one of `READ_ERRORS`."""
    return getattr(error, "strerror", None) or str(error)


def read_lines(file: IO[bytes], limit: int = MAX_LINE) -> Iterator[bytes]:
    """Yields the lines of an open file, with their line ends."""
    while line := file.readline(limit + len(b"\r\n")):
        if len(line.rstrip(b"\r\n")) > limit:
            rule = f"a line must have at most {limit:,} bytes before its end, got more"
            raise OSError(errno.EFBIG, rule, getattr(file, "name", None))
        yield line


def plain_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yields each line without its line end; removes a byte order mark from the first line."""
    for number, line in enumerate(read_lines(file)):
        yield (line if number else line.removeprefix(codecs.BOM_UTF8)).rstrip(b"\r\n")


def json_text(data: Any, **layout: Any) -> str:
    """Returns data as JSON; NaN and infinity, which JSON does not have, become texts."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [finite(item) for item in value]
        infinite = isinstance(value, float) and not math.isfinite(value)
        return json.dumps(value) if infinite else value

    return json.dumps(finite(data), allow_nan=False, **layout)


def from_json(text: str) -> Any:
    """Returns the data of a text of `json_text`."""

    def number(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: number(item) for key, item in value.items()}
        if isinstance(value, list):
            return [number(item) for item in value]
        return _NOT_IN_JSON.get(value, value) if isinstance(value, str) else value

    return number(json.loads(text))


def read_json(path: Path) -> Any:
    """Reads a JSON file of at most `MAX_JSON` bytes."""
    content = read_file(path, MAX_JSON)
    try:
        return from_json(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be JSON, got a syntax error: {error}") from None


def output_file(path: Path) -> AbstractContextManager[BinaryIO]:
    """Opens a file for writing; a file of this name is replaced only by the complete new file."""
    if not path.parent.is_dir():
        raise ConfigError(f"{path} must be in an existing folder, but {path.parent} does not exist")
    return atomic_file(path)


def file_fingerprint(file: Path) -> str:
    """Returns the file's name, size and modification time as text."""
    status = file.stat()
    return f"{file.name} {status.st_size} {status.st_mtime_ns}"


class Locked(Exception):
    """Raised by ``file_lock`` if another process holds the lock."""


@contextmanager
def file_lock(path: Path, *, wait: bool) -> Iterator[None]:
    """Holds an exclusive lock on a file, so that only one process runs the body."""
    lock = filelock.FileLock(path, timeout=-1 if wait else 0)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise Locked(f"{path} is locked by another process") from None
    try:
        yield
    finally:
        lock.release()


def write_json(path: Path, data: Any) -> None:
    """Writes data to a JSON file atomically."""
    write_text(path, json_text(data, indent=1) + "\n")
