"""Measures implementations of experts against each other and against the limits of the machine.

`layer` explains the rounds, the limit, and the figures of several runs.
"""

import gc
import importlib.metadata
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from moe_lab.benchmarks.harness import (
    Quartiles,
    Row,
    clock_of,
    environment,
    interleaved,
    pinned,
    ratio,
)
from moe_lab.benchmarks.memory import keep_freed_memory, peak_allocated_mib
from moe_lab.benchmarks.roofline import Probe, Work, gemm_probe, limit, stream_probe
from moe_lab.benchmarks.shapes import Shape
from moe_lab.experiments.page import Page, publish
from moe_lab.files import from_json, write_json
from moe_lab.progress import progress

# Seconds. A slower function that also takes 2.5 times as long as ours is timed once.
LONG_ON_CPU, LONG_ON_GPU = 0.5, 0.05
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
T = TypeVar("T")
Key = tuple[str, str]  # an implementation or "machine"; a pass or a probe
GEMM, STREAM = ("machine", "gemm"), ("machine", "stream")
Functions = dict[Key, Callable[[], object]]
Stacked = Tensor | Sequence[Tensor]  # [E, …], or E of them


class Extra(NamedTuple):
    """What an implementation needs in addition to Eq. 1: bytes of memory, flops, bytes moved."""

    memory: float = 0
    flops: float = 0
    bytes: float = 0


class LayerProblem(ABC):
    """What is measured: tokens and experts that all implementations share.

    The result shows its shape, activation, hidden, used_experts and dtype.
    """

    passes: Collection[str]  # the names of what is timed
    beside: Sequence[str] = ()  # implementations whose results are not compared
    tolerances: Mapping[str, float] = {}  # of implementations that round more than the dtype
    has_peak = False  # whether the peak memory is measured
    device, activation = "cpu", "swiglu"
    shape: Shape
    hidden: int
    used_experts: int
    dtype: torch.dtype

    @abstractmethod
    def work(self, which: str) -> Work:
        """Returns the work of a pass."""

    @abstractmethod
    def results(self, implementation: str, which: str) -> Mapping[str, Stacked]:
        """Runs a pass with an implementation; returns what is compared."""

    def extra(self, implementation: str, which: str) -> Extra:
        return Extra()

    def call(self, implementation: str, which: str) -> Callable[[], object]:
        """Returns the function that is timed."""
        return partial(self.results, implementation, which)


class WrongResult(AssertionError):
    """The result of another implementation differs from the result of moe_ext."""


def check(
    results: Mapping[str, Iterable[Tensor]],
    expected: Mapping[str, Iterable[Tensor]],
    tolerance: float | None = None,
) -> None:
    """Raises `WrongResult` if the norms of `results` - `expected` are more than rounding.

    The rounding of a sum near zero can switch a hidden unit on or off, which changes a few numbers
    by more. The tolerance is relative to the norm of `expected`; None: depends on the dtype.
    """
    for name, tensors in results.items():
        pairs = list(zip(tensors, expected[name], strict=True))
        error = torch.stack([(a - b).float().norm() for a, b in pairs]).norm().item()
        size = torch.stack([b.float().norm() for _, b in pairs]).norm().item()
        allowed = _TOLERANCE[pairs[0][0].dtype] if tolerance is None else tolerance
        if not error <= allowed * size:  # or NaN
            raise WrongResult(
                f"{name} differs from moe_ext by {error:.2g} in norm; moe_ext has norm {size:.2g}"
            )


class Candidates(NamedTuple):
    """The functions to measure, the seconds of their first round, and reasons to skip others."""

    functions: Functions
    seconds: dict[Key, list[float]]
    remarks: dict[Key, str]
    peak_mib: dict[Key, float]


