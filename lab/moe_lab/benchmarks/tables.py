"""Tables and plots of the results of `moe_lab.benchmarks.measurement`."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from statistics import median
from typing import TYPE_CHECKING, Any

from moe_lab.benchmarks.harness import Quartiles, Row
from moe_lab.benchmarks.measurement import best_ratio, by
from moe_lab.benchmarks.peers import BESIDE_PEERS, PASSES, PEERS
from moe_lab.experiments.page import Command, Page, Plot, table_of
from moe_lab.markdown import markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Column = Callable[[Row, str], str]  # the cell of a result and a pass


def place(threads: int | None) -> str:
    return f"threads: {threads}" if threads else "GPU"


def unit_of(threads: int | None) -> tuple[str, float]:
    """Returns the unit of operations per second, and its GFLOP/s."""
    return ("GF/s", 1) if threads else ("TF/s", 1000)


def cell(result: Row, name: str, which: str, form: Callable[[dict[str, Any]], str]) -> str:
    """Formats a figure of an implementation, and its time divided by the time of moe_ext."""
    figures = result.figures.get(name, {}).get(which)
    if figures is None:
        return "–"
    once = "~" if figures["rounds"] == 1 else ""
    return f"{once}{form(figures)} ({figures['ratio_to_ours'][1]:.2f})"


def percent_of_limit(figures: dict[str, Any]) -> str:
    return f"{Quartiles(*figures['share_of_limit']).scaled(100):.0f}"


def number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def list_section(title: str, items: Sequence[str]) -> list[str]:
    """Returns a section with a list, or no section if the list is empty."""
    return [f"## {title}", "\n".join(f"- {item}" for item in items)] if items else []


def remarks_of(results: Iterable[Row]) -> list[str]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for peer, remarks in result.remarks.items():
            for which, reason in remarks.items():
                where = reasons.setdefault((peer, f"{which}: {reason}"), [])
                if (problem := f"{result.name} {result.dtype}") not in where:
                    where.append(problem)
    return [f"{peer}, {reason} ({', '.join(where)})" for (peer, reason), where in reasons.items()]


def spread_of(results: Iterable[Row]) -> str:
    """Says what the figures of a page and their brackets are."""
    occasions = max((result.occasions for result in results), default=1)
    runs = f"medians over up to {occasions} runs (minimum-maximum)"
    return runs if occasions > 1 else "medians over the rounds (quartiles)"


def time_sections(
    results: Iterable[Row], table: Callable[[Sequence[Row]], str], what: str = ""
) -> list[str]:
    """Returns a section with the peaks and a table for each dtype and number of threads."""
    parts = []
    for (dtype, threads), group in by(results, lambda r: (r.dtype, r.threads)).items():
        gflops = max(result.gemm_gflops for result in group)
        gbytes = max(result.stream_gbytes for result in group)
        peaks = f"GEMM peak {gflops:.0f} GF/s, stream {gbytes:.1f} GB/s."
        parts += [f"## {what}{dtype}, {place(threads)}", peaks, table(group)]
    return parts


def memory_sections(results: Iterable[Row], table: Callable[[Sequence[Row]], str]) -> list[str]:
    """Returns a section with a table of peak memory for each dtype."""
    parts = []
    for dtype, group in by(results, lambda result: result.dtype).items():
        first = [result for result in group if result.threads == group[0].threads]
        what = "MiB without weights and inputs."
        parts += [f"## Peak memory, {dtype}", what, table(first)]
    return parts


MOE_EXT_TIMES: dict[str, Column] = {
    "moe_ext, ms": lambda result, which: f"{Quartiles(*result.figures['ours'][which]['ms']):.4g}",
    "limit, ms": lambda result, which: f"{result.limit_ms[which]:.4g}",
    "% of limit": lambda result, which: percent_of_limit(result.figures["ours"][which]),
}


def ms_of(name: str) -> Column:
    return lambda result, which: cell(result, name, which, lambda figs: f"{figs['ms'][1]:.4g}")


def peak_of(name: str, form: str = ".0f") -> Column:
    return lambda result, which: number(result.peak_mib.get(name, {}).get(which), form)


def pass_table(columns: Mapping[str, Column], group: Sequence[Row]) -> str:
    """Formats a table with one line for each result and pass."""
    return table_of(columns, [(result, which) for result in group for which in result.limit_ms])


def peak_table(group: Sequence[Row]) -> str:
    """Formats peak memory; one line per shape, activation and pass."""
    names = dict.fromkeys(name for result in group for name in result.peak_mib)
    columns: dict[str, Column] = {
        "shape": lambda result, _: result.name,
        "activation": lambda result, _: result.activation,
        "pass": lambda _, which: which,
    }
    return pass_table(columns | {name: peak_of(name) for name in names}, group)


def _speed_table(group: Sequence[Row], which: str) -> str:
    """Formats the results of one dtype, number of threads and pass; one line per shape."""
    unit, gflops = unit_of(group[0].threads)
    head, lines = ["shape"], []
    peers = {}
    for activation, rows in by(group, lambda result: result.activation).items():
        peers[activation] = [
            name for name in (*BESIDE_PEERS, *PEERS) if any(name in r.figures for r in rows)
        ]
        head += [f"ours, {activation}: ms", unit, "limit, ms", "% of limit", *peers[activation]]

    def speed(figures: dict[str, Any]) -> str:
        return f"{figures['gflops'] / gflops:.3g}"

    for name, results in by(group, lambda result: result.name).items():
        line = [name]
        for result in results:
            base = result.figures["ours"][which]
            line += [
                *(f"{Quartiles(*base['ms']):.4g}", speed(base), f"{result.limit_ms[which]:.4g}"),
                percent_of_limit(base),
                *(cell(result, peer, which, speed) for peer in peers[result.activation]),
            ]
        best = [best_ratio(result, which, BESIDE_PEERS) for result in results]
        least = min((ratio for ratio in best if ratio is not None), default=None)
        lines.append([*line, number(least, ".2f")])
    return markdown_table([*head, "best peer"], lines)


def print_results(results: Sequence[Row]) -> None:
    for (dtype, threads), group in by(results, lambda r: (r.dtype, r.threads)).items():
        unit, gflops = unit_of(threads)
        gemm = median(result.gemm_gflops for result in group) / gflops
        stream = median(result.stream_gbytes for result in group)
        print(
            f"\n{dtype}, {place(threads)}, GEMM peak {gemm:.0f} {unit}, "
            f"stream {stream:.1f} GB/s (medians over the shapes)"
        )
        for which in PASSES:
            print(f"\n{which}: peers in {unit}, in brackets their time / ours\n")
            print(_speed_table(group, which), end="")
        if any(result.peak_mib for result in group):
            print(f"\nPeak memory in MiB without inputs and weights, {dtype}\n")
            print(peak_table(group), end="")
    if remarks := remarks_of(results):
        print("\nNot timed:", *remarks, sep="\n- ")


def print_routing(rows: Sequence[dict[str, Any]]) -> None:
    lines = [
        [", ".join(map(str, row["shape"]))]
        + [f"{Quartiles(*ms):.4g}" for ms in row["ms"].values()]
        + [f"{ms:.4g}" for ms in row["limit_ms"].values()]
        for row in rows
    ]
    print("\nRouting: time in ms from the gate's logits to the dispatch plan\n")
    header = ["T, E, k", *rows[0]["ms"], *(f"limit, {name}" for name in rows[0]["limit_ms"])]
    print(markdown_table(header, lines), end="")


def _print_speed_up(results: Sequence[Row], field: str) -> None:
    """Prints moe_ext's speed-up, relative to the first value of `field` (threads or dtype)."""

    rest = attrgetter(*{"name", "activation", "dtype", "threads"} - {field})
    first = getattr(results[0], field)
    base = {rest(result): result for result in results if getattr(result, field) == first}
    lines = []
    for result in results:
        if getattr(result, field) != first:
            ms = [[r.figures["ours"][p]["ms"][1] for p in PASSES]
                  for r in (base[rest(result)], result)]  # fmt: skip
            place_of = [result.name, result.activation, result.dtype, place(result.threads)]
            lines.append([*place_of, *(f"{a / b:.2f}" for a, b in zip(*ms, strict=True))])
    if lines:
        print(f"\nOurs: speed-up over {field} = {first}\n")
        print(markdown_table(["shape", "activation", "type", "on", *PASSES], lines), end="")


