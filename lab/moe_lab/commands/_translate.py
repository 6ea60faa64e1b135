"""The work of ``moe-lab translate``: translates files of text with a trained model."""

import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from moe_lab.decoding.beam_search import BeamSearch
from moe_lab.decoding.bleu import corpus_bleu
from moe_lab.decoding.translator import Translation
from moe_lab.errors import ConfigError
from moe_lab.files import READ_ERRORS, open_plain, output_file, plain_lines, reason_of
from moe_lab.training.checkpoint import load_run
from moe_lab.training.config import TranslationConfig
from moe_lab.training.translation import make_translator

_STDIN = "-"


def _read_lines(file: str) -> Iterator[str]:
    """Reads the lines of a file or of stdin; invalid UTF-8 becomes U+FFFD."""
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
        f"{number} ||| {t.text} ||| logP= {t.log_prob:.4f} ||| {t.score:.4f}" for t in translations
    )


def search_of(options: Namespace) -> BeamSearch:
    """Makes the beam search of the command's options."""
    if options.greedy:
        if options.n_best > 1:
            raise ConfigError(f"--n-best must be 1 with --greedy, got {options.n_best}")
        return BeamSearch.greedy()
    penalties = options.length_penalty, options.coverage_penalty
    try:
        return BeamSearch(options.beam, *penalties, num_best=options.n_best)
    except ValueError as error:
        name, rule = str(error).removeprefix("BeamSearch: ").split(" ", 1)
        option = name.replace("num_best", "n_best").replace("_", "-")
        raise ConfigError(f"--{option} {rule}") from error


def translate_files(options: Namespace) -> None:
    """Translates the files of the command's options, line by line."""
    files = options.files or [_STDIN]
    if _STDIN in files and sys.stdin is None:
        raise ConfigError("stdin must be open if no files are given, got a closed stdin")
    one_by_one = _STDIN in files and sys.stdin.isatty()
    search = search_of(options)
    trained = load_run(options.run, options.device)
    sizes = {"tokens_per_batch": options.tokens_per_batch, "max_pieces": options.max_pieces}
    if one_by_one:
        sizes["lines_at_a_time"] = 1
    languages = getattr(trained.config.data, "languages_with_token", ())
    if options.into is not None and not languages:
        rule = "be left out for a model that translates into one language"
        raise ConfigError(f"--into must {rule}, got {options.into!r}")
    translator = make_translator(trained, search, options.into, **sizes)
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
        plot = None
        if options.attention:
            from moe_lab.decoding.attention_plot import attention_file  # imports matplotlib

            plot = stack.enter_context(attention_file(options.attention))
        output = sys.stdout.buffer
        if options.output:
            output = stack.enter_context(output_file(options.output))
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

    if number := translator.num_cut:
        print(f"{number:,} lines cut after {options.max_pieces} wordpieces", file=sys.stderr)
    if not one_by_one:
        speed = f"{seconds:.1f} s, {num_lines / seconds:.1f} per second"
        print(f"{num_lines:,} sentences in {speed}", file=sys.stderr)
    if references is not None:
        report = sys.stdout if options.output else sys.stderr
        assert isinstance(trained.config, TranslationConfig)  # make_translator checks it
        language = options.into or trained.config.data.language_pairs[0][1]
        bleu = corpus_bleu(best, references, language=language)
        print(f"BLEU {bleu.score:.2f} ({bleu.signature})", file=report)
