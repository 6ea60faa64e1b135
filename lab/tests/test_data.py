"""Vocabularies, corpora, the built-in corpus and batches of sentences."""

import gzip
import hashlib
import lzma
import os
import stat
import subprocess
import sys
from itertools import islice

import pytest
import torch
from moe_lab.data import (
    CorpusError,
    EncodedSentences,
    SentenceBatches,
    Vocabulary,
    builtin,
    encode_sentences,
    load_corpus,
    load_parallel,
)
from moe_lab.files import MAX_LINE, atomic_file

# --- vocabulary ---------------------------------------------------------------------------------


def test_vocabulary_is_ordered_by_frequency_then_spelling():
    # b 4, </s> 3 (once per sentence), a 2, c 2, d 1. <unk> and </s> use two of the five entries.
    sentences = [["b", "b", "a"], ["c", "b", "c"], ["a", "b", "d"]]
    vocabulary = Vocabulary.build(sentences, max_size=5)
    # d is excluded, so <unk> counts 1 and is last.
    assert vocabulary.words == ("b", "</s>", "a", "c", "<unk>")
    assert (vocabulary.eos_id, vocabulary.unk_id, len(vocabulary)) == (1, 4, 5)


def test_unk_has_its_place_by_the_number_of_words_left_out():
    sentences = [["a", "a", "a", "<unk>", "x", "y", "z"]]
    # a 3; <unk> 4 (one in the text, and x, y, z); </s> 1.
    assert Vocabulary.build(sentences, max_size=3).words == ("<unk>", "a", "</s>")
    assert Vocabulary.build(sentences, max_size=99, min_count=2).words == ("<unk>", "a", "</s>")
    assert len(Vocabulary.build(sentences, max_size=99)) == 6


def test_vocabulary_round_trip_and_unknown_words(tmp_path):
    vocabulary = Vocabulary.build([["the", "Käse", "the", "'s"]], max_size=10)
    assert vocabulary.decode(vocabulary.encode(["the", "Käse", "'s"])) == ["the", "Käse", "'s"]
    assert vocabulary.encode(["The"]) == [vocabulary.unk_id]
    vocabulary.save(tmp_path / "vocabulary.txt")
    again = Vocabulary.load(tmp_path / "vocabulary.txt")
    assert again.words == vocabulary.words
    assert again.fingerprint() == vocabulary.fingerprint()


def test_the_longest_word_is_read_again(tmp_path):
    words = ["a", "w" * MAX_LINE]
    Vocabulary.build([words], 10).save(tmp_path / "words.txt")
    assert {*words} < {*Vocabulary.load(tmp_path / "words.txt").words}


