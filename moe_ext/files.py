"""Files that are written whole or not at all, and files that may be compressed."""

import codecs
import gzip
import json
import lzma
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

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


def write_json(path: Path, data: Any) -> None:
    """`write_text` of the data as JSON."""
    write_text(path, json.dumps(data, indent=1) + "\n")


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk, as fsync does for a file's content."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
