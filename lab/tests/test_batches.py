"""Batches of sentences, and of sentence pairs."""

from collections import Counter
from dataclasses import fields

import pytest
import torch
from moe_lab.data import EncodedPairs, EncodedSentences, PairBatches, batches_of
from moe_lab.data.batches import SentenceBatches
from tiny import equal

EOS = 1


def numbered_sentences(count=500, seed=0):
    """Makes sentences of 0 to 39 words in random order of length, with ids from 2 on."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (torch.rand(count, generator=generator) ** 2 * 40).int().tolist()
    sentences = [torch.randint(2, 1000, (n,), generator=generator).tolist() for n in lengths]
    return EncodedSentences(sentences, EOS)


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


NUMBERED = {"sentences": numbered_sentences, "pairs": numbered_pairs}


@pytest.fixture(params=NUMBERED)
def numbered(request):
    """Returns a function that makes sentences or pairs."""
    return NUMBERED[request.param]


def make(text, tokens_per_batch=200, shuffle=True, seed=3, **options):
    kind = PairBatches if isinstance(text, EncodedPairs) else SentenceBatches
    return kind(text, tokens_per_batch=tokens_per_batch, shuffle=shuffle, seed=seed, **options)


def sides(batch):
    """Returns the ids and the mask of inputs, targets and, of pairs, sources."""
    pairs = [(batch.inputs, batch.mask), (batch.targets, batch.mask)]
    return [*pairs, (batch.source, batch.source_mask)] if hasattr(batch, "source") else pairs


def rows(batches):
    """Yields (sentence_index, inputs, targets, source) of every row, without padding."""
    for batch in batches:
        for i, index in enumerate(batch.sentence_index.tolist()):
            yield index, *(ids[i][mask[i]].tolist() for ids, mask in sides(batch))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("tokens_per_batch", [1, 37, 400, 10**9])
def test_every_row_is_there_exactly_once(numbered, shuffle, tokens_per_batch):
    text = numbered()
    batches = make(text, tokens_per_batch, shuffle)
    made = list(batches.epoch(1))
    expected = []
    for i in range(len(text)):
        source, words = text[i] if isinstance(text, EncodedPairs) else (None, text[i])
        row = (i, [EOS, *words], [*words, EOS])
        expected.append(row if source is None else (*row, [*source, EOS]))
    assert sorted(rows(made)) == expected
    assert len(made) == batches.num_batches
    assert sum(batch.num_tokens for batch in made) == batches.num_tokens == text.num_tokens
    if isinstance(text, EncodedPairs):
        assert sum(int(batch.source_mask.sum()) for batch in made) == text.source.num_tokens
        assert batches.num_pairs == len(text)


def test_shapes_types_and_padding(numbered):
    for batch in make(numbered()).epoch(0):
        assert batch.inputs.shape == batch.targets.shape
        for ids, mask in sides(batch):
            assert ids.shape == mask.shape
            assert ids.dtype == torch.int64 and mask.dtype == torch.bool
            assert bool(mask[:, 0].all()) and bool(mask.any(0).all())  # no empty row or column
            assert not bool((mask.int().diff(dim=1) > 0).any())  # padding only at the end
            assert bool((ids[~mask] == EOS).all())
        assert batch.sentence_index.dtype == torch.int64
        assert batch.sentence_index.device.type == "cpu"


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("kind", "largest", "padding"), [("sentences", 40, 5), ("pairs", 100, 8)])
def test_batches_hold_about_the_tokens_asked_for_and_little_padding(
    kind, largest, padding, shuffle
):
    batches = make(NUMBERED[kind](6_000), tokens_per_batch=500, shuffle=shuffle)
    for epoch in (0, 1):
        made = list(batches.epoch(epoch))
        masks_of_batches = [{mask for _, mask in sides(batch)[1:]} for batch in made]
        sizes = [sum(int(mask.sum()) for mask in masks) for masks in masks_of_batches]
        positions = sum(mask.numel() for masks in masks_of_batches for mask in masks)
        # Batches have equal shares of the tokens in every epoch.
        share = sum(sizes) / len(sizes)
        assert abs(share - 500) < 500 / len(sizes)
        assert max(abs(size - share) for size in sizes) <= largest
        assert 1 - sum(sizes) / positions < padding / 100  # more than half without sorting


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("sentences", {}),
        ("sentences", {"max_length": 5}),
        *(("pairs", options) for options in ({}, {"oversample": True}, {"max_length": 20})),
        ("pairs", {"shuffle": False}),
    ],
)
def test_a_resumed_epoch_equals_the_uninterrupted_one(kind, options):
    text = numbered_sentences() if kind == "sentences" else numbered_pairs(sizes=[300, 150, 50])
    whole = list(make(text, **options).epoch(2))
    assert len(whole) > 20
    for start in (0, 1, len(whole) - 1, len(whole)):
        assert equal(list(make(text, **options).epoch(2, start)), whole[start:])


def test_order_depends_on_seed_and_epoch_only(numbered):
    text = numbered()
    torch.manual_seed(1)
    first = list(make(text).epoch(0))
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert equal(list(make(text).epoch(0)), first)
    torch.set_rng_state(state)
    list(make(text).epoch(5))
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is not used
    for reordered in (make(text).epoch(1), make(text, seed=4).epoch(0)):
        assert not equal(list(reordered), first)
    sizes = [batch.mask.shape[1] for batch in first]
    assert sizes != sorted(sizes)  # long and short batches come in random order
    in_order = batches_of(text, tokens_per_batch=200, shuffle=False)
    assert equal(list(in_order.epoch(0)), list(in_order.epoch(1)))
    targets = [batch.mask.shape[1] for batch in in_order.epoch(0)]
    assert targets[0] < targets[len(targets) // 2] < targets[-1]


def test_batches_made_by_workers_are_the_same():
    batches = make(numbered_pairs(100))
    assert equal(list(batches.epoch(1, 2, num_workers=2)), list(batches.epoch(1, 2)))


@pytest.mark.parametrize("number", [1, 3, 40])
def test_parts_of_a_batch_for_several_ranks(number):
    batch = next(make(numbered_pairs(), tokens_per_batch=600).epoch(0))
    parts = [batch.part(index, number) for index in range(number)]
    names = [field.name for field in fields(batch)]
    for name in names:
        together = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(together, getattr(batch, name))
    assert sum(part.num_tokens for part in parts) == batch.num_tokens
    sizes = [len(part.source) for part in parts]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    moved = parts[0].to("meta")
    assert {getattr(moved, name).device.type for name in names} == {"meta"}


def test_max_length_cuts_long_sentences_without_losing_a_word():
    text = EncodedSentences([[11, 12, 13, 14, 15, 16, 17], [8, 9], [10, 11, 12], []], EOS)
    assert sorted(rows(make(text, tokens_per_batch=4, max_length=4).epoch(0))) == [
        (0, [EOS, 11, 12, 13], [11, 12, 13, 14]),
        (0, [14, 15, 16, 17], [15, 16, 17, EOS]),
        (1, [EOS, 8, 9], [8, 9, EOS]),
        (2, [EOS, 10, 11, 12], [10, 11, 12, EOS]),
        (3, [EOS], [EOS]),
    ]
    in_one_row = make(text, tokens_per_batch=4, max_length=2**40)
    assert equal(list(in_one_row.epoch(0)), list(make(text, tokens_per_batch=4).epoch(0)))
    long = numbered_sentences()
    batches = make(long, max_length=5)
    assert max(batch.mask.shape[1] for batch in batches.epoch(0)) == 5
    targets_of_sentences = {i: [] for i in range(len(long))}
    for index, _, targets in rows(batches.epoch(0)):
        targets_of_sentences[index] += targets
    assert all(
        sorted(targets_of_sentences[i]) == sorted([*words, EOS]) for i, words in enumerate(long)
    )


def test_oversampling_raises_every_language_pair_to_the_largest():
    encoded = numbered_pairs(sizes=[300, 140, 60, 0])
    as_it_is, batches = make(encoded), make(encoded, oversample=True)
    assert as_it_is.num_pairs == 500 and batches.num_pairs == 900
    missing = []
    for epoch in (0, 1):
        made = list(batches.epoch(epoch))
        assert len(made) == batches.num_batches > as_it_is.num_batches
        index = torch.cat([batch.sentence_index for batch in made])
        assert encoded.pair[index].bincount().tolist() == [300, 300, 300]
        times = index.bincount(minlength=500)
        # 300 = 2 · 140 + 20 = 5 · 60: all pairs equally often, and 20 random pairs once more.
        assert Counter(times[:300].tolist()) == {1: 300}
        assert Counter(times[300:440].tolist()) == {2: 120, 3: 20}
        assert Counter(times[440:].tolist()) == {5: 60}
        missing.append(times)
        if epoch == 0:
            assert sum(batch.num_tokens for batch in made) == batches.num_tokens
    assert not torch.equal(*missing)  # another random choice in each epoch
    # Batches mix the language pairs.
    for batch in make(encoded, tokens_per_batch=2000, oversample=True).epoch(0):
        assert len(encoded.pair[batch.sentence_index].unique()) == 3
    in_order = make(encoded, oversample=True, shuffle=False)
    assert in_order.num_pairs == sum(len(b.source) for b in in_order.epoch(0)) == 900


def test_longer_pairs_are_left_out():
    lengths = [[[5] * n for n in side] for side in ((1, 4, 2, 3), (4, 1, 2, 3))]
    encoded = EncodedPairs(*(EncodedSentences(side, EOS) for side in lengths))
    batches = make(encoded, max_length=4)
    assert sorted(i for i, *_ in rows(batches.epoch(0))) == [2, 3]
    assert batches.num_left_out == 2 and batches.num_pairs == 2
    assert batches.num_tokens == 7
    assert make(encoded, max_length=5).num_left_out == 0
    with pytest.raises(ValueError, match="of at most 2 tokens per side, got 0"):
        make(encoded, max_length=2)


def test_errors(numbered):
    text = numbered(2)
    name = type(make(text)).__name__
    for option in ("tokens_per_batch", "max_length"):
        with pytest.raises(ValueError, match=f"^{name}: {option} must .*got 0"):
            make(text, **{option: 0})
    with pytest.raises(ValueError, match=f"^{name}: .* at least one .*, got 0"):
        make(text.first(0))
    with pytest.raises(ValueError, match=f"^{name}.epoch: start must .*got 2"):
        make(text, tokens_per_batch=10**9).epoch(0, start=2)


def test_errors_of_pairs():
    one, two = EncodedSentences([[5]], EOS), EncodedSentences([[5], [6]], EOS)
    for arguments, message in (
        ((one, two), "EncodedPairs: target must .*got 2"),
        ((one, EncodedSentences([[5]], 0)), "target must .*got 0"),
        ((two, two, torch.tensor([0])), "pair must .*got 1"),
        ((two, two, torch.tensor([0, 1])), "pair must"),
        ((two, two, torch.tensor([-1, 0])), "pair must"),
    ):
        with pytest.raises(ValueError, match=message):
            EncodedPairs(*arguments)
