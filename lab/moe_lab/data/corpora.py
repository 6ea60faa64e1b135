"""Opens corpora: text files in known layouts, and the texts that are installed with torch."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from moe_ext.checks import given, require_sizes
from moe_lab.data.builtin import builtin_corpus
from moe_lab.data.mixed import sources
from moe_lab.data.sentences import (
    Corpus,
    CorpusError,
    Lines,
    Sentences,
    hash_split,
    require_parts,
    shards_of,
    visible,
)
from moe_lab.names import PARTS

_SUFFIXES = (".txt", ".txt.gz", ".txt.xz")
_LM1B_TRAIN = "training-monolingual.tokenized.shuffled"
_LM1B_HELDOUT = "heldout-monolingual.tokenized.shuffled"


def load_corpus(
    name_or_path: str | Path,
    *,
    parts: Sequence[str] = PARTS,
    max_train_sentences: int | None = None,
) -> Corpus:
    """Opens a corpus of one sentence per line, with spaces between words, in UTF-8.

    Blank lines are skipped. Each iteration reads the files. A line that is not UTF-8, or longer
    than 4 MiB, raises an error. Hidden files of a folder are skipped.

    ``name_or_path`` is one of:

    - "builtin": text made from the installed documentation of Python and torch.
    - "sources": text of three kinds: Python code, the C++ headers of torch, and sentences of
      "builtin". It is meant for wordpieces.
    - A folder in the layout of the 1-billion-word benchmark. Training shards 1 to 99 are the
      training part, heldout shard 1 is dev and heldout shard 0 is test.
    - A folder of WikiText, with ``wiki.train.tokens``, ``wiki.valid.tokens`` and
      ``wiki.test.tokens``. A paragraph or heading is one sentence; ``<unk>`` and ``@-@`` are
      ordinary words. Most published perplexities are not comparable: the published models also
      predict an end for each blank line and carry the state from line to line.
    - A folder with ``train.txt``, ``dev.txt`` (or ``valid.txt``) and ``test.txt``.
    - The prefix ``NAME`` of ``NAME.train.txt``, ``NAME.dev.txt`` (or ``valid``) and
      ``NAME.test.txt``.
    - A text file or a folder of text files. A hash of each sentence decides whether the sentence is
      in train, dev (2%) or test (2%). The part of a sentence is the same on every machine and does
      not change when text is added.

    Each ``.txt`` file may be compressed as ``.txt.gz`` or ``.txt.xz``. A folder ``train`` of such
    files may replace ``train.txt``, and likewise for ``dev`` and ``test``.

    `parts` are the attributes of the corpus that must contain at least one sentence. The training
    part has at most the first `max_train_sentences`; ``Corpus.all`` is not limited.
    """
    require_sizes("load_corpus", **given(max_train_sentences=max_train_sentences))
    require_parts("load_corpus", parts)
    path, corpus = Path(name_or_path), _opened(str(name_or_path))
    for part in parts:
        if next(iter(getattr(corpus, part)), None) is not None:
            continue
        if part == "all":
            raise CorpusError(f"{path} must hold at least one sentence, got none")
        raise CorpusError(
            f"the {part} part of {path} must hold at least one sentence, got none; "
            "give a longer text, or one file for each part"
        )
    if max_train_sentences is not None:
        corpus = replace(corpus, train=replace(corpus.train, limit=max_train_sentences))
    return corpus


def _opened(name: str) -> Corpus:
    path = Path(name)
    if not name:
        raise CorpusError(
            "load_corpus: name_or_path must be 'builtin', 'sources' or a path, got ''"
        )
    if name == "builtin":
        return builtin_corpus()
    if name == "sources":
        made = [(Lines(lines),) for lines in sources().values()]
        return Corpus(*map(Sentences, [*made, tuple(chain.from_iterable(made))]))
    if (path / _LM1B_TRAIN).is_dir():
        return _lm1b(path)
    if (path / "wiki.train.tokens").is_file():
        return _corpus(*([path / f"wiki.{part}.tokens"] for part in ("train", "valid", "test")))
    if path.is_file():
        return hash_split(shards_of([path]))
    if _variant(path / "train"):
        return _given_parts(path, separator="/")
    if path.is_dir():
        files = _text_files(path)
        if named := [file for file in files if ".train.txt" in file.name]:
            prefix = path / named[0].name.partition(".train.txt")[0]
            raise CorpusError(
                f"{path} must hold text files of one corpus, got parts of named corpora, such "
                f"as {named[0].name}; give {prefix} to load that corpus"
            )
        return hash_split(shards_of(files))
    if _variant(Path(f"{path}.train")):
        return _given_parts(path, separator=".")
    raise CorpusError(
        f"there is no corpus at {path}: give a text file, a folder of text files, the prefix "
        "NAME of NAME.train.txt, NAME.dev.txt and NAME.test.txt, 'builtin' or 'sources'"
    )


def _corpus(train: Sequence[Path], dev: Sequence[Path], test: Sequence[Path]) -> Corpus:
    """Makes a corpus of the files of each part."""
    for file in (*train, *dev, *test):
        if not file.is_file():
            raise CorpusError(f"the corpus file {file} is missing; extract the corpus again")
    return Corpus(
        *(Sentences(shards_of(files)) for files in (train, dev, test, [*train, *dev, *test]))
    )


def _lm1b(folder: Path) -> Corpus:
    shards = [
        shard
        for shard in sorted((folder / _LM1B_TRAIN).glob("news.en-000[0-9][0-9]-of-00100"))
        if "-00000-" not in shard.name  # the held-out shard, which dev and test are cut from
    ]
    if not shards:
        raise CorpusError(
            f"{folder / _LM1B_TRAIN} must hold the shards news.en-00001-of-00100 to "
            "news.en-00099-of-00100, got none; extract the corpus again"
        )
    if len(shards) < 99:
        warnings.warn(
            f"{folder / _LM1B_TRAIN} holds {len(shards)} of the 99 training shards", stacklevel=4
        )
    heldout = [folder / _LM1B_HELDOUT / f"news.en.heldout-0000{i}-of-00050" for i in (0, 1)]
    return _corpus(shards, heldout[1:], heldout[:1])


def _given_parts(path: Path, separator: str) -> Corpus:
    files = []
    for names in (("train",), ("dev", "valid"), ("test",)):
        variants = [_variant(Path(f"{path}{separator}{name}")) for name in names]
        part = next((part for part in variants if part), None)
        if part is None:
            raise CorpusError(
                f"{path}{separator}{names[0]}.txt is missing, but the corpus has a training text; "
                "add the file (.txt, .txt.gz or .txt.xz) or a folder of such files"
            )
        files.append(part)
    return _corpus(*files)


def _text_files(folder: Path) -> list[Path]:
    files = sorted(
        file for file in visible(folder.iterdir(), folder) if file.name.endswith(_SUFFIXES)
    )
    if entry := next((file for file in files if not file.is_file()), None):
        raise CorpusError(f"{folder} must hold text files, got {entry}, which is not a file")
    if not files:
        raise CorpusError(
            f"{folder} must hold text files ({', '.join(_SUFFIXES)}), got none; "
            "add files or give another folder"
        )
    return files


def _variant(stem: Path) -> list[Path]:
    """Finds the file ``stem.txt``, plain or compressed, or the text files of the folder stem."""
    if stem.is_dir():
        return _text_files(stem)
    variants = [Path(f"{stem}{suffix}") for suffix in _SUFFIXES]
    return [file for file in variants if file.is_file()][:1]
