"""Beam search, compared with hand-worked and exhaustive search, for single sources and batches."""

import math

import pytest
import torch
from assertions import assert_exact, assert_same_bits
from moe_lab.decoding.beam_search import BeamSearch, largest
from tiny import cases

pytestmark = pytest.mark.usefixtures("one_thread")

EOS = 0
INF = math.inf


class PrefixModel:
    """A model from functions of (source, prefix) to probabilities [V] and attention weights."""

    def __init__(self, probs, attention=None, dtype=torch.float64):
        self.probs, self.attention, self.dtype = probs, attention, dtype
        self.num_rows = []

    def start(self, lengths):
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        return PrefixState([(i, None) for i in range(len(lengths))], mask), mask

    def step(self, tokens, state):
        self.num_rows.append(len(tokens))
        rows = [
            (source, () if prefix is None else (*prefix, token))
            for (source, prefix), token in zip(state.rows, tokens.tolist(), strict=True)
        ]
        attention = torch.zeros(state.mask.shape, dtype=self.dtype)
        for i, row in enumerate(rows):
            length = int(state.mask[i].sum())
            weights = self.attention(*row) if self.attention else [1 / length] * length
            attention[i, :length] = torch.tensor(weights, dtype=self.dtype)
        probs = torch.tensor([self.probs(*row) for row in rows], dtype=torch.float64)
        return probs.log().to(self.dtype), attention, PrefixState(rows, state.mask)


class PrefixState:
    def __init__(self, rows, mask):
        self.rows, self.mask = rows, mask

    def select(self, index):
        return PrefixState([self.rows[i] for i in index.tolist()], self.mask[index])


class TableModel:
    """A model with random probabilities that depend on the source and all tokens so far."""

    SIZE = 997

    def __init__(self, vocab_size, seed, sharpness=1.0, device="cpu", dtype=torch.float64):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(self.SIZE, vocab_size, generator=generator, dtype=torch.float64)
        self.log_probs = (sharpness * logits).log_softmax(1).to(device, dtype)
        self.weights = torch.rand(self.SIZE, 16, generator=generator, dtype=torch.float64)
        self.weights = self.weights.to(device, dtype)

    def start(self, sources):
        """Returns the state and mask of sources given as (key, length) pairs."""
        keys, lengths = torch.tensor(sources, device=self.log_probs.device).unbind(1)
        mask = torch.arange(int(lengths.max()), device=keys.device) < lengths[:, None]
        return TableState(keys % self.SIZE, mask), mask

    def step(self, tokens, state):
        node = (state.node * 31 + tokens * 7 + 1) % self.SIZE
        weights = self.weights[node, : state.mask.shape[1]] * state.mask
        attention = weights / weights.cumsum(1)[:, -1:]  # cumsum: padding does not change results
        return self.log_probs[node], attention, TableState(node, state.mask)


class TableState:
    def __init__(self, node, mask):
        self.node, self.mask = node, mask

    def select(self, index):
        return TableState(self.node[index], self.mask[index])


def translate(search, model, sources):
    state, mask = model.start(sources)
    return search(model, state, mask, EOS)


def score_of(search, log_prob, attention):
    """Computes s(Y, X) in plain floats from the attention rows p_ij of each token j."""
    lp = (5 + len(attention)) ** search.length_penalty / (5 + 1) ** search.length_penalty
    covered = [min(sum(column), 1) for column in zip(*attention, strict=True)]
    return log_prob / lp + search.coverage_penalty * sum(math.log(c) for c in covered)


def all_translations(search, model, source, limit):
    """Lists (score, tokens, log_prob, attention) of all unpruned translations, best score first."""
    finished = []

    def extend(tokens, log_prob, attention, last, state):
        log_probs, weights, state = model.step(torch.tensor([last]), state)
        log_probs, attention = log_probs[0].tolist(), [*attention, weights[0].tolist()]
        for token, value in enumerate(log_probs):
            if len(tokens) + 1 == limit and token != EOS:
                continue
            if len(tokens) + 1 < limit and value < max(log_probs) - search.window:
                continue
            if token == EOS:
                score = score_of(search, log_prob + value, attention)
                finished.append((score, [*tokens, token], log_prob + value, attention))
            else:
                extend([*tokens, token], log_prob + value, attention, token, state)

    extend([], 0.0, [], EOS, model.start([source])[0])
    finished.sort(key=lambda one: -one[0])
    return [one for one in finished if one[0] >= finished[0][0] - search.window]


# Scores


