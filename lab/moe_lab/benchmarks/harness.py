"""Measures the run time of functions in interleaved rounds; shared by all benchmarks."""

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from moe_ext import MoE
from moe_ext.info import blas_name, cpu_name, isa
from moe_lab.experiments.report import markdown_table
from moe_lab.files import write_json

Name = TypeVar("Name")
Row = TypeVar("Row")
Clock = Callable[[Callable[[], object]], float]  # returns the seconds of one call


class Quartiles(NamedTuple):
    """The quartiles of a measured value over the rounds; formatted as "median (low-high)"."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """Computes the quartiles of at least 2 values."""
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    def __format__(self, form: str) -> str:
        return f"{self.median:{form}} ({self.low:{form}}-{self.high:{form}})"

    def cells(self, form: str = ".2f") -> tuple[str, str]:
        """Formats two cells of a table: the median, and the lower and upper quartile."""
        low, median, high = (format(value, form) for value in self)
        return median, f"{low}-{high}"


def environment(device: str = "cpu") -> str:
    """Describes the test system: processor or GPU, torch, BLAS, the kernels' instruction set."""
    if device != "cpu":
        name = torch.cuda.get_device_name(device)
        return f"{name}; torch {torch.__version__}, CUDA {torch.version.cuda}; {cpu_name()}"
    return f"{cpu_name()}; torch {torch.__version__}, {blas_name()}, kernels {isa()}"


def report_rows(
    rows: Sequence[Row],
    header: Sequence[str],
    cells: Callable[[Row], Sequence[object]],
    path: Path | None,
) -> None:
    """Prints the rows of a benchmark as a table; writes rows and environment to a JSON file.

    Args:
        rows: instances of a dataclass.
        header: header of the table.
        cells: function that returns the cells of a row.
        path: the JSON file; None writes no file.
    """
    print(markdown_table(header, map(cells, rows)))
    if path is not None:
        write_json(path, {"environment": environment(), "rows": [vars(row) for row in rows]})


def options_as_text(options: argparse.Namespace) -> dict[str, str]:
    """Returns the options of a benchmark for its record, without files that it reads or writes."""

    def is_path(value: object) -> bool:
        return isinstance(value, Path) or (isinstance(value, list) and any(map(is_path, value)))

    return {name: str(value) for name, value in vars(options).items() if not is_path(value)}


def host_seconds(function: Callable[[], object]) -> float:
    """Returns the wall-clock seconds of one call of `function`."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


class DeviceClock:
    """Measures the seconds that a call keeps a GPU's current stream busy, with two CUDA events.

    Before the call, the device overwrites a buffer of twice the size of its L2 cache. Inputs are
    thus read from memory, as in a training step. The device then waits for about 2 ms, in which the
    host enqueues the kernels. Launch overhead is therefore measured only if the overhead exceeds 2
    ms or the call synchronizes.
    """

    CYCLES = 4_000_000  # about 2 ms

    def __init__(self, device: str) -> None:
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self._buffer = torch.empty(2 * cache, dtype=torch.uint8, device=device)
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def __call__(self, function: Callable[[], object]) -> float:
        self._buffer.zero_()
        torch.cuda._sleep(self.CYCLES)
        self._start.record()
        function()
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) / 1e3


def clock_of(device: str) -> Clock:
    """Returns a function that measures the seconds of a call whose work runs on `device`."""
    return host_seconds if device == "cpu" else DeviceClock(device)


def interleaved(
    functions: Mapping[Name, Callable[[], object]],
    rounds: int,
    warm_up: int = 2,
    *,
    twice: bool = False,
    clock: Clock = host_seconds,
) -> dict[Name, list[float]]:
    """Measures the run time of each function in every round; a round calls all functions in turn.

    Args:
        functions: the functions whose run time is measured, by name.
        rounds: number of timed rounds.
        warm_up: number of untimed rounds before the timed rounds.
        twice: call each function twice and time the second call. Caches and free memory are then in
            the state that the function itself leaves.
        clock: measures the seconds of one call; see `clock_of`.

    Returns:
        The seconds of every round, by name.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in functions}
    for number in range(-warm_up, rounds):
        for name, function in functions.items():
            if twice:
                function()
            took = clock(function)
            if number >= 0:
                seconds[name].append(took)
    return seconds


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Quartiles:
    """Returns the quartiles of numerator / denominator over the rounds; needs 2 or more."""
    return Quartiles.of(a / b for a, b in zip(numerator, denominator, strict=True))


class OutputOnly(nn.Module):
    """Returns the output of a MoE layer without `MoEAux`."""

    def __init__(self, layer: MoE) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


@contextlib.contextmanager
def pinned(threads: int) -> Iterator[None]:
    """Limits torch to `threads` threads and, on Linux, the process to this number of processors."""
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
    """Restricts the threads of the process, and threads that they start, to `processors`."""
    if not processors:
        return
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(task.name), processors)
