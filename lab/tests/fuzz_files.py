"""Corrupts the files that users hand to the lab, and checks what the loaders do with them.

    python lab/tests/fuzz_files.py                            # 10,000 files of each kind
    python lab/tests/fuzz_files.py config text --files 200    # 200 files of two kinds
    python lab/tests/fuzz_files.py config --only 4711        # one file again, with the error

A loader accepts a corrupted file only if the result is valid. Otherwise it refuses the file as the
commands do: status 2 and one sentence that names the file. The loader does not write, warn, crash
or hang, and its memory is bounded. Some refused files are also given to the real command. Each file
depends only on `SEED`, its kind and its number.

Prints the numbers of each kind, and each failure with the command that replays it. Status 1: a
loader failed.
"""

import argparse
import faulthandler
import fcntl
import gzip
import json
import lzma
import os
import random
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from moe_lab import __main__ as command
from moe_lab.cli import exit_status
from moe_lab.commands import compare, train
from moe_lab.data import EncodedPairs, Vocabulary, Wordpieces
from moe_lab.errors import ConfigError
from moe_lab.experiments.comparison import Comparison
from moe_lab.experiments.results import read_test, train_and_test
from moe_lab.training.checkpoint import load_run
from moe_lab.training.config import (
    Config,
    DataConfig,
    ParallelDataConfig,
    TranslationConfig,
    read_config,
    to_toml,
)
from moe_lab.training.logging import read_metrics
from moe_lab.training.model import make_model
from moe_lab.training.text import load_text

from moe_ext.distributed._checkpoint_folder import SUMS, sums_of

SEED = 20170123
MEMORY = 2**30  # bytes that a loader may add to the process
SECONDS = 60  # a loader that takes longer hangs
MESSAGE = 1_200  # characters of the longest error message
_ROOT = Path(__file__).resolve().parents[2]
_NOBODY = 65534

# --- corrupts ------------------------------------------------------------------------------------

_HOSTILE = [
    *(
        b"\0",
        b"\xff",
        b"\xff\xfe",
        b"\xef\xbb\xbf",
        b"\xed\xa0\x80",
        b"\r",
        b"\n",
        b"\t",
        b'"',
        b"'",
    ),
    *("\u2028".encode(), "\u0085".encode(), "\u202e".encode(), b"\x1b[31m", b"\x7f", b"\x1c"),
    *(b"</s>", b"<unk>", b"<UNK>", b"<S>", b"<2fr>", b"null", b"true", b"{}", b"[]", b"[" * 5_000),
    *(b"nan", b"1e999", b"-1", b"0", b"1.5", str(2**60).encode(), b"9" * 5_000, b'{"a":' * 3_000),
    *(b"../../x", b"/dev/zero", b"__main__", b"\\ud800", b"\\u0000", b"%s%n", b"x" * 100_000),
]


def _block(draw: random.Random, content: bytes) -> tuple[int, int]:
    begin = draw.randrange(len(content) + 1)
    return begin, min(len(content), begin + draw.choice([1, 2, 8, 64, 512]))


def _flip(draw: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice([1, 1, 2, 8])):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _overwrite(draw: random.Random, content: bytes) -> bytes:
    begin, end = _block(draw, content)
    new = draw.choice([bytes(end - begin), draw.randbytes(end - begin)])
    return content[:begin] + new + content[end:]


def _delete(draw: random.Random, content: bytes) -> bytes:
    begin, end = _block(draw, content)
    return content[:begin] + content[end:]


def _copy(draw: random.Random, content: bytes) -> bytes:
    begin, end = _block(draw, content)
    place = draw.randrange(len(content) + 1)
    return content[:place] + content[begin:end] + content[place:]


def _swap(draw: random.Random, content: bytes) -> bytes:
    (a, b), (c, d) = sorted([_block(draw, content), _block(draw, content)])
    b = min(b, c)
    return content[:a] + content[c:d] + content[b:c] + content[a:b] + content[d:]


def _insert(draw: random.Random, content: bytes) -> bytes:
    place = draw.randrange(len(content) + 1)
    return content[:place] + draw.choice(_HOSTILE) + content[place:]


