"""A folder of checkpoints; a crash at any moment leaves those that are there whole.

latest                            the name of the newest
step-00000042/
    .metadata  __0_0.distcp  …    tensors, as torch.distributed.checkpoint writes them
    state.pt  rank-0.pt  …        the rest, and that of single processes
    SHA256SUMS                    of all these, for `sha256sum --check` too
"""

import hashlib
import math
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from moe_ext.distributed.files import sync_folder, write_text

STEP = re.compile(r"step-(\d+)(\.old)?")
SUMS = "SHA256SUMS"


class CheckpointFolder:
    """Which checkpoints there are, and how one becomes one.

    1. `begin` makes a hidden folder, in which files are written
    2. `publish` adds their sums, renames the folder, step-00000042, and then replaces `latest` by a
       file with that name: from now on it is a checkpoint
    3. all but the newest are deleted, and what interrupted saves left

    Steps beyond the one that was saved last belong to a run that was given up: they do not count.

    Args:
        path: made when the first is written.
        keep: how many stay.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self.path = path
        self.keep = keep

    def checkpoints(self) -> dict[int, Path]:
        """The folders by step, in order."""
        paths = sorted(self.path.glob("step-*"), reverse=True)  # a new one after its .old
        found = {int(match[1]): path for path in paths if (match := STEP.fullmatch(path.name))}
        latest = self.path / "latest"
        match = STEP.fullmatch(latest.read_text().strip()) if latest.exists() else None
        last = int(match[1]) if match else math.inf
        return {step: found[step] for step in sorted(found) if step <= last}

    def temporary(self, step: int) -> Path:
        """Where the files of a checkpoint are written."""
        return self.path / f".step-{step:08d}"

    def begin(self, step: int) -> None:
        """Makes room."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._clear()
        self.temporary(step).mkdir()

    def publish(self, step: int, sums: Mapping[str, str]) -> None:
        """Makes a checkpoint of the files, all of which are on the disk.

        Args:
            sums: of `sums_of`, of all files.
        """
        temporary = self.temporary(step)
        lines = [f"{sums[name]}  {name}\n" for name in sorted(sums)]
        write_text(temporary / SUMS, "".join(lines))
        path = self.path / temporary.name[1:]
        if path.exists():
            path.rename(path.with_suffix(".old"))  # it counts until the new one has its name
        temporary.rename(path)
        sync_folder(self.path)
        write_text(self.path / "latest", f"{path.name}\n")
        for old in list(self.checkpoints().values())[: -self.keep]:
            _hide(old)
        self._clear()

    def abandon(self, step: int) -> None:
        """Deletes what was written."""
        shutil.rmtree(self.temporary(step), ignore_errors=True)

    def _clear(self) -> None:
        """Deletes what is no checkpoint: of an interrupted save, replaced, or given up."""
        counting = self.checkpoints().values()
        for path in self.path.glob("step-*"):
            if STEP.fullmatch(path.name) and path not in counting:
                _hide(path)
        for path in self.path.glob(".step-*"):
            shutil.rmtree(path)
        for path in self.path.glob(".latest.*"):
            path.unlink()


def sums_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The SHA-256 sums of some files by their names."""
    return {name: _sum(folder / name) for name in names}


def verify(folder: Path, share: int, shares: int) -> None:
    """Compares the sums of one of several shares of a checkpoint's files.

    Raises:
        OSError: a file is missing, or cannot be read.
        ValueError: a file is not what was written.
    """
    lines = (folder / SUMS).read_text().splitlines()
    written = {".metadata", *(p.name for p in folder.iterdir() if p.suffix in (".distcp", ".pt"))}
    missing = written - {line.partition("  ")[2] for line in lines}
    if missing:
        raise ValueError(f"{folder / SUMS} is damaged: it has no sum of {', '.join(missing)}")
    for line in lines[share::shares]:
        expected, _, name = line.partition("  ")
        if _sum(folder / name) != expected:
            raise ValueError(f"{folder / name} is damaged: its sum is not that of {SUMS}")


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hide(path: Path) -> None:
    """From now on it is no checkpoint, and may be deleted file by file."""
    path.rename(path.with_name(f".{path.name}.deleted"))