def test_files_are_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError), atomic_file(path) as file:
        file.write(b"half of the n")
        raise RuntimeError("disk full")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]

    on_disk = {}  # contents that fsync has seen, by inode: what survives a power failure
    rename = os.replace

    def sync(handle):
        status = os.fstat(handle)
        content = [*tmp_path.iterdir()] if stat.S_ISDIR(status.st_mode) else status.st_size
        on_disk[status.st_ino] = content

    def replace(source, target):
        assert on_disk[os.stat(source).st_ino] == len(b"new")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    with atomic_file(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"
    assert on_disk[tmp_path.stat().st_ino] == [*tmp_path.iterdir()] == [path]


def test_links_and_pipes_stay_what_they_are(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for content in (b"made", b"replaced"):
        with atomic_file(tmp_path / "link") as file:
            file.write(content)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "file").read_bytes() == content
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with atomic_file(pipe) as file:
        file.write(b"through")
    assert os.read(reader, 99) == b"through" and pipe.is_fifo()
    os.close(reader)


def test_a_file_has_the_permissions_of_the_umask_or_of_the_replaced_file(tmp_path):
    path = tmp_path / "file"
    before = os.umask(0o027)
    try:
        for permissions in (0o640, 0o604):
            with atomic_file(path) as file:
                file.write(b"new")
            assert stat.S_IMODE(path.stat().st_mode) == permissions
            path.chmod(0o604)
    finally:
        os.umask(before)
    with pytest.raises(IsADirectoryError), atomic_file(tmp_path):
        pass
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"), atomic_file(tmp_path / "loop"):
        pass


def test_fingerprint_depends_on_words_and_order_only():
    words = ["a", "</s>", "<unk>"]
    expected = hashlib.sha256(b"a\n</s>\n<unk>").hexdigest()
    assert Vocabulary(words).fingerprint() == expected
    assert Vocabulary(words[::-1]).fingerprint() != expected


@pytest.mark.parametrize(
    "text, words",
    [
        ("</S>\n<S>\n<UNK>\nthe\n,", ("</s>", "<S>", "<unk>", "the", ",")),
        ("the 44\n<S> 30\n<UNK> 2\n", ("the", "</s>", "<unk>")),
        ("the\n</s>\n<unk>\n", ("the", "</s>", "<unk>")),
        ("\ufeffthe\r\n</s>\r\n<unk>\r\n\r\n", ("the", "</s>", "<unk>")),
    ],
)
def test_vocabulary_files_of_the_billion_word_benchmark(tmp_path, text, words):
    path = tmp_path / "vocab.txt"
    path.write_text(text, "utf-8")
    assert Vocabulary.load(path).words == words


@pytest.mark.parametrize(
    "content, message",
    [
        (b"a\n</s>\n", "<unk>"),
        (b"a\n<unk>\n", "</s>"),
        (b"</s>\n<unk>\n", "at least one word"),
        (b"</s>\n<unk>\na\na\n", "line 4 must"),
        (b"</s>\n<unk>\n\na\n", "line 3 must"),
        (b"</s>\n<unk>\nNew York\n", "line 3 must"),
        (b"</s>\n<unk>\n\xff\n", "line 3 must"),
    ],
)
def test_vocabulary_file_errors_name_the_line(tmp_path, content, message):
    path = tmp_path / "vocab.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        Vocabulary.load(path)
    assert str(path) in str(error.value)


def test_vocabulary_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.txt"):
        Vocabulary.load(tmp_path / "nowhere.txt")
    with pytest.raises(ValueError, match="max_size must .*got 2"):
        Vocabulary.build([["a"]], max_size=2)
    with pytest.raises(ValueError, match="at least one word, got 0 sentences"):
        Vocabulary.build([], max_size=10)
    with pytest.raises(ValueError, match="</s>"):
        Vocabulary.build([["a", "</s>"]], max_size=10)
    with pytest.raises(ValueError, match="min_count must .*got 0"):
        Vocabulary.build([["a"]], max_size=10, min_count=0)
    with pytest.raises(ValueError, match="min_count must be at most 2, .*word, got 3$"):
        Vocabulary.build([["a", "b", "a"]], max_size=10, min_count=3)
    with pytest.raises(ValueError, match="must .*'a'"):
        Vocabulary(["a", "a", "</s>", "<unk>"])
    with pytest.raises(ValueError, match="not contain white space, got 'a b'"):
        Vocabulary(["a b", "</s>", "<unk>"])
    with pytest.raises(IndexError, match="id must .*got -1"):
        Vocabulary(["a", "</s>", "<unk>"]).decode([-1])


# --- corpora ------------------------------------------------------------------------------------


def write_billion_word_layout(folder):
    train = folder / "training-monolingual.tokenized.shuffled"
    heldout = folder / "heldout-monolingual.tokenized.shuffled"
    train.mkdir(parents=True)
    heldout.mkdir()
    for shard in range(3):
        text = f"Shard {shard} begins .\nIt has two sentences .\n"
        (train / f"news.en-{shard:05d}-of-00100").write_text(text)
    (heldout / "news.en.heldout-00000-of-00050").write_text("A test .\n\nOf three words\n")
    (heldout / "news.en.heldout-00001-of-00050").write_text("A dev sentence .\n")


def test_billion_word_layout(tmp_path):
    write_billion_word_layout(tmp_path)
    with pytest.warns(UserWarning, match="2 of the 99 training shards"):
        corpus = load_corpus(tmp_path)
    train = list(corpus.train)
    assert [words[1] for words in train[::2]] == ["1", "2"]  # shard 0 is the held-out text
    assert list(corpus.dev) == [["A", "dev", "sentence", "."]]
    assert list(corpus.test) == [["A", "test", "."], ["Of", "three", "words"]]
    # The vocabulary files of the benchmark have entries for both ends; ours has only </s>.
    given = tmp_path / "vocabulary.txt"
    given.write_text("</S>\n<S>\n<UNK>\n.\nA\nwords\n")
    vocabulary = Vocabulary.load(given)
    encoded = encode_sentences(corpus.test, vocabulary)
    (batch,) = SentenceBatches(encoded, tokens_per_batch=100, shuffle=False).epoch(0)
    # "test", "Of" and "three" are not in the vocabulary: they are <unk> and predicted.
    targets = vocabulary.decode(batch.targets[batch.mask].tolist())
    assert targets == ["A", "<unk>", ".", "</s>", "<unk>", "<unk>", "words", "</s>"]
    assert vocabulary.decode(batch.inputs[:, 0].tolist()) == ["</s>", "</s>"]


def test_billion_word_layout_with_a_missing_file(tmp_path):
    write_billion_word_layout(tmp_path)
    missing = "heldout-monolingual.tokenized.shuffled/news.en.heldout-00001-of-00050"
    (tmp_path / missing).unlink()
    with pytest.warns(UserWarning), pytest.raises(CorpusError, match=missing):
        load_corpus(tmp_path)
    (tmp_path / "empty/training-monolingual.tokenized.shuffled").mkdir(parents=True)
    with pytest.raises(CorpusError, match="news.en-00001-of-00100"):
        load_corpus(tmp_path / "empty")


def test_no_name_is_not_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "requirements.txt").write_text("torch\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CorpusError, match="must .*got ''$"):
        load_corpus("")


def test_given_parts_as_a_folder_or_a_prefix(tmp_path):
    (tmp_path / "train.txt").write_text("one\n")
    with gzip.open(tmp_path / "valid.txt.gz", "wt", encoding="utf-8") as file:
        file.write("zwei é\n")
    with lzma.open(tmp_path / "test.txt.xz", "wt", encoding="utf-8") as file:
        file.write("three\n\n  \nfour   four\r\n")
    for part in ("train.txt", "valid.txt.gz", "test.txt.xz"):
        (tmp_path / f"prose.{part}").write_bytes((tmp_path / part).read_bytes())
    for place in (tmp_path, tmp_path / "prose", str(tmp_path / "prose")):
        corpus = load_corpus(place)
        assert list(corpus.train) == [["one"]]
        assert list(corpus.dev) == [["zwei", "é"]]
        assert list(corpus.test) == [["three"], ["four", "four"]]
        assert list(corpus.train) == [["one"]]  # a second iteration reads the file again
        assert list(corpus.all) == [["one"], ["zwei", "é"], ["three"], ["four", "four"]]

    (tmp_path / "test.txt.xz").unlink()
    with pytest.raises(CorpusError, match=r"test.txt is missing"):
        load_corpus(tmp_path)


def test_wikitext_is_a_line_a_sentence(tmp_path):
    text = " \n = Game = \n \n The 1 @-@ 0 <unk> , 2 @.@ 5 . It was . \n \n = = Plot = = \n"
    for part in ("train", "valid", "test"):
        (tmp_path / f"wiki.{part}.tokens").write_text(text.replace("Game", part))
    corpus = load_corpus(tmp_path)
    paragraph = ["The", "1", "@-@", "0", "<unk>", ",", "2", "@.@", "5", ".", "It", "was", "."]
    for part, words in (("train", corpus.train), ("valid", corpus.dev), ("test", corpus.test)):
        assert list(words) == [["=", part, "="], paragraph, ["=", "=", "Plot", "=", "="]]
    # "valid" and the <unk> of the text are the same entry.
    vocabulary = Vocabulary.build(corpus.train, max_size=100)
    assert (encode_sentences(corpus.dev, vocabulary).stream == vocabulary.unk_id).sum() == 2
    (tmp_path / "wiki.valid.tokens").unlink()
    with pytest.raises(CorpusError, match="wiki.valid.tokens is missing"):
        load_corpus(tmp_path)


def test_a_part_may_be_a_folder_of_shards(tmp_path):
    (tmp_path / "train").mkdir()
    with gzip.open(tmp_path / "train" / "news-2.txt.gz", "wt") as file:
        file.write("three\n")
    (tmp_path / "train" / "news-1.txt").write_text("one\ntwo\n")
    (tmp_path / "train" / "README").write_text("not text of the corpus\n")
    (tmp_path / "dev").mkdir()
    with pytest.raises(CorpusError, match="dev must"):
        load_corpus(tmp_path)
    (tmp_path / "dev" / "a.txt").write_text("dev\n")
    (tmp_path / "test.txt").write_text("test\n")
    corpus = load_corpus(tmp_path)
    assert list(corpus.train) == [["one"], ["two"], ["three"]]
    assert list(corpus.all) == [["one"], ["two"], ["three"], ["dev"], ["test"]]


NUMBERS = [f"sentence number {i} ." for i in range(2000)]


def joined(sentences):
    return list(map(" ".join, sentences))


def test_hash_split_is_disjoint_complete_and_in_order(tmp_path):
    path = tmp_path / "all.txt"
    path.write_text("\n".join(NUMBERS + NUMBERS[:500]))
    corpus = load_corpus(path)
    parts = [joined(part) for part in (corpus.train, corpus.dev, corpus.test)]
    assert sum(map(len, parts)) == 2500
    train, dev, test = map(set, parts)
    assert not train & dev and not train & test and not dev & test
    assert train | dev | test == set(NUMBERS)
    # 2,000 sentences with p = 0.02: 5 standard deviations are 31.
    assert abs(len(dev) - 40) < 31 and abs(len(test) - 40) < 31
    assert parts[0] == [s for s in NUMBERS + NUMBERS[:500] if s in train]
    assert joined(corpus.all) == NUMBERS + NUMBERS[:500]


def test_hash_split_stays_when_text_is_added(tmp_path):
    (tmp_path / "b.txt").write_text("\n".join(NUMBERS))
    before = joined(load_corpus(tmp_path).test)
    with gzip.open(tmp_path / "a.txt.gz", "wt") as file:
        file.write("\n".join(f"another {i}" for i in range(100)))
    after = joined(load_corpus(tmp_path).test)
    assert [s for s in after if s.startswith("sentence")] == before


def test_max_train_sentences_keeps_the_first(tmp_path):
    path = tmp_path / "all.txt"
    path.write_text("\n".join(NUMBERS))
    all_of_it, some = load_corpus(path), load_corpus(path, max_train_sentences=7)
    assert list(some.train) == list(islice(all_of_it.train, 7))
    assert list(some.test) == list(all_of_it.test)
    assert list(some.all) == list(all_of_it.all)


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("nowhere", {}, CorpusError, "there is no corpus at .*nowhere"),
        ("nothing", {}, CorpusError, "must hold text files"),
        ("empty.txt", {}, CorpusError, "train part of .*empty.txt must"),
        ("empty.txt", {"parts": ["all"]}, CorpusError, "empty.txt must"),
        (".", {}, CorpusError, "give .*prose to load"),
        ("prose", {}, CorpusError, "prose.dev.txt is missing"),
        ("empty.txt", {"max_train_sentences": 0}, ValueError, "train_sentences must .*got 0"),
        ("empty.txt", {"parts": "train"}, ValueError, "parts must .*got 'train'"),
    ],
)
def test_corpus_errors(tmp_path, name, options, error, message):
    (tmp_path / "nothing").mkdir()
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "prose.train.txt").write_text("a\n")
    with pytest.raises(error, match=message):
        load_corpus(tmp_path / name, **options)


