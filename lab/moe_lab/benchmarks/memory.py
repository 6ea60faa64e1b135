"""Measures the memory of a computation, as the operating system (Linux) and torch report it."""

import ctypes
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor


def keep_freed_memory() -> None:
    """Makes the process keep large freed blocks for later allocations (glibc).

    By default, glibc returns freed blocks to the system, which clears every page before reuse. A
    step with gigabytes of weight gradients then spends most of its time on page faults.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return
    mmap_max, trim_threshold = -4, -1  # malloc.h
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, -1)


def peak_mib(function: Callable[[], object]) -> float:
    """Returns the resident set's peak growth in MiB in a call of `function`; NaN outside Linux."""

    def resident(field: str) -> float:
        status = Path("/proc/self/status").read_text()
        return int(status.split(f"{field}:")[1].split()[0]) / 1024

    try:
        ctypes.CDLL(None).malloc_trim(0)  # returns memory that earlier calls freed
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    except (OSError, AttributeError):
        return float("nan")
    before = resident("VmRSS")
    function()
    return resident("VmHWM") - before


def peak_allocated_mib(function: Callable[[], object], device: str = "cpu") -> float:
    """Returns the peak in MiB of the memory that torch allocates in a call of `function`.

    The result is the same in every run; memory that the allocator caches does not count. On the CPU
    the profiler's record of each allocation takes about 3 kB.
    """
    if device != "cpu":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        function()
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events), default=0) / 2**20


def saved_bytes(function: Callable[[], object], parameters: Iterable[Tensor]) -> int:
    """Returns the bytes that autograd saves for backward in `function`, without `parameters`."""
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        kept = function()
    for parameter in parameters:
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    del kept  # its graph kept the storages alive: no address was reused
    return sum(storages.values())
