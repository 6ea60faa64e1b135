"""Corrupts the files that users hand to the lab, and checks what the loaders do with them.

    python lab/tests/fuzz_files.py                            # 10,000 files of each kind
    python lab/tests/fuzz_files.py config text --files 200    # 200 files of two kinds
    python lab/tests/fuzz_files.py config --only 4711        # one file again, with the error

A loader accepts a corrupted file only if the result is valid. Otherwise it refuses the file as the
commands do: status 2 and one sentence that names the file. The loader does not write, warn, crash
or hang, and its memory is bounded. Each file depends only on `SEED`, its kind and its number.

Prints the numbers of each kind, and each failure with the command that replays it. Status 1: a
loader failed.
"""

import argparse
import contextlib
import faulthandler
import gzip
import io
import lzma
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from moe_lab.cli import exit_status
from moe_lab.commands import compare, train
from moe_lab.data import EncodedPairs, Vocabulary, Wordpieces
from moe_lab.errors import ConfigError
from moe_lab.experiments.comparison import Comparison
from moe_lab.experiments.single_run import read_test, train_and_test
from moe_lab.training.checkpoint import load_run
from moe_lab.training.config import Config, DataConfig, TranslationConfig, read_config, to_toml
from moe_lab.training.logging import read_metrics
from moe_lab.training.model import make_model
from moe_lab.training.text import load_text

from moe_ext.distributed._checkpoint_folder import SUMS, sums_of

SEED = 20170123
MEMORY = 2**31  # bytes of address space that the loaders may add to the process
SECONDS = 60  # a loader that takes longer hangs
MESSAGE = 1_200  # characters of the longest error message
ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534

# --- corrupts ------------------------------------------------------------------------------------

HOSTILE = [
    "\0", "\r", "\n", "\t", '"', "'", "\ufeff", "\u2028", "\u0085", "\u202e", "\x1b[31m", "\x7f",
    "</s>", "<unk>", "<UNK>", "<S>", "<2fr>", "null", "true", "{}", "[]", "[" * 5_000, "nan",
    "1e999", "-1", "0", "1.5", str(2**60), "9" * 5_000, '{"a":' * 3_000, "../../x", "/dev/zero",
    "__main__", "\\ud800", "\\u0000", "%s%n", "x" * 100_000,
]  # fmt: skip
HOSTILE = [*(text.encode() for text in HOSTILE), b"\xff", b"\xff\xfe", b"\xed\xa0\x80", b"\x1c"]
NUMBERS = ["-1", "0", "1.5", "2", "1e999", "nan", '"1"', "true", "null"]
NUMBERS += [str(2**bits) for bits in (7, 31, 40, 60, 64, 10_000)]
ENCODINGS = ["utf-16", "utf-16-be", "utf-32", "latin-1", "utf-8-sig", "cp037", "\r\n", "\r"]


def flipped(draw, content, _):
    changed = bytearray(content)
    for _ in range(draw.choice([1, 1, 2, 8])):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def with_number(draw, content, _):
    match = draw.choice([*re.finditer(rb"\d+", content), re.match(b"", content)])
    return content[: match.start()] + draw.choice(NUMBERS).encode() + content[match.end() :]


def with_other_lines(draw, content, _):
    lines = content.splitlines(keepends=True)
    draw.choice([lines.reverse, lambda: draw.shuffle(lines), lines.sort])()
    return b"".join(lines[: draw.randint(1, 2 * len(lines))])


def encoded(draw, content, _):
    text, name = content.decode("utf-8", errors="replace"), draw.choice(ENCODINGS)
    if name.isspace():
        return text.replace("\n", name).encode()
    return text.encode(name, errors="replace")


def put(content, place, new):
    return content[:place] + new + content[place:]


