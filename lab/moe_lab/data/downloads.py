"""Public corpora: downloads, verifies and unpacks them."""

import hashlib
import http.client
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from moe_lab.errors import ConfigError
from moe_lab.progress import progress

_BLOCK = 2**20


@dataclass(frozen=True)
class Download:
    """A file to download from the first address that answers."""

    urls: tuple[str, ...]  # the addresses, tried in order
    sha256: str = ""  # the checksum of the file; "" skips the verification

    @property
    def name(self) -> str:
        return Path(urlsplit(self.urls[0]).path).name


@dataclass(frozen=True)
class DataSet:
    """A public corpus."""

    archive: Download
    corpus: str  # the name of the folder in the archive
    vocabulary: Download | None  # None makes one from the words of the training part
    vocab_size: int
    # The published numbers of each part: sentences, words, and predictions, which are words and
    # ends of sentences.
    expected: dict[str, dict[str, int]] = field(default_factory=dict)


def _wikitext(name: str, sha256: str, vocab_size: int) -> DataSet:
    urls = "https://wikitext.smerity.com", "https://s3.amazonaws.com/research.metamind.io/wikitext"
    archive = Download(tuple(f"{url}/{name}-v1.zip" for url in urls), sha256)
    expected = {"dev": {"words": 213_886}, "test": {"words": 241_211}}
    return DataSet(archive, name, None, vocab_size, expected)


_LM1B = "1-billion-word-language-modeling-benchmark-r13output"
SETS = {
    "lm1b": DataSet(
        Download(
            (f"https://www.statmt.org/lm-benchmark/{_LM1B}.tar.gz",),
            "01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e",
        ),
        corpus=_LM1B,
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


def corpus_of(data_set: DataSet, output: Path, source: Path | None) -> Path:
    """Finds the folder of the unpacked corpus, or unpacks it into `output`."""
    for folder in (source, output):
        if folder and (folder / data_set.corpus).is_dir():
            return folder / data_set.corpus
    downloads = [file.name for file in (data_set.archive, data_set.vocabulary) if file]
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
        archive = find_or_download(data_set.archive, output, source)
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=output) as temporary:
        unpack(archive, Path(temporary))
        unpacked = Path(temporary) / data_set.corpus
        if not unpacked.is_dir():
            raise ConfigError(
                f"{archive} must contain the folder {data_set.corpus}; download the archive again"
            )
        return unpacked.rename(output / data_set.corpus)


def find_or_download(download: Download, output: Path, source: Path | None) -> Path:
    """Finds the file in `source` or `output`, or downloads it into `output`."""
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
    """Downloads the part of `url` that is missing in the file `part`."""
    size = part.stat().st_size if part.is_file() else 0
    headers = {"User-Agent": "moe_lab", **({"Range": f"bytes={size}-"} if size else {})}
    try:
        response = urlopen(Request(url, headers=headers), timeout=60)
    except HTTPError as error:
        if error.code == 416 and size:  # nothing is missing; the checksum is verified later
            return
        raise
    with response, part.open("ab" if response.status == 206 else "wb") as file:
        begin, length = file.tell(), int(response.headers["Content-Length"] or 0)
        blocks: Iterator[bytes] = iter(lambda: response.read(_BLOCK), b"")
        num_blocks = -(-length // _BLOCK) or None
        for block in progress(blocks, f"downloading {part.stem}", "MiB", num_blocks):
            file.write(block)
        if length and file.tell() != begin + length:
            sizes = f"{file.tell():,} of {begin + length:,} bytes"
            raise OSError(f"the connection ended after {sizes}")


def _verify(file: Path, sha256: str) -> None:
    if not sha256:
        return
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != sha256:
        raise ConfigError(
            f"{file} must have the SHA-256 {sha256}, got {digest}; download the file again"
        )


def unpack(archive: Path, folder: Path) -> None:
    """Unpacks a zip or tar archive into `folder`, never outside of `folder`."""
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
