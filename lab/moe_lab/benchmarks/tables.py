"""Tables and plots of the results of `moe_lab.benchmarks.measurement`."""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from moe_lab.benchmarks.measurement import BESIDE_PEERS, Result
from moe_lab.experiments.report import markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def place(threads: int | None) -> str:
    return f"threads: {threads}" if threads else "GPU"


def list_of_remarks(results: Iterable[Result]) -> str:
    """Returns a Markdown list of what is not timed, and why; "" if all is timed."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for peer, remarks in result.remarks.items():
            for which, reason in remarks.items():
                where = reasons.setdefault((peer, f"{which}: {reason}"), [])
                if (problem := f"{result.name} {result.dtype}") not in where:
                    where.append(problem)
    return "".join(
        f"- {peer}, {reason} ({', '.join(places)})\n" for (peer, reason), places in reasons.items()
    )


def peak_table(group: Sequence[Result]) -> str:
    """Formats peak memory; one line per shape, activation and pass."""
    names = list(dict.fromkeys(name for result in group for name in result.peak_mib))
    lines = []
    for result in group:
        for which in result.limit_ms:
            found = [result.peak_mib.get(name, {}).get(which) for name in names]
            sizes = ["–" if size is None else f"{size:.0f}" for size in found]
            lines.append([result.name, result.activation, which, *sizes])
    return markdown_table(["shape", "activation", "pass", *names], lines)


def report_wrong(results: Iterable[Result]) -> int:
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


def plot(results: Sequence[Result], machine: str, label: Callable[[Result], str]) -> "Figure":
    """Plots percentages of the limit for the first dtype and number of threads.

    Args:
        results: at least one result; all have the same passes.
        machine: text above the plot.
        label: returns the text under the bars of a result.
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
    for axes, which in zip(figure.subplots(len(passes), sharex=True), passes, strict=True):
        for number, name in enumerate(("ours", *peers)):
            shares = [
                100 * r.figures[name][which].share_of_limit[1]
                if which in r.figures.get(name, {})
                else math.nan
                for r in chosen
            ]
            at = [index + (number + 0.5) * width - 0.42 for index in range(len(chosen))]
            grey = str(0.35 + 0.5 * (number - 1) / max(1, len(peers) - 1))
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
    figure.legend(*handles, loc="outside lower center", ncols=6, frameon=False)
    return figure
