"""Evaluates the measurements of all ranks: results, tables and plot."""

import argparse
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from moe_lab.benchmarks._distributed_ranks import PASSES, Bytes, Found, Key
from moe_lab.benchmarks.harness import Quartiles, ratio
from moe_lab.experiments.report import markdown_table

__all__ = ["Result", "plot", "print_results", "quartiles", "results_of"]


@dataclass
class Result:
    """The measurements of a layer at a number of ranks; quartiles are over the rounds."""

    processes: int
    exchange: str
    chunks: int
    step_ms: Quartiles
    tokens_per_second: float
    efficiency: float | None
    by_alone: Quartiles
    waits: float
    alone_ms: float
    transfers_ms: float | None = None
    raw_ms: float | None = None
    by_raw: Quartiles | None = None
    raw_mb_per_second: float | None = None
    hidden: Quartiles | None = None
    bytes: dict[str, Bytes] | None = None


def results_of(everything: Sequence[Found], args: argparse.Namespace) -> list[Result]:
    """Returns a result for each number of ranks, exchange and number of chunks."""
    seconds: dict[Key, list[float]] = {}
    for key in everything[0].seconds:
        of_each = [found.seconds[key] for found in everything if key in found.seconds]
        seconds[key] = [max(each) for each in zip(*of_each, strict=True)]

    def median_ms(key: Key) -> float:
        return 1e3 * statistics.median(seconds[key])

    single = seconds.get(Key(1, "alone"))
    found = []
    for key, each in seconds.items():
        size = key.processes
        if key.what != "step" and key != Key(1, "alone"):
            continue
        alone = Key(size, "alone")
        step_ms = Quartiles.of(1e3 * s for s in each)
        waited = [
            statistics.median(w / s for w, s in zip(f.waited[key], f.seconds[key], strict=True))
            for f in everything
            if key in f.waited
        ]
        result = Result(
            processes=size,
            exchange=key.exchange,
            chunks=key.chunks,
            step_ms=step_ms,
            tokens_per_second=1e3 * size * args.tokens / step_ms.median,
            efficiency=None if single is None else ratio(single, each).median,
            by_alone=ratio(seconds[alone], each),
            waits=statistics.mean(waited),
            alone_ms=median_ms(alone),
        )
        if key.what == "step":
            result.bytes = {name: total(f.passes[key][name] for f in everything if key in f.passes)
                            for name in PASSES}  # fmt: skip
            transfers, raw = (Key(size, what, key.exchange) for what in ("transfers", "raw"))
            if transfers in seconds:
                result.transfers_ms, result.raw_ms = median_ms(transfers), median_ms(raw)
                result.by_raw = ratio(seconds[transfers], seconds[raw])
                first = key._replace(chunks=1)
                moved = [
                    sum(b.rows + b.gates + b.indices + b.counts for b in f.passes[first].values())
                    for f in everything
                    if first in f.passes
                ]
                result.raw_mb_per_second = sum(moved) / result.raw_ms / 1e3
                could = [min(pair) for pair in zip(seconds[transfers], seconds[alone], strict=True)]
                gain = [a - b for a, b in zip(seconds[first], each, strict=True)]
                result.hidden = ratio(gain, could)
        found.append(result)
    return found


def total(each: Iterable[Bytes]) -> Bytes:
    """Returns the sum of the ranks' bytes."""
    return Bytes(*(sum(values) for values in zip(*(asdict(b).values() for b in each), strict=True)))


def quartiles(values: Quartiles | None, form: str, scale: float = 1.0) -> str:
    if values is None:
        return "–"
    low, middle, high = (format(scale * value, form) for value in values)
    return f"{middle} ({low} to {high})"


