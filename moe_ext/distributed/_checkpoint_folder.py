"""A folder of checkpoints that are written atomically and verified by checksum.

Contents::

    latest                            the name of the newest checkpoint, twice
    .lock                             locked by the run that saves here: its host and process
    step-00000042/
        .metadata  __0_0.distcp  …    tensors, in the format of torch.distributed.checkpoint
        state.pt  rank-0.pt  …        the other state: common to all ranks, and of each rank
        SHA256SUMS                    checksums of these files, in the format of sha256sum
"""

import errno
import fcntl
import hashlib
import math
import os
import re
import secrets
import shutil
import socket
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from moe_ext.checks import require
from moe_ext.files import read_file, require_regular, sync_folder, write_text

STEP = re.compile(r"step-(\d{1,18})(\.old)?")
MAX_STEP = 10**18  # with more digits, STEP does not match
SUMS = "SHA256SUMS"
PATIENCE = 10.0  # seconds; a network file system shows the changes of other machines late
_HIDDEN = ".deleted"  # the suffix of checkpoints that count no more
_MAX_LATEST, _MAX_SUMS = 1_000, 2**26  # bytes; a checksum with its name has about 80
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}


class CheckpointFolder:
    """Lists checkpoints and writes new ones atomically.

    1. `begin` makes a hidden folder for the files. Its file SHA256SUMS holds a token until
       `publish`: a rank that reads the token shares the folder (`require_shared`).
    2. `publish` adds their checksums, renames the folder to step-00000042, and replaces the
       file `latest`, which contains that name twice. The checkpoint is now valid.
    3. `publish` also deletes old checkpoints and the files of interrupted saves. It warns about
       files that cannot be deleted, which another program may read; the next save tries again.
    4. `require_published` waits until a rank sees the checkpoint.

    `begin` and `publish` are for the first rank. From its first save on, no other run can save
    in the folder until this object is deleted or its process ends.

    Checkpoints later than the one in `latest` belong to an abandoned run and are ignored. If the
    two names in `latest` differ, the file is corrupted, and all checkpoints count.

    Args:
        path: the folder of all checkpoints; the first save creates it.
        keep: number of the newest checkpoints to keep.

    Attributes:
        continued_from: the step from which the run continued, until the next `publish`. Checkpoints
            between this step and the new one belong to an abandoned run.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self.path = path
        self.keep = keep
        self.continued_from: int | None = None
        self._is_locked = False

    def checkpoints(self) -> dict[int, Path]:
        """Returns the folder of each checkpoint by step, in ascending order.

        Raises:
            OSError: the file `latest` cannot be read.
            ValueError: `latest` is not a regular file, or too large.
        """
        # In reverse order, step-N comes after step-N.old and replaces it in `folders`.
        paths = sorted(self.path.glob("step-*"), reverse=True)
        folders = {int(match[1]): path for path in paths if (match := STEP.fullmatch(path.name))}
        latest = self.path / "latest"
        has_latest = latest.exists() or latest.is_symlink()
        text = read_file(latest, _MAX_LATEST).decode(errors="replace") if has_latest else ""
        names = set(text.split())  # earlier versions wrote the name once
        match = STEP.fullmatch(names.pop()) if len(names) == 1 else None
        last = int(match[1]) if match else math.inf
        return {step: folders[step] for step in sorted(folders) if step <= last}

    def temporary(self, step: int) -> Path:
        """Returns the hidden folder for the files of the new checkpoint of a step."""
        return self.path / f".step-{step:08d}"

    def begin(self, step: int, token: str) -> None:
        """Makes the hidden folder of a step and deletes the files of interrupted saves.

        Raises:
            OSError: the folder cannot be made.
            ValueError: another run saves in this folder. Or the folder has a checkpoint of a later
                step, and this run has not loaded one.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock()
        if self.continued_from is None:
            newest = max(self.checkpoints(), default=step)
            rule = (
                f"be at least {newest}, the newest step in {self.path}, unless a model was loaded "
                "(load a checkpoint, use another folder, or delete the old checkpoints)"
            )
            require(step >= newest, "Checkpoints: step", rule, step)
        self._clear()
        self.temporary(step).mkdir()
        (self.temporary(step) / SUMS).write_text(token)

    def require_shared(self, step: int, token: str) -> None:
        """Raises ValueError unless this rank sees the hidden folder that `begin` has made."""
        sums = self.temporary(step) / SUMS
        rule = f"{self.path} must be a folder that all ranks share"
        if not _in_time(lambda: self._shows(sums, token)):
            raise ValueError(f"{rule}; this rank does not see the files of rank 0 there")

    def publish(self, step: int, sums: Mapping[str, str]) -> None:
        """Turns the hidden folder of a step into a checkpoint; its files must be synced to disk.

        Args:
            step: the number of the checkpoint.
            sums: the checksums of all files, from `sums_of`.

        Raises:
            OSError: a file cannot be written.
            ValueError: the folder does not have all files.
        """
        temporary = self.temporary(step)
        if not _in_time(lambda: {*sums} <= {path.name for path in temporary.iterdir()}):
            missing = {*sums} - {path.name for path in temporary.iterdir()}
            rule = f"{temporary} must have the files of all ranks"
            raise ValueError(f"{rule}; this rank does not see {', '.join(sorted(missing))}")
        lines = [f"{sums[name]}  {name}\n" for name in sorted(sums)]
        write_text(temporary / SUMS, "".join(lines))
        path = self.path / temporary.name[1:]
        if path.exists():
            path.rename(path.with_suffix(".old"))  # valid until the new folder has its name
        temporary.rename(path)
        sync_folder(self.path)
        write_text(self.path / "latest", _latest(path.name))
        if self.continued_from is not None:
            for number, abandoned in self.checkpoints().items():
                if self.continued_from < number < step:
                    _hide(abandoned)
            self.continued_from = None
        for old in list(self.checkpoints().values())[: -self.keep]:
            _hide(old)
        self._clear()

    def require_published(self, step: int) -> None:
        """Raises ValueError unless this rank sees that a checkpoint is the newest one."""
        latest, name = self.path / "latest", self.temporary(step).name[1:]
        if not _in_time(lambda: self._shows(latest, _latest(name))):
            raise ValueError(f"{latest} must name {name}; this rank does not see the change")

    def abandon(self, step: int) -> None:
        """Deletes the hidden folder of a step whose save failed."""
        shutil.rmtree(self.temporary(step), ignore_errors=True)

    def _shows(self, path: Path, text: str) -> bool:
        """Returns whether a file in the folder has a text."""
        if self.path.is_dir():
            os.listdir(self.path)  # a network file system then asks its server for new names
        return _reads(path, text)

    def _lock(self) -> None:
        """Locks the folder until this object is deleted; a new run may have to wait for an old one.

        A lock of fcntl belongs to the process: forked processes, such as those that load data, do
        not keep it when this process is killed.
        """
        if self._is_locked:
            return
        path = self.path / ".lock"
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not _in_time(lambda: _locks(handle)):
                holder = os.read(handle, 1_000).decode(errors="replace").strip()
                raise ValueError(f"{path} is locked; another run saves in this folder: {holder}")
            os.truncate(handle, 0)
            os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        except BaseException as error:
            os.close(handle)
            if not isinstance(error, OSError) or error.errno not in _NO_LOCKS:
                raise
            _warn(f"{path} cannot be locked ({error.strerror}): no other run may save here")
        else:
            weakref.finalize(self, os.close, handle)
        self._is_locked = True

    def _clear(self) -> None:
        """Deletes interrupted saves, replaced checkpoints and checkpoints of abandoned runs."""
        counting = self.checkpoints().values()
        for path in self.path.glob("step-*"):
            if STEP.fullmatch(path.name) and path not in counting:
                _hide(path)
        for path in self.path.glob(".step-*"):
            if path.suffix != _HIDDEN:
                _hide(path)  # a folder that cannot be deleted must not be in the way of the next
        for path in self.path.glob(f".step-*{_HIDDEN}"):
            with _warns(path, "deleted"):
                if path.is_symlink():
                    path.unlink()
                else:
                    shutil.rmtree(path)
        for path in self.path.glob(".latest.*"):
            with _warns(path, "deleted"):
                path.unlink()


