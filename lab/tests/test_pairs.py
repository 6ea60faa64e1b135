"""Sentence pairs as ids, and their batches."""

import itertools
import pickle
from collections import Counter

import pytest
import torch
from moe_lab.data import (
    CorpusError,
    EncodedPairs,
    EncodedSentences,
    PairBatches,
    Wordpieces,
    encode_pairs,
    load_parallel,
    pairs,
)

EOS = 1
FIELDS = ("source", "source_mask", "inputs", "targets", "mask", "sentence_index")


def numbered_pairs(count=500, seed=0, sizes=None):
    """Makes pairs of 0 to 39 ids on each side, of similar length, in language pairs of `sizes`."""
    generator = torch.Generator().manual_seed(seed)
    source = (torch.rand(count, generator=generator) ** 2 * 30).int()
    target = (source * (0.7 + 0.6 * torch.rand(count, generator=generator))).int()
    source, target = (
        EncodedSentences(
            (torch.randint(2, 1000, (n,), generator=generator).tolist() for n in lengths), EOS
        )
        for lengths in (source.tolist(), target.tolist())
    )
    if sizes is None:
        return EncodedPairs(source, target)
    pair = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return EncodedPairs(source, target, pair, [f"en-{i}" for i in range(len(sizes))])


def make(encoded, tokens_per_batch=200, shuffle=True, seed=3, **options):
    return PairBatches(
        encoded, tokens_per_batch=tokens_per_batch, shuffle=shuffle, seed=seed, **options
    )


def rows(batches):
    """Yields (sentence_index, source, inputs, targets) of every row, without padding."""
    for batch in batches:
        for i in range(len(batch.source)):
            source = batch.source[i][batch.source_mask[i]].tolist()
            inputs, targets = (x[i][batch.mask[i]].tolist() for x in (batch.inputs, batch.targets))
            yield int(batch.sentence_index[i]), source, inputs, targets


def equal(one, other):
    return len(one) == len(other) and all(
        torch.equal(getattr(a, name), getattr(b, name))
        for a, b in zip(one, other, strict=True)
        for name in FIELDS
    )


# --- batches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("tokens_per_batch", [1, 37, 400, 10**9])
def test_every_pair_is_there_exactly_once(shuffle, tokens_per_batch):
    encoded = numbered_pairs()
    batches = make(encoded, tokens_per_batch, shuffle)
    found = list(batches.epoch(1))
    assert sorted(rows(found)) == [
        (i, [*source, EOS], [EOS, *target], [*target, EOS])
        for i, (source, target) in enumerate(encoded[i] for i in range(len(encoded)))
    ]
    assert len(found) == batches.num_batches and batches.num_pairs == len(encoded)
    assert sum(b.num_tokens for b in found) == batches.num_tokens == encoded.num_tokens
    source_tokens = sum(b.num_source_tokens for b in found)
    assert source_tokens == batches.num_source_tokens == encoded.num_source_tokens


def test_tokens_are_counted_with_one_end_a_sentence():
    encoded = EncodedPairs(EncodedSentences([[5, 6, 7]], EOS), EncodedSentences([[8, 9]], EOS))
    assert (encoded.num_source_tokens, encoded.num_tokens) == (4, 3)
    (batch,) = make(encoded).epoch(0)
    assert (batch.num_source_tokens, batch.num_tokens) == (4, 3)
    assert batch.source.tolist() == [[5, 6, 7, EOS]]
    assert batch.inputs.tolist() == [[EOS, 8, 9]] and batch.targets.tolist() == [[8, 9, EOS]]


def test_shapes_types_and_padding():
    for batch in make(numbered_pairs()).epoch(0):
        assert batch.source.shape == batch.source_mask.shape
        assert batch.inputs.shape == batch.targets.shape == batch.mask.shape
        for ids, mask in (
            (batch.source, batch.source_mask),
            (batch.inputs, batch.mask),
            (batch.targets, batch.mask),
        ):
            assert ids.dtype == torch.int64 and mask.dtype == torch.bool
            assert bool(mask[:, 0].all()) and bool(mask.any(0).all())  # no empty row or column
            assert not bool((mask.int().diff(dim=1) > 0).any())  # padding only at the end
            assert bool((ids[~mask] == EOS).all())
        assert batch.sentence_index.dtype == torch.int64


