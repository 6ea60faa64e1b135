"""Purity and mutual information of experts, by hand and by enumeration; random gates."""

import itertools
import math
import statistics

import pytest
import torch

from moe_ext import BalancedGate, HierarchicalMoE, MoE
from moe_ext.analysis import Routing, joined, labels_of, specialisation, untrained_gates
from moe_ext.analysis.routing import NO_WORD
from moe_ext.analysis.specialisation import (
    WORD_CLASSES,
    entropy,
    mutual_information,
    purity,
    word_class,
)
from moe_ext.data import Vocabulary


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)


def routing_of(slots, num_experts, words=None):
    """Of (position, expert, gate) triples; the words stand one after the other."""
    position, expert, gate = map(torch.tensor, zip(*slots, strict=True))
    number = int(position.max()) + 1 if words is None else len(words)
    padded = torch.full((number + 4,), NO_WORD)
    padded[2:-2] = torch.zeros(number) if words is None else torch.tensor(words)
    return Routing(num_experts, padded.unfold(0, 5, 1), position, expert, gate)


def one_expert_each(experts, num_experts):
    """Position i goes to experts[i] alone."""
    return routing_of([(i, e, 1.0) for i, e in enumerate(experts)], num_experts)


def test_purity():
    labels = torch.tensor([4, 4, 0, 4, 1, 0])
    positions = torch.tensor([[0, 1, 2, 3], [2, 5, 4, -1], [5, -1, -1, -1], [-1] * 4])
    found = purity(labels, positions)
    assert found[:3].tolist() == [3 / 4, 2 / 3, 1.0]
    assert found[3].isnan()


def test_information_by_hand():
    # p(a, b) = 3/8, 1/8, 1/8, 3/8, all of p(a) and p(b) 1/2.
    a = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    b = torch.tensor([0, 0, 0, 1, 0, 1, 1, 1])
    expected = 2 * 3 / 8 * math.log(3 / 8 * 4) + 2 * 1 / 8 * math.log(1 / 8 * 4)
    assert mutual_information(a, b) == pytest.approx(expected, abs=1e-12)
    assert mutual_information(a, a) == pytest.approx(math.log(2), abs=1e-12)
    assert mutual_information(a, torch.tensor([0, 1] * 4)) == pytest.approx(0, abs=1e-12)
    # Shares 1/2, 1/4 and 1/4.
    assert entropy(torch.tensor([0, 0, 2, 5])) == pytest.approx(1.5 * math.log(2), abs=1e-12)


def test_positions_of_the_experts():
    slots = [(0, 1, 0.75), (0, 2, 0.25), (2, 2, 0.5), (2, 1, 0.5), (3, 1, 0.9), (3, 0, 0.1)]
    routing = routing_of(slots, num_experts=4)
    assert routing.highest(2).tolist() == [[3, -1], [3, 0], [2, 0], [-1, -1]]
    position, expert = routing.first_choice()  # nobody has position 1; of equal gates the first
    assert position.tolist() == [0, 2, 3] and expert.tolist() == [1, 2, 1]
    both = joined([routing, routing])
    assert both.highest(3)[0].tolist() == [3, 7, -1]
    assert len(both.windows) == 8 and both.first_choice()[0].tolist() == [0, 2, 3, 4, 6, 7]


def test_experts_that_follow_the_label():
    labels = torch.arange(4).repeat(100)
    found = specialisation(
        one_expert_each(labels.tolist(), 4), {"label": labels}, num_permutations=99
    )["label"]
    assert found.purity.tolist() == [1.0] * 4
    assert found.information == pytest.approx(math.log(4), abs=1e-12) == found.entropy
    bias = float(found.permuted_information.mean())
    assert found.share == pytest.approx(1 - bias / math.log(4), abs=1e-12)
    assert found.p_purity == found.p_information == 1 / 100


