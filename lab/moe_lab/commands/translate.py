"""Translates text with one sentence per line, using a trained model.

    echo "a sentence" | moe-lab translate runs/en-fr
    moe-lab translate runs/en-fr news.en --output news.fr --reference news.reference.fr
    moe-lab translate runs/multilingual --into fr < news.en
    moe-lab translate runs/en-fr news.en --n-best 5
    moe-lab translate runs/en-fr news.en --attention attention.pdf

Reads files (.gz and .xz too) or stdin, and writes one translation to stdout for each line. Input
from a terminal is translated line by line. Other input is sorted by length, thousands of lines at a
time, and translated in batches. An empty line stays empty. A line is cut after --max-pieces
wordpieces; stderr reports the number of cut lines and the speed.

--n-best prints several translations for each line, best first, in the format of Moses:

    line number, from 0 ||| translation ||| logP= log P(Y|X) ||| score s(Y, X)

--output is written after the last line is translated, so it may be one of the input files.

--reference prints two BLEU scores to stderr, or to stdout with --output. The first is sacreBLEU's
score with its signature. The second is the score of multi-bleu.perl, which splits text at spaces.

--attention plots the attention of each translated wordpiece over the source wordpieces. A .png has
the first sentence, a .pdf has one page for each sentence.
"""

import argparse
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from moe_lab.cli import add_threads, at_least, make_parser
from moe_lab.decoding import BeamSearch, Translation, corpus_bleu
from moe_lab.errors import ConfigError
from moe_lab.files import READ_ERRORS, atomic_file, open_plain, plain_lines, reason_of
from moe_lab.packages import require_package
from moe_lab.training.checkpoint import load_run
from moe_lab.training.config import TranslationConfig
from moe_lab.training.device import set_up_torch
from moe_lab.training.translation import make_translator, require_bleu

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STDIN = "-"
_MAX_INCHES = 38  # the largest width or height of all cells of a plot
# Fonts for characters that matplotlib's own font lacks; only installed fonts are used.
_MORE_FONTS = (
    "Noto Sans CJK JP", "Noto Sans CJK KR", "Noto Sans CJK SC", "Noto Sans JP", "Noto Sans KR",
    "Noto Sans SC", "IPAexGothic", "IPAGothic", "VL Gothic", "TakaoGothic", "NanumGothic",
    "UnDotum", "WenQuanYi Zen Hei", "Droid Sans Fallback", "Hiragino Sans", "Apple SD Gothic Neo",
    "Yu Gothic", "Malgun Gothic", "Microsoft YaHei", "Arial Unicode MS", "Unifont",
)  # fmt: skip


def _read_lines(file: str) -> Iterator[str]:
    """Reads the lines of a file or of stdin; invalid UTF-8 becomes U+FFFD.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        with ExitStack() as stack:
            lines = sys.stdin.buffer
            if file != _STDIN:
                lines = stack.enter_context(open_plain(Path(file)))
            for line in plain_lines(lines):
                yield line.decode("utf-8", errors="replace")
    except READ_ERRORS as error:
        raise ConfigError(f"{file} cannot be read: {reason_of(error)}") from error


def as_text(number: int, translations: Sequence[Translation], n_best: int) -> str:
    """Formats the `n_best` translations of the input line `number`, with one line for each."""
    if n_best == 1:
        return translations[0].text
    return "\n".join(
        f"{number} ||| {each.text} ||| logP= {each.log_prob:.4f} ||| {each.score:.4f}"
        for each in translations
    )


def _output_file(path: Path) -> AbstractContextManager[BinaryIO]:
    """Opens a file for writing; a file of this name is replaced only by the complete new file.

    Raises:
        ConfigError: the folder of `path` does not exist.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"{path} must be in an existing folder, but {path.parent} does not exist")
    return atomic_file(path)


