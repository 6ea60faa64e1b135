"""Measures speed and memory of the data pipeline on a generated corpus.

    moe-lab benchmark data                              # 5 minutes, 2 GB of disk
    moe-lab benchmark data --workers 0 1 2 --json data.json

The corpus has the layout of the 1-billion-word benchmark. Its words are Zipf-distributed over
793,471 entries, the size of the benchmark's vocabulary, so vocabulary look-ups miss the
caches as often as in the benchmark. Words include ends of sentences. Words per processor second
hardly depend on other running programs. Memory is the peak growth of the process and its workers,
without file pages, which the system can drop (Linux). The last rows of the table are for 30,301,028
sentences of empty text, as many sentences as in the benchmark.
"""

import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch

from moe_lab.benchmarks.harness import Row
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

_MEAN_LENGTH = 25  # words per sentence
T = TypeVar("T")
TITLE = "a corpus of {words:,} words of {vocab_size:,}"
HEADER = "what | workers | words | seconds | words/s | words/processor s | memory, MiB"
CELLS = (
    "{what} | {workers} | {words:,} | {seconds:.1f} | {words_per_second:,.0f} | "
    "{words_per_processor_second:,.0f} | {peak_mib:,.0f}"
)


def measure(args: Any) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        corpus, vocabulary = _make_corpus(folder, args.words, args.vocab_size)
        stages = [partial(_counting, corpus), partial(_encoding, corpus, vocabulary, folder)]
        encoded = folder / f"encoded-{args.workers[0]}"
        for tokens in args.tokens_per_batch:
            stages.append(partial(_batches, encoded, tokens, args.batch_words))
        for stage in stages:
            for workers in args.workers:
                yield elsewhere(stage, workers)
        _empty_text(folder / "empty", args.sentences)
        yield from elsewhere(_whole_epoch, folder / "empty")


# The stages. Each runs in a separate process: memory that other stages freed has no effect.


def _counting(corpus: Path, workers: int) -> Row:
    sentences = load_corpus(corpus).train
    with measured("counting words", workers) as row:
        counted = in_workers(Vocabulary.count, sentences.pieces, workers)
        row.words = sum(counts.total() for counts in counted)
    return row


def _encoding(corpus: Path, vocabulary: Path, folder: Path, workers: int) -> Row:
    words, sentences = Vocabulary.load(vocabulary), load_corpus(corpus).train
    with measured("encoding", workers) as row:
        files = folder / f"encoded-{workers}"
        made = encode_to_files(sentences, words, files, name="train", num_workers=workers)
        row.words = made.num_tokens
    return row


def _batches(folder: Path, tokens_per_batch: int, num_words: int, workers: int) -> Row:
    encoded = EncodedSentences.open(next(folder.glob("train-*")))
    with measured(f"batches of {tokens_per_batch:,}", workers) as row:
        epoch = SentenceBatches(encoded, tokens_per_batch=tokens_per_batch, shuffle=True)
        some = islice(epoch.epoch(0, num_workers=workers), -(-num_words // tokens_per_batch))
        row.words = sum(batch.num_tokens for batch in some)
    return row


def _whole_epoch(folder: Path) -> list[Row]:
    encoded = EncodedSentences.open(folder)
    what = f"{len(encoded):,} sentences"
    with measured(f"sizes of the batches of {what}", 0, encoded.num_tokens) as made:
        epoch = SentenceBatches(encoded, tokens_per_batch=300_000, shuffle=True)
    with measured(f"order of an epoch of {what}", 0, encoded.num_tokens) as begun:
        next(epoch.epoch(0))
    return [made, begun]


def elsewhere(function: Callable[..., T], *arguments: Any) -> T:
    """Runs function(*arguments) in a new process."""
    method = multiprocessing.get_start_method()  # for its workers
    set_method = partial(multiprocessing.set_start_method, method, force=True)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), set_method) as executor:
        return executor.submit(function, *arguments).result()


@contextmanager
def measured(what: str, workers: int, words: int = 0) -> Iterator[Row]:
    """Yields a row, to which the block's end adds seconds, processor seconds and peak MiB."""
    before = peak = _anonymous_mib()
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.05):
            peak = max(peak, _anonymous_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    row = Row(what=what, workers=workers, words=words)
    start = time.perf_counter(), _processor_seconds()
    try:
        yield row
        row.seconds = time.perf_counter() - start[0]
        row.processor_seconds = _processor_seconds() - start[1]
        row.words_per_second = row.words / row.seconds
        row.words_per_processor_second = row.words / row.processor_seconds
        row.peak_mib = max(peak, _anonymous_mib()) - before
    finally:
        ended.set()
        watcher.join()


def _processor_seconds() -> float:
    """Returns the processor time of this process and its ended children."""
    return time.process_time() + sum(os.times()[2:4])


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
    torch.manual_seed(1)
    words = ["</S>", "<S>", "<UNK>"]
    # Common words are short: bytes per word are about those of English text.
    words += [f"{'wordforms'[: 1 + len(str(i))]}{i:x}" for i in range(vocab_size - len(words))]
    vocabulary, corpus = folder / "vocabulary.txt", folder / "corpus"
    vocabulary.write_text("\n".join(words) + "\n")
    train, heldout = (
        corpus / f"{part}-monolingual.tokenized.shuffled" for part in ("training", "heldout")
    )
    train.mkdir(parents=True)
    heldout.mkdir()
    share = 1 / torch.arange(1, vocab_size - 2, dtype=torch.float64)
    below = (share.cumsum(0) / share.sum()).float()
    per_shard = -(-num_words // 99)
    for number in progress(range(1, 100), "making a corpus", "files"):
        ids = torch.searchsorted(below, torch.rand(per_shard)) + 3
        ends = torch.rand(per_shard) < 1 / _MEAN_LENGTH
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
    torch.manual_seed(1)
    folder.mkdir()
    lengths = 2 + 2 * (_MEAN_LENGTH - 1) * torch.rand(num_sentences)
    starts = str(folder / "starts.int64")
    mapped = torch.from_file(starts, True, num_sentences + 1, dtype=torch.int64)
    torch.cumsum(lengths.long(), 0, out=mapped[1:])
    num_tokens = int(mapped[-1])
    with (folder / "stream.int32").open("wb") as file:
        file.truncate(4 * (num_tokens + 1))
    about = {"num_sentences": num_sentences, "num_tokens": num_tokens, "eos_id": 0}
    write_json(folder / "about.json", about)
