"""Corpora larger than memory: pieces of text, ids in files, worker processes."""

import hashlib
import itertools
import multiprocessing
import os
import pickle
import random
import resource
import signal
import sys
import time

import pytest
import torch
from moe_lab.data import (
    CorpusError,
    EncodedSentences,
    SentenceBatches,
    Sentences,
    Vocabulary,
    encode_sentences,
    encode_to_files,
    encoded,
    in_workers,
    load_corpus,
)
from moe_lab.data import sentences as texts
from moe_lab.errors import ConfigError
from tiny import equal

WORDS = [*(f"w{i}" for i in range(40)), "Käse", "日本", "\u00e9"]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(texts, "PIECE_BYTES", 2_000)


@pytest.fixture
def text(tmp_path):
    """A folder of parts; the train part has several pieces, blank lines and unknown words."""
    draw = random.Random(2)
    folder = tmp_path / "text"
    folder.mkdir()
    for part, count in (("train", 600), ("dev", 20), ("test", 30)):
        lines = (draw.choices(WORDS, k=draw.randrange(12)) for _ in range(count))
        (folder / f"{part}.txt").write_text("\n".join(map(" ".join, lines)))
    return folder


@pytest.fixture
def vocabulary():
    return Vocabulary([*WORDS[5:], "</s>", "<unk>"])


def assert_same_sentences(actual, expected):
    assert torch.equal(actual.stream, expected.stream)
    assert torch.equal(actual.starts, expected.starts)
    assert actual.eos_id == expected.eos_id and actual.stream.dtype == torch.int32


def spoil(file):
    """Makes a file invalid UTF-8, with the same size and time."""
    status = file.stat()
    file.write_bytes(b"\xff" * status.st_size)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