BYTES = {  # functions of random numbers, the content, and the begin and end of a block in it
    "truncated": lambda draw, content, at: content[: at[0]],
    "deleted block": lambda draw, content, at: content[: at[0]] + content[at[1] :],
    "overwritten": lambda draw, content, at: (
        content[: at[0]] + draw.choice([bytes, draw.randbytes])(at[1] - at[0]) + content[at[1] :]
    ),
    "copied block": lambda draw, content, at: put(
        content, draw.randrange(len(content)), content[at[0] : at[1]]
    ),
    "moved block": lambda draw, content, at: put(
        content[: at[0]] + content[at[1] :], draw.randrange(len(content)), content[at[0] : at[1]]
    ),
    "hostile bytes": lambda draw, content, at: put(content, at[0], draw.choice(HOSTILE)),
    "flipped bits": flipped,
    "hostile number": with_number,
    "other lines": with_other_lines,
    "other encoding": encoded,
}
WHOLE = {  # something else at the path of the file
    "empty": Path.touch,
    "missing": lambda file: None,
    "directory": Path.mkdir,
    "link to itself": lambda file: file.symlink_to(file.name),
    "link to nothing": lambda file: file.symlink_to("nowhere"),
    "link to its folder": lambda file: file.symlink_to("."),
    "link to /dev/zero": lambda file: file.symlink_to("/dev/zero"),
    "link to another file": lambda file: file.symlink_to(ROOT / "README.md"),
    "pipe": os.mkfifo,
    "one long line": lambda file: file.write_bytes(b"x" * 6_000_000),
}


def corrupt(kind, folder, number):
    """Corrupts a file of a folder that `Kind.make` has filled; returns the file and how."""
    draw = random.Random(f"{SEED} {kind.name} {number}")
    file = draw.choice(sorted(path for glob in kind.files for path in folder.glob(glob)))
    if draw.random() < 0.1:
        how = draw.choice([*WHOLE, "huge", "no permission"])
        if how == "huge":
            os.truncate(file, kind.huge)
        elif how == "no permission":
            file.chmod(0)
        else:
            file.unlink()
            WHOLE[how](file)
        return file, how
    content = file.read_bytes()
    packed = {".gz": gzip, ".xz": lzma}.get(file.suffix)
    inside = packed is not None and draw.random() < 0.7  # corrupts what the file unpacks to
    content = packed.decompress(content) if inside else content
    names = draw.choices([*BYTES], k=draw.choice([1, 1, 1, 2, 3]))
    for name in names:
        if content:
            begin = draw.randrange(len(content))
            end = min(len(content), begin + draw.choice([1, 2, 8, 64, 512]))
            content = BYTES[name](draw, content, (begin, end))
    file.write_bytes(packed.compress(content) if inside else content)
    if kind.sign is not None and draw.random() < 0.6:
        kind.sign(file)
        names.append("signed")
    return file, ", ".join(names)


# --- kinds of files -----------------------------------------------------------------------------


class Kind(NamedTuple):
    """A kind of files that a user can hand to the lab."""

    name: str  # the name on the command line
    make: Any  # writes intact files into a folder
    files: list[str]  # shell patterns of the files to corrupt
    # Reads the files of a folder as the commands do; the second argument is the corrupted file.
    # Asserts that the result is valid.
    load: Any
    sign: Any = None  # makes the checksum of a corrupted file valid again
    huge: int = 2**40  # size in bytes of a huge file without content


WORDS = ["the", "a", "of", "Käse", "日本", "\u00e9", "x", "and", "to", "in", "is", "1", "%", "'s"]
TINY = [
    "num_threads=1", "steps=2", "log.tensorboard=false", "log.progress=false", "model.d_model=4",
    "model.moe.num_experts=3", "model.moe.k=2", "model.moe.hidden_sizes=[4]",
    "data.tokens_per_batch=200", "log.log_every=1",
]  # fmt: skip
SMALL = [str(ROOT / "configs/small/moe-32.toml"), "data.vocab_size=30", "model.layers=['moe']"]
SMALL += TINY
SMALL_MT = [str(ROOT / "configs/mt/small-moe-32.toml"), 'data.pairs=["en-fr"]']
SMALL_MT += ["data.vocab_size=60", "model.lstm_units=4", *TINY]


def sentences(number):
    draw = random.Random(3)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 9))) for _ in range(number)]


def write(folder, name, line="{0}\n"):
    """Writes the parts of a corpus as files such as train.txt."""
    folder.mkdir(exist_ok=True)
    for part, number in (("train", 60), ("dev", 5), ("test", 5)):
        lines = "".join(line.format(sentence, sentence[::-1]) for sentence in sentences(number))
        (folder / f"{part}.{name}").write_text(lines, "utf-8")


