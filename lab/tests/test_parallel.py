"""Parallel text: layouts, directions, invalid lines and filters."""

import gzip
import lzma
import os
from collections import Counter

import pytest
from moe_lab.data import CorpusError, load_parallel
from moe_lab.data.parallel import describe

PAIRS = [(f"the {n} dogs", f"les {n} chiens") for n in ("one", "two", "three", "日本", "é")]


def write(path, lines):
    """Writes text or bytes as lines of a file, compressed as its suffix says."""
    data = b"".join((x if isinstance(x, bytes) else x.encode()) + b"\n" for x in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    compress = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
    path.write_bytes(compress(data))


def write_sides(folder, name, pairs, suffix=""):
    for language, side in zip(("en", "fr"), zip(*pairs, strict=True), strict=True):
        write(folder / f"{name}.{language}{suffix}", side)


def load(place, **options):
    return load_parallel(place, **({"source": "en", "target": "fr"} | options))


def kept_and_counts(text):
    counts = Counter()
    return list(text.read(counts)), dict(counts)


# --- where the parts are ------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", ".txt", ".gz", ".txt.gz", ".xz"])
def test_aligned_files_of_parts(tmp_path, suffix):
    for part, pairs in (("train", PAIRS), ("dev", PAIRS[:2]), ("test", PAIRS[2:3])):
        write_sides(tmp_path, part, pairs, suffix)
    corpus = load(tmp_path)
    for _ in range(2):  # a second iteration reads the files again
        assert list(corpus.train) == PAIRS
        assert list(corpus.dev) == PAIRS[:2]
        assert list(corpus.test) == PAIRS[2:3]
    back = load(tmp_path, source="fr", target="en")
    assert list(back.train) == [(f, e) for e, f in PAIRS]
    assert (back.train.source, back.train.target) == ("fr", "en")


def test_the_layout_of_wmt(tmp_path):
    names = [f"training/{name}.fr-en" for name in ("commoncrawl", "europarl-v7", "undoc.2000")]
    names += ["dev/news-test2008", *(f"dev/newstest{year}" for year in (2012, 2013, 2014))]
    for i, name in enumerate(names):
        write_sides(tmp_path, name, [(f"{i}", f"{i} fr")])
    write(tmp_path / "training/commoncrawl.de-en.en", ["other"])  # not a text of en and fr
    write(tmp_path / "training/commoncrawl.de-en.de", ["other"])
    write(tmp_path / "training/README", ["no text"])
    corpus = load(tmp_path)
    assert [e for e, _ in corpus.train] == ["0", "1", "2"]
    assert [e for e, _ in corpus.dev] == ["4", "5"]  # newstest2012 and 2013, as in the paper
    assert [e for e, _ in corpus.test] == ["6"]
    assert [e for e, _ in load(tmp_path, drop=["commoncrawl*"]).train] == ["1", "2"]


def test_the_sets_of_older_years_are_of_no_part(tmp_path):
    old = "dev2006 devtest2006 test2006 test2007 nc-dev2007 nc-devtest2007 nc-test2007"
    old = [*old.split(), "news-dev2009a", "newssyscomb2009", "newstest2009", "tst2010"]
    names = ["news-commentary-v9", "newstest2012", "newstest2013", "newstest2014"]
    for name in [*old, *names]:
        write_sides(tmp_path, f"{name}.fr-en", [(name, "fr")])
    corpus = load(tmp_path)
    assert [e for e, _ in corpus.train] == names[:1]
    assert [e for e, _ in corpus.dev] == names[1:3]  # as in the paper
    assert [e for e, _ in corpus.test] == names[3:]
    write_sides(tmp_path / "new", "test_2016_flickr", PAIRS)
    write_sides(tmp_path / "new", "test2017", PAIRS)
    assert len(list(load(tmp_path / "new", parts=["test"]).test)) == 2 * len(PAIRS)


def test_tables_of_several_languages_in_a_folder(tmp_path):
    for part, pairs in (("train", PAIRS), ("dev", PAIRS[:2]), ("test", PAIRS[2:3])):
        write(tmp_path / f"{part}.en-fr.tsv.xz", [f"manual\t{e}\t{f}" for e, f in pairs])
        write(tmp_path / f"{part}.en-de.tsv", [f"manual\t{e}\tde {f}" for e, f in pairs])
    assert list(load(tmp_path).train) == PAIRS
    assert list(load(tmp_path, target="de").dev) == [(e, f"de {f}") for e, f in PAIRS[:2]]
    back = load(tmp_path, source="fr", target="en")
    assert list(back.train) == [(f, e) for e, f in PAIRS]
    assert list(back.test) == [(f, e) for e, f in PAIRS[2:3]]
    with pytest.raises(CorpusError, match="train part of .* one pair of de and fr, got no file"):
        load(tmp_path, source="de")


def test_tables_of_two_columns_with_a_prefix(tmp_path):
    for name in ("train", "val", "test_2016_flickr", "test_2017_mscoco"):
        write(tmp_path / f"captions.{name}.en-fr.tsv", [f"{name}\tfr"])
    corpus = load(tmp_path)
    assert list(corpus.train) == [("train", "fr")] and list(corpus.dev) == [("val", "fr")]
    assert [e for e, _ in corpus.test] == ["test_2016_flickr", "test_2017_mscoco"]


def test_a_table_is_a_training_part(tmp_path):
    write(tmp_path / "x.fr-en.tsv", [f"{f}\t{e}" for e, f in PAIRS])
    assert list(load(tmp_path / "x.fr-en.tsv", parts=["train"]).train) == PAIRS
    with pytest.raises(CorpusError, match="dev part of .*x.fr-en.tsv must"):
        load(tmp_path / "x.fr-en.tsv")
    write(tmp_path / "four.tsv", ["7\tun chien\tweb\ta dog"])
    with pytest.raises(CorpusError, match="two or three columns .* got 4 in most of"):
        load(tmp_path / "four.tsv", parts=["train"])


def test_a_table_of_other_languages_is_refused(tmp_path):
    for name in ("test.en-de.tsv", "test.EN-FR.tsv", "x.deu-eng.txt"):
        write(tmp_path / name, ["a\tb"])
        with pytest.raises(CorpusError, match=f"{name} must .*got"):
            load(tmp_path / name, parts=["train"])
    for name in ("test.tsv", "pre.twenty-one.tsv", "test.en-de.en-fr.tsv"):
        write(tmp_path / name, ["a\tb"])
        assert list(load(tmp_path / name, parts=["train"]).train) == [("a", "b")]


def test_a_text_is_there_once(tmp_path):
    write_sides(tmp_path, "a/train", PAIRS)
    write_sides(tmp_path, "b/train", PAIRS)
    with pytest.raises(CorpusError, match=r"got .*a/train.en and .*b/train.en"):
        load(tmp_path)
    write(tmp_path / "a/train.en-fr.tsv", ["a\tb"])
    with pytest.raises(CorpusError, match="must .*got train"):
        load(tmp_path / "a")


# --- lines --------------------------------------------------------------------------------------

ODD = [
    b"m\ta dog\tun chien",
    b"m\ta dog",
    b"m\ta\tb\tc",
    b"",
    b"m\t\tun chien",
    b"m\ta dog\t \xc2\xa0 ",
    b"m\tcaf\xe9\tcaf\xc3\xa9",
    b"m\t a  line\xe2\x80\xa8separator\x0c \tet \x85 alors\r".replace(b"\x85", b"\xc2\x85"),
    b"ptpt\ttwo\tdeux",
    b"m\tone two three four\tun",
    b"m\t1 2 3 4 5 6\t1 2 3 4 5 6",
    b"m\tlast\tdernier",
]


@pytest.mark.parametrize("suffix", ["tsv", "tsv.gz", "tsv.xz"])
def test_bad_lines_are_counted_by_kind(tmp_path, suffix):
    path = tmp_path / f"train.en-fr.{suffix}"
    write(path, ODD)
    odd = ("a  line\u2028separator", "et \x85 alors")
    kept, counts = kept_and_counts(load(path, parts=["train"]).train)
    assert kept[:2] == [("a dog", "un chien"), odd] and len(kept) == 6
    bad = {"wrong number of columns": 3, "empty side": 2, "not UTF-8": 1}
    assert counts == {"kept": 6} | bad
    text = load(path, parts=["train"], drop=["*pt"]).train
    kept, counts = kept_and_counts(text)
    assert kept[:2] == [("a dog", "un chien"), odd] and kept[-1] == ("last", "dernier")
    assert counts == {"kept": 5, "dropped source": 1} | bad
    assert sum(counts.values()) == len(ODD)
    assert describe(Counter(counts)).startswith(
        "5 of 12 lines kept, 7 skipped (3 wrong number of columns, 2 empty side, 1 "
    )
    assert describe(Counter(kept=1234)) == "1,234 of 1,234 lines kept"
    again = Counter()
    assert list(text.read(again)) == kept and again == counts  # iterations are independent


@pytest.mark.parametrize("bad", ["", "# made by hand", "name\ta\tb\tc"])
def test_a_bad_first_line_does_not_decide_the_columns(tmp_path, bad):
    write(tmp_path / "train.en-fr.tsv", [bad, *(f"{e}\t{f}" for e, f in PAIRS)])
    kept, counts = kept_and_counts(load(tmp_path, parts=["train"]).train)
    assert kept == PAIRS and counts == {"kept": len(PAIRS), "wrong number of columns": 1}


def test_bad_lines_of_aligned_files_keep_the_alignment(tmp_path):
    write(tmp_path / "train.en", [b"\xef\xbb\xbfone", "", b"\xff", "four", "five"])
    write(tmp_path / "train.fr", ["un", "deux", "trois", b"\xff", "cinq\r"])
    kept, counts = kept_and_counts(load(tmp_path, parts=["train"]).train)
    assert kept == [("one", "un"), ("five", "cinq")]
    assert counts == {"kept": 2, "empty side": 1, "not UTF-8": 2}
    (tmp_path / "train.fr").write_bytes(b"un\ndeux\ntrois\nquatre\ncinq")  # no line end at the end
    assert len(list(load(tmp_path, parts=["train"]).train)) == 3


@pytest.mark.parametrize("lengths", [(5, 3), (3, 5), (4, 0)])
def test_files_that_are_not_aligned_are_an_error(tmp_path, lengths):
    for language, length in zip(("en", "fr"), lengths, strict=True):
        write(tmp_path / f"train.{language}", ["x"] * length)
    text = load(tmp_path, parts=[]).train
    pairs = iter(text)
    for _ in range(min(lengths)):
        assert next(pairs) == ("x", "x")
    message = rf"train.en and .*train.fr must .*got {lengths[0]} and {lengths[1]}"
    with pytest.raises(CorpusError, match=message):
        next(pairs)


def test_filters_and_limits_are_of_the_training_part(tmp_path):
    pairs = [("a b c d", "a"), ("a", "a"), ("b", "b"), ("c", "c")]
    for part in ("train", "dev", "test"):
        write_sides(tmp_path, part, pairs)
    corpus = load(tmp_path, max_train_pairs=2)
    assert list(corpus.train) == pairs[:2]
    assert list(corpus.dev) == list(corpus.test) == pairs
    assert list(load(tmp_path, drop=["train*"], parts=["dev"]).train) == []
    with pytest.raises(CorpusError, match=r"got none in .*: 0 of 4 lines kept, 4 skipped \(4 drop"):
        load(tmp_path, drop=["train"])


def test_all_parts_together(tmp_path):
    pairs = {part: [(part, number) for number in "abc"] for part in ("train", "dev", "test")}
    for part in pairs:
        write_sides(tmp_path, part, pairs[part])
    options = {"drop": ["train"], "parts": ["all"]}
    assert list(load(tmp_path, **options).all) == [*pairs["train"], *pairs["dev"], *pairs["test"]]
    assert list(load(tmp_path, source="fr", target="en", **options).all)[-1] == ("c", "test")
    with pytest.raises(CorpusError, match=f"^{tmp_path} must .*en and de"):
        load(tmp_path, target="de", **options)


def test_fingerprint_is_of_the_text_and_the_filters(tmp_path):
    write_sides(tmp_path, "train", PAIRS)
    write(tmp_path / "x.en-fr.tsv", ["m\ta\tb"])

    def fingerprint(place=tmp_path, **options):
        return load(place, parts=["train"], **options).train.fingerprint()

    first = fingerprint()
    assert first == fingerprint()
    changes = {"drop": ["x"]}, {"max_train_pairs": 2}, {"source": "fr", "target": "en"}
    seen = {first, fingerprint(tmp_path / "x.en-fr.tsv"), *(fingerprint(**c) for c in changes)}
    status = (tmp_path / "train.en").stat()
    os.utime(tmp_path / "train.en", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert len(seen | {fingerprint()}) == 6


def test_errors(tmp_path):
    with pytest.raises(
        CorpusError, match="there is no parallel corpus at .*nowhere: .* train.en and train.fr or"
    ):
        load(tmp_path / "nowhere")
    names = r"X.en-fr.tsv, or X.en and X.fr, where X matches "
    with pytest.raises(CorpusError, match=rf"train part of .* got no file; .* {names}train\*$"):
        load(tmp_path)
    with pytest.raises(
        CorpusError, match=rf"dev part of .* {names}dev\* or val\* or newstest2012\*"
    ):
        load(tmp_path, parts=["dev"])
    for parts in ("train", ["valid"]):
        with pytest.raises(ValueError, match="load_parallel: parts must be a sequence of names"):
            load_parallel(tmp_path, source="en", target="fr", parts=parts)
    with pytest.raises(ValueError, match="load_parallel: target must"):
        load(tmp_path, target="en")
    with pytest.raises(ValueError, match="load_parallel: max_train_pairs must .*got 0"):
        load(tmp_path, max_train_pairs=0)
    write(tmp_path / "train.en-fr.tsv.gz", [f"{n}\t{n}" for n in range(5000)])
    data = (tmp_path / "train.en-fr.tsv.gz").read_bytes()
    (tmp_path / "train.en-fr.tsv.gz").write_bytes(data[:-2000])
    text = load(tmp_path, parts=["train"]).train
    with pytest.raises(CorpusError, match=r"train.en-fr.tsv.gz cannot be read after line \d+"):
        list(text)
