"""Specialisation of experts: hand-worked and enumerated values, random gates, language pairs."""

import itertools
import math
import statistics
from collections import Counter

import pytest
import torch
from moe_lab.analysis.experts import expert_reports
from moe_lab.analysis.routed_text import NO_WORD, RoutedText, joined, route_text, untrained_gates
from moe_lab.analysis.specialisation import (
    WORD_CLASSES,
    entropy,
    labels_of,
    measure_specialisation,
    mutual_information,
    piece_class,
    purity,
    word_class,
)
from moe_lab.data import EncodedPairs, EncodedSentences, Vocabulary, Wordpieces
from moe_lab.models import MoEConfig, TranslationModel, TranslationModelConfig

from moe_ext import BalancedGate, HierarchicalMoE, MoE

pytestmark = pytest.mark.usefixtures("one_thread")


def routing_of(slots, num_experts, words=None):
    """Makes the routing of one sequence of words from (position, expert, gate) triples."""
    position, expert, gate = map(torch.tensor, zip(*slots, strict=True))
    number = int(position.max()) + 1 if words is None else len(words)
    padded = torch.full((number + 4,), NO_WORD)
    padded[2:-2] = torch.zeros(number) if words is None else torch.tensor(words)
    return RoutedText(num_experts, padded.unfold(0, 5, 1), position, expert, gate)


def one_expert_each(experts, num_experts):
    """Routes position i to experts[i] only."""
    return routing_of([(i, e, 1.0) for i, e in enumerate(experts)], num_experts)


def test_purity():
    labels = torch.tensor([4, 4, 0, 4, 1, 0])
    positions = torch.tensor([[0, 1, 2, 3], [2, 5, 4, -1], [5, -1, -1, -1], [-1] * 4])
    purities = purity(labels, positions)
    assert purities[:3].tolist() == [3 / 4, 2 / 3, 1.0]
    assert purities[3].isnan()


def test_information_by_hand():
    # p(a, b) is 3/8, 1/8, 1/8, 3/8; each p(a) and p(b) is 1/2.
    a = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    b = torch.tensor([0, 0, 0, 1, 0, 1, 1, 1])
    expected = 2 * 3 / 8 * math.log(3 / 8 * 4) + 2 * 1 / 8 * math.log(1 / 8 * 4)
    assert mutual_information(a, b) == pytest.approx(expected, abs=1e-12)
    assert mutual_information(a, a) == pytest.approx(math.log(2), abs=1e-12)
    assert mutual_information(a, torch.tensor([0, 1] * 4)) == pytest.approx(0, abs=1e-12)
    # The shares are 1/2, 1/4 and 1/4.
    assert entropy(torch.tensor([0, 0, 2, 5])) == pytest.approx(1.5 * math.log(2), abs=1e-12)


def test_positions_of_the_experts():
    slots = [(0, 1, 0.75), (0, 2, 0.25), (2, 2, 0.5), (2, 1, 0.5), (3, 1, 0.9), (3, 0, 0.1)]
    routed = routing_of(slots, num_experts=4)
    assert routed.highest(2).tolist() == [[3, -1], [3, 0], [2, 0], [-1, -1]]
    # Position 1 has no expert. The first of equal gates counts as the highest.
    position, expert = routed.first_choice()
    assert position.tolist() == [0, 2, 3] and expert.tolist() == [1, 2, 1]
    twice = joined([routed, routed])
    assert twice.highest(3)[0].tolist() == [3, 7, -1]
    assert len(twice.windows) == 8 and twice.first_choice()[0].tolist() == [0, 2, 3, 4, 6, 7]


def test_experts_that_follow_the_label():
    labels = torch.arange(4).repeat(100)
    measured = measure_specialisation(
        one_expert_each(labels.tolist(), 4), {"label": labels}, num_permutations=99
    )["label"]
    assert measured.purity.tolist() == [1.0] * 4
    assert measured.information == pytest.approx(math.log(4), abs=1e-12) == measured.entropy
    bias = float(measured.permuted_information.mean())
    assert measured.share == pytest.approx(1 - bias / math.log(4), abs=1e-12)
    assert measured.p_purity == measured.p_information == 1 / 100


