"""Prepares a corpus for training: downloads, verifies, unpacks, mixes and encodes it.

    moe-lab prepare-data lm1b            # the 1-billion-word benchmark: 1.8 GB download,
                                                   # 10 GB of disk, 10 minutes to encode
    moe-lab prepare-data wikitext-103    # 190 MB download; wikitext-2: 4 MB
    moe-lab prepare-data lm1b --from FOLDER     # downloads only files missing in FOLDER
    moe-lab prepare-data text --from PATH --vocab-size 100000      # any other corpus
    moe-lab prepare-data languages --from FOLDER    # the languages of parallel text

Give the command again to continue an interrupted download; no finished work is repeated. --from is
an archive, a folder with the archive or the vocabulary file, or the unpacked corpus. With the name
"text", --from is a corpus as in lab/moe_lab/data/corpora.py. The script verifies the SHA-256 of
archives, the 793,471 entries of the benchmark's vocabulary, and the published numbers of sentences
and words. At the end, the script prints the options for moe-lab train.

"languages" has both sides of the parallel text in FOLDER, from English into each of --languages,
each side as a text of its own, in wordpieces. --sentences limits the training sentences of each
language. Wordpieces of the kind "bpe", the default here, train in 20 seconds; "unigram", which a
sampled softmax needs, trains in 6 minutes.
"""

import argparse
import hashlib
import http.client
import os
import shlex
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from moe_lab.cli import at_least, make_parser
from moe_lab.data import EncodedSentences, Vocabulary
from moe_lab.data.corpora import PARTS, CorpusError
from moe_lab.data.mixed import of_languages, write_parts
from moe_lab.data.wordpieces import PIECE_KINDS
from moe_lab.errors import ConfigError
from moe_lab.experiments.report import markdown_table
from moe_lab.progress import progress
from moe_lab.training.checkpoint import vocabulary_file
from moe_lab.training.config import DataConfig
from moe_lab.training.text import SentenceText, load_text

_BLOCK = 2**20
_WITHOUT_SIZES = ("text", "languages")  # corpora without published sizes and vocabulary


@dataclass(frozen=True)
class Download:
    """A file to download from the first address that answers.

    Attributes:
        urls: the addresses, tried in order.
        sha256: the checksum of the file; "" skips the verification.
    """

    urls: tuple[str, ...]
    sha256: str = ""

    @property
    def name(self) -> str:
        """The name of the downloaded file."""
        return Path(urlsplit(self.urls[0]).path).name


@dataclass(frozen=True)
class _DataSet:
    """A public corpus.

    Attributes:
        archive: the archive of the corpus.
        corpus: the name of the folder in the archive.
        vocabulary: the vocabulary file; None makes one from the words of the training part.
        vocab_size: the number of entries of the vocabulary.
        expected: the published numbers of each part: sentences, words, and predictions, which are
            words and ends of sentences.
    """

    archive: Download
    corpus: str
    vocabulary: Download | None
    vocab_size: int
    expected: dict[str, dict[str, int]] = field(default_factory=dict)


def _wikitext(name: str, sha256: str, vocab_size: int) -> _DataSet:
    urls = (
        "https://wikitext.smerity.com",
        "https://s3.amazonaws.com/research.metamind.io/wikitext",
    )
    return _DataSet(
        Download(tuple(f"{url}/{name}-v1.zip" for url in urls), sha256),
        corpus=name,
        vocabulary=None,
        vocab_size=vocab_size,
        expected={"dev": {"words": 213_886}, "test": {"words": 241_211}},
    )


SETS = {
    "lm1b": _DataSet(
        Download(
            (
                "https://www.statmt.org/lm-benchmark/"
                "1-billion-word-language-modeling-benchmark-r13output.tar.gz",
            ),
            "01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e",
        ),
        corpus="1-billion-word-language-modeling-benchmark-r13output",
        vocabulary=Download(
            (
                "http://download.tensorflow.org/models/LM_LSTM_CNN/vocab-2016-09-10.txt",
                "https://s3-us-west-2.amazonaws.com/allennlp/models/elmo/vocab-2016-09-10.txt",
            )
        ),
        vocab_size=793_471,
        expected={
            "train": {"sentences": 30_301_028},
            "dev": {"sentences": 6_206},
            "test": {"sentences": 6_075, "predictions": 159_658},
        },
    ),
    "wikitext-103": _wikitext(
        "wikitext-103", "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590", 267_735
    ),
    "wikitext-2": _wikitext(
        "wikitext-2", "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c", 33_278
    ),
}