def test_penalties_by_hand():
    search = BeamSearch(length_penalty=0.5, coverage_penalty=0.4)
    coverage = torch.tensor([[0.5, 1.5, 0.25, 0.0], [1.0, 1.0, 2.0, 3.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False], [True] * 4])
    log_prob = torch.tensor([-6.0, -2.0], dtype=torch.float64)
    # (5 + 19) / 6 = 4, whose square root is 2; the log of 1/2 · 1 · 1/4.
    expected = torch.tensor([-6 / 2 + 0.4 * math.log(1 / 8), -2 / 2], dtype=torch.float64)
    assert_exact(search.score(log_prob, 19, coverage, mask), expected)
    # With one token (the end of sentence), lp is 1.
    expected[0] = -6 + 0.4 * math.log(1 / 8)
    lengths = torch.tensor([1, 19])
    assert_exact(search.score(log_prob, lengths, coverage, mask), expected)


def test_no_attention_at_all_keeps_a_score():
    search = BeamSearch(length_penalty=0.0, coverage_penalty=1.0)
    score = search.score(
        torch.tensor([-1.0]), 3, torch.tensor([[0.0, 1.0]]), torch.tensor([[True, True]])
    )
    assert float(score) == pytest.approx(-1 + math.log(torch.finfo(torch.float32).tiny))


@pytest.mark.parametrize("window", [INF, 1.2])
@pytest.mark.parametrize(("a", "b"), [(0.0, 0.0), (0.2, 0.2), (1.0, 0.5)])
def test_equals_exhaustive_search(a, b, window):
    """The beam holds all prefixes, so it finds the best of all translations of up to 4 tokens."""
    search = BeamSearch(64, a, b, window, 0.0, min_length_limit=4, num_best=6)
    for seed in range(6):
        model = TableModel(4, seed)
        sources = [(seed, 3), (seed + 7, 1), (seed + 20, 5)]
        for source, hypotheses in zip(sources, translate(search, model, sources), strict=True):
            expected = all_translations(search, model, source, 4)[:6]
            assert [h.tokens for h in hypotheses] == [tokens for _, tokens, _, _ in expected]
            for h, (score, _, log_prob, attention) in zip(hypotheses, expected, strict=True):
                assert h.score == pytest.approx(score, abs=1e-12)
                assert h.log_prob == pytest.approx(log_prob, abs=1e-12)
                assert_exact(h.attention, torch.tensor(attention, dtype=torch.float64))


def first_then(first, then):
    return lambda source, prefix: then if prefix else first


def near(source, prefix):
    """Prefixes have 0.3, 0.27, ... and 0.1425, 0.068, ...; a window of log 4 ends at 0.1."""
    if not prefix:
        return [0.4, 0.3, 0.3]
    return [0.1, 0.9, 0] if prefix[0] == 1 else [0.05, 0.475, 0.475]


def garden_path(source, prefix):
    """A plain beam of 2 keeps (2, 1) and (2, 2), which end badly, and drops the greedy (1, 1)."""
    probs = {(): [0.04, 0.4, 0.36, 0.1, 0.1], (1,): [0.1, 0.3, 0.2, 0.2, 0.2]}
    last = [1, 0, 0, 0, 0] if prefix[:1] == (1,) else [0.2] * 5
    return (probs | {(2,): [0, 0.5, 0.5, 0, 0]}).get(prefix, last)