def test_information_uses_the_expert_with_the_highest_gate():
    """The expert with the lower gate, always 3, has no effect."""
    labels = torch.arange(3).repeat(4)
    slots = [slot for i, e in enumerate(labels.tolist()) for slot in ((i, 3, 0.25), (i, e, 0.75))]
    measured = measure_specialisation(routing_of(slots, 4), {"label": labels}, num_permutations=1)[
        "label"
    ]
    assert measured.information == pytest.approx(math.log(3), abs=1e-12) == measured.entropy


def test_permutations_are_uniform():
    """Means over shuffled labels equal means over all 720 orders, up to 5 standard errors."""
    labels, experts = [0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 1, 1]
    purities, mutual = [], []
    for order in itertools.permutations(labels):
        most = [max(map(part.count, part)) / len(part) for part in (order[:4], order[4:])]
        purities.append(statistics.fmean(most))
        mutual.append(mutual_information(torch.tensor(experts), torch.tensor(order)))
    measured = measure_specialisation(
        one_expert_each(experts, 2), {"label": torch.tensor(labels)}, num_permutations=2_000
    )["label"]
    for shuffled, exact in (
        (measured.permuted_purity.mean(1), purities),
        (measured.permuted_information, mutual),
    ):
        error = statistics.pstdev(exact) / math.sqrt(2_000)
        assert abs(float(shuffled.mean()) - statistics.fmean(exact)) < 5 * error


def test_summary():
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    measured = measure_specialisation(
        one_expert_each([0, 0, 1, 1, 1, 1], 3), {"a": labels, "b": labels}, num_permutations=50
    )
    assert measured["a"].summary() == measured["b"].summary()  # both use the same shuffles
    summary = measured["a"].summary()
    assert summary["expert_purity"] == [1.0, 0.5]  # the third has no tokens
    assert summary["purity"] == 0.75
    assert summary["information"] == pytest.approx(entropy(torch.tensor([0, 0, 1, 1, 1, 1])))


def test_labels():
    words = ["the", "</s>", "<unk>", "Paris", "1,024", "--", "slowly", "nation", "cats", "house"]
    vocabulary = Vocabulary(words)
    text = [1, 0, 8, 6]
    routed = routing_of([(i, 0, 1.0) for i in range(4)], 1, words=text)
    labels = labels_of(routed, vocabulary)
    assert labels["current word"].tolist() == text
    assert labels["previous word"].tolist() == [0, 2, 1, 9]  # 0: no previous word
    classes = [WORD_CLASSES[i] for i in labels["word class"].tolist()]
    assert classes == ["</s>", "up to 3 letters", "-s", "-ly"]
    assert [word_class(word) for word in words] == [
        "up to 3 letters", "</s>", "<unk>", "capitalised", "number", "punctuation", "-ly", "-tion",
        "-s", "other",
    ]  # fmt: skip
    assert len(set(WORD_CLASSES)) == len(WORD_CLASSES)


@pytest.mark.parametrize("kind", [MoE, HierarchicalMoE])
def test_untrained_gates(kind):
    torch.manual_seed(0)
    experts = {"num_experts": 6} if kind is MoE else {"num_groups": 3, "experts_per_group": 4}
    layer = kind(64, k=2, hidden_sizes=[4], **experts).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    x = torch.randn(50, 64)
    y = layer(x)[0]
    drawn = []
    for seed in (1, 1, 2):
        with untrained_gates(layer, seed):
            inside = {name: value.clone() for name, value in layer.state_dict().items()}
            drawn.append(layer(x)[1].expert_index)
        changed = {name for name in before if not torch.equal(before[name], inside[name])}
        assert changed == {name for name in before if "w_gate" in name} != set()
        for name in changed:  # 5 standard errors are 26% for 192 weights
            sizes = [float(value[name].square().mean().sqrt()) for value in (before, inside)]
            assert sizes[0] == pytest.approx(sizes[1], rel=0.26)
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert torch.equal(layer(x)[0], y)


