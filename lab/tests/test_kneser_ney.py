"""Interpolated Kneser-Ney: hand-worked numbers, and a reference with dictionaries."""

from collections import Counter, defaultdict

import pytest
import torch
from moe_lab.data import EncodedSentences
from moe_lab.models import fit_kneser_ney

A, B, C, EOS, UNK = range(5)
START = "start"


def encoded(*sentences):
    return EncodedSentences(sentences, EOS)


def random_sentences(number, vocab_size, seed):
    """Makes sentences whose ids are squares of uniform numbers, so that some are frequent."""
    generator = torch.Generator().manual_seed(seed)
    sentences = []
    for _ in range(number):
        length = int(torch.randint(0, 12, (), generator=generator))
        ids = torch.rand(length, generator=generator).square().mul(vocab_size - 1).long()
        sentences.append([i if i < EOS else i + 1 for i in ids.tolist()])  # no word is </s>
    return sentences


class Reference:
    """The definition with dictionaries of tuples; START is before each sentence."""

    def __init__(self, sentences, vocab_size, order, modified):
        self.vocab_size, self.order = vocab_size, order
        raw = Counter()
        for sentence in sentences:
            words = (START, *sentence, EOS)
            for n in range(1, order + 1):
                raw.update(words[i : i + n] for i in range(len(words) - n + 1))
        before = defaultdict(set)
        for ngram in raw:
            before[ngram[1:]].add(ngram[0])
        self.count = {
            ngram: raw[ngram] if len(ngram) == order or ngram[0] == START else len(before[ngram])
            for ngram in raw
            if ngram != (START,)
        }
        self.discount = {n: self._discounts(n, modified) for n in range(1, order + 1)}
        self.following = defaultdict(list)
        for ngram in self.count:
            self.following[ngram[:-1]].append(ngram)

    def _discounts(self, n, modified):
        t = Counter(count for ngram, count in self.count.items() if len(ngram) == n)
        fallback = [0, 0.5, 1, 1.5] if modified else [0, 0.5, 0.5, 0.5]
        if not t[1] or (modified and not (t[2] and t[3])):
            return fallback
        y = t[1] / (t[1] + 2 * t[2])
        if not modified:
            return [0, y, y, y]
        discounts = [0] + [j - (j + 1) * y * t[j + 1] / t[j] for j in (1, 2, 3)]
        return discounts if all(0 <= d <= j for j, d in enumerate(discounts)) else fallback

    def removed(self, ngram):
        return self.discount[len(ngram)][min(self.count[ngram], 3)]

    def prob(self, word, context):
        context = context[-(self.order - 1) :] if self.order > 1 else ()
        lower = self.prob(word, context[1:]) if context else 1 / self.vocab_size
        following = self.following[context]
        if not following:
            return lower
        total = sum(self.count[ngram] for ngram in following)
        gamma = sum(self.removed(ngram) for ngram in following) / total
        ngram = (*context, word)
        own = (self.count[ngram] - self.removed(ngram)) / total if ngram in self.count else 0
        return own + gamma * lower

    def token_prob(self, sentences):
        return [
            self.prob(word, (START, *sentence[:i]))
            for sentence in sentences
            for i, word in enumerate([*sentence, EOS])
        ]


