"""Runs a benchmark: interleaved rounds, threads, clocks, the table and its JSON file."""

import argparse
import contextlib
import os
import statistics
import string
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from moe_ext import MoE
from moe_ext.info import avoid_missing_amx, blas_name, cpu_name, isa
from moe_lab.files import write_json
from moe_lab.markdown import markdown_table

Name = TypeVar("Name")
Clock = Callable[[Callable[[], Any]], Any]  # calls a function once and returns its seconds


class Row(SimpleNamespace):
    """A row of a table: the figures that a benchmark measured, by name."""


class Quartiles(NamedTuple):
    """The quartiles of a measured value over the rounds.

    They are formatted as "median (low-high)". At the end of a format, "~" writes "low to high", and
    "|" makes two cells of a table, the median and the other quartiles.
    """

    low: float
    median: float
    high: float

    @classmethod
    def from_values(cls, values: Iterable[float]) -> Self:
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    def scaled(self, factor: float) -> "Quartiles":
        return Quartiles(*(factor * value for value in self))

    def __format__(self, form: str) -> str:
        low, median, high = (format(value, form.rstrip("|~")) for value in self)
        if form.endswith("|"):
            return f"{median} | {low}-{high}"
        return f"{median} ({low}{' to ' if form.endswith('~') else '-'}{high})"


class _Cells(string.Formatter):
    """Formats None as "–"."""

    def format_field(self, value: Any, form: str) -> Any:
        if value is None:
            return "– | –" if form.endswith("|") else "–"
        return super().format_field(value, form)


def environment(device: str = "cpu") -> str:
    """Describes the test system: processor or GPU, torch, BLAS, the kernels' instruction set."""
    if device != "cpu":
        name = torch.cuda.get_device_name(device)
        return f"{name}; torch {torch.__version__}, CUDA {torch.version.cuda}; {cpu_name()}"
    return f"{cpu_name()}; torch {torch.__version__}, {blas_name()}, kernels {isa()}"


def run(case: Any, args: Any, command: str) -> Any:
    """Measures a case and reports it; returns its rows, or the result of its own `run`.

    The case is a module. It has the function `run(args)`, or `measure(args)`, which returns rows
    and is called once for each number of threads. `HEADER` and `CELLS` are the columns of their
    table, and `TITLE` has the names of options in braces. The command is shown on the page.
    """
    if "bfloat16" in getattr(args, "dtype", ""):
        avoid_missing_amx()
    torch.manual_seed(0)
    args.arguments, args.command = options_as_text(args), command
    if hasattr(case, "run"):
        return case.run(args)
    threads = getattr(args, "threads", None)
    if not isinstance(threads, list):
        if threads == 0:
            args.threads = threads = torch.get_num_threads()
        threads = [threads]
    print(f"{environment()}\n{case.TITLE.format(**vars(args))}\n")
    rows = []
    for args.threads in threads:
        with pinned(args.threads):
            rows += case.measure(args)
    report(rows, case.HEADER, case.CELLS, args.json)
    return rows


def report(
    rows: Sequence[Row], header: str, cells: str, path: Path | None, *last: str, **more: Any
) -> None:
    """Prints rows, and `last` lines, as a table; writes rows and `more` to the JSON file `path`."""
    print(table(header, cells, rows, *last))
    if path is not None:
        record = {"environment": environment(), "rows": [vars(row) for row in rows]}
        write_json(path, record | more)


def table(header: str, cells: str, rows: Iterable[Row], *last: str) -> str:
    """Formats a Markdown table with `last` lines; " | " stands between columns."""
    lines = [_Cells().vformat(cells, (), vars(row)) for row in rows]
    return markdown_table(header.split(" | "), (line.split(" | ") for line in [*lines, *last]))


def options_as_text(options: argparse.Namespace) -> dict[str, str]:
    """Returns the options of a benchmark for its record, without files that it reads or writes."""
    first = {n: v[0] if isinstance(v, list) and v else v for n, v in vars(options).items()}
    return {n: str(v) for n, v in vars(options).items() if not isinstance(first[n], Path)}


def host_seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


class DeviceClock:
    """Measures the seconds that a call keeps a GPU's current stream busy, with two CUDA events.

    Before the call, the device overwrites a buffer of twice the size of its L2 cache, so inputs are
    read from memory. The device then waits for about 2 ms, in which the host enqueues the kernels.
    Launch overhead is therefore measured only if it exceeds 2 ms or the call synchronizes.
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
) -> dict[Name, list[Any]]:
    """Returns the seconds of each function in every round; a round calls all functions in turn.

    Args:
        functions: the timed functions, by name.
        rounds: number of timed rounds.
        warm_up: number of untimed rounds before the timed rounds.
        twice: call each function twice and time the second call. Caches and free memory are then in
            the state that the function itself leaves.
        clock: calls a function and returns its seconds, or several figures; see `clock_of`.
    """
    seconds: dict[Name, list[Any]] = {name: [] for name in functions}
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
    return Quartiles.from_values(a / b for a, b in zip(numerator, denominator, strict=True))


class OutputOnly(nn.Module):
    """Returns the output of a MoE layer without `MoEAux`."""

    def __init__(self, layer: MoE) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


@contextlib.contextmanager
def pinned(threads: int | None) -> Iterator[None]:
    """Limits torch to `threads` threads and, on Linux, the process to this number of processors.

    None limits nothing, and 0 is torch's number of threads.
    """
    before = torch.get_num_threads()
    processors = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if threads is not None:
        torch.set_num_threads(threads or before)
        _run_on(set(sorted(processors)[: threads or before]))
    try:
        yield
    finally:
        _run_on(processors)
        torch.set_num_threads(before)


def _run_on(processors: set[int]) -> None:
    """Restricts the threads of the process, and threads that they start, to `processors`."""
    for task in Path("/proc/self/task").iterdir() if processors else ():
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(task.name), processors)