# --- pieces of text -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 7, 11, 1000])
def test_pieces_are_the_file(tmp_path, monkeypatch, size):
    monkeypatch.setattr(texts, "PIECE_BYTES", size)
    file = tmp_path / "text.txt"
    file.write_bytes("one two\n\n \na\r\nKäse 日本\nb\n\nthe last".encode())
    sentences = load_corpus(file, parts=["all"]).all
    assert len(sentences.pieces) == -(-file.stat().st_size // size)
    expected = [["one", "two"], ["a"], ["Käse", "日本"], ["b"], ["the", "last"]]
    assert list(sentences) == expected
    assert list(itertools.chain.from_iterable(sentences.pieces)) == expected


# --- ids in files -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_mapped_sentences_are_those_in_memory(text, tmp_path, vocabulary, num_workers):
    corpus = load_corpus(text)
    expected = encode_sentences(corpus.train, vocabulary)
    made = encode_to_files(
        corpus.train, vocabulary, tmp_path / "ids", name="train", num_workers=num_workers
    )
    assert_same_sentences(made, expected)
    assert list(made) == list(expected) and made.num_tokens == expected.num_tokens
    assert (made.stream == vocabulary.unk_id).any()
    (folder,) = (tmp_path / "ids").glob("train-*")
    again = EncodedSentences.open(folder)
    assert_same_sentences(again, expected)
    unpickled = pickle.loads(pickle.dumps(again))  # pickled by path
    assert_same_sentences(unpickled, expected)
    assert len(pickle.dumps(again)) < 1000
    for max_length in (None, 5):
        epochs = [
            SentenceBatches(
                sentences, max_length=max_length, tokens_per_batch=50, shuffle=True
            ).epoch(1, 3, workers)
            for sentences, workers in ((expected, 0), (again, 0), (again, num_workers))
        ]
        for batches in zip(*epochs, strict=True):
            assert equal(batches[1:], batches[:1] * 2)


def test_the_first_sentences_and_builtin_lines_too(text, tmp_path, vocabulary):
    limited = load_corpus(text, max_train_sentences=7).train
    lines = texts.Sentences((texts.Lines(["w7 w8", "w9"]),))
    for sentences in (limited, lines):
        made = encode_to_files(sentences, vocabulary, tmp_path, name="part")
        assert_same_sentences(made, encode_sentences(sentences, vocabulary))
    assert len(list(tmp_path.glob("part-*"))) == 2


@pytest.mark.parametrize("number", [1000, 5_000_000])
def test_what_a_fingerprint_hashes(number):
    """The numbers and the ids; of a long text, 1,024 blocks of ids from its begin to its end."""
    ids = torch.randint(2, 100, (number + 1,), dtype=torch.int32)
    text = EncodedSentences.from_tensors(ids, torch.tensor([0, number // 2, number]), eos_id=1)
    digest = hashlib.sha256(f"2 {number}".encode())
    starts = [block * (number + 1 - 4096) // 1023 for block in range(1024)]
    for start, size in [(start, 4096) for start in starts] if number > 2**22 else [(0, number + 1)]:
        digest.update(ids[start : start + size].numpy().tobytes())
    assert text.fingerprint() == digest.hexdigest()


def test_encoded_once(text, tmp_path, vocabulary):
    """The second call does not read the text, which would fail."""
    train = load_corpus(text).train
    first = encode_to_files(train, vocabulary, tmp_path, name="train")
    spoil(text / "train.txt")
    assert_same_sentences(encode_to_files(train, vocabulary, tmp_path, name="train"), first)
    with pytest.raises(CorpusError):
        encode_to_files(train, vocabulary, tmp_path / "anew", name="train")


def test_files_of_another_text_or_vocabulary_are_not_used(text, tmp_path, vocabulary):
    ids = tmp_path / "ids"

    def check(words):
        train = load_corpus(text).train
        made = encode_to_files(train, words, ids, name="train")
        assert_same_sentences(made, encode_sentences(train, words))
        return len(list(ids.iterdir()))

    number = check(vocabulary)
    assert check(Vocabulary([*vocabulary.words, "w0"])) == number + 1
    file = text / "train.txt"
    status = file.stat()
    file.write_bytes(file.read_bytes().replace(b"w1", b"w2"))  # of the same size
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert check(vocabulary) == number + 2
    with file.open("a") as more:
        more.write("w3 w4\n")
    assert check(vocabulary) == number + 3
    (text / "train.txt").rename(text / "train2.txt")
    (text / "train").mkdir()
    (text / "train2.txt").rename(text / "train" / "a.txt")
    (text / "train" / "b.txt").write_text("w5\n")
    assert check(vocabulary) == number + 4


def kill_at_third_piece(text, folder, vocabulary):
    piece = encoded._encode_piece
    pieces = itertools.count(1)

    def deadly(*arguments):
        if next(pieces) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return piece(*arguments)

    encoded._encode_piece = deadly
    encode_to_files(load_corpus(text).train, vocabulary, folder, name="train")


def test_a_killed_encoding_leaves_nothing_that_is_used(text, tmp_path, vocabulary):
    ids = tmp_path / "ids"
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=kill_at_third_piece, args=(text, ids, vocabulary))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert len(list(ids.glob(".encoding-*"))) == 1 and not list(ids.glob("train-*"))
    train = load_corpus(text).train
    made = encode_to_files(train, vocabulary, ids, name="train")
    assert_same_sentences(made, encode_sentences(train, vocabulary))
    assert not list(ids.glob(".encoding-*"))


def encode_slowly(text, folder, vocabulary, log):
    into = encoded._encode_into

    def slow(*arguments):
        with log.open("a") as file:
            file.write("x")
        time.sleep(0.3)
        into(*arguments)

    encoded._encode_into = slow
    made = encode_to_files(load_corpus(text).train, vocabulary, folder, name="train")
    sys.exit(len(made) == 0)


def test_of_several_processes_one_encodes(text, tmp_path, vocabulary):
    ids, log = tmp_path / "ids", tmp_path / "log"
    fork, arguments = multiprocessing.get_context("fork"), (text, ids, vocabulary, log)
    processes = [fork.Process(target=encode_slowly, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert log.read_text() == "x" and len(list(ids.glob("train-*"))) == 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_encoding_errors(text, tmp_path, vocabulary, monkeypatch, num_workers):
    ids = tmp_path / "ids"

    def encode():
        train = load_corpus(text).train
        return encode_to_files(train, vocabulary, ids, name="train", num_workers=num_workers)

    words = (text / "train.txt").read_bytes()
    (text / "train.txt").write_bytes(words + b"\nw1 </s>\n")
    with pytest.raises(CorpusError, match=r"train.txt from byte \d+: .* must"):
        encode()
    (text / "train.txt").write_bytes(words + b"\n\xff\n")
    with pytest.raises(CorpusError, match="train.txt, line 601 must") as error:
        encode()
    assert str(error.value).count("\n") == 0  # the worker's traceback is a note
    assert [path.name for path in ids.iterdir()] == [".lock"]

    (text / "train.txt").write_text("w1\n")
    fingerprints = itertools.count()
    monkeypatch.setattr(Sentences, "fingerprint", lambda self: str(next(fingerprints)))
    with pytest.raises(CorpusError, match="the text of train changed while it was read"):
        encode()
    assert [path.name for path in ids.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("stream.int32", 3, -1, r"ids in stream.int32 must be in \[0, \d+\), got -1 to \d+"),
        ("stream.int32", 3, 1000, r"ids in stream.int32 must be in \[0, \d+\), got 0 to 1000"),
        ("stream.int32", 0, 1, r"stream.int32 must hold the id \d+ \d+ times, got \d+"),
        ("starts.int64", 0, 1, "starts.int64 must begin with 0 and end with"),
        ("starts.int64", 2, 0, "starts.int64 must hold the places of the id"),
        ("starts.int64", 2, 2**62, "starts.int64 must hold the places of the id"),
        ("starts.int64", 1, 1, "starts.int64 must hold the places of the id"),
        # Their differences are positive in int64.
        ("starts.int64", slice(1, 4), [2**62, 2**63 - 1, -(2**62)], "starts.int64 must hold the"),
    ],
)
def test_files_of_other_numbers_are_refused(
    text, tmp_path, vocabulary, name, place, value, message
):
    train = load_corpus(text).train
    encode_to_files(train, vocabulary, tmp_path / "ids", name="train")
    (folder,) = (tmp_path / "ids").glob("train-*")
    dtype = torch.int32 if name == "stream.int32" else torch.int64
    size = (folder / name).stat().st_size // dtype.itemsize
    torch.from_file(str(folder / name), True, size, dtype=dtype)[place] = torch.tensor(value)
    with pytest.raises(CorpusError, match=message):
        encode_to_files(train, vocabulary, tmp_path / "ids", name="train")


@pytest.mark.parametrize("name", ["stream.int32", "starts.int64"])
def test_files_of_other_sizes_are_refused(text, tmp_path, vocabulary, name):
    train = load_corpus(text).train
    encode_to_files(train, vocabulary, tmp_path / "ids", name="train")
    (file,) = (tmp_path / "ids").glob(f"train-*/{name}")
    with file.open("ab") as more:
        more.write(bytes(8))
    with pytest.raises(CorpusError, match=f"{name} must have [0-9,]+ bytes, got"):
        encode_to_files(train, vocabulary, tmp_path / "ids", name="train")


# --- worker processes ---------------------------------------------------------------------------


def square(number):
    return torch.tensor(number) ** 2, os.getpid()


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_work_comes_back_in_order(num_workers):
    before = torch.get_rng_state()
    results = list(in_workers(square, iter(range(20)), num_workers))
    assert [int(result) for result, _ in results] == [number**2 for number in range(20)]
    processes = {process for _, process in results}
    assert len(processes) == max(num_workers, 1)
    assert (os.getpid() in processes) == (num_workers == 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_work_can_be_pickled(text, tmp_path, vocabulary):
    """Pickling is needed where Python does not start processes by fork."""
    train = load_corpus(text).train
    for piece in (*train.pieces, load_corpus(text, max_train_sentences=5).train):
        assert list(pickle.loads(pickle.dumps(piece))) == list(piece)
    assert pickle.loads(pickle.dumps(vocabulary)).encode(WORDS) == vocabulary.encode(WORDS)
    made = encode_to_files(train, vocabulary, tmp_path, name="train")
    for max_length in (None, 5):
        batches = SentenceBatches(made, tokens_per_batch=9, max_length=max_length, shuffle=True)
        unpickled = pickle.loads(pickle.dumps(batches))
        for batch, expected in zip(unpickled.epoch(0), batches.epoch(0), strict=True):
            assert torch.equal(batch.inputs, expected.inputs)


def signal_itself(number):
    if number:
        os.kill(os.getpid(), number)
    return "still here"


def test_workers_leave_signals_to_the_first_process():
    signals = [signal.SIGINT, signal.SIGTERM, 0]
    assert list(in_workers(signal_itself, signals, 1)) == ["still here"] * 3


def fail_at_three(number):
    if number == 3:
        raise CorpusError("three is too much")
    return number


def test_errors_and_early_ends_leave_no_process(children):
    results = in_workers(fail_at_three, itertools.count(), 2)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    assert len(children()) == 2
    with pytest.raises(CorpusError) as error:
        next(results)
    assert str(error.value) == "three is too much"
    assert "in fail_at_three" in error.value.__notes__[0]
    del results, error
    assert not children()

    results = in_workers(square, itertools.count(), 2)
    next(results)
    results.close()
    assert not children()


def more_than_the_shared_memory(number):
    if number:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # also of files in shared memory
    return torch.zeros(10_000)


class Unpicklable(Exception):
    def __reduce__(self):
        raise TypeError("cannot be pickled")


def fail_unpicklable(number):
    raise Unpicklable(f"number {number}")


def test_a_result_that_cannot_be_sent_is_an_error():
    """Before, the parent process hung."""
    results = in_workers(more_than_the_shared_memory, [0, 1], 1)
    assert next(results).shape == (10_000,)
    with pytest.raises(ConfigError, match=r"^the shared memory /dev/shm must have room .*torch_"):
        next(results)
    with pytest.raises(RuntimeError, match="^Unpicklable: number 3$"):
        list(in_workers(fail_unpicklable, [3], 1))
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        list(in_workers(a_lambda, [0], 1))


def a_lambda(number):
    return lambda: number