def _number(draw: random.Random, content: bytes) -> bytes:
    numbers = list(re.finditer(rb"\d+", content))
    if not numbers:
        return content + b"1"
    found = draw.choice(numbers)
    new = draw.choice([b"-1", b"0", b"1.5", b"2", b"1e999", b"nan", b'"1"', b"true", b"null"])
    new = draw.choice([new, str(2 ** draw.choice([7, 31, 40, 60, 64, 10_000])).encode()])
    return content[: found.start()] + new + content[found.end() :]


def _lines(draw: random.Random, content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    draw.choice([lines.reverse, lambda: draw.shuffle(lines), lines.sort])()
    return b"".join(lines[: draw.randint(1, 2 * len(lines))])


def _encode(draw: random.Random, content: bytes) -> bytes:
    text = content.decode("utf-8", errors="replace")
    name = draw.choice(
        ["utf-16", "utf-16-be", "utf-32", "latin-1", "utf-8-sig", "cp037", "\r\n", "\r"]
    )
    if name.isspace():
        return text.replace("\n", name).encode()
    return text.encode(name, errors="replace")


_BYTES: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "truncated": lambda draw, content: content[: draw.randrange(len(content))],
    "flipped bits": _flip,
    "overwritten": _overwrite,
    "deleted block": _delete,
    "copied block": _copy,
    "swapped blocks": _swap,
    "hostile bytes": _insert,
    "hostile number": _number,
    "other lines": _lines,
    "other encoding": _encode,
}


def _instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Returns a function that makes something else at the path of the file."""

    def replaced(file: Path) -> None:
        file.unlink()
        make(file)

    return replaced


_WHOLE: dict[str, Callable[[Path], object]] = {
    "empty": _instead(Path.touch),
    "missing": Path.unlink,
    "directory": _instead(Path.mkdir),
    "link to itself": _instead(lambda file: file.symlink_to(file.name)),
    "link to nothing": _instead(lambda file: file.symlink_to("nowhere")),
    "link to its folder": _instead(lambda file: file.symlink_to(".")),
    "link to /dev/zero": _instead(lambda file: file.symlink_to("/dev/zero")),
    "link to another file": _instead(lambda file: file.symlink_to(_ROOT / "README.md")),
    "pipe": _instead(os.mkfifo),
    "no permission": lambda file: file.chmod(0),
    "one long line": lambda file: file.write_bytes(b"x" * 6_000_000),
}


def corrupt(kind: "Kind", folder: Path, number: int) -> tuple[Path, str]:
    """Corrupts a file of a folder that `Kind.make` has filled; returns the file and how."""
    draw = random.Random(f"{SEED} {kind.name} {number}")
    file = draw.choice(sorted(path for glob in kind.files for path in folder.glob(glob)))
    if draw.random() < 0.1:
        name = draw.choice([*_WHOLE, "huge"])
        if name == "huge":
            os.truncate(file, kind.huge)
        else:
            _WHOLE[name](file)
        return file, name
    content = file.read_bytes()
    packed = {".gz": gzip, ".xz": lzma}.get(file.suffix)
    inside = packed is not None and draw.random() < 0.7  # corrupts what the file unpacks to
    content = packed.decompress(content) if packed and inside else content
    names = draw.choices(list(_BYTES), k=draw.choice([1, 1, 1, 2, 3]))
    for name in names:
        content = _BYTES[name](draw, content) if content else content
    file.write_bytes(packed.compress(content) if packed and inside else content)
    if kind.sign is not None and draw.random() < 0.6:
        kind.sign(file)
        names.append("signed")
    return file, ", ".join(names)


# --- kinds of files -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A kind of files that a user can hand to the lab.

    Attributes:
        name: the name on the command line.
        make: writes intact files into a folder.
        files: shell patterns of the files to corrupt.
        load: reads the files of a folder as the commands do; the second argument is the corrupted
            file. Asserts that the result is valid.
        command: arguments of ``moe-lab`` that read the corrupted file and write to "output".
        sign: makes the checksum of a corrupted file valid again.
        huge: size in bytes of a huge file without content.
    """

    name: str
    make: Callable[[Path], None]
    files: Sequence[str]
    load: Callable[[Path, Path], None]
    command: Callable[[Path, Path], list[str]]
    sign: Callable[[Path], None] | None = None
    huge: int = 2**40