def attention_plot(translation: Translation) -> "Figure":
    """Plots attention: a row for each translated wordpiece, a column for each source wordpiece."""
    from matplotlib.figure import Figure
    from matplotlib.font_manager import get_font_names

    rows, columns = translation.attention.shape
    inches = min(0.25, _MAX_INCHES / max(rows, columns))  # the size of a cell
    figure = Figure(figsize=(2 + inches * columns, 1.5 + inches * rows), layout="constrained")
    axes = figure.subplots()
    axes.imshow(translation.attention.float().numpy(), cmap="Greys", vmin=0, vmax=1, aspect="auto")
    installed = set(get_font_names())
    labels: dict[str, Any] = {
        "parse_math": False,
        "fontsize": 40 * inches,  # points
        "fontfamily": ["sans-serif", *(font for font in _MORE_FONTS if font in installed)],
    }
    axes.set_xticks(range(columns), translation.source, rotation=90, **labels)
    axes.set_yticks(range(rows), translation.pieces, **labels)
    axes.xaxis.tick_top()
    return figure


@contextmanager
def attention_file(path: Path) -> Iterator[Callable[[Translation], None]]:
    """Yields a function that plots a translation into the file `path`.

    A .pdf gets the plots of all translations, a .png the plot of the first translation.

    Raises:
        ConfigError: matplotlib is missing, or no translation has text.
    """
    try:
        pdf = require_package("--attention", "matplotlib.backends.backend_pdf", "translation")
    except ImportError as error:
        raise ConfigError(str(error)) from error
    is_pdf = path.suffix.lower() == ".pdf"
    num_plots = 0
    no_glyphs = False
    with _output_file(path) as file, pdf.PdfPages(file) if is_pdf else nullcontext() as pages:

        def add(translation: Translation) -> None:
            nonlocal num_plots, no_glyphs
            if not translation.source or (num_plots and not is_pdf):
                return
            figure = attention_plot(translation)
            with warnings.catch_warnings(record=True) as caught:
                if pages is not None:
                    pages.savefig(figure)
                else:
                    figure.savefig(file, format="png", dpi=150)
            for warning in caught:
                if re.match("Glyph .* missing from", str(warning.message)):
                    no_glyphs = True
                else:
                    warnings.warn(warning.message, stacklevel=2)
            num_plots += 1

        yield add
        if not num_plots:
            raise ConfigError("--attention must have text to plot, got only empty lines")
    if no_glyphs:
        print(f"{path} shows boxes for characters that no installed font has", file=sys.stderr)


def _plot_file(text: str) -> Path:
    """Parses `text` as the path of a .png or .pdf file, as an argparse type."""
    path = Path(text)
    if path.suffix.lower() not in (".png", ".pdf"):
        raise argparse.ArgumentTypeError(f"must end in .png or .pdf, got {text!r}")
    return path