def main(arguments: Sequence[str] | None = None) -> SentenceText:
    """Runs the command and returns the encoded text."""
    parser = make_parser(__doc__)
    parser.add_argument("name", choices=[*SETS, *_WITHOUT_SIZES], help="the corpus")
    parser.add_argument(
        "--from", dest="source", type=Path, help="local files to use instead of downloads"
    )
    parser.add_argument("--output", type=Path, help="folder of the results (default: data/NAME)")
    parser.add_argument("--vocabulary", type=Path, help="vocabulary file to use")
    parser.add_argument(
        "--vocab-size",
        type=at_least(3),
        help="maximum vocabulary size, for text and languages only",
    )
    parser.add_argument(
        "--kind",
        choices=["words", *PIECE_KINDS],
        help="words, or wordpieces (default: bpe for languages, else words)",
    )
    parser.add_argument(
        "--languages",
        nargs="+",
        default=["fr", "de", "es", "pt", "ja", "ko"],
        help="languages in addition to English, for languages only (%(default)s)",
    )
    parser.add_argument(
        "--sentences",
        type=at_least(1),
        default=60_000,
        help="maximum number of training sentences of each language (%(default)s)",
    )
    parser.add_argument(
        "--workers",
        type=at_least(0),
        default=os.cpu_count() or 1,
        help="number of encoding processes (%(default)s)",
    )
    options = parser.parse_args(arguments)
    if options.name in _WITHOUT_SIZES and options.source is None:
        parser.error(f"--from must be given for the corpus {options.name}")
    if options.name not in _WITHOUT_SIZES:
        for option, value in (("vocab-size", options.vocab_size), ("kind", options.kind)):
            if value is not None:
                parser.error(f"--{option} must be omitted: {options.name} has a fixed vocabulary")
    if options.source and not options.source.exists() and options.name != "text":
        raise ConfigError(
            f"--from must be a file or folder, got {options.source}, which does not exist"
        )
    output = options.output or Path("data") / options.name

    vocabulary = options.vocabulary
    if options.name in _WITHOUT_SIZES:
        expected = None
        corpus = options.source if options.name == "text" else _of_languages(options, output)
        config = DataConfig(
            vocab_size=options.vocab_size or DataConfig.vocab_size,
            kind=options.kind or ("bpe" if options.name == "languages" else "words"),
        )
    else:
        expected = SETS[options.name]
        output.mkdir(parents=True, exist_ok=True)
        corpus = _corpus_of(expected, output, options.source)
        if expected.vocabulary and not vocabulary:
            vocabulary = _file_of(expected.vocabulary, output, options.source)
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
    found = shlex.join(f"data.{option}={value}" for option, value in values.items())
    print(f"moe-lab train CONFIG data.num_workers=1 \\\n    {found}")
    return text


def _of_languages(options: argparse.Namespace, output: Path) -> Path:
    """Mixes languages in a subfolder of `output`, once for each choice of languages.

    Raises:
        ConfigError: the parallel text cannot be used.
    """
    name = "-".join([*options.languages, f"{options.sentences}-sentences"])
    corpus = output / name
    if not corpus.is_dir():
        try:
            parts = of_languages(options.source, options.languages, options.sentences)
        except CorpusError as error:
            raise ConfigError(f"--from: {error}") from error
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".mixing-", dir=output) as temporary:
            write_parts(parts, Path(temporary) / name)
            (Path(temporary) / name).rename(corpus)
    return corpus


def _corpus_of(data_set: _DataSet, output: Path, source: Path | None) -> Path:
    """Finds the folder of the unpacked corpus, or unpacks it into `output`.

    Raises:
        ConfigError: `source` has neither the archive nor the corpus, or unpacking fails.
    """
    for folder in (source, output):
        if folder is None or not folder.is_dir():
            continue
        if (folder / data_set.corpus).is_dir():
            return folder / data_set.corpus
    downloads = [each.name for each in (data_set.archive, data_set.vocabulary) if each]
    if source and source.is_dir() and not any((source / name).is_file() for name in downloads):
        if source.name == data_set.corpus:
            return source
        raise ConfigError(
            f"--from must hold {data_set.archive.name} or the folder {data_set.corpus}, "
            f"got {source}, which holds neither"
        )
    if source and source.is_file():
        archive = source
        _verify(archive, data_set.archive.sha256)
    else:
        archive = _file_of(data_set.archive, output, source)
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=output) as temporary:
        unpack(archive, Path(temporary))
        unpacked = Path(temporary) / data_set.corpus
        if not unpacked.is_dir():
            raise ConfigError(
                f"{archive} must contain the folder {data_set.corpus}; download the archive again"
            )
        return unpacked.rename(output / data_set.corpus)


