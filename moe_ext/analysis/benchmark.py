"""Functions timed side by side, for the benchmarks in scripts/."""

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from moe_ext import _C
from moe_ext.info import blas_name, cpu_name

Name = TypeVar("Name")


class Ratio(NamedTuple):
    """The quartiles of a ratio over the rounds."""

    low: float
    median: float
    high: float


def environment() -> str:
    """What the figures depend on: processor, torch, BLAS, the kernels' instruction set."""
    return f"{cpu_name()}; torch {torch.__version__}, {blas_name()}, kernels {_C.isa()}"


def interleaved(
    functions: Mapping[Name, Callable[[], object]],
    rounds: int,
    warm_up: int = 2,
    *,
    twice: bool = False,
) -> dict[Name, list[float]]:
    """Seconds of each function in every round: one after the other, so that all see the same noise.

    Args:
        functions: by name.
        rounds: how often each is timed.
        warm_up: rounds before, which are not timed.
        twice: call each two times in a row and time the second, which finds the caches and the
            free memory as in a loop of it alone, and not as another function left them.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in functions}
    for number in range(-warm_up, rounds):
        for name, function in functions.items():
            if twice:
                function()
            start = time.perf_counter()
            function()
            if number >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(numerator: list[float], denominator: list[float]) -> Ratio:
    """Quartiles of the rounds' ratios; at least 2 rounds."""
    pairs = zip(numerator, denominator, strict=True)
    return Ratio(*statistics.quantiles([a / b for a, b in pairs], n=4, method="inclusive"))


@contextlib.contextmanager
def pinned(threads: int) -> Iterator[None]:
    """So many threads of torch, and the process on as many of its processors (Linux)."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    processors = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    try:
        _run_on(set(sorted(processors)[:threads]))
        yield
    finally:
        _run_on(processors)
        torch.set_num_threads(before)


def _run_on(processors: set[int]) -> None:
    """Lets all threads of the process, and those that it starts, run there only."""
    if not processors:
        return
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(task.name), processors)