def print_results(results: Sequence[Result]) -> None:
    header = ["ranks", "exchange", "chunks", "pass", "rows, MB", "gates, MB", "indices, MB"]
    header += ["total / minimum", "counts, kB", "losses, kB"]
    lines = []
    for result in results:
        for name, found in (result.bytes or {}).items():
            moved = found.rows + found.gates + found.indices
            lines.append(
                [
                    *(str(value) for value in (result.processes, result.exchange, result.chunks)),
                    name,
                    *(f"{b / 1e6:.3f}" for b in (found.rows, found.gates, found.indices)),
                    "–" if found.minimum == 0 else f"{moved / found.minimum:.4f}",
                    *(f"{b / 1e3:.2f}" for b in (found.counts, found.losses)),
                ]
            )
    print("\nBytes that a step sends to other ranks, summed over all ranks\n")
    print(markdown_table(header, lines))

    header = ["ranks", "exchange", "transfers, ms", "raw, ms", "raw, MB/s", "transfers / raw"]
    lines = []
    for result in results:
        if result.raw_ms is not None and result.chunks == 1:
            lines.append(
                [
                    str(result.processes),
                    result.exchange,
                    f"{result.transfers_ms:.2f}",
                    f"{result.raw_ms:.2f}",
                    f"{result.raw_mb_per_second:.0f}",
                    quartiles(result.by_raw, ".3f"),
                ]
            )
    print("The all-to-all without the layer: all transfers of a step\n")
    print(markdown_table(header, lines))

    header = ["ranks", "exchange", "chunks", "step, ms", "tokens/s", "efficiency", "alone, ms"]
    header += ["alone / step", "waits", "hidden"]
    lines = []
    for result in results:
        lines.append(
            [
                str(result.processes),
                *((result.exchange, str(result.chunks)) if result.exchange else ("–", "–")),
                quartiles(result.step_ms, ".1f"),
                f"{result.tokens_per_second:,.0f}",
                "–" if result.efficiency is None else f"{result.efficiency:.2f}",
                f"{result.alone_ms:.1f}",
                quartiles(result.by_alone, ".2f"),
                f"{100 * result.waits:.0f}%",
                "–" if result.chunks == 1 else quartiles(result.hidden, ".0f", 100) + " %",
            ]
        )
    print("Steps\n")
    print(markdown_table(header, lines))


def plot(results: Sequence[Result], path: Path, title: str) -> None:
    """Plots tokens/s over the number of ranks, and the parts of a step's time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    speed, share = figure.subplots(1, 2)
    sizes = sorted({result.processes for result in results})
    single = [result.tokens_per_second for result in results if result.processes == 1]
    variants = dict.fromkeys((r.exchange, r.chunks) for r in results if r.exchange)
    for exchange, chunks in variants:
        points = [(1, each) for each in single] + [
            (r.processes, r.tokens_per_second)
            for r in results
            if (r.exchange, r.chunks) == (exchange, chunks)
        ]
        speed.plot(*zip(*points, strict=True), marker="o", label=f"{exchange}, chunks: {chunks}")
    if single:
        speed.plot(sizes, [single[0] * size for size in sizes], "k--", label="linear")
    alone = {r.processes: 1e3 * r.processes / r.alone_ms for r in results}
    tokens = results[0].tokens_per_second * results[0].step_ms.median / results[0].processes / 1e3
    speed.plot(sizes, [tokens * alone[size] for size in sizes], "k:", label="no exchange")
    speed.set(xlabel="ranks", ylabel="tokens/s", xticks=sizes, ylim=(0, None))
    speed.legend(fontsize=8)
    shown = [r for r in results if r.exchange]
    names = [f"{r.processes}: {r.exchange}, {r.chunks}" for r in shown]
    share.barh(names, [r.step_ms.median for r in shown], color="tab:orange", label="waits")
    share.barh(
        names, [r.step_ms.median * (1 - r.waits) for r in shown], color="tab:blue", label="rest"
    )
    share.set(xlabel="step, ms")
    share.invert_yaxis()
    share.legend(fontsize=8)
    figure.suptitle(title, fontsize=8)
    figure.savefig(path, dpi=120)