def write_table(folder):
    write(folder / "table", "en-fr.tsv", "{0}\t{1}\n")
    lines = [text for line in sentences(100) for text in (line, line[::-1])]
    Wordpieces.train(lines, 60, target_tokens=["fr"]).save(folder / "wordpieces.model")


def check_vocabulary(vocabulary):
    again = Path("vocabulary.txt")  # in the current folder, which is empty
    vocabulary.save(again)
    assert Vocabulary.load(again).words == vocabulary.words


def check(text):
    """Asserts that a text is valid."""
    for part in (text.train, text.dev, text.test):
        has_pairs = isinstance(part, EncodedPairs)
        for side in (part.source, part.target) if has_pairs else (part,):
            assert int(side.stream.min()) >= 0 and int(side.stream.max()) < len(text.vocabulary)
            assert int(side.lengths.sum()) == side.num_tokens
            assert all(side.eos_id not in sentence for sentence in side)
        if has_pairs:
            assert len(part.source) == len(part.target) == len(part.pair)
            assert len(part.report().splitlines()) == len(part.names) == 1
    if isinstance(text.vocabulary, Vocabulary):
        check_vocabulary(text.vocabulary)
    else:
        pieces = text.vocabulary
        assert len(pieces.words) == len(pieces) > pieces.unk_id
        assert all(isinstance(pieces.decode(pieces.encode(line)), str) for line in sentences(20))


def make_config(folder):
    (folder / "lm.toml").write_text(to_toml(Config()), "utf-8")
    (folder / "translation.toml").write_text(to_toml(TranslationConfig()), "utf-8")
    shutil.copy(SMALL[0], folder / "small.toml")


def load_config(folder, file):
    config = read_config(file)
    again = Path(file.name)  # in the current folder, which is empty
    again.write_text(to_toml(config), "utf-8")
    assert replace(read_config(again), output=config.output) == config
    try:
        with torch.device("meta"):
            make_model(config.model, 100)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def make_vocabulary(folder):
    (folder / "vocabulary.txt").write_text("\n".join(["<unk>", "</s>", *WORDS]) + "\n", "utf-8")
    lines = [f"{word}\t{1000 - i}" for i, word in enumerate(["<S>", "</S>", "<UNK>", *WORDS])]
    (folder / "counts.txt").write_text("\n".join(lines) + "\n", "utf-8")
    write(folder / "corpus", "txt")


def data_of(folder, vocabulary, **options):
    return DataConfig(str(folder / "corpus"), vocabulary=str(vocabulary), **options)


def make_text(folder):
    content = ("\n".join(sentences(300)) + "\n").encode()
    (folder / "text.txt").write_bytes(content)
    (folder / "text.txt.gz").write_bytes(gzip.compress(content, mtime=0))
    (folder / "text.txt.xz").write_bytes(lzma.compress(content))


def make_table(folder):
    write_table(folder)
    write(folder / "aligned", "en")
    write(folder / "aligned", "fr", "{1}\n")


def data_of_pairs(folder, corpus):
    config, *options = SMALL_MT
    places = [f"data.corpus={corpus}", f"data.wordpieces={folder / 'wordpieces.model'}"]
    return read_config(config, [*options, *places]).data


def make_encoded(folder):
    make_vocabulary(folder)
    load_text(data_of(folder, folder / "vocabulary.txt", encoded=str(folder / "ids")))
    write_table(folder)
    load_text(replace(data_of_pairs(folder, folder / "table"), encoded=str(folder / "pairs")))


def load_encoded(folder, file):
    if file.is_relative_to(folder / "ids"):
        text = load_text(data_of(folder, folder / "vocabulary.txt", encoded=str(folder / "ids")))
        assert text.train.eos_id == text.vocabulary.eos_id
    else:
        data = data_of_pairs(folder, folder / "table")
        text = load_text(replace(data, encoded=str(folder / "pairs")))
    check(text)


def make_run(folder):
    write(folder / "corpus", "txt")
    options = [*SMALL, f"data.corpus={folder / 'corpus'}", f"output={folder / 'run'}"]
    assert exit_status(lambda: train.main(options)) == 0
    (folder / "run" / ".training.lock").unlink()