def candidates(
    problem: Any, peers: Sequence[str], rates: Mapping[Key, float], args: Any
) -> Candidates:
    """Checks each implementation against the result of moe_ext, just before its first round.

    A wrong implementation is not timed in the passes that follow, either. The rates are the GEMM
    peak in FLOP/s and the stream bandwidth in bytes/s.
    """
    chosen = Candidates({}, {}, {}, {})
    tolerances: Mapping[str, float] = getattr(problem, "tolerances", {})
    for which in reversed(problem.passes):  # the last pass computes the most results
        expected = problem.results("ours", which)
        for name in ("ours", *problem.beside, *peers):
            key = (name, which)
            wrong = [r for (n, _), r in chosen.remarks.items() if n == name and "WRONG" in r]
            reason = "".join(wrong[:1]) or _reason_to_skip(problem.extra(*key), rates, args)
            if not reason:
                try:
                    call = problem.call(*key)
                    if name in problem.beside:
                        call()
                    else:
                        check(problem.results(*key), expected, tolerances.get(name))
                    chosen.seconds.update(interleaved({key: call}, 1, 0, clock=args.clock))
                    if problem.has_peak:
                        chosen.peak_mib[key] = peak_allocated_mib(call, problem.device)
                    chosen.functions[key] = call
                except ImportError as error:
                    reason = f"not installed: {error}"
                except WrongResult as error:
                    reason = f"WRONG: {error}"
                except Exception as error:  # what a peer does not support, in its own words
                    if name in ("ours", *problem.beside):
                        raise
                    text = str(error).strip().splitlines() or [type(error).__name__]
                    out_of_memory = isinstance(error, torch.OutOfMemoryError)
                    reason = "out of memory" if out_of_memory else f"fails: {text[0]}"
            if reason:
                chosen.remarks[key] = reason
    return chosen


def _reason_to_skip(extra: Extra, rates: Mapping[Key, float], args: Any) -> str:
    """Returns why an implementation that needs `extra` does not run; "" if it runs."""
    seconds = extra.flops / rates[GEMM] + extra.bytes / rates[STREAM]
    if extra.memory > args.memory * 2**30:
        return f"would need {extra.memory / 2**30:.1f} GiB"
    return f"would take {seconds:.0f} s more" if seconds > args.patience else ""


def measure(
    name: str, problem: Any, peers: Sequence[str], args: Any, gemm: Probe | None = None
) -> list[dict[str, Any]]:
    """Measures a problem; returns a result for each number of threads.

    The figures of a result are by implementation and pass. Three numbers are the quartiles over the
    rounds or, for several runs, minimum, median and maximum.

    Args:
        name: the name in the tables.
        problem: has the attributes and methods of a `LayerProblem`.
        peers: the other implementations.
        args: the options of the run.
        gemm: the probe of the GEMM peak; None: `gemm_probe`.
    """
    gemm = gemm or gemm_probe(problem.dtype, device=problem.device)
    probes = {"gemm": gemm, "stream": stream_probe(device=problem.device)}
    machine: Functions = {("machine", what): probe.function for what, probe in probes.items()}
    work = {which: problem.work(which) for which in problem.passes}
    work |= {what: probe.work for what, probe in probes.items()}
    chosen: Candidates | None = None
    records = []
    for threads in args.threads:  # None on a GPU
        with pinned(threads):
            seconds = _machine_seconds(machine, args)
            if chosen is None:
                rates = {key: max(work[key[1]]) / samples[0] for key, samples in seconds.items()}
                chosen = candidates(problem, peers, rates, args)
                seconds |= chosen.seconds
            else:
                seconds |= interleaved(chosen.functions, 1, 0, twice=True, clock=args.clock)
            add_rounds(seconds, machine, chosen.functions, args)
        limit_ms, figures = figures_of(seconds, work)
        records.append(
            {
                "name": name,
                "shape": problem.shape,
                **{key: getattr(problem, key) for key in ("activation", "hidden", "used_experts")},
                "dtype": str(problem.dtype).removeprefix("torch."),
                "threads": threads,
                "gemm_gflops": work["gemm"].flops / median(seconds[GEMM]) / 1e9,
                "stream_gbytes": work["stream"].bytes / median(seconds[STREAM]) / 1e9,
                "limit_ms": limit_ms,
                "figures": figures,
                "remarks": by_pass(chosen.remarks),
                "peak_mib": by_pass(chosen.peak_mib),
                "occasions": 1,
            }
        )
    return records