def test_a_byte_order_mark_is_not_of_the_first_word(tmp_path):
    text = tmp_path / "marked.txt"
    text.write_text("\ufeffthe end\n\ufeffof\n", "utf-8")
    corpus = load_corpus(text, parts=["all"])
    assert list(corpus.all) == [["the", "end"], ["\ufeffof"]]


def test_hidden_files_are_no_text(tmp_path):
    (tmp_path / "a.txt").write_text("a b\n")
    (tmp_path / ".a.txt").write_text("a b\n")  # an editor's copy
    assert list(load_corpus(tmp_path, parts=["all"]).all) == [["a", "b"]]

    folder = tmp_path / ".pairs"  # a folder that the user names may be hidden
    copies = folder / ".ipynb_checkpoints"
    copies.mkdir(parents=True)
    for name in ("train", "dev", "test"):
        for language in ("de", "en"):
            for file in (folder / f"{name}.{language}", copies / f"{name}-checkpoint.{language}"):
                file.write_text(f"{name} {language}\n")
    corpus = load_parallel(folder, source="de", target="en")
    assert [len(list(part)) for part in (corpus.train, corpus.dev, corpus.test)] == [1, 1, 1]


def test_unreadable_text_is_named_with_its_line(tmp_path):
    latin = tmp_path / "latin.txt"
    latin.write_bytes("\n".join(NUMBERS).encode() + b"\nCaf\xe9\n")
    corpus = load_corpus(latin)
    with pytest.raises(CorpusError, match="latin.txt, line 2001 must .*got the byte 0xe9"):
        list(corpus.train)
    cut = tmp_path / "cut.txt.gz"
    cut.write_bytes(gzip.compress("\n".join(NUMBERS).encode())[:-2000])
    with pytest.raises(CorpusError, match="cut.txt.gz cannot be read after line"):
        list(load_corpus(cut).train)
    plain = tmp_path / "plain.txt.xz"
    plain.write_text("not compressed")
    with pytest.raises(CorpusError, match="plain.txt.xz cannot be read"):
        load_corpus(plain)