_WORDS = ["the", "a", "of", "Käse", "日本", "\u00e9", "x", "and", "to", "in", "is", "1", "%", "'s"]
_TINY = [
    "num_threads=1", "steps=2", "log.tensorboard=false", "log.progress=false", "model.d_model=4",
    "model.moe.num_experts=3", "model.moe.k=2", "model.moe.hidden_sizes=[4]",
    "data.tokens_per_batch=200", "log.log_every=1",
]  # fmt: skip
_LM = ["data.vocab_size=30", "model.layers=['moe']", *_TINY]
_MT = ['data.pairs=["en-fr"]', "data.vocab_size=60", "model.lstm_units=4", *_TINY]
_SMALL = str(_ROOT / "configs" / "small" / "moe-32.toml")
_SMALL_MT = str(_ROOT / "configs" / "mt" / "small-moe-32.toml")


def _sentences(number: int) -> list[str]:
    draw = random.Random(3)
    return [" ".join(draw.choices(_WORDS, k=draw.randint(1, 9))) for _ in range(number)]


def _write_corpus(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for part, number in (("train", 60), ("dev", 5), ("test", 5)):
        (folder / f"{part}.txt").write_text("\n".join(_sentences(number)) + "\n", "utf-8")


def _write_parallel(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for part, number in (("train", 60), ("dev", 5), ("test", 5)):
        lines = [f"{line}\t{line[::-1]}\n" for line in _sentences(number)]
        (folder / f"{part}.en-fr.tsv").write_text("".join(lines), "utf-8")


def _valid_sentences(sentences, num_words: int) -> None:
    assert int(sentences.stream.min()) >= 0 and int(sentences.stream.max()) < num_words
    assert int(sentences.lengths.sum()) == sentences.num_tokens
    for index in range(len(sentences)):
        assert sentences.eos_id not in sentences[index]


def _valid_vocabulary(vocabulary: Vocabulary) -> None:
    again = Path("vocabulary.txt")  # in the current folder, which is empty
    vocabulary.save(again)
    assert Vocabulary.load(again).words == vocabulary.words


def _make_config(folder: Path) -> None:
    (folder / "lm.toml").write_text(to_toml(Config()), "utf-8")
    (folder / "translation.toml").write_text(to_toml(TranslationConfig()), "utf-8")
    shutil.copy(_SMALL, folder / "small.toml")


def _load_config(folder: Path, file: Path) -> None:
    config = read_config(file)
    again = Path(file.name)  # in the current folder, which is empty
    again.write_text(to_toml(config), "utf-8")
    assert replace(read_config(again), output=config.output) == config
    try:
        with torch.device("meta"):
            make_model(config.model, 100)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def _make_vocabulary(folder: Path) -> None:
    (folder / "vocabulary.txt").write_text("\n".join(["<unk>", "</s>", *_WORDS]) + "\n", "utf-8")
    lines = [f"{word}\t{1000 - i}" for i, word in enumerate(["<S>", "</S>", "<UNK>", *_WORDS])]
    (folder / "counts.txt").write_text("\n".join(lines) + "\n", "utf-8")
    _write_corpus(folder / "corpus")


def _load_vocabulary(folder: Path, file: Path) -> None:
    text = load_text(DataConfig(corpus=str(folder / "corpus"), vocabulary=str(file)))
    _valid_vocabulary(text.vocabulary)
    _valid_sentences(text.train, len(text.vocabulary))


def _make_text(folder: Path) -> None:
    content = ("\n".join(_sentences(300)) + "\n").encode()
    (folder / "text.txt").write_bytes(content)
    (folder / "text.txt.gz").write_bytes(gzip.compress(content, mtime=0))
    (folder / "text.txt.xz").write_bytes(lzma.compress(content))


def _load_text(folder: Path, file: Path) -> None:
    text = load_text(DataConfig(corpus=str(file)))
    _valid_vocabulary(text.vocabulary)
    for part in (text.train, text.dev, text.test):
        _valid_sentences(part, len(text.vocabulary))


def _make_table(folder: Path) -> None:
    _write_parallel(folder / "table")
    aligned = folder / "aligned"
    aligned.mkdir()
    for part, number in (("train", 60), ("dev", 5), ("test", 5)):
        for language in ("en", "fr"):
            (aligned / f"{part}.{language}").write_text("\n".join(_sentences(number)), "utf-8")
    _save_wordpieces(folder)


def _save_wordpieces(folder: Path) -> None:
    lines = _sentences(100)
    pieces = Wordpieces.train(lines + [line[::-1] for line in lines], 60, target_tokens=["fr"])
    pieces.save(folder / "wordpieces.model")


def _parallel(folder: Path, corpus: Path) -> ParallelDataConfig:
    pieces = f"data.wordpieces={folder / 'wordpieces.model'}"
    options = [*_MT, f"data.corpus={corpus}", pieces]
    return read_config(_SMALL_MT, options, TranslationConfig).data


def _valid_pairs(pairs: EncodedPairs, num_words: int) -> None:
    for side in (pairs.source, pairs.target):
        _valid_sentences(side, num_words)
    assert len(pairs.source) == len(pairs.target) == len(pairs.pair)
    assert len(pairs.report().splitlines()) == len(pairs.names) == 1


def _load_table(folder: Path, file: Path) -> None:
    text = load_text(_parallel(folder, file.parent))
    for part in (text.train, text.dev, text.test):
        _valid_pairs(part, len(text.vocabulary))
        assert all(source and target for source, target in map(part.__getitem__, range(len(part))))


def _make_wordpieces(folder: Path) -> None:
    _write_parallel(folder / "table")
    _save_wordpieces(folder)


def _load_wordpieces(folder: Path, file: Path) -> None:
    text = load_text(_parallel(folder, folder / "table"))
    pieces = text.vocabulary
    for part in (text.train, text.dev, text.test):
        _valid_pairs(part, len(pieces))
    assert len(pieces.words) == len(pieces) and pieces.unk_id < len(pieces)
    for line in _sentences(20):
        assert isinstance(pieces.decode(pieces.encode(line)), str)


def _encoded(folder: Path, vocabulary: str) -> DataConfig:
    corpus, encoded = str(folder / "corpus"), str(folder / "ids")
    return DataConfig(corpus=corpus, vocabulary=vocabulary, encoded=encoded)


def _make_encoded(folder: Path) -> None:
    _make_vocabulary(folder)
    load_text(_encoded(folder, str(folder / "vocabulary.txt")))
    _write_parallel(folder / "table")
    _save_wordpieces(folder)
    load_text(replace(_parallel(folder, folder / "table"), encoded=str(folder / "pairs")))


def _load_encoded(folder: Path, file: Path) -> None:
    if file.is_relative_to(folder / "ids"):
        vocabulary = Vocabulary.load(folder / "vocabulary.txt")
        text = load_text(_encoded(folder, str(folder / "vocabulary.txt")))
        for part in (text.train, text.dev, text.test):
            _valid_sentences(part, len(vocabulary))
            assert part.eos_id == vocabulary.eos_id
    else:
        text = load_text(
            replace(_parallel(folder, folder / "table"), encoded=str(folder / "pairs"))
        )
        for part in (text.train, text.dev, text.test):
            _valid_pairs(part, len(text.vocabulary))


def _run_config(folder: Path) -> Config:
    options = [*_LM, f"data.corpus={folder / 'corpus'}", f"output={folder / 'moe-seed1'}"]
    return read_config(_SMALL, options, Config)


def _make_run(folder: Path) -> None:
    _write_corpus(folder / "corpus")
    options = [*_LM, f"data.corpus={folder / 'corpus'}", f"output={folder / 'run'}"]
    assert exit_status(lambda: train.main([_SMALL, *options])) == 0
    for name in ("tensorboard", ".training.lock"):
        shutil.rmtree(folder / "run" / name, ignore_errors=True)


def _sign(file: Path) -> None:
    folder = file.parent
    if (folder / SUMS).is_file() and file.name != SUMS:
        names = sorted(path.name for path in folder.iterdir() if path.name != SUMS)
        sums = sums_of(folder, names)
        (folder / SUMS).write_text("".join(f"{sums[name]}  {name}\n" for name in names))


def _load_checkpoint(folder: Path, file: Path) -> None:
    trained = load_run(folder / "run")
    _valid_vocabulary(trained.vocabulary)
    assert trained.step >= 0
    with torch.device("meta"):
        shapes = make_model(trained.config.model, len(trained.vocabulary)).state_dict()
    found = trained.model.state_dict()
    assert {name: value.shape for name, value in found.items()} == {
        name: value.shape for name, value in shapes.items()
    }


def _compare(folder: Path, output: Path) -> list[str]:
    corpus = f"data.corpus={folder / 'corpus'}"
    return [_SMALL, *_LM, corpus, "--seeds", "1", "--output", str(output)]


def _make_results(folder: Path) -> None:
    _write_corpus(folder / "corpus")
    config = _run_config(folder)
    train_and_test(config, load_text(config.data))
    compare.main(_compare(folder, folder / "compared"))


def _load_results(folder: Path, file: Path) -> None:
    if file.name == "metrics.jsonl":
        for record in read_metrics(file.parent):
            assert isinstance(record["step"], int) and record["kind"] in ("train", "dev")
    elif file.name == "comparison.json":
        options = argparse.Namespace(
            name="comparison", config=_SMALL, overrides=[], against=[], output=file.parent
        )
        study = Comparison(options)
        stored = study.store.read()
        page = study.store.page(stored, study.page)
        assert page is None or page.as_markdown("comparison").startswith("# ")
    else:
        config = _run_config(folder)
        text = load_text(config.data)
        assert len(read_test(Path(config.output), config.steps, text)) == len(text.test)


def _train(folder: Path, *options: str) -> list[str]:
    return ["train", _SMALL, *_LM, f"data.corpus={folder / 'corpus'}", "output=output", *options]


def _train_translation(folder: Path, corpus: Path, *options: str) -> list[str]:
    pieces = f"data.wordpieces={folder / 'wordpieces.model'}"
    return ["train", _SMALL_MT, *_MT, f"data.corpus={corpus}", pieces, "output=output", *options]


KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "config",
            _make_config,
            ["*.toml"],
            _load_config,
            lambda folder, file: ["train", str(file), "output=output"],
        ),
        Kind(
            "vocabulary",
            _make_vocabulary,
            ["*.txt"],
            _load_vocabulary,
            lambda folder, file: _train(folder, f"data.vocabulary={file}"),
        ),
        Kind(
            "text",
            _make_text,
            ["text.*"],
            _load_text,
            lambda folder, file: [
                *("prepare-data", "text", "--from", str(file)),
                *("--workers", "0", "--output", "output"),
            ],
        ),
        Kind(
            "table",
            _make_table,
            ["table/*", "aligned/*"],
            _load_table,
            lambda folder, file: _train_translation(folder, file.parent),
        ),
        Kind(
            "wordpieces",
            _make_wordpieces,
            ["wordpieces.model"],
            _load_wordpieces,
            lambda folder, file: _train_translation(folder, folder / "table"),
        ),
        Kind(
            "encoded",
            _make_encoded,
            ["ids/*/*", "pairs/*/*.json", "pairs/*/*/*"],
            _load_encoded,
            lambda folder, file: (
                _train(
                    folder,
                    f"data.vocabulary={folder / 'vocabulary.txt'}",
                    f"data.encoded={folder / 'ids'}",
                )
                if file.is_relative_to(folder / "ids")
                else _train_translation(
                    folder, folder / "table", f"data.encoded={folder / 'pairs'}"
                )
            ),
        ),
        Kind(
            "checkpoint",
            _make_run,
            ["run/checkpoints/latest", "run/checkpoints/*/*", "run/checkpoints/*/.metadata"],
            _load_checkpoint,
            lambda folder, file: ["evaluate", str(folder / "run")],
            sign=_sign,
            huge=2**30,  # the checksum reads the whole file
        ),
        Kind(
            "results",
            _make_results,
            ["compared/comparison.json", "moe-seed1/metrics.jsonl", "moe-seed1/test_nll-*.pt"],
            _load_results,
            lambda folder, file: {
                "metrics.jsonl": [
                    *("train", str(folder / "moe-seed1" / "config.toml")),
                    *("steps=3", "resume=true"),
                ],
                "comparison.json": ["compare", *_compare(folder, folder / "compared")],
            }.get(file.name, ["compare", *_compare(folder, folder)]),
        ),
    )
}