def sign(file):
    sums = file.parent / SUMS
    if sums.is_file() and file != sums:
        names = sorted(path.name for path in file.parent.iterdir() if path != sums)
        sums_of_files = sums_of(file.parent, names)
        sums.write_text("".join(f"{sums_of_files[name]}  {name}\n" for name in names))


def load_checkpoint(folder, file):
    trained = load_run(folder / "run")
    check_vocabulary(trained.vocabulary)
    assert trained.step >= 0
    with torch.device("meta"):
        expected = make_model(trained.config.model, len(trained.vocabulary)).state_dict()
    shapes = [
        {name: tensor.shape for name, tensor in state.items()}
        for state in (trained.model.state_dict(), expected)
    ]
    assert shapes[0] == shapes[1]


def run_config(folder):
    config, *options = SMALL
    places = [f"data.corpus={folder / 'corpus'}", f"output={folder / 'moe-seed1'}"]
    return read_config(config, [*options, *places], Config)


def make_results(folder):
    write(folder / "corpus", "txt")
    config = run_config(folder)
    train_and_test(config, load_text(config.data))
    places = [f"data.corpus={folder / 'corpus'}", f"--output={folder / 'compared'}"]
    compare.main([*SMALL, *places, "--seeds", "1"])


def load_results(folder, file):
    if file.name == "metrics.jsonl":
        for record in read_metrics(file.parent):
            assert isinstance(record["step"], int) and record["kind"] in ("train", "dev")
    elif file.name == "comparison.json":
        options = {"config": SMALL[0], "overrides": [], "against": [], "output": file.parent}
        study = Comparison(argparse.Namespace(name="comparison", **options))
        page = study.store.page(study.store.read(), study.page)
        assert page is None or page.as_markdown("comparison").startswith("# ")
    else:
        config = run_config(folder)
        text = load_text(config.data)
        assert len(read_test(Path(config.output), config.steps, text)) == len(text.test)


KINDS = [
    Kind("config", make_config, ["*.toml"], load_config),
    Kind(
        "vocabulary", make_vocabulary, ["*.txt"],
        lambda folder, file: check(load_text(data_of(folder, file))),
    ),
    Kind(
        "text", make_text, ["text.*"],
        lambda folder, file: check(load_text(DataConfig(corpus=str(file)))),
    ),
    Kind(
        "table", make_table, ["table/*", "aligned/*"],
        lambda folder, file: check(load_text(data_of_pairs(folder, file.parent))),
    ),
    Kind(
        "wordpieces", write_table, ["wordpieces.model"],
        lambda folder, file: check(load_text(data_of_pairs(folder, folder / "table"))),
    ),
    Kind("encoded", make_encoded, ["ids/*/*", "pairs/*/*.json", "pairs/*/*/*"], load_encoded),
    Kind(
        "checkpoint", make_run,
        ["run/checkpoints/latest", "run/checkpoints/*/*", "run/checkpoints/*/.metadata"],
        load_checkpoint, sign, huge=2**30,  # the checksum reads the whole file
    ),
    Kind(
        "results", make_results,
        ["compared/comparison.json", "moe-seed1/metrics.jsonl", "moe-seed1/test_nll-*.pt"],
        load_results,
    ),
]  # fmt: skip
KINDS = {kind.name: kind for kind in KINDS}

# --- oracle -------------------------------------------------------------------------------------


def listing(folder):
    """Returns path, mode, size and time of everything in a folder."""
    statuses = {path: path.lstat() for path in folder.rglob("*")}
    return {path: (s.st_mode, s.st_size, s.st_mtime_ns) for path, s in statuses.items()}


