"""Measures implementations against each other and against the limits of the machine.

`layer` explains the rounds, the limit, and the figures of several runs.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from moe_lab.benchmarks.harness import (
    Clock,
    Quartiles,
    host_seconds,
    interleaved,
    pinned,
    ratio,
)
from moe_lab.benchmarks.peers import Extra, Shape
from moe_lab.benchmarks.roofline import Work, gemm_probe, limit, stream_probe

# Seconds. A slower function that also takes 2.5 times as long as ours is timed once.
LONG_ON_CPU, LONG_ON_GPU = 0.5, 0.05
BESIDE_PEERS = ("experts", "dense")  # timed without a comparison of results
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
T = TypeVar("T")
Key = tuple[str, str]  # an implementation or "machine"; a pass or a probe
GEMM, STREAM = ("machine", "gemm"), ("machine", "stream")
Functions = dict[Key, Callable[[], object]]


@dataclass
class Options:
    """The implementations to measure, the clock, and the limits of time and memory."""

    threads: Sequence[int | None]  # None on a GPU: unchanged
    rounds: int
    seconds: float
    memory: float
    patience: float
    peers: list[str]
    long: float
    clock: Clock = host_seconds


class Measured(Protocol):
    """The attributes of a problem that its results show."""

    @property
    def shape(self) -> Shape: ...

    @property
    def activation(self) -> str: ...

    @property
    def hidden(self) -> int: ...

    @property
    def used_experts(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> str: ...


class WrongResult(AssertionError):
    """The result of another implementation differs from the result of moe_ext."""


@dataclass
class Figures:
    """The measurements of one implementation in one pass.

    A sequence of three numbers has the quartiles over the rounds or, for several runs, minimum,
    median and maximum.
    """

    rounds: int
    ms: Sequence[float]
    gflops: float
    share_of_limit: Sequence[float]
    ratio_to_ours: Sequence[float]


@dataclass
class Result:
    """The measurements of a problem at a number of threads, by implementation and pass.

    Attributes:
        threads: the number of threads; None on a GPU.
        limit_ms: the least possible time in ms, by pass.
        gemm_gflops: the median GEMM peak in these rounds.
        stream_gbytes: the median stream bandwidth in these rounds.
        remarks: why an implementation has no figures, by implementation and pass.
        peak_mib: on a GPU, the peak memory of a pass without its inputs.
        occasions: number of runs that the figures are medians of.
    """

    name: str
    shape: Shape
    activation: str
    hidden: int
    used_experts: int
    dtype: str
    threads: int | None
    gemm_gflops: float
    stream_gbytes: float
    limit_ms: dict[str, float]
    figures: dict[str, dict[str, Figures]]
    remarks: dict[str, dict[str, str]]
    peak_mib: dict[str, dict[str, float]]
    occasions: int = 1

    @classmethod
    def of_json(cls, record: dict[str, Any]) -> "Result":
        figures = {
            name: {which: Figures(**each) for which, each in found.items()}
            for name, found in record["figures"].items()
        }
        return cls(**record | {"shape": Shape(*record["shape"]), "figures": figures})

    def best_ratio(self, which: str) -> float | None:
        """Returns the least time of another implementation / the time of moe_ext, in a pass."""
        ratios = [
            found[which].ratio_to_ours[1]
            for name, found in self.figures.items()
            if name not in ("ours", *BESIDE_PEERS) and which in found
        ]
        return min(ratios, default=None)


def check(found: Mapping[str, Iterable[Tensor]], expected: Mapping[str, Iterable[Tensor]]) -> None:
    """Checks that the results `found` and `expected` agree up to rounding.

    Compares norms: the rounding of a sum near zero can switch a hidden unit on or off. This
    changes a few numbers by more than rounding.

    Raises:
        WrongResult: a result differs from the expected result.
    """
    for name, tensors in found.items():
        pairs = list(zip(tensors, expected[name], strict=True))
        error = torch.stack([(a - b).float().norm() for a, b in pairs]).norm().item()
        size = torch.stack([b.float().norm() for _, b in pairs]).norm().item()
        if not error <= _TOLERANCE[pairs[0][0].dtype] * size:  # or NaN
            raise WrongResult(
                f"{name} differs from moe_ext by {error:.2g} in norm; moe_ext has norm {size:.2g}"
            )


def reason_to_skip(extra: Extra, rates: Mapping[Key, float], options: Options) -> str:
    """Returns why an implementation that needs `extra` does not run; "" if it runs."""
    seconds = extra.flops / rates[GEMM] + extra.bytes / rates[STREAM]
    if extra.memory > options.memory * 2**30:
        return f"would need {extra.memory / 2**30:.1f} GiB"
    return f"would take {seconds:.0f} s more" if seconds > options.patience else ""


class Candidates(NamedTuple):
    """The functions to measure, the seconds of their first round, and reasons to skip others."""

    functions: Functions
    seconds: dict[Key, list[float]]
    remarks: dict[Key, str]
    peak_mib: dict[Key, float]


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message, or the name of its type."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def measure(
    name: str,
    problem: Measured,
    work: Mapping[str, Work],
    choose: Callable[[Mapping[Key, float]], Candidates],
    options: Options,
) -> list[Result]:
    """Measures the candidates at each number of threads in `options`.

    Args:
        name: name of the problem.
        problem: its attributes are copied to the results.
        work: the work of each pass.
        choose: returns the candidates, and is called once. Its argument has the GEMM peak in FLOP/s
            and the stream bandwidth in bytes/s.
        options: options of the run.
    """
    device = problem.device
    probes = {
        "gemm": gemm_probe(problem.dtype, device=device),
        "stream": stream_probe(device=device),
    }
    machine: Functions = {("machine", what): probe.function for what, probe in probes.items()}
    work = dict(work) | {what: probe.work for what, probe in probes.items()}
    chosen: Candidates | None = None
    found = []
    for threads in options.threads:
        with pinned(threads) if threads else contextlib.nullcontext():
            seconds = {
                key: [statistics.median(each)]
                for key, each in interleaved(machine, 3, warm_up=1, clock=options.clock).items()
            }
            if chosen is None:
                rates = {key: max(work[key[1]]) / each for key, (each,) in seconds.items()}
                chosen = choose(rates)
                seconds |= chosen.seconds
            else:
                seconds |= interleaved(
                    chosen.functions, 1, warm_up=0, twice=True, clock=options.clock
                )
            add_rounds(seconds, machine, chosen.functions, options)
        limit_ms, figures = figures_of(seconds, work)
        found.append(
            Result(
                name=name,
                shape=problem.shape,
                activation=problem.activation,
                hidden=problem.hidden,
                used_experts=problem.used_experts,
                dtype=str(problem.dtype).removeprefix("torch."),
                threads=threads,
                gemm_gflops=work["gemm"].flops / statistics.median(seconds[GEMM]) / 1e9,
                stream_gbytes=work["stream"].bytes / statistics.median(seconds[STREAM]) / 1e9,
                limit_ms=limit_ms,
                figures=figures,
                remarks=by_pass(chosen.remarks),
                peak_mib=by_pass(chosen.peak_mib),
            )
        )
    return found


def add_rounds(
    found: dict[Key, list[float]], machine: Functions, functions: Functions, options: Options
) -> None:
    """Measures at least one more round, and as many as fit into the time limit.

    A function that took far longer than moe_ext in the first round is not repeated.
    """
    often = {
        (name, which): function
        for (name, which), function in functions.items()
        if found[name, which][0] < max(2.5 * found["ours", which][0], options.long)
    }
    start = time.perf_counter()
    for rounds in range(1, options.rounds):
        took = time.perf_counter() - start
        if rounds > 1 and took * rounds / (rounds - 1) > options.seconds:
            break
        for key, each in interleaved(machine, 3, warm_up=1, clock=options.clock).items():
            found[key].append(statistics.median(each))
        for key, each in interleaved(often, 1, warm_up=0, twice=True, clock=options.clock).items():
            found[key] += each


def figures_of(
    seconds: Mapping[Key, Sequence[float]], work: Mapping[str, Work]
) -> tuple[dict[str, float], dict[str, dict[str, Figures]]]:
    """Returns each pass's limit in ms, and figures by implementation and pass.

    Args:
        seconds: the seconds of every round by function, including ``GEMM`` and ``STREAM``; some
            functions have only one round.
        work: the work of each pass, and of "gemm" and "stream".
    """
    gemm = [work["gemm"].flops / each for each in seconds[GEMM]]
    stream = [work["stream"].bytes / each for each in seconds[STREAM]]
    limits = {
        which: [limit(work[which], *rates) for rates in zip(gemm, stream, strict=True)]
        for which in work
        if ("machine", which) not in seconds
    }
    figures: dict[str, dict[str, Figures]] = {}
    for (name, which), each in seconds.items():
        if name == "machine":
            continue
        ideal, mine = limits[which], seconds["ours", which]
        if len(each) == 1:  # only the first round; quartiles need at least two values
            ideal, mine, each = ([other[0]] * 2 for other in (ideal, mine, each))
        figures.setdefault(name, {})[which] = Figures(
            rounds=len(seconds[name, which]),
            ms=Quartiles.of(1e3 * s for s in each),
            gflops=work[which].flops / statistics.median(each) / 1e9,
            share_of_limit=ratio(ideal, each),
            ratio_to_ours=ratio(each, mine),
        )
    return {which: 1e3 * statistics.median(each) for which, each in limits.items()}, figures


def merged(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merges the records of several runs into one."""
    results = by(
        [Result.of_json(each) for record in records for each in record["results"]],
        lambda r: (r.name, r.activation, r.dtype, r.threads),
    )
    lists = {
        key: [each for record in records for each in record[key]]
        for key in ("memory", "routing", "left_out", "warnings")
        if key in records[0]
    }
    environments = "; ".join(dict.fromkeys(record["environment"] for record in records))
    medians = [asdict(_over_occasions(found)) for found in results.values()]
    return records[0] | {"environment": environments, "results": medians} | lists