def _machine_seconds(machine: Functions, args: Any) -> dict[Key, list[float]]:
    seconds = interleaved(machine, 3, 1, clock=args.clock)
    return {key: [median(samples)] for key, samples in seconds.items()}


def add_rounds(
    seconds: dict[Key, list[float]], machine: Functions, functions: Functions, args: Any
) -> None:
    """Measures at least one more round, and as many as fit into the time limit.

    A function that took far longer than moe_ext in the first round is not repeated.
    """
    often = {
        (name, which): function
        for (name, which), function in functions.items()
        if seconds[name, which][0] < max(2.5 * seconds["ours", which][0], args.long)
    }
    start = time.perf_counter()
    for rounds in range(1, args.rounds):
        took = time.perf_counter() - start
        if rounds > 1 and took * rounds / (rounds - 1) > args.seconds:
            break
        more = _machine_seconds(machine, args)
        more |= interleaved(often, 1, 0, twice=True, clock=args.clock)
        for key, samples in more.items():
            seconds[key] += samples


def figures_of(
    seconds: Mapping[Key, Sequence[float]], work: Mapping[str, Work]
) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
    """Returns each pass's limit in ms, and figures by implementation and pass.

    Some functions have only one round. `work` has that of "gemm" and "stream" too.
    """
    gemm = [work["gemm"].flops / second for second in seconds[GEMM]]
    stream = [work["stream"].bytes / second for second in seconds[STREAM]]
    limits = {
        which: [limit(work[which], *rates) for rates in zip(gemm, stream, strict=True)]
        for which in work
        if ("machine", which) not in seconds
    }
    figures = {}
    for (name, which), samples in seconds.items():
        if name == "machine":
            continue
        ideal, base = limits[which], seconds["ours", which]
        if len(samples) == 1:  # only the first round; quartiles need at least two values
            ideal, base, samples = ([values[0]] * 2 for values in (ideal, base, samples))
        figures[name, which] = {
            "rounds": len(seconds[name, which]),
            "ms": Quartiles.from_values(1e3 * s for s in samples),
            "gflops": work[which].flops / median(samples) / 1e9,
            "share_of_limit": ratio(ideal, samples),
            "ratio_to_ours": ratio(samples, base),
        }
    return {which: 1e3 * median(samples) for which, samples in limits.items()}, by_pass(figures)


def measure_all(
    todo: Sequence[tuple[str, str, Callable[[], T]]],
    examine: Callable[[str, T, dict[str, Any]], None],
    args: Any,
    **more: Any,
) -> dict[str, Any]:
    """Measures problems in sequence; returns the record, which is written after each problem.

    Args:
        todo: the name of each problem, a text that describes it, and a function that makes it.
        examine: measures a problem and adds the result to the record.
        args: the options. `json` is the file of the record.
        more: further entries of the record.
    """
    args.long = LONG_ON_CPU if args.device == "cpu" else LONG_ON_GPU
    args.clock = clock_of(args.device)
    if args.keep_freed_memory:
        keep_freed_memory()
    record: dict[str, Any] = {
        "environment": environment(args.device),
        "command": args.command,
        "arguments": args.arguments,
        **{"results": [], "left_out": []},
        **more,
    }
    start = time.monotonic()
    for name, text, make in progress(todo, "problems", "problem"):
        if args.minutes is not None and time.monotonic() - start > 60 * args.minutes:
            record["left_out"].append(f"{text}: the time limit was reached")
            continue
        try:
            examine(name, make(), record)
        except torch.OutOfMemoryError:
            record["left_out"].append(f"{text}: out of memory")
        if args.json:
            write_json(args.json, record)
        gc.collect()  # implementations refer to their problem, which holds them
        if args.device != "cpu":
            torch.cuda.empty_cache()
    return record


def results_of(record: Mapping[str, Any]) -> list[Row]:
    return [Row(**row | {"shape": Shape(*row["shape"])}) for row in record["results"]]