FREE = {"length_penalty": 0.0, "coverage_penalty": 0.0}
TOKENS = first_then([0.01, 0.5, 0.13, 0.12, 0.24], [0.96, 0.01, 0.01, 0.01, 0.01])
UNLIKELY = first_then([0.6, 0.3, 0.1], [0.999, 0.0005, 0.0005])
ENDS = first_then([0.6, 0.4], [0.5, 0.5])  # the rest is as probable as the last finished one
WINDOW = math.log(4)
BY_HAND = [  # probabilities, search, number of sources, translations, rows of the first steps
    # The window keeps first tokens with p >= 0.125, whatever follows them.
    (TOKENS, BeamSearch(8, window=WINDOW, num_best=8), 1, [[[1, 0], [4, 0], [2, 0]]], [1, 3]),
    (UNLIKELY, BeamSearch(**FREE, window=3.0, num_best=3), 1, [[[0], [1, 0], [2, 0]]], [1, 2]),
    # Rule 1 keeps the third token, as 0.6 / 0.1 < 6.002; rule 2 drops it: 0.6 / 0.0999 > 6.002.
    (UNLIKELY, BeamSearch(**FREE, window=math.log(6.002), num_best=3), 1, [[[0], [1, 0]]], [1, 2]),
    (near, BeamSearch(8, **FREE, window=WINDOW, num_best=8), 1, None, [1, 2, 3, 1]),
    (garden_path, BeamSearch(2, **FREE), 1, [[[1, 1, 0]]], [1, 2]),
    # Source i ends after i tokens with probability 1.
    (
        lambda source, prefix: [0, 0.7, 0.3] if len(prefix) < source else [1, 0, 0],
        BeamSearch(2, **FREE), 4, [[[1] * i + [0]] for i in range(4)], [4, 6, 4, 2],
    ),
    (ENDS, BeamSearch(8, **FREE, window=INF, num_best=1), 1, [[[0]]], [1]),
    (ENDS, BeamSearch(8, **FREE, window=INF, num_best=2), 1, [[[0], [1, 0]]], [1, 1]),
    (first_then([1, 0, 0], [1, 0, 0]), BeamSearch(num_best=8), 2, [[[0]]] * 2, [2]),
    (first_then([1, 0, 0], [1, 0, 0]), BeamSearch.greedy(), 2, [[[0]]] * 2, [2]),
]  # fmt: skip


@pytest.mark.parametrize(("probs", "search", "number", "translations", "num_rows"), BY_HAND)
def test_translations_and_steps_by_hand(probs, search, number, translations, num_rows):
    model = PrefixModel(probs)
    actual = translate(search, model, [9] * number)
    actual = [[h.tokens for h in hypotheses] for hypotheses in actual]
    assert translations in (None, actual)
    assert model.num_rows[: len(num_rows)] == num_rows
    assert len(model.num_rows) == len(num_rows) or probs in (near, garden_path)


# What a beam guarantees


def greedy_by_hand(model, source, limit):
    state = model.start([source])[0]
    tokens, last, log_prob = [], EOS, 0.0
    while not tokens or last != EOS:
        log_probs, _, state = model.step(torch.tensor([last]), state)
        last = EOS if len(tokens) + 1 == limit else int(log_probs[0].argmax())
        log_prob += float(log_probs[0, last])
        tokens.append(last)
    return tokens, log_prob


def test_greedy():
    model = TableModel(9, seed=1, sharpness=0.5)
    sources = [(key, 1 + key % 6) for key in range(40)]
    for (hypothesis,), source in zip(
        translate(BeamSearch.greedy(), model, sources), sources, strict=True
    ):
        tokens, log_prob = greedy_by_hand(model, source, max(10, 2 * source[1]))
        assert hypothesis.tokens == tokens
        assert hypothesis.log_prob == hypothesis.score == pytest.approx(log_prob, abs=1e-12)


@pytest.mark.parametrize("beam", [1, 2, 8])
def test_not_below_greedy(beam):
    """The best score is at least the greedy score, with any penalties and windows."""
    sources = [(key, 1 + key % 7) for key in range(300)]
    for a, b, window in [(0.0, 0.0, INF), (0.2, 0.2, 3.0), (1.0, 1.0, 0.5), (0.2, 0.2, 0.0)]:
        search = BeamSearch(beam, a, b, window)
        model = TableModel(20, seed=3, sharpness=1.5)
        searched = translate(search, model, sources)
        for (best,), (greedy,) in zip(
            searched, translate(BeamSearch.greedy(), model, sources), strict=True
        ):
            score = score_of(search, greedy.log_prob, greedy.attention.tolist())
            assert best.score >= score - 1e-12


def test_equal_probabilities_go_by_id():
    """Ties go to the lowest id in the greedy hypothesis."""
    model = PrefixModel(lambda source, prefix: [0.01, *([0.99 / 59] * 59)])
    ((greedy,),) = translate(BeamSearch.greedy(), model, [2])
    assert greedy.tokens == [1] * 9 + [0]
    hypotheses = translate(BeamSearch(num_best=8), model, [2])[0]
    assert hypotheses[0].score >= score_of(BeamSearch(), greedy.log_prob, greedy.attention.tolist())
    ((best,),) = translate(BeamSearch(beam=1), model, [2])
    assert best.tokens == greedy.tokens