def test_untrained_gates_reject_gates_with_thresholds():
    layer = MoE(8, 4, 2, gate=BalancedGate(8, 4, 2), w_load=0.0)
    with pytest.raises(ValueError, match="untrained_gates: layer must"):
        untrained_gates(layer, 0).__enter__()


def test_words_that_occur_once_give_no_information():
    vocabulary = Vocabulary([*(f"w{i}" for i in range(8)), "<unk>", "</s>"])
    routed = routing_of([(i, i % 2, 1.0) for i in range(8)], 2, words=range(8))
    for report in expert_reports(routed, vocabulary.words):
        assert report.information == pytest.approx(0, abs=1e-12)  # ln 2, minus ln 2 by chance


# Translation models

FIRST, SECOND = "acegik", "bdfhjl"  # letters of two languages
SPECIAL, FIRST_CLASS, SECOND_CLASS = range(3)  # classes of wordpieces
PAIRS = ("xx-yy", "yy-xx", "yy-yy")
SIZES = (10, 20, 30)  # sentences of each pair


def class_of(piece):
    if piece.startswith("<") or piece == "▁":
        return SPECIAL
    return FIRST_CLASS if piece.removeprefix("▁") in FIRST else SECOND_CLASS


@pytest.fixture(scope="module")
def wordpieces():
    """A wordpiece is one letter, inside a word or at its beginning."""
    letters = FIRST + SECOND
    text = [" ".join(f"{a}{b}" for b in letters) for a in letters]
    learned = Wordpieces.train(text, 5 + 24, target_tokens=["xx", "yy"], character_coverage=1.0)
    assert {len(piece.removeprefix("▁")) for piece in learned.pieces(range(5, 29))} <= {0, 1}
    return learned


@pytest.fixture(scope="module")
def pairs(wordpieces):
    """Makes random sentence pairs; a source begins with the token of the target language."""
    generator = torch.Generator().manual_seed(5)

    def text(language):
        letters = FIRST if language == "xx" else SECOND
        words = [
            "".join(letters[i] for i in torch.randint(6, (length,), generator=generator))
            for length in torch.randint(1, 4, (3,), generator=generator)
        ]
        return " ".join(words)

    source, target = [], []
    for name, size in zip(PAIRS, SIZES, strict=True):
        one, target_language = name.split("-")
        token = wordpieces.target_token_id(target_language)
        source += [[token, *wordpieces.encode(text(one))] for _ in range(size)]
        target += [wordpieces.encode(text(target_language)) for _ in range(size)]
    pair = torch.arange(3).repeat_interleave(torch.tensor(SIZES))
    sides = (EncodedSentences(side, wordpieces.eos_id) for side in (source, target))
    return EncodedPairs(*sides, pair, PAIRS)


def translation_model(vocab_size, d_model, **moe):
    config = TranslationModelConfig(
        d_model, 2 * d_model, dropout=0.0, moe=MoEConfig(hidden_sizes=[4], **moe)
    )
    return TranslationModel(config, vocab_size)


@pytest.fixture(scope="module")
def model_by_class(wordpieces):
    """The embedding is the one-hot class of a piece; the gates route each class to one expert.

    All other weights are zero, so the gates see only the embedding.
    """
    model = translation_model(len(wordpieces), 3, gate="topk", num_experts=3, k=1, w_load=0)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        classes = [class_of(piece) for piece in wordpieces.pieces(range(len(wordpieces)))]
        model.embedding.weight.copy_(torch.eye(3)[classes])
        for layer in (model.encoder_between, model.decoder_between):
            layer.gate.w_gate.copy_(torch.eye(3))
    return model


