"""Compares the speed of translation in batches and of one sentence at a time.

    moe-lab benchmark translation runs/en-fr text.en
    moe-lab benchmark translation runs/en-fr text.en --rounds 5 --json translation.json

Both modes use the same beam search. The batch mode translates the first --sentences lines in
batches, sorted by length. The other mode translates --alone of these lines, of all lengths, one at
a time. Each round times both modes. "x" is the time per sentence one at a time, divided by that in
batches, median over the rounds, with quartiles. Processor time hardly depends on other running
programs.
"""

import time
from collections.abc import Callable, Sequence
from itertools import islice
from statistics import median
from typing import Any

import torch

from moe_lab.benchmarks.harness import (
    Quartiles,
    Row,
    environment,
    interleaved,
    pinned,
    ratio,
    report,
)
from moe_lab.decoding.beam_search import BeamSearch
from moe_lab.decoding.translator import Translation, Translator
from moe_lab.errors import ConfigError
from moe_lab.files import open_plain, plain_lines
from moe_lab.training.checkpoint import load_run
from moe_lab.training.translation import make_translator

CLOCKS = {"seconds": time.perf_counter, "processor_seconds": time.process_time}
HEADER = "way | threads | sentences | sentences/s | sentences/processor s"
CELLS = (
    "{way} | {threads} | {sentences:,} | {sentences_per_second:.2f} | "
    "{sentences_per_processor_second:.2f}"
)


def evenly(lines: Sequence[str], number: int) -> list[str]:
    """Selects `number` of the `lines`, evenly over their lengths."""
    lines = sorted(lines, key=len)
    step = len(lines) / min(number, len(lines))
    return [lines[int((index + 0.5) * step)] for index in range(min(number, len(lines)))]


def compare(
    translator: Translator, lines: Sequence[str], alone: Sequence[str], rounds: int
) -> tuple[list[Row], dict[str, Quartiles], int]:
    """Times batches and single lines; returns rows, ratios and the number of equal translations.

    The ratios are by clock. Only the lines in `alone` are compared.
    """
    translated: dict[str, dict[str, list[Translation]]] = {"batches": {}, "one by one": {}}

    def batches() -> None:
        translated["batches"].update(zip(lines, translator(lines, title=None), strict=True))

    def one_by_one() -> None:
        for line in alone:
            translated["one by one"][line] = next(translator([line], title=None))

    def clocks(function: Callable[[], None]) -> list[float]:
        start = [now() for now in CLOCKS.values()]
        function()
        return [now() - then for now, then in zip(CLOCKS.values(), start, strict=True)]

    list(translator(alone[:2], title=None))  # warm-up: the first calls take longer
    ways = {"batches": batches, "one by one": one_by_one}
    times, rows = interleaved(ways, rounds, warm_up=0, clock=clocks), []
    latency: dict[tuple[str, str], list[float]] = {}
    for way, number in (("batches", len(lines)), ("one by one", len(alone))):
        for clock, clock_times in zip(CLOCKS, zip(*times[way], strict=True), strict=True):
            latency[way, clock] = [seconds / number for seconds in clock_times]
        medians = {clock: median(latency[way, clock]) for clock in CLOCKS}
        speeds = {f"sentences_per_{clock.removesuffix('s')}": 1 / s for clock, s in medians.items()}
        threads = torch.get_num_threads()
        rows.append(Row(way=way, threads=threads, sentences=number, **medians, **speeds))
    ratios = {c: ratio(latency["one by one", c], latency["batches", c]) for c in CLOCKS}
    texts = [{line: by_line[line][0].text for line in alone} for by_line in translated.values()]
    return rows, ratios, sum(texts[0][line] == texts[1][line] for line in alone)


def run(args: Any) -> list[Row]:
    with pinned(args.threads):
        return _run(args)


def _run(args: Any) -> list[Row]:
    translator = make_translator(load_run(args.model), BeamSearch(args.beam))
    with open_plain(args.text) as file:
        text = (line.decode("utf-8", errors="replace").strip() for line in plain_lines(file))
        lines = list(islice(filter(None, text), args.sentences))
    if not lines:
        raise ConfigError(f"{args.text} must hold at least one sentence, got none")
    alone = evenly(lines, args.alone)
    pieces = sum(len(translator.wordpieces.encode(line)) for line in lines) / len(lines)
    print(
        f"{args.model}, {len(translator.wordpieces):,} wordpieces, {pieces:.1f} per sentence, "
        f"beam {args.beam}, float32; {environment()}\n"
    )
    rows, ratios, same = compare(translator, lines, alone, args.rounds)
    by_clock = " | ".join(f"{r:.1f}" for r in ratios.values())
    more = {"ratios": {name: r._asdict() for name, r in ratios.items()}, "same": same}
    report(rows, HEADER, CELLS, args.json, f"x |  |  | {by_clock}", **more)
    print(f"{same} of the {len(alone)} lines have the same translation in a batch and alone")
    return rows