def _over_occasions(occasions: Sequence[Result]) -> Result:
    """Merges one problem's results of several runs; a single run is returned unchanged."""
    if len(occasions) == 1:
        return occasions[0]
    figures: dict[Key, list[Figures]] = {}
    for result in occasions:
        for name, found in result.figures.items():
            for which, each in found.items():
                figures.setdefault((name, which), []).append(each)
    return replace(
        occasions[0],
        gemm_gflops=statistics.median(result.gemm_gflops for result in occasions),
        stream_gbytes=statistics.median(result.stream_gbytes for result in occasions),
        limit_ms={
            which: statistics.median(result.limit_ms[which] for result in occasions)
            for which in occasions[0].limit_ms
        },
        figures=by_pass({key: _median_figures(each) for key, each in figures.items()}),
        occasions=sum(result.occasions for result in occasions),
    )


def _median_figures(occasions: Sequence[Figures]) -> Figures:
    def spread(quartiles: Iterable[Sequence[float]]) -> list[float]:
        medians = [median for _, median, _ in quartiles]
        return [min(medians), statistics.median(medians), max(medians)]

    return Figures(
        rounds=sum(each.rounds for each in occasions),
        ms=spread(each.ms for each in occasions),
        gflops=statistics.median(each.gflops for each in occasions),
        share_of_limit=spread(each.share_of_limit for each in occasions),
        ratio_to_ours=spread(each.ratio_to_ours for each in occasions),
    )


def by_pass(found: Mapping[Key, T]) -> dict[str, dict[str, T]]:
    """Nests the figures by implementation, then by pass."""
    nested: dict[str, dict[str, T]] = {}
    for (name, which), each in found.items():
        nested.setdefault(name, {})[which] = each
    return nested


def by(results: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """Groups `results` by the value of `key`, in order of appearance."""
    groups: dict[Any, list[T]] = {}
    for result in results:
        groups.setdefault(key(result), []).append(result)
    return groups
