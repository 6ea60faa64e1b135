"""Measures speed and memory of the data pipeline on a generated corpus.

    moe-lab benchmark data                              # 5 minutes, 2 GB of disk
    moe-lab benchmark data --workers 0 1 2 --json data.json
    moe-lab benchmark data --corpus FOLDER --vocabulary FILE     # a real corpus

The corpus has the layout of the 1-billion-word benchmark. Its words are Zipf-distributed over
793,471 entries, the size of the benchmark's vocabulary, so vocabulary look-ups miss the
caches as often as in the benchmark. Words include ends of sentences. Words per processor second
hardly depend on other running programs. Memory is the peak growth of the process and its workers,
without file pages, which the system can drop (Linux). The last rows of the table are for 30,301,028
sentences of empty text, as many sentences as in the benchmark.
"""

import argparse
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch

from moe_lab.benchmarks.harness import environment, report_rows
from moe_lab.cli import at_least, make_parser
from moe_lab.data import (
    EncodedSentences,
    SentenceBatches,
    Vocabulary,
    encode_to_files,
    in_workers,
    load_corpus,
)
from moe_lab.files import write_json
from moe_lab.progress import progress

_VOCABULARY = 793_471
_SENTENCES = 30_301_028
_MEAN_LENGTH = 25  # words per sentence

T = TypeVar("T")


@dataclass
class Row:
    """The measurements of one stage of the data pipeline."""

    what: str
    workers: int
    words: int
    seconds: float
    processor_seconds: float
    peak_mib: float


def main(arguments: list[str] | None = None) -> list[Row]:
    parser = make_parser(__doc__)
    parser.add_argument("--workers", type=at_least(0), nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--words",
        type=at_least(1_000),
        default=20_000_000,
        help="number of words of the generated corpus",
    )
    parser.add_argument(
        "--vocab-size",
        type=at_least(3),
        default=_VOCABULARY,
        help="vocabulary size of the generated corpus",
    )
    parser.add_argument(
        "--sentences",
        type=at_least(1),
        default=_SENTENCES,
        help="number of sentences of empty text",
    )
    parser.add_argument("--tokens-per-batch", type=at_least(1), nargs="+", default=[2_560, 300_000])
    parser.add_argument(
        "--batch-words",
        type=at_least(1),
        default=10_000_000,
        help="number of words to read in batches",
    )
    parser.add_argument("--corpus", type=Path, help="a corpus to use instead of the generated one")
    parser.add_argument("--vocabulary", type=Path, help="the vocabulary of --corpus")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if (options.corpus is None) != (options.vocabulary is None):
        parser.error("--corpus and --vocabulary must be given together")
    print(environment())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        corpus, vocabulary = options.corpus, options.vocabulary
        if corpus is None:
            corpus, vocabulary = _make_corpus(folder, options.words, options.vocab_size)
        rows = [
            elsewhere(measure, corpus, vocabulary, workers, folder, options)
            for measure in (counting, encoding)
            for workers in options.workers
        ]
        for size in options.tokens_per_batch:
            rows += [
                elsewhere(batches, corpus, vocabulary, workers, folder, options, size)
                for workers in options.workers
            ]
        _empty_text(folder / "empty", options.sentences)
        rows += elsewhere(_whole_epoch, folder / "empty")
    report_rows(
        rows,
        ["what", "workers", "words", "seconds", "words/s", "words/processor s", "memory, MiB"],
        lambda row: [
            row.what,
            row.workers,
            f"{row.words:,}",
            f"{row.seconds:.1f}",
            f"{row.words / row.seconds:,.0f}",
            f"{row.words / row.processor_seconds:,.0f}",
            f"{row.peak_mib:,.0f}",
        ],
        options.json,
    )
    return rows


# The stages. Each runs in a separate process: memory that other stages freed has no effect.


def counting(corpus: Path, vocabulary: Path, workers: int, *unused: object) -> Row:
    sentences = load_corpus(corpus).train
    with measured() as result:
        total = sum(
            counts.total() for counts in in_workers(Vocabulary.count, sentences.pieces, workers)
        )
    return Row("counting words", workers, total, *result)


def encoding(
    corpus: Path, vocabulary: Path, workers: int, folder: Path, options: argparse.Namespace
) -> Row:
    words = Vocabulary.load(vocabulary)
    sentences = load_corpus(corpus).train
    with measured() as result:
        made = encode_to_files(
            sentences, words, folder / f"encoded-{workers}", name="train", num_workers=workers
        )
    return Row("encoding", workers, made.num_tokens, *result)


