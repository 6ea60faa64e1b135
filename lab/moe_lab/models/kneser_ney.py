"""The n-gram baseline of App. C.1: interpolated Kneser-Ney smoothing, estimated by sorting.

Sources: Kneser and Ney 1995; Chen and Goodman 1998 for the modified version with three discounts.

- h' is the context h without its first word.
- a(hw) is the count of the n-gram hw if it has the highest order or begins a sentence. Otherwise
  a(hw) is the number of distinct words that precede hw in the text.

The probability of the word w after h is::

    p(w|h) = (a(hw) - D(a(hw))) / sum_v a(hv) + gamma(h) p(w|h')
    gamma(h) = sum_v D(a(hv)) / sum_v a(hv)

The recursion ends below the unigrams with the uniform probability 1/V. D(0) is 0. After an unseen
context, p(w|h) = p(w|h').
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ext.checks import require, require_sizes
from moe_lab.data import EncodedSentences
from moe_lab.progress import progress

_NONE = -1


@dataclass(frozen=True, eq=False)
class NGramModel:
    """Predicts each word of a sentence from the n - 1 preceding words.

    The n-grams form a trie. Each argument but vocab_size, V, is a sequence with one element for
    each order n = 1, 2, and so on. M is the number of n-grams of one order.
    """

    vocab_size: int  # V, number of predicted words
    # [M] int64, ascending. A key is (index of the first n - 1 words in the keys of order n - 1) · V
    # + last word. Order 1 has all V words and, as V, the start of a sentence.
    keys: Sequence[Tensor]
    prob: Sequence[Tensor]  # [M] float64, probability of the last word after the other words
    # [M] float64, gamma of the n-gram as a context, or 1 if the n-gram is never a context. The
    # sequence has no element for the highest order.
    backoff: Sequence[Tensor]
    discounts: Sequence[list[float]]  # [D(1), D(2), D(3 and more)]

    @property
    def order(self) -> int:
        """The length n of the longest n-grams."""
        return len(self.keys)

    @property
    def num_ngrams(self) -> list[int]:
        """The number of n-grams of each order; the start of a sentence is not a unigram."""
        return [self.vocab_size, *map(len, self.keys[1:])]

    @property
    def num_parameters(self) -> int:
        """The number of probabilities plus the number of back-off weights of seen contexts."""
        contexts = [(keys // self.vocab_size).unique_consecutive() for keys in self.keys[1:]]
        return sum(self.num_ngrams) + sum(map(len, contexts))

    def token_prob(self, sentences: EncodedSentences) -> Tensor:
        """Computes the probability of each word of sentences, in float64.

        The order is that of ``sentences.stream[1:]``.
        """
        words, first = _words(sentences, self.vocab_size, "NGramModel.token_prob")
        index, prob = words, self.prob[0][words]
        for n in range(2, self.order + 1):
            context = _contexts(index, first, n, self.vocab_size)
            index = _find(self.keys[n - 1], context, words, self.vocab_size)
            gamma = torch.where(context == _NONE, 1.0, self.backoff[n - 2][context])
            prob = torch.where(index == _NONE, gamma * prob, self.prob[n - 1][index])
        return prob

    def sentence_nll(self, sentences: EncodedSentences) -> Tensor:
        """Computes the negative log-likelihood of each sentence: [N] float64, in nats."""
        nll = -self.token_prob(sentences).log()
        sentence = torch.repeat_interleave(sentences.lengths)
        return nll.new_zeros(len(sentences)).index_add_(0, sentence, nll)


def fit_kneser_ney(
    sentences: EncodedSentences, vocab_size: int, order: int = 5, *, modified: bool = True
) -> NGramModel:
    """Fits an interpolated Kneser-Ney model to sentences, without pruning of n-grams.

    t_j is the number of n-grams of one order whose count a is j. The discounts of this order are::

        Y = t_1 / (t_1 + 2 t_2)
        D(j) = Y                                  modified=False
        D(j) = j - (j + 1) Y t_(j+1) / t_j        modified=True, j = 1, 2 and 3

    D(3) also applies to larger counts. If a discount is undefined or outside [0, j], the order uses
    0.5 for all counts, or 0.5, 1 and 1.5 with modified=True. For example, the unigrams of a
    vocabulary without rare words use these values.

    Args:
        sentences: the training text; ``<unk>`` is treated as any other word.
        vocab_size: V, number of predicted words.
        order: maximum n; the order of the model is lower if all sentences are too short.
        modified: whether each order has three discounts instead of one.
    """
    require_sizes("fit_kneser_ney", order=order)
    words, first = _words(sentences, vocab_size, "fit_kneser_ney")
    # For each order: the n-grams, their counts, and the indices of their last n - 1 words.
    keys, counts, suffixes = [torch.arange(vocab_size + 1)], [_count(words, vocab_size + 1)], []
    index = words  # index of the n-gram that ends at each position
    for n in progress(range(2, order + 1), "counting n-grams", "orders"):
        context = _contexts(index, first, n, vocab_size)
        inside = context != _NONE
        if not inside.any():
            break  # all sentences are shorter than n
        ngrams, inverse, count = torch.unique(
            context[inside] * vocab_size + words[inside], return_inverse=True, return_counts=True
        )
        suffix = torch.empty_like(ngrams)
        suffix[inverse] = index[inside]  # equal at all occurrences of the n-gram
        index = torch.full_like(index, _NONE)
        index[inside] = inverse
        keys.append(ngrams)
        counts.append(count)
        suffixes.append(suffix)
    for n, suffix in enumerate(suffixes, start=1):
        preceding = _count(suffix, len(keys[n - 1]))
        # 0 only if the n-gram begins a sentence, where no word precedes it.
        counts[n - 1] = torch.where(preceding > 0, preceding, counts[n - 1])

    probs: list[Tensor] = []
    backoffs, discounts = [], []
    for n, (key, count) in enumerate(zip(keys, counts, strict=True), start=1):
        discount = _discounts(count, modified)
        discounts.append(discount[1:].tolist())
        removed = discount[count.clamp(max=3)]
        if n == 1:
            prob = (count - removed + removed.sum() / vocab_size) / count.sum()
            prob[vocab_size] = 0.0  # the start of a sentence
        else:
            prefix, num_prefixes = key // vocab_size, len(keys[n - 2])
            total = _count(prefix, num_prefixes, count)
            gamma = torch.where(total > 0, _count(prefix, num_prefixes, removed) / total, 1.0)
            backoffs.append(gamma)
            lower = probs[-1][suffixes[n - 2]]
            prob = (count - removed) / total[prefix] + gamma[prefix] * lower
        probs.append(prob)
    return NGramModel(vocab_size, keys, probs, backoffs, discounts)


def _words(sentences: EncodedSentences, vocab_size: int, name: str) -> tuple[Tensor, Tensor]:
    """Returns the predicted words, and a mask of the first word of each sentence."""
    words, name = sentences.stream[1:].long(), f"{name}: sentences"
    require(len(sentences) > 0, name, "hold at least one sentence", "none")
    largest = int(words.max())
    require(largest < vocab_size, name, f"hold word ids below {vocab_size}", largest)
    first = torch.zeros_like(words, dtype=torch.bool)
    first[sentences.starts[:-1]] = True
    return words, first


def _contexts(index: Tensor, first: Tensor, n: int, vocab_size: int) -> Tensor:
    """Returns the index of the n - 1 words before each position; _NONE if they span sentences."""
    context = index.roll(1)
    context[first] = vocab_size if n == 2 else _NONE  # V is the start of a sentence
    return context


def _find(keys: Tensor, context: Tensor, words: Tensor, vocab_size: int) -> Tensor:
    """Returns the index of each (context, word) in the ascending keys; _NONE if not found."""
    wanted = context * vocab_size + words
    index = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
    missing = (context == _NONE) | (keys[index] != wanted)
    return index.masked_fill(missing, _NONE)


def _count(index: Tensor, size: int, weights: Tensor | None = None) -> Tensor:
    return torch.bincount(index, weights, minlength=size)


def _discounts(counts: Tensor, modified: bool) -> Tensor:
    """Computes D(0), D(1), D(2), D(3 and more): [4] float64."""
    _, t1, t2, t3, t4, _ = _count(counts.clamp(max=5), 6).double().unbind()
    y = t1 / (t1 + 2 * t2)
    estimates, fallback = [0 * y, y, y, y], [0.0, 0.5, 0.5, 0.5]
    if modified:
        estimates = [0 * y, 1 - 2 * y * t2 / t1, 2 - 3 * y * t3 / t2, 3 - 4 * y * t4 / t3]
        fallback = [0.0, 0.5, 1.0, 1.5]
    discounts = torch.stack(estimates)
    largest = torch.arange(4, dtype=torch.float64)
    valid = (discounts >= 0) & (discounts <= largest)  # False for 0 / 0
    if y > 0 and valid.all():
        return discounts
    return torch.tensor(fallback, dtype=torch.float64)