def _print_memory(rows: Sequence[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row["kept"]))
    lines = []
    for row in rows:
        shown = [row[key] for key in ("name", "dtype", "activation")]
        shown += [f"{row[key] / 2**20:.1f}" for key in ("x", "hidden")]
        kept = [row["kept"].get(name) for name in names]
        lines.append(shown + [number(k and k / (row["x"] + row["hidden"]), ".2f") for k in kept])
    print("Saved for backward without the weights, divided by x + hidden\n")
    header = ["shape", "type", "activation", "x, MiB", "hidden, MiB", *names]
    print(markdown_table(header, lines), end="")


def print_report(record: dict[str, Any], results: Sequence[Row]) -> None:
    """Prints the tables of a run of the layer's benchmark, finished or not, from its record."""
    print(record["environment"], record["versions"], sep="\n")
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
        print("\nLeft out:", *record["left_out"], sep="\n- ")


def page_of_run(
    title: str, record: dict[str, Any], about: str, figure: "Figure", sections: Sequence[str]
) -> Page:
    """Makes the page of a run, or of several merged runs.

    What somebody has written about the figures is in "notes" of the record, as Markdown. Add it to
    the JSON file, and --report writes it into the page.
    """
    machine = f"{record['environment']}; {record['versions']}"
    head = [Command(record["command"]), machine, about, record.get("notes", "")]
    return Page(title, [*head, Plot("share of the limit", figure), *sections])