def versions_of(*packages: str) -> str:
    """Returns the versions of packages that may be missing."""
    lines = []
    for package in packages:
        try:
            lines.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"no {package}")
    return ", ".join(lines)


def best_ratio(result: Row, which: str, beside: Sequence[str] = ()) -> float | None:
    """Returns the least time of another implementation / the time of moe_ext, in a pass."""
    peers = [f for name, f in result.figures.items() if name not in ("ours", *beside)]
    return min((f[which]["ratio_to_ours"][1] for f in peers if which in f), default=None)


def read_merged(args: Any) -> dict[str, Any]:
    """Merges the records of the runs of --report into one, which --json writes."""
    records = [from_json(path.read_text("utf-8")) for path in args.report]
    results = by(
        [{**row, "occasions": row.get("occasions", 1)} for r in records for row in r["results"]],
        lambda r: (r["name"], r["activation"], r["dtype"], r["threads"]),
    )
    lists = {
        key: [row for record in records for row in record.get(key, [])]
        for key in ("memory", "routing", "left_out", "warnings")
        if key in records[0]
    }
    texts = {
        key: separator.join(dict.fromkeys(record[key] for record in records if key in record))
        for key, separator in (("environment", "; "), ("command", "\n"), ("notes", "\n\n"))
        if any(key in record for record in records)
    }
    medians = [_over_occasions(rows) for rows in results.values()]
    merged = records[0] | texts | {"results": medians} | lists
    if args.json:
        write_json(args.json, merged)
    return merged


def _over_occasions(occasions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merges the results of a problem in several runs; those of a single run stay unchanged."""
    if len(occasions) == 1:
        return occasions[0]
    keys = ("gemm_gflops", "stream_gbytes", "limit_ms", "figures", "occasions")
    return occasions[0] | {key: _median([row[key] for row in occasions], key) for key in keys}


def _median(values: Sequence[Any], key: str) -> Any:
    """Merges the values of a key: medians with minimum and maximum, and sums of numbers of runs."""
    if isinstance(values[0], dict):
        names = dict.fromkeys(name for value in values for name in value)
        return {n: _median([value[n] for value in values if n in value], n) for n in names}
    if isinstance(values[0], list):
        medians = [middle for _, middle, _ in values]
        return [min(medians), median(medians), max(medians)]
    return sum(values) if key in ("rounds", "occasions") else median(values)


def by_pass(figures: Mapping[Key, T]) -> dict[str, dict[str, T]]:
    names = dict.fromkeys(name for name, _ in figures)
    return {name: {w: figure for (n, w), figure in figures.items() if n == name} for name in names}


def by(results: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """Groups `results` by the value of `key`, in order of appearance."""
    groups: dict[Any, list[T]] = {}
    for result in results:
        groups.setdefault(key(result), []).append(result)
    return groups


def run_page(
    args: Any,
    name: str,
    measure: Callable[[Any], dict[str, Any]],
    page_of: Callable[[dict[str, Any], list[Row]], Page],
) -> int:
    """Measures or merges earlier runs; prints the page NAME, or writes it, its data and its plot.

    Returns the status. `measure` makes the record of a run, `page_of` the page of a record and its
    results.
    """
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        args.json = args.json or args.output / f"{name}.json"
    record = read_merged(args) if args.report else measure(args)
    results = results_of(record)
    page = page_of(record, results)
    if args.output is None:
        print(page.as_markdown(name), end="")
    else:
        publish(args.output, name, page, record)
    return report_wrong(results)


def report_wrong(results: Iterable[Row]) -> int:
    """Prints wrong results to stderr; returns the exit status, 1 if there are any."""
    wrong = [
        f"{result.name}, {result.dtype}: {peer}: {reason}"
        for result in results
        for peer, remarks in result.remarks.items()
        for reason in set(remarks.values())
        if reason.startswith("WRONG")
    ]
    for line in dict.fromkeys(wrong):
        print(f"error: {line}", file=sys.stderr)
    return 1 if wrong else 0