@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_hold_about_the_tokens_asked_for_and_little_padding(shuffle):
    batches = make(numbered_pairs(6_000), tokens_per_batch=500, shuffle=shuffle)
    for epoch in (0, 1):
        sizes, positions = [], 0
        for batch in batches.epoch(epoch):
            sizes.append(batch.num_tokens + batch.num_source_tokens)
            positions += batch.mask.numel() + batch.source_mask.numel()
        # Batches have equal shares of the tokens in every epoch.
        share = sum(sizes) / len(sizes)
        assert abs(share - 500) < 500 / len(sizes)
        assert max(abs(size - share) for size in sizes) < 100
        assert 1 - sum(sizes) / positions < 0.08  # more than half without sorting


def test_padding_is_less_than_with_one_side_sorted():
    encoded = numbered_pairs(6_000)
    batches = make(encoded, tokens_per_batch=1000)
    found = sum(b.mask.numel() + b.source_mask.numel() for b in batches.epoch(0))
    order = encoded.target.starts.diff().sort(stable=True).indices
    lengths = [side.starts.diff()[order] for side in (encoded.source, encoded.target)]
    per_batch = len(encoded) // batches.num_batches
    positions = sum(
        int(block.max()) * len(block) for side in lengths for block in side.split(per_batch)
    )
    tokens = encoded.num_tokens + encoded.num_source_tokens
    assert 1 - tokens / found < 0.7 * (1 - tokens / positions)


def test_a_resumed_epoch_equals_the_uninterrupted_one():
    encoded = numbered_pairs(sizes=[300, 150, 50])
    for options in ({}, {"oversample": True}, {"shuffle": False}, {"max_length": 20}):
        whole = list(make(encoded, **options).epoch(2))
        assert len(whole) > 20
        for start in (0, 1, len(whole) - 1, len(whole)):
            assert equal(list(make(encoded, **options).epoch(2, start)), whole[start:])


