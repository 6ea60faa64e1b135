"""The work of ``moe-lab prepare-data``: prepares a corpus for training."""

import shlex
import tempfile
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from moe_lab.data import EncodedSentences, Vocabulary
from moe_lab.data.downloads import SETS, DataSet, corpus_of, find_or_download
from moe_lab.data.mixed import mix_languages, write_parts
from moe_lab.data.sentences import CorpusError
from moe_lab.errors import ConfigError, config_errors
from moe_lab.markdown import markdown_table
from moe_lab.names import PARTS
from moe_lab.training.config import DataConfig, require_utf8
from moe_lab.training.folder import vocabulary_file
from moe_lab.training.text import SentenceText, load_text


def prepare(options: Namespace) -> SentenceText:
    """Prepares the corpus of the command's options and returns the encoded text."""
    output = options.output or Path("data") / options.name
    # These paths become options of a configuration.
    vocabulary = options.vocabulary
    paths = {"--from": options.source, "--output": output, "--vocabulary": vocabulary}
    for name, path in paths.items():
        require_utf8(name, str(path))

    if options.name not in SETS:
        expected = None
        corpus = options.source if options.name == "text" else _write_languages(options, output)
        config = DataConfig(
            vocab_size=options.vocab_size or DataConfig.vocab_size,
            kind=options.kind or ("bpe" if options.name == "languages" else "words"),
        )
    else:
        expected = SETS[options.name]
        output.mkdir(parents=True, exist_ok=True)
        corpus = corpus_of(expected, output, options.source)
        if expected.vocabulary and not vocabulary:
            vocabulary = find_or_download(expected.vocabulary, output, options.source)
        config = DataConfig(vocab_size=10**9)
    config = replace(
        config,
        corpus=str(corpus),
        vocabulary=str(vocabulary or ""),
        encoded=str(output / "encoded"),
        num_workers=options.workers,
    )
    text = load_text(config)
    if not vocabulary:
        vocabulary = output / vocabulary_file(config)
        text.vocabulary.save(vocabulary)
    check(text, expected)
    values = {"corpus": corpus, "vocabulary": vocabulary, "encoded": config.encoded}
    if config.kind != "words":
        values["kind"] = config.kind
    arguments = shlex.join(f"data.{option}={value}" for option, value in values.items())
    print(f"moe-lab train CONFIG data.num_workers=1 \\\n    {arguments}")
    return text


def _write_languages(options: Namespace, output: Path) -> Path:
    """Mixes languages in a subfolder of `output`, once for each choice of languages."""
    name = "-".join([*options.languages, f"{options.sentences}-sentences"])
    corpus = output / name
    if not corpus.is_dir():
        with config_errors("--from: ", kinds=CorpusError):
            parts = mix_languages(options.source, options.languages, options.sentences)
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".mixing-", dir=output) as temporary:
            write_parts(parts, Path(temporary) / name)
            (Path(temporary) / name).rename(corpus)
    return corpus


def check(text: SentenceText, expected: DataSet | None) -> None:
    """Prints the sizes of the vocabulary and of the parts of the corpus."""
    wrong = []

    def row(what: str, number: int, published: int | None) -> str:
        if published not in (None, number):
            wrong.append(f"{what} must be {published:,}, got {number:,}")
        return f"{number:,}"

    vocab_size = expected.vocab_size if expected else None
    size = row("the vocabulary size", len(text.vocabulary), vocab_size)
    unit = "words" if isinstance(text.vocabulary, Vocabulary) else "wordpieces"
    print(f"{size} {unit} in the vocabulary\n")
    rows = []
    for part in PARTS:
        sentences: EncodedSentences = getattr(text, part)
        numbers = {
            "sentences": len(sentences),
            "words": sentences.num_tokens - len(sentences),
            "predictions": sentences.num_tokens,
        }
        published = expected.expected.get(part, {}) if expected else {}
        cells = [
            row(f"the number of {what} in {part}", number, published.get(what))
            for what, number in numbers.items()
        ]
        rows.append([part, *cells])
    print(markdown_table(["part", "sentences", unit, "predictions"], rows))
    if wrong:
        raise ConfigError(
            f"the corpus must have its published sizes: {'; '.join(wrong)}; unpack the archive "
            "again. For a corpus of your own, use "
            f"`moe-lab prepare-data text --from PATH`"
        )