# --- oracle -------------------------------------------------------------------------------------


def _listing(folder: Path) -> list[tuple[str, int, int, int]]:
    """Returns path, mode, size and time of everything in a folder."""
    found = []
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            status = os.lstat(os.path.join(place, name))
            path = os.path.relpath(os.path.join(place, name), folder)
            found.append((path, status.st_mode, status.st_size, status.st_mtime_ns))
    return sorted(found)


def _run(function: Callable[[], object]) -> tuple[int, str]:
    """Returns the exit status of a function and what it wrote to stderr."""
    sys.stderr.flush()
    start = os.lseek(2, 0, os.SEEK_END)
    try:
        status = exit_status(function)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    sys.stderr.flush()
    return status, os.pread(2, 2**20, start).decode("utf-8", errors="replace")


def _wrong(status: int, error: str, folder: Path) -> str | None:
    """Returns what is wrong with a refusal, or None."""
    line = error.removesuffix("\n")
    if status != 2:
        return f"status {status} instead of 2: {error[:500]!r}"
    if not line.startswith("error: ") or not line.isprintable() or not error.endswith("\n"):
        return f"not one printable sentence: {error[:500]!r}"
    if len(line) > MESSAGE + len(str(folder)):
        return f"a message of {len(line):,} characters: {line[:300]!r}"
    if str(folder) not in line:
        return f"a message without the name of the file: {line!r}"
    if obscure := re.search(r"\w+Error\b|Traceback|<class", line.replace(str(folder), "")):
        return f"an obscure message ({obscure[0]}): {line!r}"
    return None