def batches(
    corpus: Path,
    vocabulary: Path,
    workers: int,
    folder: Path,
    options: argparse.Namespace,
    tokens_per_batch: int,
) -> Row:
    made = folder / f"encoded-{options.workers[0]}"
    encoded = EncodedSentences.open(next(made.glob("train-*")))
    with measured() as result:
        epoch = SentenceBatches(encoded, tokens_per_batch=tokens_per_batch, shuffle=True)
        some = -(-options.batch_words // tokens_per_batch)
        total = 0
        for batch in islice(epoch.epoch(0, num_workers=workers), some):
            total += batch.num_tokens
    return Row(f"batches of {tokens_per_batch:,}", workers, total, *result)


def _whole_epoch(folder: Path) -> list[Row]:
    encoded = EncodedSentences.open(folder)
    with measured() as made:
        epoch = SentenceBatches(encoded, tokens_per_batch=300_000, shuffle=True)
    with measured() as begun:
        next(epoch.epoch(0))
    what = f"{len(encoded):,} sentences"
    return [
        Row(f"sizes of the batches of {what}", 0, encoded.num_tokens, *made),
        Row(f"order of an epoch of {what}", 0, encoded.num_tokens, *begun),
    ]


def elsewhere(function: Callable[..., T], *arguments: Any) -> T:
    """Runs function(*arguments) in a new process."""
    method = multiprocessing.get_start_method()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        return executor.submit(_with_start_method, method, function, *arguments).result()


def _with_start_method(method: str, function: Callable[..., T], *arguments: Any) -> T:
    multiprocessing.set_start_method(method, force=True)  # for its workers
    return function(*arguments)


@contextmanager
def measured() -> Iterator[list[float]]:
    """Yields a list, to which the block's end adds seconds, processor seconds and peak MiB."""
    before = peak = _anonymous_mib()
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.05):
            peak = max(peak, _anonymous_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    result: list[float] = []
    start = seconds()
    try:
        yield result
        result += [end - begin for end, begin in zip(seconds(), start, strict=True)]
        result.append(max(peak, _anonymous_mib()) - before)
    finally:
        ended.set()
        watcher.join()


def seconds() -> tuple[float, float]:
    """Returns the clock, and the processor time of this process and its ended children, in s."""
    return time.perf_counter(), time.process_time() + sum(os.times()[2:4])


def _anonymous_mib() -> float:
    """Returns the memory in MiB of this process and its children, without file pages."""
    total = 0
    for pid in (os.getpid(), *(child.pid for child in multiprocessing.active_children())):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # the process has ended, or this is not Linux
            continue
        values = {line.split(":")[0]: line.split()[1] for line in lines[1:]}
        total += int(values["Pss_Anon"]) + int(values["Pss_Shmem"])
    return total / 1024


# The generated texts.


def _make_corpus(folder: Path, num_words: int, vocab_size: int) -> tuple[Path, Path]:
    """Generates a corpus in `folder`; returns the corpus and its vocabulary file."""
    generator = torch.Generator().manual_seed(1)
    words = ["</S>", "<S>", "<UNK>"]
    # Common words are short: bytes per word are about those of English text.
    words += [f"{'wordforms'[: 1 + len(str(i))]}{i:x}" for i in range(vocab_size - len(words))]
    vocabulary = folder / "vocabulary.txt"
    vocabulary.write_text("\n".join(words) + "\n")
    corpus = folder / "corpus"
    train = corpus / "training-monolingual.tokenized.shuffled"
    heldout = corpus / "heldout-monolingual.tokenized.shuffled"
    train.mkdir(parents=True)
    heldout.mkdir()
    share = 1 / torch.arange(1, vocab_size - 2, dtype=torch.float64)
    below = (share.cumsum(0) / share.sum()).float()
    per_shard = -(-num_words // 99)
    for number in progress(range(1, 100), "making a corpus", "files"):
        ids = torch.searchsorted(below, torch.rand(per_shard, generator=generator)) + 3
        ends = torch.rand(per_shard, generator=generator) < 1 / _MEAN_LENGTH
        ends[-1] = True
        bounds = [0, *(ends.nonzero().flatten() + 1).tolist()]
        text = [words[i] for i in ids.clamp_(max=vocab_size - 1).tolist()]
        with (train / f"news.en-{number:05d}-of-00100").open("w") as file:
            file.writelines(" ".join(text[a:b]) + "\n" for a, b in pairwise(bounds))
    for number in range(2):
        (heldout / f"news.en.heldout-{number:05d}-of-00050").write_text("word0\n")
    return corpus, vocabulary


def _empty_text(folder: Path, num_sentences: int) -> None:
    """Creates files of encoded sentences; all words have id 0, so the files take no disk space."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    lengths = 2 + 2 * (_MEAN_LENGTH - 1) * torch.rand(num_sentences, generator=generator)
    starts = folder / "starts.int64"
    mapped = torch.from_file(str(starts), True, num_sentences + 1, dtype=torch.int64)
    torch.cumsum(lengths.long(), 0, out=mapped[1:])
    num_tokens = int(mapped[-1])
    with (folder / "stream.int32").open("wb") as file:
        file.truncate(4 * (num_tokens + 1))
    about = {"num_sentences": num_sentences, "num_tokens": num_tokens, "eos_id": 0}
    write_json(folder / "about.json", about)
