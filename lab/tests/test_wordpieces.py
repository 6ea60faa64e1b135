"""Wordpieces: encoding and decoding, unknown characters, training and files."""

import os
import pickle
import re
import unicodedata

import pytest
from moe_lab.data import Wordpieces
from moe_lab.data.wordpieces import uniform_sample
from tiny import cases

TEXT = [
    "The quick brown fox jumps over the lazy dog .",
    "Le renard brun rapide saute par-dessus le chien paresseux .",
    "Der schnelle braune Fuchs springt über den faulen Hund !",
    "Où est l'été ? Ça va, naïve cœur « français » : 100 %",
    "日本語の文章です。素早い茶色の狐",
    "빠른 갈색 여우가 게으른 개를",
    "quicker quickest jumping jumped foxes dogs the the the",
    "0123456789 <>/()[]{}&;_-+=*#@\"'",
    "🙂 ok, A B C D E F G H I J K L M N O P Q R S T U V W X Y Z",
    "the foxes and the dogs jump and jump over the lazy quick ones, the quickest foxes",
    "le chien et le renard, le renard et le chien, par-dessus le chien paresseux et rapide",
    "der Hund und der Fuchs, der schnelle Fuchs und der faule Hund, braun und schnell",
    "the brown dogs of the foxes, the lazy foxes of the brown dogs, jumping and jumping",
] * 3


def train(**options):
    options = {"target_tokens": ["fr", "de", "ja"], "character_coverage": 1.0} | options
    return Wordpieces.train(TEXT, options.pop("vocab_size", 170), **options)


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def wordpieces(request):
    return train(kind=request.param)


def test_special_entries(wordpieces):
    assert len(wordpieces) == 170
    specials = [wordpieces.unk_id, wordpieces.eos_id]
    specials += [wordpieces.target_token_id(language) for language in ("fr", "de", "ja")]
    assert sorted(specials) == [0, 1, 2, 3, 4]
    assert wordpieces.pieces(specials) == ["<unk>", "</s>", "<2fr>", "<2de>", "<2ja>"]
    assert wordpieces.target_tokens == ["fr", "de", "ja"]


@pytest.mark.parametrize(
    "text",
    [
        *TEXT[:13],
        "",
        "a",
        "the foxes' dogs: unseen words of seen letters",
        "日本 the quick 여우 🙂🙂",
        "naïve cœur",
        " leading, trailing  and   double ",
        "tabs\tand\nlines\r\nand\u00a0no-break\u3000ideographic spaces",
        unicodedata.normalize("NFD", "Où est l'été ? über 개를"),
        "▁the▁ lower block",
        "<2fr> the </s> dog <unk>",
    ],
)
def test_decoding_gives_the_text_back(wordpieces, text):
    ids = wordpieces.encode(text)
    assert wordpieces.unk_id not in ids
    assert wordpieces.decode(ids) == Wordpieces.normalise(text)
    # Text that spells special entries does not become special entries.
    assert not {wordpieces.eos_id, *map(wordpieces.target_token_id, ["fr", "de"])} & {*ids}


def test_what_is_normalised():
    normalise = Wordpieces.normalise
    assert normalise("as it is: ﬁ Ａ １ ① ç") == "as it is: ﬁ Ａ １ ① ç"
    assert normalise("e\u0301t\u0065\u0301") == "ét\u00e9"
    assert normalise("\u1112\u1161\u11ab") == "한"
    assert normalise("\t a\u00a0b\u3000c \n") == "a b c"
    # A combining mark without a composed form stays.
    assert normalise("q\u0301") == "q\u0301"


@pytest.mark.parametrize("text, shown", [("Ж", "⁇"), ("the Жук fox", "the ⁇ fox"), ("\0", "⁇")])
def test_unseen_characters_are_unknown(wordpieces, text, shown):
    ids = wordpieces.encode(text)
    assert ids.count(wordpieces.unk_id) == 1  # one for adjacent unknown characters
    assert wordpieces.decode(ids) == shown