# --- the built-in corpus ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.mark.long
def test_builtin_corpus_is_large_distinct_and_cached(cache):
    made = builtin.builtin_sentences()
    assert [f.suffix for f in (cache / "moe_ext").iterdir()] == [".txt"]
    assert builtin.builtin_sentences() == made  # now from the cache
    corpus = load_corpus("builtin")
    parts = [joined(part) for part in (corpus.train, corpus.dev, corpus.test)]
    assert sorted([*parts[0], *parts[1], *parts[2]]) == sorted(made)
    assert len(set(made)) == len(made) > 30_000
    assert sum(sentence.count(" ") + 1 for sentence in parts[0]) > 400_000
    assert min(map(len, parts)) > 500
    # The text is prose: few of 10,000 words are unknown, and the most frequent are English words.
    vocabulary = Vocabulary.build(corpus.train, max_size=10_000)
    encoded = encode_sentences(corpus.test, vocabulary)
    assert (encoded.stream == vocabulary.unk_id).double().mean() < 0.08
    assert {"the", "of", "to", "a", "is"} < set(vocabulary.words[:12])


DOCSTRING = """
Compute the sum of it all. See :func:`~torch.add` for more on this, e.g. on ``alpha``.
It isn't exact -- use *double* for 3.14 or more.

Args:
    input (Tensor): The tensor to be added up here.
    dim (int, optional): The dimension, which it's
        best to give.

.. note::
    A note is prose as well, of course.

.. math::
    This is no sentence of the text at all.

Example::

    The code below an example is not prose.

    >>> print("This is not prose either, really.")
    Nor is the output of the example here.

======= ===========
Column  Another one
======= ===========

* The item of a list is one well-
  formed sentence, too.
"""