@pytest.mark.parametrize("layer", [0, 1])
def test_routing_of_a_translation_model(layer, wordpieces, pairs, model_by_class):
    routed = route_text(
        model_by_class, pairs, layer=layer, num_positions=10**6, tokens_per_batch=90
    )
    # </s> is after the words in the encoder, and before them in the decoder.
    expected = Counter()
    for index, (source, target) in enumerate(pairs):
        source, target = [*source, wordpieces.eos_id], [wordpieces.eos_id, *target]
        seen = [target + [wordpieces.eos_id], source][layer == 0]
        padded = [NO_WORD] * 2 + seen + [NO_WORD] * 2
        for place in range(len([target, source][layer == 0])):
            expected[(int(pairs.pair[index]), *padded[place : place + 5])] += 1
    rows = torch.cat([routed.pair.unsqueeze(1), routed.windows], 1)
    assert Counter(map(tuple, rows.tolist())) == expected
    assert routed.pair_names == PAIRS

    classes = [class_of(piece) for piece in wordpieces.pieces(routed.words.tolist())]
    assert routed.expert.tolist() == classes
    assert routed.position.tolist() == list(range(len(classes)))
    twice = joined([routed, routed])
    assert twice.pair.tolist() == 2 * routed.pair.tolist() and twice.pair_names == PAIRS


@pytest.mark.parametrize("layer", [0, 1])
def test_experts_of_languages(layer, wordpieces, pairs, model_by_class):
    routed = route_text(model_by_class, pairs, layer=layer, num_positions=10**6)
    reports = expert_reports(routed, wordpieces.words, num_words=99)
    # Wordpieces by class and language pair.
    text = pairs.source if layer == 0 else pairs.target
    counts = torch.zeros(3, 3, dtype=torch.float64)
    for pair, sentence in zip(pairs.pair.tolist(), text, strict=True):
        for piece in wordpieces.pieces([*sentence, wordpieces.eos_id]):
            counts[class_of(piece), pair] += 1
    expected = counts.sum(0) / counts.sum()
    for report, count in zip(reports, counts, strict=True):
        assert report.share == pytest.approx(float(count.sum() / counts.sum()))
        assert [share.name for share in report.pairs] == list(PAIRS)
        assert [p.share for p in report.pairs] == pytest.approx((count / count.sum()).tolist())
        assert [p.expected for p in report.pairs] == pytest.approx(expected.tolist())
        assert all(
            word.share == 1 and class_of(word.word) == report.expert for word in report.words
        )
        times = [word.times for word in report.words]
        assert times == sorted(times, reverse=True)
        assert report.information == pytest.approx(-math.log(report.share), rel=0.2)
    # Words of the first language occur in sources of the first pair and in targets of the second.
    alone = float(expected[layer])
    assert reports[FIRST_CLASS].pairs[layer].share == 1
    assert reports[FIRST_CLASS].pair_information == pytest.approx(-math.log(alone))
    assert reports[SECOND_CLASS].pairs[layer].share == 0
    assert reports[SECOND_CLASS].pair_information == pytest.approx(-math.log(1 - alone), rel=0.1)
    assert reports[SPECIAL].pair_information < 0.1
    assert any(context.words[1].startswith("▁") for context in reports[FIRST_CLASS].contexts)

    routed = route_text(model_by_class, pairs, layer=layer, num_positions=10**6)
    labels = labels_of(routed, wordpieces)
    information = mutual_information(routed.expert, labels["language pair"])
    mean = sum(report.share * report.pair_information for report in reports)
    assert information == pytest.approx(mean, abs=1e-12)
    pair_measures = measure_specialisation(routed, labels, num_permutations=9)["language pair"]
    assert pair_measures.information == pytest.approx(information, abs=1e-12)


def test_one_language_pair_is_not_reported(wordpieces, pairs, model_by_class):
    alone = EncodedPairs(pairs.source, pairs.target)
    routed = route_text(model_by_class, alone)
    assert routed.pair is None and joined([routed, routed]).pair is None
    assert "language pair" not in labels_of(routed, wordpieces)
    for report in expert_reports(routed, wordpieces.words):
        assert report.pairs == [] and report.pair_information == 0


def test_classes_of_pieces():
    classes = {
        "▁Paris": "capitalised", "▁slowly": "-ly", "▁the": "up to 3 letters", "▁": "punctuation",
        "ing": "inside a word", "Y": "inside a word", ",": "punctuation", "▁,": "punctuation",
        "12": "number", "<unk>": "<unk>", "</s>": "</s>", "<2fr>": "target token", "<2": "number",
    }  # fmt: skip
    assert {piece: piece_class(piece) for piece in classes} == classes