def test_the_languages_that_can_be_asked_for(wordpieces):
    ids = [wordpieces.target_token_id("fr"), *wordpieces.encode("the fox"), wordpieces.eos_id]
    assert wordpieces.decode(ids) == "the fox"
    with pytest.raises(ValueError, match="language must .*got 'ko'"):
        wordpieces.target_token_id("ko")
    for language in ("fr>", "", "the"):
        with pytest.raises(ValueError, match="language must"):
            wordpieces.target_token_id(language)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_training_is_deterministic(kind):
    first, again = train(kind=kind), train(kind=kind)
    assert first.fingerprint() == again.fingerprint()
    assert train(kind=kind, vocab_size=165).fingerprint() != first.fingerprint()
    reversed_text = Wordpieces.train(TEXT[::-1], 160, kind=kind)
    assert reversed_text.target_tokens == []


def test_a_sample_of_a_long_text_is_of_all_its_parts():
    numbers = list(map(str, range(10_000)))
    sample = list(uniform_sample(numbers, 500))
    assert sample == list(uniform_sample(iter(numbers), 500))
    assert len({*sample}) == 500 and {*sample} <= {*numbers}
    # 500 samples without replacement: mean 4,999.5, standard deviation 126; the bound is 5 of them.
    assert abs(sum(map(int, sample)) / 500 - 4999.5) < 630
    assert list(uniform_sample(["a", "b"], 500)) == ["a", "b"]
    first, again = (Wordpieces.train(TEXT * 20, 140, max_sentences=30) for _ in range(2))
    assert first.fingerprint() == again.fingerprint()


def test_files(wordpieces, tmp_path, monkeypatch):
    path = tmp_path / "wordpieces.model"
    wordpieces.save(path)
    for loaded in (Wordpieces.load(path), pickle.loads(pickle.dumps(wordpieces))):
        assert loaded.fingerprint() == wordpieces.fingerprint()
        assert len(loaded) == len(wordpieces)
        assert loaded.encode(TEXT[0]) == wordpieces.encode(TEXT[0])
        assert loaded.decode(loaded.encode("a Ж")) == "a ⁇"

    def full(handle):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        train(vocab_size=165).save(path)
    assert Wordpieces.load(path).fingerprint() == wordpieces.fingerprint()
    assert list(tmp_path.iterdir()) == [path]


def test_errors(wordpieces, tmp_path):
    with pytest.raises(FileNotFoundError, match="Wordpieces.load: path must .*got .*none.model"):
        Wordpieces.load(tmp_path / "none.model")
    (tmp_path / "rubbish.model").write_bytes(b"rubbish")
    with pytest.raises(ValueError, match="rubbish.model: .* must .*got 7 b"):
        Wordpieces.load(tmp_path / "rubbish.model")
    for index in (-1, 170):
        with pytest.raises(IndexError, match=rf"decode: id must .*got {index}"):
            wordpieces.decode([0, index])
        with pytest.raises(IndexError, match=rf"pieces: id must .*got {index}"):
            wordpieces.pieces([index])
    wrong = {"kind": ["word"], "vocab_size": [0, 9, 9000], "character_coverage": [0.97]}
    wrong |= {"max_sentences": [0], "target_tokens": [["fr", "fr"]]}
    for option, value in cases(wrong):
        with pytest.raises(ValueError, match=f"Wordpieces.train: {option} must .*got"):
            train(**{option: value})
    with pytest.raises(ValueError, match="must suit the text"):
        Wordpieces.train(["", " "], 10)


def test_the_limits_that_errors_name_hold():
    for size in (9, 9000):
        with pytest.raises(ValueError, match="vocab_size must") as error:
            train(vocab_size=size)
        limit = int(re.search(r"(\d+) for this text", str(error.value))[1])
        assert len(train(vocab_size=limit)) == limit


def test_errors_of_the_text_are_its_own():
    def text():
        yield "a dog"
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="^the disk is gone$"):
        Wordpieces.train(text(), 10)
    with pytest.raises(ValueError, match="vocab_size must"):
        Wordpieces.train([], 10)