def sums_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Returns the SHA-256 checksums of the files in folder that names lists."""
    return {name: _sum(folder / name) for name in names}


def verify(folder: Path, share: int, shares: int) -> None:
    """Verifies the checksums of every `shares`-th file in folder, starting with file `share`.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: a file is corrupted, is not a regular file, or lies outside of the folder.
    """
    # A corrupted byte may be invalid UTF-8. The sum or the name that contains it is then wrong too.
    content = read_file(folder / SUMS, _MAX_SUMS).decode(errors="replace")
    lines = content.removesuffix("\n").split("\n")
    written = {".metadata", *(p.name for p in folder.iterdir() if p.suffix in (".distcp", ".pt"))}
    missing = written - {line.partition("  ")[2] for line in lines}
    if missing:
        raise ValueError(
            f"{folder / SUMS} is corrupted: it has no checksum of {', '.join(missing)}"
        )
    for line in lines[share::shares]:
        expected, _, name = line.partition("  ")
        if Path(name).parts != (name,) or name == "..":
            raise ValueError(f"{folder / SUMS} is corrupted: it must name files, got {name!r:.100}")
        require_regular(folder / name, follow=False)  # a link may lead out of the folder
        if _sum(folder / name) != expected:
            raise ValueError(f"{folder / name} is corrupted: its checksum differs from {SUMS}")


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hide(path: Path) -> None:
    """Renames the checkpoint at path: an interrupted deletion leaves no partial checkpoint."""
    hidden = f".{path.name.removeprefix('.')}.{secrets.token_hex(4)}{_HIDDEN}"
    with _warns(path, "renamed"):
        path.rename(path.with_name(hidden))


@contextmanager
def _warns(path: Path, changed: str) -> Iterator[None]:
    """Warns if path cannot be changed: the new checkpoint is valid nevertheless."""
    try:
        yield
    except OSError as error:
        _warn(f"{path} cannot be {changed}: {error.strerror or error}; the next save tries again")


def _warn(message: str) -> None:
    warnings.warn(f"Checkpoints: {message}", stacklevel=2)


def _latest(name: str) -> str:
    """Returns the content of the file `latest`."""
    return f"{name}\n{name}\n"


def _in_time(holds: Callable[[], bool]) -> bool:
    """Waits until holds() is true; returns False if it is not within `PATIENCE`."""
    end = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _reads(path: Path, text: str) -> bool:
    """Returns whether a file has a text."""
    try:
        return path.read_text() == text
    except FileNotFoundError:
        return False


def _locks(handle: int) -> bool:
    """Locks an open file; returns False if another process has locked it."""
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True