def test_cleaning_keeps_prose_and_drops_code():
    sentences = [
        " ".join(builtin._tokenise(sentence))
        for paragraph in builtin._paragraphs(DOCSTRING)
        for sentence in builtin._split(paragraph)
    ]
    assert [s for s in sentences if builtin._is_prose(s.split())] == [
        "Compute the sum of it all .",
        "See torch.add for more on this , e.g. on alpha .",
        "It is n't exact -- use double for 3.14 or more .",
        "The tensor to be added up here .",
        "The dimension , which it 's best to give .",
        "A note is prose as well , of course .",
        "The item of a list is one well-formed sentence , too .",
    ]


def test_builtin_corpus_needs_no_writable_cache(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    source = next(f for f in builtin.source_files() if f.name == "_torch_docs.py")
    monkeypatch.setattr(builtin, "source_files", lambda: [source])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    made = builtin.builtin_sentences()  # no exception
    assert len(made) > 100
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    assert builtin.builtin_sentences() == made
    (cached,) = (tmp_path / "new" / "moe_ext").iterdir()
    assert cached.read_text("utf-8").splitlines() == made


# --- ids ---------------------------------------------------------------------------------------


def test_encoded_sentences_give_the_ids_back():
    vocabulary = Vocabulary.build([["a", "b"], ["a"], []], max_size=10)
    encoded = encode_sentences([["b", "a", "x"], [], ["a"]], vocabulary)
    a, b, unk = vocabulary.encode(["a", "b", "<unk>"])
    assert len(encoded) == 3 and list(encoded) == [[b, a, unk], [], [a]]
    assert encoded[-1] == [a]
    assert encoded.num_tokens == 7
    assert encoded.stream.dtype == torch.int32
    with pytest.raises(ValueError, match="sentence 1 must"):
        EncodedSentences([[1], [1, 0]], 0)
    with pytest.raises(IndexError, match="index must .*got 3"):
        encoded[3]


def choices(folder):
    """Returns what must not differ between processes: cleaning, hash split, order of batches."""
    sources = [f for f in builtin.source_files() if f.name in ("topics.py", "_torch_docs.py")]
    assert len(sources) == 2
    made = [s for f in sources for s in builtin._sentences_of(f)]
    sentences = EncodedSentences([[2] * (3 * i % 40) for i in range(100)], 1)
    batches = SentenceBatches(sentences, tokens_per_batch=200, shuffle=True, seed=3)
    order = [batch.sentence_index.tolist() for batch in batches.epoch(1)]
    return repr((made, list(load_corpus(folder).test), order))


def test_another_process_with_other_hashes_chooses_the_same(tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(NUMBERS))
    code = f"import test_data; print(test_data.choices({str(tmp_path)!r}))"
    paths = [os.path.dirname(__file__), *sys.path]
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(paths)}
    child = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert child.stdout.strip() == choices(tmp_path)