def test_experts_that_do_not():
    # Each label meets each expert as often: nothing is to be known, and shuffling can only add.
    labels = torch.arange(5).repeat(80)
    experts = torch.arange(4).repeat_interleave(5).repeat(20).tolist()
    found = specialisation(one_expert_each(experts, 4), {"label": labels}, num_permutations=99)
    assert found["label"].information == pytest.approx(0, abs=1e-12)
    assert found["label"].p_information == 1.0
    assert found["label"].share < 0


def test_random_routing_is_not_special():
    """I is too high by (E - 1)(V - 1) / 2N, which shuffled labels show as well.

    2 N I is about chi-squared with (E - 1)(V - 1) = 133 degrees of freedom: its deviation is 16.3,
    that of the mean of 200 is 1.2.
    """
    generator = torch.Generator().manual_seed(2)
    N, E, V = 4_000, 8, 20
    experts = torch.randint(E, (N,), generator=generator)
    labels = torch.randint(V, (N,), generator=generator)
    found = specialisation(
        one_expert_each(experts.tolist(), E), {"label": labels}, num_permutations=200
    )["label"]
    degrees = (E - 1) * (V - 1)
    assert abs(2 * N * float(found.permuted_information.mean()) - degrees) < 5 * 1.2 + 2
    assert abs(2 * N * found.information - degrees) < 5 * 16.3
    assert abs(found.share * found.entropy * 2 * N) < 5 * 16.3
    assert found.p_purity > 0.01 and found.p_information > 0.01


def test_permutations_are_fair():
    """The means over shuffled labels are those over all 720 orders, to 5 standard errors."""
    labels, experts = [0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 1, 1]
    purities, informations = [], []
    for order in itertools.permutations(labels):
        most = [max(map(part.count, part)) / len(part) for part in (order[:4], order[4:])]
        purities.append(statistics.fmean(most))
        informations.append(mutual_information(torch.tensor(experts), torch.tensor(order)))
    found = specialisation(
        one_expert_each(experts, 2), {"label": torch.tensor(labels)}, num_permutations=2_000
    )["label"]
    for shuffled, exact in (
        (found.permuted_purity.mean(1), purities),
        (found.permuted_information, informations),
    ):
        error = statistics.pstdev(exact) / math.sqrt(2_000)
        assert abs(float(shuffled.mean()) - statistics.fmean(exact)) < 5 * error


def test_summary():
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    found = specialisation(
        one_expert_each([0, 0, 1, 1, 1, 1], 3), {"a": labels, "b": labels}, num_permutations=50
    )
    assert found["a"].summary() == found["b"].summary()  # of the same shuffles
    summary = found["a"].summary()
    assert summary["expert_purity"] == [1.0, 0.5]  # nobody chose the third
    assert summary["purity"] == 0.75
    assert summary["information"] == pytest.approx(entropy(torch.tensor([0, 0, 1, 1, 1, 1])))


def test_labels():
    words = ["the", "</s>", "<unk>", "Paris", "1,024", "--", "slowly", "nation", "cats", "house"]
    vocabulary = Vocabulary(words)
    text = [1, 0, 8, 6]
    routing = routing_of([(i, 0, 1.0) for i in range(4)], 1, words=text)
    labels = labels_of(routing, vocabulary)
    assert labels["current word"].tolist() == text
    assert labels["previous word"].tolist() == [0, 2, 1, 9]  # 0: none
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
        for name in changed:  # 192 numbers or more: 5 standard errors are 26%
            sizes = [float(value[name].square().mean().sqrt()) for value in (before, inside)]
            assert sizes[0] == pytest.approx(sizes[1], rel=0.26)
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert torch.equal(layer(x)[0], y)


def test_untrained_gates_without_thresholds_only():
    layer = MoE(8, 4, 2, gate=BalancedGate(8, 4, 2), w_load=0.0)
    with pytest.raises(ValueError, match="must have gates without thresholds"):
        untrained_gates(layer, 0).__enter__()