def _search_of(options: argparse.Namespace) -> BeamSearch:
    if options.greedy:
        if options.n_best > 1:
            raise ConfigError(f"--n-best must be 1 with --greedy, got {options.n_best}")
        return BeamSearch.greedy()
    try:
        return BeamSearch(
            options.beam,
            options.length_penalty,
            options.coverage_penalty,
            num_best=options.n_best,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _options_parser() -> argparse.ArgumentParser:
    default = BeamSearch()
    parser = make_parser(__doc__)
    parser.add_argument("run", help="the folder of a training run")
    parser.add_argument("files", nargs="*", help='text files; "-" is stdin (default: stdin)')
    parser.add_argument("--into", help="target language, for a model of several language pairs")
    parser.add_argument(
        "--beam",
        type=at_least(1),
        default=default.beam,
        help="beam width (%(default)s); a translation has at most "
        f"{default.max_length_ratio:g} times as many wordpieces as its source, or "
        f"{default.min_length_limit} if that is more; hypotheses more than {default.window:g} nats "
        "below the best one are pruned",
    )
    parser.add_argument(
        "--length-penalty",
        type=float,
        default=default.length_penalty,
        help="in [0, 10]; larger values favour longer translations (%(default)s)",
    )
    parser.add_argument(
        "--coverage-penalty",
        type=float,
        default=default.coverage_penalty,
        help="in [0, 10]; larger values favour translations of the whole source (%(default)s)",
    )
    parser.add_argument("--greedy", action="store_true", help="a beam of 1, without penalties")
    parser.add_argument(
        "--n-best",
        type=at_least(1),
        default=1,
        help="number of translations for each line (%(default)s)",
    )
    parser.add_argument("--output", type=Path, help="file of the translations (default: stdout)")
    parser.add_argument("--reference", help="file of reference translations; prints BLEU")
    parser.add_argument(
        "--attention", type=_plot_file, help="plot the attention into this .png or .pdf"
    )
    parser.add_argument(
        "--max-pieces",
        type=at_least(1),
        default=500,
        help="wordpieces after which a line is cut (%(default)s)",
    )
    parser.add_argument(
        "--tokens-per-batch",
        type=at_least(1),
        default=2_560,
        help="approximate number of source wordpieces in a batch (%(default)s)",
    )
    add_threads(parser)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    return parser


def _print_bleu(
    best: Sequence[str], references: Sequence[str], language: str, file: TextIO
) -> None:
    bleu = corpus_bleu(best, references, language=language)
    print(f"BLEU {bleu.score:.2f} ({bleu.signature})", file=file)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    options = _options_parser().parse_intermixed_args(arguments)
    set_up_torch(options.device, options.threads)
    if options.reference:
        require_bleu()

    files = options.files or [_STDIN]
    if _STDIN in files and sys.stdin is None:
        raise ConfigError("stdin must be open if no files are given, got a closed stdin")
    one_by_one = _STDIN in files and sys.stdin.isatty()
    search = _search_of(options)
    trained = load_run(options.run, options.device)
    translator = make_translator(
        trained,
        search,
        options.into,
        tokens_per_batch=options.tokens_per_batch,
        max_pieces=options.max_pieces,
        **({"lines_at_a_time": 1} if one_by_one else {}),
    )
    lines: Iterable[str] = (line for file in files for line in _read_lines(file))
    references = None
    if options.reference:
        lines, references = list(lines), list(_read_lines(options.reference))
        if len(references) != len(lines) or not lines:
            raise ConfigError(
                f"--reference: {options.reference} must have as many lines as the text, at least "
                f"one, got {len(references):,} lines for a text of {len(lines):,}"
            )
    elif _STDIN not in files:
        lines = list(lines)

    best = []
    num_lines = 0
    start = time.perf_counter()
    with ExitStack() as stack:
        plot = stack.enter_context(attention_file(options.attention)) if options.attention else None
        output = sys.stdout.buffer
        if options.output:
            output = stack.enter_context(_output_file(options.output))
        # On a terminal, the output lines would break the progress bar.
        title = None if output.isatty() else "translating"
        for number, translations in enumerate(translator(lines, title=title)):
            output.write(f"{as_text(number, translations, options.n_best)}\n".encode())
            output.flush()
            if plot is not None:
                plot(translations[0])
            num_lines += 1
            if references is not None:
                best.append(translations[0].text)
    seconds = time.perf_counter() - start

    if translator.num_cut:
        print(
            f"{translator.num_cut:,} lines cut after {options.max_pieces} wordpieces",
            file=sys.stderr,
        )
    if not one_by_one:
        print(
            f"{num_lines:,} sentences in {seconds:.1f} s, {num_lines / seconds:.1f} per second",
            file=sys.stderr,
        )
    if references is not None:
        report = sys.stdout if options.output else sys.stderr
        assert isinstance(trained.config, TranslationConfig)  # make_translator checks it
        language = options.into or trained.config.data.language_pairs[0][1]
        _print_bleu(best, references, language, report)