def test_order_depends_on_seed_and_epoch_only():
    encoded = numbered_pairs()
    torch.manual_seed(1)
    first = list(make(encoded).epoch(0))
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert equal(list(make(encoded).epoch(0)), first)
    torch.set_rng_state(state)
    list(make(encoded).epoch(5))
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is not used
    for other in (make(encoded).epoch(1), make(encoded, seed=4).epoch(0)):
        assert not equal(list(other), first)
    in_order = make(encoded, shuffle=False)
    assert equal(list(in_order.epoch(0)), list(in_order.epoch(1)))
    targets = [batch.mask.shape[1] for batch in in_order.epoch(0)]
    assert targets[0] < targets[len(targets) // 2] < targets[-1]


def test_batches_made_by_workers_are_the_same():
    batches = make(numbered_pairs(100))
    assert equal(list(batches.epoch(1, 2, num_workers=2)), list(batches.epoch(1, 2)))


@pytest.mark.parametrize("number", [1, 3, 40])
def test_parts_of_a_batch_for_several_processes(number):
    batch = next(make(numbered_pairs(sizes=[500]), tokens_per_batch=600).epoch(0))
    parts = [batch.part(index, number) for index in range(number)]
    for name in FIELDS:
        together = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(together, getattr(batch, name))
    assert sum(part.num_tokens for part in parts) == batch.num_tokens
    sizes = [len(part.source) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    moved = parts[0].to("meta")
    assert {getattr(moved, name).device.type for name in FIELDS} == {"meta"}


def test_oversampling_raises_every_language_pair_to_the_largest():
    sizes = [300, 140, 60, 0]
    encoded = numbered_pairs(sizes=sizes)
    as_it_is, batches = make(encoded), make(encoded, oversample=True)
    assert as_it_is.num_pairs == 500 and batches.num_pairs == 900
    missing = []
    for epoch in (0, 1):
        found = list(batches.epoch(epoch))
        assert len(found) == batches.num_batches > as_it_is.num_batches
        index = torch.cat([batch.sentence_index for batch in found])
        assert encoded.pair[index].bincount().tolist() == [300, 300, 300]
        times = index.bincount(minlength=500)
        # 300 = 2 · 140 + 20 = 5 · 60: all pairs equally often, and 20 random pairs once more.
        assert Counter(times[:300].tolist()) == {1: 300}
        assert Counter(times[300:440].tolist()) == {2: 120, 3: 20}
        assert Counter(times[440:].tolist()) == {5: 60}
        missing.append(times)
        if epoch == 0:
            assert sum(batch.num_tokens for batch in found) == batches.num_tokens
            assert sum(batch.num_source_tokens for batch in found) == batches.num_source_tokens
    assert not torch.equal(*missing)  # another random choice in each epoch
    # Batches mix the language pairs.
    for batch in make(encoded, tokens_per_batch=2000, oversample=True).epoch(0):
        assert len(encoded.pair[batch.sentence_index].unique()) == 3
    in_order = make(encoded, oversample=True, shuffle=False)
    assert in_order.num_pairs == sum(len(b.source) for b in in_order.epoch(0)) == 900


def test_longer_pairs_are_left_out():
    sides = [[[5] * n for n in lengths] for lengths in ((1, 4, 2, 3), (4, 1, 2, 3))]
    encoded = EncodedPairs(*(EncodedSentences(side, EOS) for side in sides))
    batches = make(encoded, max_length=4)
    assert sorted(i for i, *_ in rows(batches.epoch(0))) == [2, 3]
    assert batches.num_left_out == 2 and batches.num_pairs == 2
    assert (batches.num_tokens, batches.num_source_tokens) == (7, 7)
    assert make(encoded, max_length=5).num_left_out == 0
    with pytest.raises(ValueError, match="of at most 2 tokens per side, got 0"):
        make(encoded, max_length=2)


def test_errors_of_pairs_and_batches():
    one, two = EncodedSentences([[5]], EOS), EncodedSentences([[5], [6]], EOS)
    with pytest.raises(ValueError, match="EncodedPairs: target must .*got 2"):
        EncodedPairs(one, two)
    with pytest.raises(ValueError, match="target must .*got 0"):
        EncodedPairs(one, EncodedSentences([[5]], 0))
    with pytest.raises(ValueError, match="pair must .*got 1"):
        EncodedPairs(two, two, torch.tensor([0]))
    for pair in ([0, 1], [-1, 0]):
        with pytest.raises(ValueError, match="pair must"):
            EncodedPairs(two, two, torch.tensor(pair))
    encoded = EncodedPairs(two, two)
    for option in ("tokens_per_batch", "max_length"):
        with pytest.raises(ValueError, match=f"PairBatches: {option} must .*got 0"):
            make(encoded, **{option: 0})
    with pytest.raises(ValueError, match="PairBatches: pairs must .*got 0"):
        make(encoded.first(0))
    with pytest.raises(ValueError, match="PairBatches.epoch: start must .*got 2"):
        make(encoded).epoch(0, start=2)


# --- from text to ids ---------------------------------------------------------------------------

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


def assert_same_pairs(one, other):
    for side in ("source", "target"):
        assert torch.equal(getattr(one, side).stream, getattr(other, side).stream)
        assert torch.equal(getattr(one, side).starts, getattr(other, side).starts)
    assert torch.equal(one.pair, other.pair) and one.pair.dtype == torch.int64
    assert (one.names, one.counts, one.eos_id) == (other.names, other.counts, other.eos_id)


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
    assert encoded.num_source_tokens == sum(len(source) + 1 for source, _ in expected)
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
    reasons = f"1 wrong number of columns, 1 empty side, {38 - len(narrow)} length ratio"
    line = f"en-fr: {len(narrow)} of 40 lines kept, {40 - len(narrow)} skipped"
    assert sorted(narrow.report().removeprefix(f"{line} (")[:-1].split(", ")) == sorted(
        reasons.split(", ")
    )
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
    assert equal(list(make(made).epoch(0)), list(make(expected).epoch(0)))


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

    text = train_texts(folder)[0]
    fingerprints = itertools.count()
    monkeypatch.setattr(type(text), "fingerprint", lambda self: str(next(fingerprints)))
    with pytest.raises(CorpusError, match="the text of pairs changed while it was read"):
        encode()
    assert len(list(ids.glob("pairs-*"))) == 7 and not list(ids.glob(".encoding-*"))


def test_damaged_files_are_refused(folder, wordpieces, tmp_path):
    encode_pairs(train_texts(folder), wordpieces, folder=tmp_path / "ids")
    (place,) = (tmp_path / "ids").glob("pairs-*")
    (place / "about.json").write_text("{}")
    with pytest.raises(CorpusError, match="names must be a list of texts, got None"):
        encode_pairs(train_texts(folder), wordpieces, folder=tmp_path / "ids")
    with (place / "target" / "stream.int32").open("ab") as file:
        file.write(b"more")
    with pytest.raises(CorpusError, match=r"target/stream.int32 must .*got \d+"):
        EncodedPairs.open(place)


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
