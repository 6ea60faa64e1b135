"""Memory that a computation takes, as the system sees it (Linux) and as torch does."""

import ctypes
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor


def keep_freed_memory() -> None:
    """Lets the process keep the large blocks that it frees, for its next ones (glibc).

    Else they go back to the system, which clears every page before it hands it out again: a step
    that makes the gradients of gigabytes of weights then spends most of its time on that.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return
    mmap_max, trim_threshold = -4, -1  # malloc.h
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, -1)


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


def peak_allocated_mib(function: Callable[[], object], device: str = "cpu") -> float:
    """The most that torch has allocated at once, beyond what there was before, in MiB.

    The same every time, whatever the allocator keeps of what was freed. On the CPU the record of
    allocations itself takes about 3 kB for each.
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
    """What autograd keeps of `function` for the backward pass, beside the parameters."""
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        kept = function()
    for parameter in parameters:
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    del kept  # its graph held the storages until here, so that none was counted for another
    return sum(storages.values())
