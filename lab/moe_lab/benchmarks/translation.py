"""Compares the speed of translation in batches and of one sentence at a time.

    moe-lab benchmark translation runs/en-fr text.en
    moe-lab benchmark translation mt/small-moe-32  # generated sentences
    moe-lab benchmark translation runs/en-fr text.en --rounds 5 --json translation.json

Both modes use the same beam search. The batch mode translates the first --sentences lines in
batches, sorted by length. The other mode translates --alone of these lines, of all lengths, one at
a time. Each round times both modes. "x" is the time per sentence one at a time, divided by that in
batches, median over the rounds, with quartiles. Processor time hardly depends on other running
programs.

With a configuration, the model has random weights and the sentences are generated words, with the
lengths of prose. Such a model does not end its translations, so they are as long as their sources.
A top-k gate replaces a strictly balanced gate, whose thresholds would have to be trained.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch

from moe_lab.benchmarks.harness import Quartiles, environment, ratio
from moe_lab.cli import at_least, make_parser
from moe_lab.data import Wordpieces
from moe_lab.decoding import BeamSearch, Translation, Translator
from moe_lab.errors import ConfigError
from moe_lab.experiments.report import markdown_table
from moe_lab.files import open_plain, write_json
from moe_lab.models import TranslationModel
from moe_lab.progress import progress
from moe_lab.training.checkpoint import load_run
from moe_lab.training.config import TranslationConfig, read_config
from moe_lab.training.translation import make_translator


class _Measured(NamedTuple):
    """The times of one round, in batches or one by one."""

    seconds: float
    processor_seconds: float


@dataclass
class Row:
    """The median times per sentence, in batches or one by one."""

    way: str
    threads: int
    sentences: int
    seconds: float
    processor_seconds: float


def _made_up(number: int, vocab_size: int) -> tuple[list[str], Wordpieces]:
    """Returns generated sentences, and wordpieces trained on similar sentences."""
    draw = random.Random(0)
    syllables = [first + second for first in "bcdfghjklmnprstvz" for second in "aeiou"]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 5))) for _ in range(4 * vocab_size)]
    rare = [1 / (rank + 10) for rank in range(len(words))]

    def sentences(number: int) -> list[str]:
        lengths = (min(80, 1 + int(draw.lognormvariate(2.8, 0.6))) for _ in range(number))
        return [" ".join(draw.choices(words, rare, k=length)) for length in lengths]

    return sentences(number), Wordpieces.train(sentences(max(1_000, 2 * vocab_size)), vocab_size)


def _random_model(config: str, number: int, beam: int) -> tuple[Translator, list[str]]:
    """Returns a model of the configuration with random weights, and sentences for it."""
    of_run = read_config(config, [], TranslationConfig)
    lines, wordpieces = _made_up(number, of_run.data.vocab_size)
    moe = of_run.model.moe
    if moe.gate == "balanced":
        moe = replace(moe, gate="topk", num_groups=0, k=moe.experts_per_token)
    torch.manual_seed(0)
    model = TranslationModel(replace(of_run.model, moe=moe), len(wordpieces)).eval()
    return Translator(model, wordpieces, BeamSearch(beam, max_length_ratio=1.0)), lines


def evenly(lines: Sequence[str], number: int) -> list[str]:
    """Selects `number` of the `lines`, evenly over their lengths."""
    lines = sorted(lines, key=len)
    step = len(lines) / min(number, len(lines))
    return [lines[int((index + 0.5) * step)] for index in range(min(number, len(lines)))]


def measured(function: Callable[[], object]) -> _Measured:
    start = time.perf_counter(), time.process_time()
    function()
    return _Measured(time.perf_counter() - start[0], time.process_time() - start[1])


def compare(
    translator: Translator, lines: Sequence[str], alone: Sequence[str], rounds: int
) -> tuple[list[Row], dict[str, Quartiles], int]:
    """Times batches and single lines; returns rows, ratios and the number of equal translations.

    The ratios are by clock. Only the lines in `alone` are compared.
    """
    found: dict[str, dict[str, list[Translation]]] = {"batches": {}, "one by one": {}}

    def batches() -> None:
        results = translator(lines, title=None)
        found["batches"].update(zip(lines, results, strict=True))

    def one_by_one() -> None:
        for line in alone:
            found["one by one"][line] = next(translator([line], title=None))

    ways = {"batches": (batches, len(lines)), "one by one": (one_by_one, len(alone))}
    list(translator(alone[:2], title=None))  # warm-up: the first calls take longer
    times: dict[str, list[_Measured]] = {way: [] for way in ways}
    schedule = [way for _ in range(rounds) for way in ways]
    for way in progress(schedule, "translating", "ways"):
        function, number = ways[way]
        times[way].append(_Measured(*(clock / number for clock in measured(function))))

    def median(way: str, clock: str) -> float:
        return statistics.median(getattr(each, clock) for each in times[way])

    threads = torch.get_num_threads()
    rows = [
        Row(way, threads, number, *(median(way, name) for name in _Measured._fields))
        for way, (_, number) in ways.items()
    ]
    ratios = {
        name: ratio(*([getattr(each, name) for each in times[way]] for way in reversed(ways)))
        for name in _Measured._fields
    }
    same = sum(
        found["batches"][line][0].text == found["one by one"][line][0].text for line in alone
    )
    return rows, ratios, same


def as_markdown(rows: Sequence[Row], ratios: dict[str, Quartiles]) -> str:
    table = [
        [
            row.way,
            f"{row.threads}",
            f"{row.sentences:,}",
            f"{1 / row.seconds:.2f}",
            f"{1 / row.processor_seconds:.2f}",
        ]
        for row in rows
    ]
    table.append(["x", "", "", *(f"{x:.1f}" for x in ratios.values())])
    return markdown_table(
        ["way", "threads", "sentences", "sentences/s", "sentences/processor s"], table
    )


def main(arguments: Sequence[str] | None = None) -> dict[str, Quartiles]:
    parser = make_parser(__doc__)
    parser.add_argument("model", help="the folder of a training run, or a configuration (.toml)")
    parser.add_argument("text", nargs="?", type=Path, help="text for a run, one sentence per line")
    parser.add_argument("--into", help="target language, for a run with several language pairs")
    parser.add_argument("--sentences", type=at_least(1), default=1_000)
    parser.add_argument(
        "--alone", type=at_least(1), default=50, help="number of lines to translate alone"
    )
    parser.add_argument("--beam", type=at_least(1), default=8)
    parser.add_argument("--threads", type=at_least(1), default=torch.get_num_threads())
    parser.add_argument("--rounds", type=at_least(2), default=3)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if (options.text is None) != options.model.endswith(".toml"):
        raise ConfigError(
            "text: must be given with a run folder, and omitted with a configuration (.toml)"
        )
    if options.text is None:
        translator, lines = _random_model(options.model, options.sentences, options.beam)
    else:
        translator = make_translator(
            load_run(options.model), BeamSearch(options.beam), options.into
        )
        with open_plain(options.text) as file:
            text = (line.decode("utf-8", errors="replace").strip() for line in file)
            lines = list(islice(filter(None, text), options.sentences))
        if not lines:
            raise ConfigError(f"{options.text} must hold at least one sentence, got none")
    alone = evenly(lines, options.alone)
    pieces = sum(len(translator.wordpieces.encode(line)) for line in lines) / len(lines)
    print(
        f"{options.model}, {len(translator.wordpieces):,} wordpieces, {pieces:.1f} per sentence, "
        f"beam {options.beam}, float32; {environment()}\n"
    )
    rows, ratios, same = compare(translator, lines, alone, options.rounds)
    print(as_markdown(rows, ratios))
    print(f"{same} of the {len(alone)} lines have the same translation in a batch and alone")
    if options.json:
        figures = {
            "environment": environment(),
            "rows": [asdict(row) for row in rows],
            "ratios": {name: each._asdict() for name, each in ratios.items()},
            "same": same,
        }
        write_json(options.json, figures)
    return ratios