def plot(results: Sequence[Row], machine: str, label: Callable[[Row], str]) -> "Figure":
    """Plots percentages of the limit for the first dtype and number of threads.

    All results have the same passes. `label` returns the text under the bars of a result.
    """
    from matplotlib.figure import Figure

    first = results[0]
    chosen = [r for r in results if (r.dtype, r.threads) == (first.dtype, first.threads)]
    names = dict.fromkeys(name for result in chosen for name in result.figures)
    peers = [name for name in names if name not in ("ours", *BESIDE_PEERS)]
    passes = list(first.limit_ms)
    width = 0.84 / (1 + len(peers))
    size = (max(8, 1.15 * len(chosen)), 3.25 * len(passes))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(passes), sharex=True, squeeze=False)[:, 0]
    for axes, which in zip(panels, passes, strict=True):
        for index, name in enumerate(("ours", *peers)):
            figures = [r.figures.get(name, {}).get(which) for r in chosen]
            shares = [100 * f["share_of_limit"][1] if f else math.nan for f in figures]
            at = [group + (index + 0.5) * width - 0.42 for group in range(len(chosen))]
            grey = str(0.35 + 0.5 * (index - 1) / max(1, len(peers) - 1))
            color, legend = ("#0b5fff", "moe_ext") if name == "ours" else (grey, name)
            bars = axes.bar(at, shares, width, color=color, label=legend)
            if name == "ours":
                axes.bar_label(bars, fmt="%.0f", fontsize=8)
        axes.axhline(100, color="black", linewidth=0.8)
        axes.set(xlim=(-0.6, len(chosen) - 0.4), ylim=(0, 115), ylabel=f"% of the limit, {which}")
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_xticks(range(len(chosen)), list(map(label, chosen)), fontsize=8)
    figure.suptitle(f"{first.dtype}, {place(first.threads)}; {machine}", fontsize=8)
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=int(size[0] // 2), frameon=False)
    return figure