def run(function, without_rights):
    """Returns the exit status of a function and what the process wrote to stderr meanwhile."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as log:
        before = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            if without_rights and os.geteuid() == 0:
                os.seteuid(NOBODY)
            status = exit_status(function)
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        finally:
            os.seteuid(os.getuid())
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
        log.seek(0)
        return status, log.read(2**20).decode("utf-8", errors="replace")


def wrong(status, error, folder):
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


def judge(kind, folder, file, how):
    """Loads a corrupted file; returns what `Judged` says of it."""
    before = listing(folder)
    try:
        status, error = run(lambda: kind.load(folder, file), how == "no permission")
        if listing(folder) != before:
            return "failed", f"the loader changed the folder: {error}"
        if status == 0:
            return ("failed", f"a warning: {error}") if error else ("accepted", "")
        failure = wrong(status, error, folder)
    except BaseException:
        return "failed", traceback.format_exc(limit=-6)
    return ("failed", failure) if failure else ("refused", error)


# --- processes ----------------------------------------------------------------------------------


class Judged(NamedTuple):
    """What a loader did with a corrupted file."""

    number: int
    file: str
    how: str
    result: str  # "accepted", "refused" or "failed"
    message: str  # of the refusal, or what is wrong


def judge_all(kind, numbers, place, pipe):
    """Sends a Judged for each file."""
    faulthandler.disable()  # pytest's would write to the terminal
    warnings.simplefilter("always", UserWarning)
    warnings.showwarning = lambda message, *_, **__: print(message, file=sys.stderr)
    sys.stderr = open(2, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115
    size = 4096 * int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    cwd, folder = place / "cwd", place / "files"
    for number in numbers:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(cwd, ignore_errors=True)
        cwd.mkdir()
        os.chdir(cwd)
        shutil.copytree(place / "intact", folder)
        file, how = corrupt(kind, folder, number)
        with contextlib.redirect_stdout(io.StringIO()):
            result = judge(kind, folder, file, how)
        pipe.send(Judged(number, str(file.relative_to(folder)), how, *result))


def make_files(kind, folder):
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()):
        kind.make(folder)


def fuzz(kind, numbers):
    """Judges the files of some numbers in child processes; yields the results in their order."""
    fork = multiprocessing.get_context("fork")
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory) as place:
        place = Path(place)
        place.chmod(0o755)
        (place / "files").mkdir()
        child = fork.Process(target=make_files, args=(kind, place / "files"))
        child.start()
        child.join()
        assert child.exitcode == 0, f"no files of the kind {kind.name} were made"
        (place / "files").rename(place / "intact")  # the files contain their first path
        numbers = list(numbers)
        while numbers:
            receiver, sender = fork.Pipe(duplex=False)
            child = fork.Process(target=judge_all, args=(kind, numbers, place, sender))
            child.start()
            sender.close()
            with contextlib.suppress(EOFError):
                while numbers and receiver.poll(SECONDS):
                    yield receiver.recv()
                    numbers.pop(0)
            child.kill()
            child.join()
            if numbers:
                end = signal.Signals(-child.exitcode).name if child.exitcode < 0 else "an error"
                end = f"more than {SECONDS} seconds" if end == "SIGKILL" else end
                yield Judged(numbers.pop(0), "", "", "failed", f"no end: {end}")


def replay(kind, judged):
    """Returns the command that judges a file again, and what happened to the file."""
    program = f"python lab/tests/fuzz_files.py {kind} --only {judged.number}"
    return f"{program}\n    {judged.file}: {judged.how}: {judged.message}"


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", default=[*KINDS], help=", ".join(KINDS))
    parser.add_argument("--files", type=int, default=10_000, help="files of a kind (%(default)s)")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="judge one file")
    options = parser.parse_args(arguments)
    if unknown := {*options.kinds} - {*KINDS}:
        parser.error(f"KIND must be one of {', '.join(KINDS)}, got {', '.join(unknown)}")
    numbers = range(options.files) if options.only is None else [options.only]
    failed = 0
    print(f"{'kind':12}{'files':>8}{'accepted':>10}{'refused':>9}{'failed':>8}", flush=True)
    for name in options.kinds:
        counts = Counter()
        for result in fuzz(KINDS[name], numbers):
            counts[result.result] += 1
            if result.result == "failed":
                print(replay(name, result), flush=True)
            elif options.only is not None:
                print(f"{result.file}: {result.how}: {result.result} {result.message}")
        row = (counts.total(), counts["accepted"], counts["refused"], counts["failed"])
        print(f"{name:12}{row[0]:>8,}{row[1]:>10,}{row[2]:>9,}{row[3]:>8,}", flush=True)
        failed += counts["failed"]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
