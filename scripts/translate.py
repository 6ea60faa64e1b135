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

--reference prints how fast it was and two BLEU scores, on stderr or, with --output, on stdout:
sacreBLEU's with its signature, and that of the text as it is, cut at spaces, which multi-bleu.perl
would print. --attention plots which wordpieces of the source each wordpiece of the translation
looked at: of the first sentence into a .png, of all into the pages of a .pdf.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure

from moe_ext.data.files import READ_ERRORS, open_plain
from moe_ext.decoding import BeamSearch, Translation, corpus_bleu
from moe_ext.training.checkpoint import load_run
from moe_ext.training.command import at_least, exit_status
from moe_ext.training.config import ConfigError
from moe_ext.training.device import set_up_torch
from moe_ext.training.translation import make_translator, require_bleu

STDIN = "-"


def read_lines(file: str) -> Iterator[str]:
    """The lines of a file or of stdin; what is not UTF-8 in them becomes U+FFFD."""
    try:
        with ExitStack() as stack:
            lines = sys.stdin.buffer
            if file != STDIN:
                lines = stack.enter_context(open_plain(Path(file)))
            for number, line in enumerate(lines):
                text = line.decode("utf-8", errors="replace").rstrip("\r\n")
                yield text if number else text.removeprefix("\ufeff")
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


def attention_plot(translation: Translation) -> Figure:
    """A row for each piece of the translation, a column for each of the source."""
    rows, columns = translation.attention.shape
    figure, axes = plt.subplots(
        figsize=(2 + 0.25 * columns, 1.5 + 0.25 * rows), layout="constrained"
    )
    axes.imshow(translation.attention.float().numpy(), cmap="Greys", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(columns), translation.source, rotation=90, parse_math=False)
    axes.set_yticks(range(rows), translation.pieces, parse_math=False)
    axes.xaxis.tick_top()
    return figure


class AttentionFile:
    """Where the plots go: those of all sentences, or that of the first one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pages = PdfPages(path) if path.suffix == ".pdf" else None
        self._done = False

    def add(self, translation: Translation) -> None:
        if self._done or not translation.source:
            return
        figure = attention_plot(translation)
        if self._pages is None:
            figure.savefig(self._path, dpi=150)
            self._done = True
        else:
            self._pages.savefig(figure)
        plt.close(figure)

    def __enter__(self) -> "AttentionFile":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pages is not None:
            self._pages.close()


def plot_file(text: str) -> Path:
    """An argparse type."""
    path = Path(text)
    if path.suffix not in (".png", ".pdf"):
        raise argparse.ArgumentTypeError(f"must end in .png or .pdf, got {text!r}")
    return path


def search_of(options: argparse.Namespace) -> BeamSearch:
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


def main(arguments: Sequence[str] | None = None) -> None:
    default = BeamSearch()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", help="the folder of a training run")
    parser.add_argument("files", nargs="*", help='text; stdin if not given, or "-"')
    parser.add_argument("--into", help="language, of a model of several language pairs")
    parser.add_argument("--beam", type=at_least(1), default=default.beam)
    parser.add_argument("--length-penalty", type=float, default=default.length_penalty)
    parser.add_argument("--coverage-penalty", type=float, default=default.coverage_penalty)
    parser.add_argument("--greedy", action="store_true", help="a beam of 1, without penalties")
    parser.add_argument("--n-best", type=at_least(1), default=1, help="translations of a line")
    parser.add_argument("--output", type=Path, help="where they go; stdout if not given")
    parser.add_argument("--reference", help="file of translations to compare with")
    parser.add_argument("--attention", type=plot_file, help="plot it into this .png or .pdf")
    parser.add_argument("--max-pieces", type=at_least(1), default=500, help="of a line")
    parser.add_argument("--tokens-per-batch", type=at_least(1), default=2_560)
    parser.add_argument(
        "--threads", type=at_least(0), default=0, help="torch's threads (0: its default)"
    )
    parser.add_argument("--device", default="cpu")
    options = parser.parse_intermixed_args(arguments)
    set_up_torch(options.device, options.threads)
    if options.reference:
        require_bleu()

    files = options.files or [STDIN]
    one_by_one = STDIN in files and sys.stdin.isatty()
    search = search_of(options)
    trained = load_run(options.run, options.device)
    translator = make_translator(
        trained,
        search,
        options.into,
        tokens_per_batch=options.tokens_per_batch,
        max_pieces=options.max_pieces,
        **({"lines_at_a_time": 1} if one_by_one else {}),
    )
    lines = (line for file in files for line in read_lines(file))
    references = None
    if options.reference or STDIN not in files:
        lines = list(lines)
    if options.reference:
        references = list(read_lines(options.reference))
        if len(references) != len(lines) or not lines:
            raise ConfigError(
                f"{options.reference} must have a line for each of the {len(lines):,} to be "
                f"translated, of which there must be one, got {len(references):,}"
            )

    best = []
    start = time.perf_counter()
    with ExitStack() as stack:
        output = sys.stdout
        if options.output:
            output = stack.enter_context(options.output.open("w", encoding="utf-8", newline="\n"))
        plots = stack.enter_context(AttentionFile(options.attention)) if options.attention else None
        # Lines that come in between would break a bar on the same terminal.
        title = None if output.isatty() else "translating"
        for number, translations in enumerate(translator(lines, title=title)):
            print(as_text(number, translations, options.n_best), file=output, flush=True)
            if plots is not None:
                plots.add(translations[0])
            if references is not None:
                best.append(translations[0].text)
    seconds = time.perf_counter() - start

    if translator.num_cut:
        print(
            f"lines of more than {options.max_pieces} wordpieces, the rest of which is left out: "
            f"{translator.num_cut:,}",
            file=sys.stderr,
        )
    if references is not None:
        report = sys.stdout if options.output else sys.stderr
        language = options.into or trained.config.data.pairs[0].partition("-")[2]
        bleu, tokenized = (
            corpus_bleu(best, references, language=language),
            corpus_bleu(best, references, tokenized=True),
        )
        print(
            f"{len(best):,} sentences in {seconds:.1f} s, {len(best) / seconds:.1f} a second\n"
            f"BLEU {bleu.score:.2f} ({bleu.signature})\n"
            f"tokenized BLEU {tokenized.score:.2f} (as multi-bleu.perl, cut at spaces)",
            file=report,
        )


if __name__ == "__main__":
    sys.exit(exit_status(main))