def _file_of(download: Download, output: Path, source: Path | None) -> Path:
    """Finds the file in `source` or `output`, or downloads it into `output`.

    Raises:
        ConfigError: no address works, or the checksum is wrong.
    """
    for folder in (source, output):
        if folder and (folder / download.name).is_file():
            _verify(folder / download.name, download.sha256)
            return folder / download.name
    target, part = output / download.name, output / f"{download.name}.part"
    failures = []
    for url in download.urls:
        try:
            _fetch(url, part)
            break
        except (URLError, OSError, http.client.HTTPException) as error:
            failures.append(f"{url}: {getattr(error, 'reason', error)}")
    else:
        raise ConfigError(
            f"{download.name} cannot be downloaded ({'; '.join(failures)}); run the command again "
            f"to continue, or download the file elsewhere and give its folder as --from"
        )
    try:
        _verify(part, download.sha256)
    except ConfigError:
        part.unlink()
        raise
    return part.rename(target)


def _fetch(url: str, part: Path) -> None:
    """Downloads the part of `url` that is missing in the file `part`.

    Raises:
        OSError: the server cannot be reached, refuses the request, or closes the connection early.
    """
    there = part.stat().st_size if part.is_file() else 0
    headers = {"User-Agent": "moe_ext", **({"Range": f"bytes={there}-"} if there else {})}
    try:
        response = urlopen(Request(url, headers=headers), timeout=60)
    except HTTPError as error:
        if error.code == 416 and there:  # nothing is missing; the checksum is verified later
            return
        raise
    with response, part.open("ab" if response.status == 206 else "wb") as file:
        length = response.headers["Content-Length"]
        total = file.tell() + int(length) if length else None
        blocks: Iterator[bytes] = iter(lambda: response.read(_BLOCK), b"")
        for block in progress(
            blocks, f"downloading {part.stem}", "MiB", -(-int(length) // _BLOCK) if length else None
        ):
            file.write(block)
        if total is not None and file.tell() != total:
            raise OSError(f"the connection ended after {file.tell():,} of {total:,} bytes")


def _verify(file: Path, sha256: str) -> None:
    if not sha256:
        return
    with file.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != sha256:
        raise ConfigError(
            f"{file} must have the SHA-256 {sha256}, got {found}; download the file again"
        )


def unpack(archive: Path, folder: Path) -> None:
    """Unpacks a zip or tar archive into `folder`, never outside of `folder`.

    Raises:
        ConfigError: the archive is corrupted, or a member lies outside of the folder.
    """
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as packed:
                packed.extractall(folder)
        else:
            with tarfile.open(archive) as packed:
                for member in progress(packed, f"unpacking {archive.name}", "files"):
                    _extract(packed, member, folder)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise ConfigError(
            f"{archive} cannot be unpacked: {error}; download the archive again"
        ) from error


def _extract(packed: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Extracts a member of a tar archive; Python 3.11.0 to 3.11.3 have no filters for this."""
    if hasattr(tarfile, "data_filter"):
        packed.extract(member, folder, filter="data")
        return
    inside = (folder / member.name).resolve().is_relative_to(folder.resolve())
    if not inside or not (member.isfile() or member.isdir()):
        raise tarfile.TarError(f"{member.name} is no file or folder within the archive")
    packed.extract(member, folder)


def check(text: SentenceText, expected: _DataSet | None) -> None:
    """Prints the sizes of the vocabulary and of the parts of the corpus.

    Raises:
        ConfigError: a size differs from the published size in `expected`.
    """
    wrong = []

    def row(what: str, found: int, published: int | None) -> str:
        if published not in (None, found):
            wrong.append(f"{what} must be {published:,}, got {found:,}")
        return f"{found:,}"

    size = row(
        "the vocabulary size", len(text.vocabulary), expected.vocab_size if expected else None
    )
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
            row(f"the number of {what} in {part}", found, published.get(what))
            for what, found in numbers.items()
        ]
        rows.append([part, *cells])
    print(markdown_table(["part", "sentences", unit, "predictions"], rows))
    if wrong:
        raise ConfigError(
            f"the corpus must have its published sizes: {'; '.join(wrong)}; unpack the archive "
            "again. For a corpus of your own, use "
            f"`moe-lab prepare-data text --from PATH`"
        )
