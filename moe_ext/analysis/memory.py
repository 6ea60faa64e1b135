"""Memory that a computation takes (Linux)."""

import ctypes
from collections.abc import Callable
from pathlib import Path


def peak_mib(function: Callable[[], object]) -> float:
    """How far the resident set grows beyond its size before the call, in MiB; NaN off Linux."""

    def resident(field: str) -> float:
        status = Path("/proc/self/status").read_text()
        return int(status.split(f"{field}:")[1].split()[0]) / 1024

    try:
        ctypes.CDLL(None).malloc_trim(0)  # what earlier calls freed counts as free
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    except (OSError, AttributeError):
        return float("nan")
    before = resident("VmRSS")
    function()
    return resident("VmHWM") - before