@contextmanager
def _without_rights(needed: bool) -> Iterator[None]:
    """Becomes a user without rights, if this process is root."""
    if needed and os.geteuid() == 0:
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(os.getuid())


def _peak() -> int:
    """Returns the largest memory of this process so far, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found[1])


def judge(kind: Kind, folder: Path, file: Path, name: str, with_command: bool) -> tuple[str, str]:
    """Loads a corrupted file.

    Returns:
        "accepted", "refused" or "failed", and the message or what is wrong.
    """
    before = _listing(folder)
    Path("/proc/self/clear_refs").write_text("5")  # begins a new peak of the memory
    start = _peak()
    try:
        with _without_rights(name == "no permission"):
            status, error = _run(lambda: kind.load(folder, file))
    except BaseException:
        return "failed", traceback.format_exc(limit=-6)
    grown = _peak() - start
    if _listing(folder) != before:
        return "failed", f"the loader changed the folder: {error}"
    if grown > MEMORY:
        return "failed", f"the loader took {grown:,} bytes of memory: {error}"
    if status == 0:
        return ("failed", f"a warning: {error}") if error else ("accepted", "")
    if wrong := _wrong(status, error, folder):
        return "failed", wrong
    if with_command:
        sys.argv = ["moe-lab", *kind.command(folder, file)]
        try:
            with _without_rights(name == "no permission"):
                status, error = _run(command.main)
        except BaseException:
            return "failed", traceback.format_exc(limit=-6)
        if wrong := _wrong(status, error, folder):
            return "failed", f"moe-lab {' '.join(sys.argv[1:])}: {wrong}"
        if Path("output").exists():
            return "failed", f"moe-lab {' '.join(sys.argv[1:])} wrote {os.listdir('output')}"
    return "refused", error


# --- processes ----------------------------------------------------------------------------------


def _fork(function: Callable[[int], None]) -> tuple[int, int]:
    """Calls a function in a child with the write end of a pipe; returns the child and the pipe."""
    there, here = os.pipe()
    child = os.fork()
    if child:
        os.close(here)
        return child, there
    status = 1
    try:
        os.close(there)
        with tempfile.TemporaryFile() as log, open(os.devnull, "w") as nothing:
            os.dup2(log.fileno(), 2)
            os.dup2(nothing.fileno(), 1)
        fcntl.fcntl(2, fcntl.F_SETFL, os.O_APPEND)
        sys.stdout = os.fdopen(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = os.fdopen(2, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115
        torch.set_num_threads(1)
        faulthandler.disable()  # pytest's would write to the terminal
        function(here)
        status = 0
    except BaseException:
        os.write(here, traceback.format_exc().encode())
    finally:
        os._exit(status)


class Judged(NamedTuple):
    """What a loader did with a corrupted file.

    Attributes:
        number: the number of the file.
        file: its path in the folder of the kind.
        how: how it was corrupted.
        result: "accepted", "refused" or "failed".
        message: the error message, or what is wrong.
    """

    number: int
    file: str
    how: str
    result: str
    message: str


def _judge_all(kind: Kind, numbers: Sequence[int], commands: int, place: Path, pipe: int) -> None:
    """Writes a line of JSON to the pipe for each file."""
    warnings.simplefilter("always", UserWarning)
    warnings.showwarning = lambda message, *_, **__: print(message, file=sys.stderr)
    size = 4096 * int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (size + 2 * MEMORY, size + 2 * MEMORY))
    cwd, folder = place / "cwd", place / "files"
    for number in numbers:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(cwd, ignore_errors=True)
        cwd.mkdir()
        os.chdir(cwd)
        shutil.copytree(place / "intact", folder)
        file, name = corrupt(kind, folder, number)
        result = judge(kind, folder, file, name, number < commands)
        line = (number, str(file.relative_to(folder)), name, *result)
        os.write(pipe, json.dumps(line).encode() + b"\n")


def fuzz(kind: Kind, numbers: Sequence[int], commands: int = 0) -> Iterator["Judged"]:
    """Judges the files of some numbers, in child processes.

    Args:
        kind: the kind of the files.
        numbers: the numbers of the files.
        commands: also give a refused file to the real command if its number is below this.

    Yields:
        The results in the order of the numbers.
    """
    memory = Path("/dev/shm")
    place = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if memory.is_dir() else None))
    place.chmod(0o755)
    try:
        (place / "intact").mkdir()
        # The files contain the path at which they are read.
        child, pipe = _fork(
            lambda _: (os.symlink("intact", place / "files"), kind.make(place / "files"))
        )
        with open(pipe, "rb") as error:
            if os.waitpid(child, 0)[1]:
                raise RuntimeError(error.read().decode())
        (place / "files").unlink()
        numbers = list(numbers)
        while numbers:
            child, pipe = _fork(
                lambda pipe: _judge_all(kind, numbers, commands, place, pipe)  # noqa: B023
            )
            with open(pipe, "rb", buffering=0) as lines:
                found = _timely(lines)
                for line in found:
                    if not line.startswith(b"["):  # a traceback of this module
                        raise RuntimeError(b"\n".join([line, *found]).decode())
                    yield Judged(*json.loads(line))
                    numbers.pop(0)
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            if numbers:
                yield Judged(numbers.pop(0), "", "", "failed", f"no end: {_how_ended(status)}")
    finally:
        shutil.rmtree(place)


def _timely(pipe) -> Iterator[bytes]:
    """Yields lines until the pipe ends or no line comes in time."""
    rest = b""
    while select.select([pipe], [], [], SECONDS)[0] and (block := pipe.read(2**16)):
        *lines, rest = (rest + block).split(b"\n")
        yield from lines


def _how_ended(status: int) -> str:
    if not os.WIFSIGNALED(status):
        return f"status {os.waitstatus_to_exitcode(status)}"
    name = signal.Signals(os.WTERMSIG(status)).name
    return f"more than {SECONDS} seconds" if name == "SIGKILL" else name


def replay(kind: str, judged: Judged) -> str:
    """Returns the command that judges a file again, and what happened to the file."""
    number, file, corrupted, _, message = judged
    return (
        f"python lab/tests/fuzz_files.py {kind} --only {number}\n    {file}: {corrupted}: {message}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--files", type=int, default=10_000, help="files of a kind (%(default)s)")
    parser.add_argument(
        "--commands", type=int, default=50, help="files for the real command too (%(default)s)"
    )
    parser.add_argument("--only", type=int, metavar="NUMBER", help="judge one file")
    options = parser.parse_args(arguments)
    if unknown := {*options.kinds} - {*KINDS}:
        parser.error(f"KIND must be one of {', '.join(KINDS)}, got {', '.join(unknown)}")
    numbers = range(options.files) if options.only is None else [options.only]
    failed = 0
    print(f"{'kind':12}{'files':>8}{'accepted':>10}{'refused':>9}{'failed':>8}", flush=True)
    for name in options.kinds or KINDS:
        commands = options.commands if options.only is None else options.only + 1
        counts = Counter[str]()
        for each in fuzz(KINDS[name], numbers, commands):
            counts[each.result] += 1
            if each.result == "failed":
                print(replay(name, each), flush=True)
            elif options.only is not None:
                print(f"{each.file}: {each.how}: {each.result} {each.message}")
        row = (counts.total(), counts["accepted"], counts["refused"], counts["failed"])
        print(f"{name:12}{row[0]:>8,}{row[1]:>10,}{row[2]:>9,}{row[3]:>8,}", flush=True)
        failed += counts["failed"]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
