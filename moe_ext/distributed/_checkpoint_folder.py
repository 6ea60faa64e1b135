"""A folder of checkpoints that are written atomically and verified by checksum.

Contents::

    latest                            the name of the newest checkpoint, twice
    step-00000042/
        .metadata  __0_0.distcp  …    tensors, in the format of torch.distributed.checkpoint
        state.pt  rank-0.pt  …        the other state: common to all ranks, and of each rank
        SHA256SUMS                    checksums of these files, in the format of sha256sum
"""

import hashlib
import math
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from moe_ext.files import read_file, require_regular, sync_folder, write_text

STEP = re.compile(r"step-(\d{1,18})(\.old)?")
MAX_STEP = 10**18  # with more digits, STEP does not match
SUMS = "SHA256SUMS"
_MAX_LATEST, _MAX_SUMS = 1_000, 2**26  # bytes; a checksum with its name has about 80


class CheckpointFolder:
    """Lists checkpoints and writes new ones atomically.

    1. `begin` makes a hidden folder for the files.
    2. `publish` adds their checksums, renames the folder to step-00000042, and replaces the
       file `latest`, which contains that name twice. The checkpoint is now valid.
    3. `publish` also deletes old checkpoints and the files of interrupted saves.

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

    def begin(self, step: int) -> None:
        """Makes the hidden folder of a step and deletes the files of interrupted saves."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._clear()
        self.temporary(step).mkdir()

    def publish(self, step: int, sums: Mapping[str, str]) -> None:
        """Turns the hidden folder of a step into a checkpoint; its files must be synced to disk.

        Args:
            step: the number of the checkpoint.
            sums: the checksums of all files, from `sums_of`.
        """
        temporary = self.temporary(step)
        lines = [f"{sums[name]}  {name}\n" for name in sorted(sums)]
        write_text(temporary / SUMS, "".join(lines))
        path = self.path / temporary.name[1:]
        if path.exists():
            path.rename(path.with_suffix(".old"))  # valid until the new folder has its name
        temporary.rename(path)
        sync_folder(self.path)
        write_text(self.path / "latest", f"{path.name}\n{path.name}\n")
        if self.continued_from is not None:
            for number, abandoned in self.checkpoints().items():
                if self.continued_from < number < step:
                    _hide(abandoned)
            self.continued_from = None
        for old in list(self.checkpoints().values())[: -self.keep]:
            _hide(old)
        self._clear()

    def abandon(self, step: int) -> None:
        """Deletes the hidden folder of a step whose save failed."""
        shutil.rmtree(self.temporary(step), ignore_errors=True)

    def _clear(self) -> None:
        """Deletes interrupted saves, replaced checkpoints and checkpoints of abandoned runs."""
        counting = self.checkpoints().values()
        for path in self.path.glob("step-*"):
            if STEP.fullmatch(path.name) and path not in counting:
                _hide(path)
        for path in self.path.glob(".step-*"):
            shutil.rmtree(path)
        for path in self.path.glob(".latest.*"):
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
    path.rename(path.with_name(f".{path.name}.deleted"))