@pytest.mark.parametrize("num_columns", [5, 64, 192, 193, 1000])
@pytest.mark.parametrize("distinct", [True, False])
def test_largest(device, num_columns, distinct):
    x = torch.randn(40, num_columns, device=device, dtype=torch.float64)
    x = x if distinct else x.mul(2).round()
    x[3, : num_columns // 2] = -INF
    for k in (1, 2, 5):
        value, index = largest(x, k)
        assert_same_bits(value, x.topk(k).values)
        assert_same_bits(x.gather(1, index), value)
        assert all(len(set(row)) == k for row in index.tolist())
    x[2, -1] = math.nan
    assert largest(x, 2)[0][2, 0].isnan()


# Several sources


def assert_same_hypotheses(actual, expected, device="cpu"):
    """Compares bitwise on the CPU; on a GPU, rounding depends on the number of rows."""
    assert len(actual) == len(expected) >= 1
    for a, e in zip(actual, expected, strict=True):
        assert a.tokens == e.tokens
        if device == "cpu":
            assert (a.log_prob, a.score) == (e.log_prob, e.score)
            assert_same_bits(a.attention, e.attention)
        else:
            assert (a.log_prob, a.score) == pytest.approx((e.log_prob, e.score), rel=1e-5)
            torch.testing.assert_close(a.attention, e.attention, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_same_alone_and_in_any_company(device, dtype):
    model = TableModel(30, seed=4, device=device, dtype=dtype)
    search = BeamSearch(beam=5, num_best=3)
    sources = [(key, 1 + key * 5 % 14) for key in range(24)]
    alone = [translate(search, model, [source])[0] for source in sources]
    for order in (range(24), reversed(range(24)), [3, 3, 17, 0], range(0, 24, 5)):
        order = list(order)
        together = translate(search, model, [sources[i] for i in order])
        for i, hypotheses in zip(order, together, strict=True):
            assert_same_hypotheses(hypotheses, alone[i], device)


# Lengths


def test_limit_ends_what_has_no_end():
    """The end has probability 0: the smallest number replaces it at the limit max(5, 2 tokens)."""
    model = PrefixModel(lambda source, prefix: [0, 0.6, 0.4], dtype=torch.float32)
    search = BeamSearch(beam=3, length_penalty=0.0, coverage_penalty=0.0, min_length_limit=5)
    hypotheses = translate(search, model, [1, 4, 2])
    assert [h[0].tokens for h in hypotheses] == [[1] * 4 + [0], [1] * 7 + [0], [1] * 4 + [0]]
    end = math.log(torch.finfo(torch.float32).tiny)
    assert hypotheses[1][0].log_prob == pytest.approx(7 * math.log(0.6) + end, rel=1e-6)


def test_low_precision_is_summed_in_float32():
    tokens = 40
    model = PrefixModel(
        lambda source, prefix: [0.001, 0.999] if len(prefix) < tokens - 1 else [1, 0],
        lambda source, prefix: [0.9, 0.1],
        dtype=torch.bfloat16,
    )
    ((hypothesis,),) = translate(BeamSearch(min_length_limit=50), model, [2])
    assert hypothesis.tokens == [1] * (tokens - 1) + [0]
    value = torch.tensor(0.999).log().bfloat16().item()
    assert hypothesis.log_prob == pytest.approx(value * (tokens - 1), rel=1e-6)


# Errors


ERRORS = {
    "beam": [0, 1.5],
    "length_penalty": [-0.1, 10.5],
    "coverage_penalty": [10.5, math.nan],
    "max_length_ratio": [INF],
    "window": [-1.0],
    "min_length_limit": [0],
    "num_best": [9, 0],
}


@pytest.mark.parametrize(("option", "value"), cases(ERRORS))
def test_options(option, value):
    with pytest.raises(ValueError, match=rf"^BeamSearch: {option} must .*got {value}$"):
        BeamSearch(**{option: value})


def test_arguments():
    model = TableModel(5, seed=0)
    state, mask = model.start([(0, 3)])
    assert BeamSearch()(model, state.select(torch.tensor([]).long()), mask[:0], EOS) == []
    for wrong_mask, eos_id, message in (
        (mask.float(), EOS, "source_mask must"),
        (mask[:, :0], EOS, "source_mask must .*got 0$"),
        (torch.zeros_like(mask), EOS, "source_mask must .*got 0$"),
        (mask, -1, "eos_id must .*got -1$"),
        (mask, 5, "eos_id must .*got 5$"),
    ):
        with pytest.raises(ValueError, match=f"^BeamSearch: {message}"):
            BeamSearch()(model, state, wrong_mask, eos_id)
    model.log_probs[:, 2] = math.nan
    with pytest.raises(ValueError, match="^BeamSearch: log_probs must .*got nan$"):
        BeamSearch()(model, state, mask, EOS)