def test_hand_worked():
    # The bigrams are <s>a 3, ab 2, ac 1, b</s> 2, c</s> 1: D = 2 / (2 + 2·2) = 1/3. The words a, b,
    # c and </s> have 1, 1, 1 and 2 predecessors: D = 3 / (3 + 2·1) = 3/5. The share 4·(3/5)/5 is
    # spread over 5 words.
    model = fit_kneser_ney(encoded([A, B], [A, B], [A, C]), 5, order=2, modified=False)
    assert model.discounts == [pytest.approx([3 / 5] * 3), pytest.approx([1 / 3] * 3)]
    unigram = {A: 0.176, B: 0.176, C: 0.176, EOS: 0.376, UNK: 0.096}
    got = model.token_prob(encoded([A, B], [A, UNK, A], [C, B]))
    expected = [
        (3 - 1 / 3) / 3 + 1 / 9 * unigram[A],  # one word follows <s>
        (2 - 1 / 3) / 3 + 2 / 9 * unigram[B],
        (2 - 1 / 3) / 2 + 1 / 6 * unigram[EOS],
        (3 - 1 / 3) / 3 + 1 / 9 * unigram[A],
        2 / 9 * unigram[UNK],
        unigram[A],  # nothing follows <unk>
        2 / 9 * unigram[EOS],
        1 / 9 * unigram[C],
        1 / 3 * unigram[B],
        (2 - 1 / 3) / 2 + 1 / 6 * unigram[EOS],
    ]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
    # 5 words and 5 bigrams; <s>, a, b and c are contexts.
    assert model.num_ngrams == [5, 5]
    assert model.num_parameters == 5 + 5 + 4


def test_discounts_without_rare_words():
    # a and </s> occur three times, so D is undefined.
    text = encoded([A], [A], [A])
    assert fit_kneser_ney(text, 5, order=1, modified=False).discounts == [[0.5] * 3]
    assert fit_kneser_ney(text, 5, order=1).discounts == [[0.5, 1.0, 1.5]]


@pytest.mark.parametrize("modified", [False, True])
@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_matches_the_reference(order, modified):
    train = random_sentences(150, 30, seed=1)
    test = random_sentences(40, 33, seed=2)  # three words are not in the training text
    model = fit_kneser_ney(encoded(*train), 33, order, modified=modified)
    reference = Reference(train, 33, order, modified)
    for sentences in (train, test):
        expected = torch.tensor(reference.token_prob(sentences), dtype=torch.float64)
        got = model.token_prob(encoded(*sentences))
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    numbers = Counter(map(len, reference.count))
    assert model.num_ngrams[1:] == [numbers[n] for n in range(2, order + 1)]
    assert [list(d) for d in model.discounts] == [
        pytest.approx(reference.discount[n][1:]) for n in range(1, order + 1)
    ]


@pytest.mark.parametrize("modified", [False, True])
def test_probabilities_sum_to_one(modified):
    train = random_sentences(150, 30, seed=3)
    model = fit_kneser_ney(encoded(*train), 33, 4, modified=modified)
    seen = max(train, key=len)
    for context in ([], seen[:1], seen[:5], [7, 7, 7, 7, 7], [31], [31, 32, 2]):
        # Every word but </s> follows the context in one sentence; </s> follows it in the last.
        words = [word for word in range(33) if word != EOS]
        prob = model.token_prob(encoded(*([*context, word] for word in words)))
        after = torch.arange(len(words)) * (len(context) + 2) + len(context)
        end = model.token_prob(encoded(context))[-1]
        assert float(prob[after].sum() + end) == pytest.approx(1, abs=1e-12)


def test_an_order_that_no_sentence_has():
    sentences = [[A], [], [B]]
    model = fit_kneser_ney(encoded(*sentences), 5, order=7)
    assert model.order == 3  # <s> a </s>
    expected = Reference(sentences, 5, 7, True).token_prob(sentences)
    got = model.token_prob(encoded(*sentences))
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


def test_errors():
    with pytest.raises(ValueError, match="fit_kneser_ney: order must .*got 0"):
        fit_kneser_ney(encoded([A]), 5, order=0)
    with pytest.raises(ValueError, match="fit_kneser_ney: sentences must .*got 3"):
        fit_kneser_ney(encoded([A]), 3)
    with pytest.raises(ValueError, match="fit_kneser_ney: sentences must"):
        fit_kneser_ney(encoded(), 5)
    model = fit_kneser_ney(encoded([A]), 5, order=2)
    with pytest.raises(ValueError, match="token_prob: sentences must .*got 9"):
        model.token_prob(encoded([9]))
