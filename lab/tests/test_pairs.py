"""Sentence pairs as ids."""

import pickle

import pytest
import torch
from moe_lab.data import EncodedPairs, PairBatches, Wordpieces, encode_pairs, load_parallel, pairs
from tiny import equal

WORDS = [f"{a}{b}" for a in ("chien", "dog", "hund", "개") for b in "abcdef"]


@pytest.fixture(scope="module")
def wordpieces():
    return Wordpieces.train(WORDS * 5, 60, target_tokens=["fr", "ko"], character_coverage=1.0)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Tables of English with French (40 lines, 3 of them invalid) and Korean (25 lines)."""
    monkeypatch.setattr(pairs, "PAIRS_AT_A_TIME", 7)
    for language, count in (("fr", 40), ("ko", 25)):
        lines = [
            f"{' '.join(WORDS[: i % 5 + 1])}\t{' '.join(WORDS[-(i % 4 + 1) :])} {language}"
            for i in range(count)
        ]
        if language == "fr":
            lines[3], lines[9], lines[20] = "no columns", "\tempty", f"doga\t{'hunda ' * 50}"
        for part in ("train", "dev", "test"):
            (tmp_path / f"{part}.en-{language}.tsv").write_text("\n".join(lines))
    return tmp_path


def train_texts(folder, **options):
    return [
        load_parallel(folder, source="en", target=language, **options).train
        for language in ("fr", "ko")
    ]


def assert_same_pairs(one, second):
    for side in ("source", "target"):
        assert torch.equal(getattr(one, side).stream, getattr(second, side).stream)
        assert torch.equal(getattr(one, side).starts, getattr(second, side).starts)
    assert torch.equal(one.pair, second.pair) and one.pair.dtype == torch.int64
    assert (one.names, one.counts, one.eos_id) == (second.names, second.counts, second.eos_id)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("target_tokens", [False, True])
def test_ids_are_those_of_the_text(folder, wordpieces, num_workers, target_tokens):
    texts = train_texts(folder)
    encoded = encode_pairs(texts, wordpieces, target_tokens=target_tokens, num_workers=num_workers)
    expected = [
        (before + wordpieces.encode(source), wordpieces.encode(target))
        for text in texts
        for before in [[wordpieces.target_token_id(text.target)] if target_tokens else []]
        for source, target in text
    ]
    assert [encoded[i] for i in range(len(encoded))] == expected
    assert encoded.eos_id == wordpieces.eos_id and encoded.names == ("en-fr", "en-ko")
    assert encoded.pair.tolist() == [0] * 38 + [1] * 25
    assert encoded.num_tokens == sum(len(target) + 1 for _, target in expected)
    assert encoded.source.num_tokens == sum(len(source) + 1 for source, _ in expected)
    assert encoded.report().splitlines() == [
        "en-fr: 38 of 40 lines kept, 2 skipped (1 wrong number of columns, 1 empty side)",
        "en-ko: 25 of 25 lines kept",
    ]
    some = encoded.first(30)  # 30 of each language pair
    assert some.pair.tolist() == [0] * 30 + [1] * 25 and some.report() == ""
    assert [*some] == expected[:30] + expected[38:]


def test_the_ratio_of_the_pieces_is_limited(folder, wordpieces):
    (text, _) = train_texts(folder)
    narrow = encode_pairs(text, wordpieces, max_ratio=2)
    assert 0 < len(narrow) < 38 and narrow.counts[0]["length ratio"] == 38 - len(narrow)
    assert narrow.report().startswith(f"en-fr: {len(narrow)} of 40 lines kept, ")
    assert f"{38 - len(narrow)} length ratio" in narrow.report()
    for source, target in (narrow[i] for i in range(len(narrow))):
        assert max(len(source), len(target)) <= 2 * min(len(source), len(target))
    # The target token does not count.
    same = encode_pairs(text, wordpieces, max_ratio=2, target_tokens=True)
    assert [pair[1] for pair in same] == [pair[1] for pair in narrow]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_mapped_pairs_are_those_in_memory(folder, wordpieces, tmp_path, num_workers):
    texts, options = train_texts(folder), {"target_tokens": True, "max_ratio": 2.0}
    expected = encode_pairs(texts, wordpieces, **options)
    options |= {"folder": tmp_path / "ids", "name": "train", "num_workers": num_workers}
    made = encode_pairs(texts, wordpieces, **options)
    assert_same_pairs(made, expected)
    (place,) = (tmp_path / "ids").glob("train-*")
    assert_same_pairs(EncodedPairs.open(place), expected)
    assert_same_pairs(pickle.loads(pickle.dumps(made)), expected)
    assert len(pickle.dumps(made.source)) < 1000  # pickled by path
    epochs = (PairBatches(text, tokens_per_batch=200, shuffle=True) for text in (made, expected))
    assert equal(*(list(batches.epoch(0)) for batches in epochs))


def test_pairs_are_encoded_once_for_each_text_and_choice(folder, wordpieces, tmp_path, monkeypatch):
    ids = tmp_path / "ids"

    def encode(texts=None, vocabulary=wordpieces, **options):
        encode_pairs(texts or train_texts(folder), vocabulary, folder=ids, **options)
        return len(list(ids.glob("pairs-*")))

    assert encode() == 1
    (made,) = ids.glob("pairs-*")
    before = made.stat().st_ino
    assert encode() == 1 and made.stat().st_ino == before
    assert encode(max_ratio=2.0) == 2
    assert encode(target_tokens=True) == 3
    assert encode(train_texts(folder)[:1]) == 4
    assert encode(train_texts(folder, drop=["x"])) == 5
    assert encode(vocabulary=Wordpieces.train(WORDS * 5, 50)) == 6
    with (folder / "train.en-ko.tsv").open("a") as more:
        more.write("\ndoga\t개a")
    assert encode() == 7


def test_encoding_errors(folder, wordpieces):
    texts = train_texts(folder)
    with pytest.raises(ValueError, match="texts must .*got .*en-fr"):
        encode_pairs([texts[0], texts[0]], wordpieces)
    with pytest.raises(ValueError, match="texts must"):
        encode_pairs([], wordpieces)
    with pytest.raises(ValueError, match="encode_pairs: max_ratio must .*got 0"):
        encode_pairs(texts, wordpieces, max_ratio=0)
    back = load_parallel(folder, source="fr", target="en").train
    with pytest.raises(ValueError, match="language must .*got 'en'"):
        encode_pairs([*texts, back], wordpieces, target_tokens=True)
