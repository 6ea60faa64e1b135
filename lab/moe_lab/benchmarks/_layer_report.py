"""Prints the results of the benchmark of the layer: tables of speed, routing and memory."""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from moe_lab.benchmarks.harness import Quartiles
from moe_lab.benchmarks.measurement import BESIDE_PEERS, Result, by
from moe_lab.benchmarks.peers import PASSES, PEERS
from moe_lab.benchmarks.tables import list_of_remarks, peak_table, place
from moe_lab.experiments.report import markdown_table

__all__ = ["label", "print_results", "print_routing", "report"]


class _Unit(NamedTuple):
    """The unit of operations per second."""

    name: str
    gflops: float

    @classmethod
    def of(cls, threads: int | None) -> "_Unit":
        return cls("GF/s", 1) if threads else cls("TF/s", 1000)


def cell(result: Result, name: str, which: str, unit: _Unit) -> str:
    """Formats operations per second, and the time divided by the time of moe_ext."""
    found = result.figures.get(name, {}).get(which)
    if found is None:
        return "–"
    once = "~" if found.rounds == 1 else ""
    return f"{once}{found.gflops / unit.gflops:.3g} ({found.ratio_to_ours[1]:.2f})"


def _speed_table(group: Sequence[Result], which: str) -> str:
    """Formats the results of one dtype, number of threads and pass; one line per shape."""
    head, lines = ["shape"], []
    unit = _Unit.of(group[0].threads)
    activations = by(group, lambda result: result.activation)
    peers = {
        activation: [
            name
            for name in (*BESIDE_PEERS, *PEERS)
            if any(name in result.figures for result in found)
        ]
        for activation, found in activations.items()
    }
    for activation, names in peers.items():
        head += [f"ours, {activation}: ms", unit.name, "limit, ms", "% of limit", *names]
    for name, results in by(group, lambda result: result.name).items():
        line = [name]
        for result in results:
            mine = result.figures["ours"][which]
            line += [
                f"{Quartiles(*mine.ms):.4g}",
                f"{mine.gflops / unit.gflops:.3g}",
                f"{result.limit_ms[which]:.4g}",
                f"{Quartiles(*(100 * share for share in mine.share_of_limit)):.0f}",
                *(cell(result, peer, which, unit) for peer in peers[result.activation]),
            ]
        best = [ratio for result in results if (ratio := result.best_ratio(which)) is not None]
        lines.append([*line, f"{min(best):.2f}" if best else "–"])
    return markdown_table([*head, "best peer"], lines)


def print_results(results: Sequence[Result]) -> None:
    for (dtype, threads), group in by(results, lambda r: (r.dtype, r.threads)).items():
        gemm = statistics.median(result.gemm_gflops for result in group)
        stream = statistics.median(result.stream_gbytes for result in group)
        unit = _Unit.of(threads)
        print(
            f"\n{dtype}, {place(threads)}, GEMM peak {gemm / unit.gflops:.0f} {unit.name}, "
            f"stream {stream:.1f} GB/s (medians over the shapes)"
        )
        for which in PASSES:
            print(f"\n{which}: peers in {unit.name}, in brackets their time / ours\n")
            print(_speed_table(group, which), end="")
        if any(result.peak_mib for result in group):
            print(f"\nPeak memory in MiB without inputs and weights, {dtype}\n")
            print(peak_table(group), end="")
    if remarks := list_of_remarks(results):
        print(f"\nNot timed:\n{remarks}", end="")


def print_routing(found: Sequence[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(name for each in found for name in each["ms"]))
    header = ["T, E, k", *names, *(f"limit, {name}" for name in found[0]["limit_ms"])]
    lines = []
    for each in found:
        times = [f"{Quartiles(*each['ms'][name]):.4g}" for name in names]
        limits = [f"{limit:.4g}" for limit in each["limit_ms"].values()]
        lines.append([", ".join(map(str, each["shape"])), *times, *limits])
    print("\nRouting: time in ms from the gate's logits to the dispatch plan\n")
    print(markdown_table(header, lines), end="")


def _print_speed_up(results: Sequence[Result], field: str) -> None:
    """Prints moe_ext's speed-up, relative to the first value of `field` (threads or dtype)."""

    def rest(result: Result) -> tuple:
        names = {"name", "activation", "dtype", "threads"} - {field}
        return tuple(getattr(result, name) for name in sorted(names))

    first = getattr(results[0], field)
    base = {rest(result): result for result in results if getattr(result, field) == first}
    others = [result for result in results if getattr(result, field) != first]
    lines = []
    for result in others:
        ms = [[r.figures["ours"][p].ms[1] for p in PASSES] for r in (base[rest(result)], result)]
        speed_ups = [f"{a / b:.2f}" for a, b in zip(*ms, strict=True)]
        lines.append(
            [result.name, result.activation, result.dtype, place(result.threads), *speed_ups]
        )
    if others:
        print(f"\nOurs: speed-up over {field} = {first}\n")
        print(markdown_table(["shape", "activation", "type", "on", *PASSES], lines), end="")


def _print_memory(found: Sequence[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(name for each in found for name in each["kept"]))
    header = ["shape", "type", "activation", "x, MiB", "hidden, MiB", *names]
    lines = []
    for each in found:
        size = each["x"] + each["hidden"]
        kept = [each["kept"].get(name) for name in names]
        lines.append(
            [
                *(each[key] for key in ("name", "dtype", "activation")),
                *(f"{each[key] / 2**20:.1f}" for key in ("x", "hidden")),
                *("–" if bytes is None else f"{bytes / size:.2f}" for bytes in kept),
            ]
        )
    print("Saved for backward without the weights, divided by x + hidden\n")
    print(markdown_table(header, lines), end="")


def label(result: Result) -> str:
    return f"{result.name}\nE={result.shape.num_experts}\nT={result.shape.tokens}"


def report(record: dict[str, Any]) -> list[Result]:
    """Prints the tables of a finished or unfinished run from its record."""
    print(record["environment"])
    print(record["versions"])
    results = [Result.of_json(each) for each in record["results"]]
    occasions = max((result.occasions for result in results), default=1)
    if occasions > 1:
        print(f"Medians over up to {occasions} runs (minimum-maximum)")
    if record["memory"]:
        _print_memory(record["memory"])
    if results:
        print_results(results)
        _print_speed_up(results, "threads")
        _print_speed_up(results, "dtype")
    if record["routing"]:
        print_routing(record["routing"])
    if record["left_out"]:
        print("\nLeft out:")
    for line in record["left_out"]:
        print(f"- {line}")
    return results
