"""A lock for builds, because the processes of pytest-xdist build in the same folders."""

import contextlib
import fcntl


@contextlib.contextmanager
def locked(folder):
    """Waits while another test worker builds in `folder`, which may not exist yet."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # closing the file releases the lock
        yield
