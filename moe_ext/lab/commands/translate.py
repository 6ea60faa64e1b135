"""Translates text, a sentence a line, with a trained model.

    echo "a sentence" | python scripts/translate.py runs/en-fr
    python scripts/translate.py runs/en-fr news.en --output news.fr --reference news.reference.fr
    python scripts/translate.py runs/multilingual --into fr < news.en
    python scripts/translate.py runs/en-fr news.en --n-best 5
    python scripts/translate.py runs/en-fr news.en --attention attention.pdf

From files (.gz and .xz too) or stdin to stdout, a line for each line; from a terminal each line at
once, else thousands of lines are sorted by length and translated in batches. A line without text
stays empty. Of a line of more than --max-pieces wordpieces the rest is left out, which stderr says.

--n-best prints several lines for each, best first, as Moses does:

    number of the line, from 0 ||| translation ||| logP= log P(Y|X) ||| score s(Y, X)

--output is there when all is translated, and may be one of the files that are read. How fast it
was is told on stderr. --reference prints two BLEU scores, on stderr or, with --output, on stdout:
sacreBLEU's with its signature, and that of the text as it is, cut at spaces, which multi-bleu.perl
would print. --attention plots which wordpieces of the source each wordpiece of the translation
looked at: of the first sentence into a .png, of all into the pages of a .pdf.
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

from moe_ext.lab.decoding import BeamSearch, Translation, corpus_bleu
from moe_ext.lab.files import READ_ERRORS, atomic_file, open_plain, plain_lines
from moe_ext.lab.packages import require_package
from moe_ext.lab.training.checkpoint import load_run
from moe_ext.lab.training.command import at_least, make_parser
from moe_ext.lab.training.config import ConfigError, TranslationConfig
from moe_ext.lab.training.device import set_up_torch
from moe_ext.lab.training.translation import make_translator, require_bleu

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STDIN = "-"
_MAX_INCHES = 38  # of a plot's cells, which are smaller where there are many
# For what matplotlib's own font does not have; those that are installed are taken.
_MORE_FONTS = (
    "Noto Sans CJK JP", "Noto Sans CJK KR", "Noto Sans CJK SC", "Noto Sans JP", "Noto Sans KR",
    "Noto Sans SC", "IPAexGothic", "IPAGothic", "VL Gothic", "TakaoGothic", "NanumGothic",
    "UnDotum", "WenQuanYi Zen Hei", "Droid Sans Fallback", "Hiragino Sans", "Apple SD Gothic Neo",
    "Yu Gothic", "Malgun Gothic", "Microsoft YaHei", "Arial Unicode MS", "Unifont",
)  # fmt: skip


def _read_lines(file: str) -> Iterator[str]:
    """The lines of a file or of stdin; what is not UTF-8 in them becomes U+FFFD."""
    try:
        with ExitStack() as stack:
            lines = sys.stdin.buffer
            if file != _STDIN:
                lines = stack.enter_context(open_plain(Path(file)))
            for line in plain_lines(lines):
                yield line.decode("utf-8", errors="replace")
    except READ_ERRORS as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{file} cannot be read: {reason}") from error


def as_text(number: int, translations: Sequence[Translation], n_best: int) -> str:
    """The lines printed for a line."""
    if n_best == 1:
        return translations[0].text
    return "\n".join(
        f"{number} ||| {each.text} ||| logP= {each.log_prob:.4f} ||| {each.score:.4f}"
        for each in translations
    )


def _output_file(path: Path) -> AbstractContextManager[BinaryIO]:
    """A file that is there as soon as it is whole, so that it may also be read meanwhile."""
    if not path.parent.is_dir():
        raise ConfigError(f"{path} must be in a folder that exists, {path.parent} does not")
    return atomic_file(path)


def attention_plot(translation: Translation) -> "Figure":
    """A row for each piece of the translation, a column for each of the source."""
    from matplotlib.figure import Figure
    from matplotlib.font_manager import get_font_names

    rows, columns = translation.attention.shape
    inches = min(0.25, _MAX_INCHES / max(rows, columns))  # of a cell
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
    """Where the plots go: those of all sentences, or that of the first one."""
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
            raise ConfigError("--attention must have text to plot, there was none")
    if no_glyphs:
        print(f"{path} has boxes for characters that no installed font has", file=sys.stderr)


def _plot_file(text: str) -> Path:
    """An argparse type."""
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
    parser.add_argument("files", nargs="*", help='text; stdin if not given, or "-"')
    parser.add_argument("--into", help="language, of a model of several language pairs")
    parser.add_argument(
        "--beam",
        type=at_least(1),
        default=default.beam,
        help="hypotheses that go on together (%(default)s); a translation has at most "
        f"{default.max_length_ratio:g} times its source's wordpieces, or "
        f"{default.min_length_limit} if that is more; what falls {default.window:g} nats below "
        "the best is dropped",
    )
    parser.add_argument(
        "--length-penalty",
        type=float,
        default=default.length_penalty,
        help="in [0, 10]; the more, the longer are translations (%(default)s)",
    )
    parser.add_argument(
        "--coverage-penalty",
        type=float,
        default=default.coverage_penalty,
        help="in [0, 10]; the more, the less of a source is left out (%(default)s)",
    )
    parser.add_argument("--greedy", action="store_true", help="a beam of 1, without penalties")
    parser.add_argument(
        "--n-best", type=at_least(1), default=1, help="translations of a line (%(default)s)"
    )
    parser.add_argument("--output", type=Path, help="where they go; stdout if not given")
    parser.add_argument("--reference", help="file of translations to compare with")
    parser.add_argument("--attention", type=_plot_file, help="plot it into this .png or .pdf")
    parser.add_argument(
        "--max-pieces",
        type=at_least(1),
        default=500,
        help="wordpieces of a line that are read (%(default)s)",
    )
    parser.add_argument(
        "--tokens-per-batch",
        type=at_least(1),
        default=2_560,
        help="wordpieces of the lines that are translated together, roughly (%(default)s)",
    )
    parser.add_argument(
        "--threads",
        type=at_least(0),
        default=0,
        help="torch's threads (%(default)s; 0 is torch's own number)",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    return parser


def _print_bleu(
    best: Sequence[str], references: Sequence[str], language: str, file: TextIO
) -> None:
    bleu = corpus_bleu(best, references, language=language)
    tokenized = corpus_bleu(best, references, tokenized=True)
    print(
        f"BLEU {bleu.score:.2f} ({bleu.signature})\n"
        f"tokenized BLEU {tokenized.score:.2f} (as multi-bleu.perl, cut at spaces)",
        file=file,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options_parser().parse_intermixed_args(arguments)
    set_up_torch(options.device, options.threads)
    if options.reference:
        require_bleu()

    files = options.files or [_STDIN]
    if _STDIN in files and sys.stdin is None:
        raise ConfigError("stdin must be open where no files are given, it is closed")
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
                f"{options.reference} must have a line for each of the {len(lines):,} to be "
                f"translated, of which there must be one, got {len(references):,}"
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
        # Lines that come in between would break a bar on the same terminal.
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
            f"lines of more than {options.max_pieces} wordpieces, the rest of which is left out: "
            f"{translator.num_cut:,}",
            file=sys.stderr,
        )
    if not one_by_one:
        print(
            f"{num_lines:,} sentences in {seconds:.1f} s, {num_lines / seconds:.1f} a second",
            file=sys.stderr,
        )
    if references is not None:
        report = sys.stdout if options.output else sys.stderr
        assert isinstance(trained.config, TranslationConfig)  # make_translator has seen to it
        language = options.into or trained.config.data.pairs[0].partition("-")[2]
        _print_bleu(best, references, language, report)
