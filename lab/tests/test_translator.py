"""Translation of lines of text by a trained model."""

import math
import random
from dataclasses import replace

import pytest
import torch
from assertions import assert_exact
from moe_lab.data import EncodedPairs, EncodedSentences, PairBatches, Wordpieces
from moe_lab.decoding.beam_search import BeamSearch
from moe_lab.decoding.translator import Translator
from moe_lab.models import MoEConfig, TranslationModel, TranslationModelConfig

pytestmark = pytest.mark.usefixtures("one_thread")

WORDS = ["the", "small", "tree", "house", "sees", "has", "no", "leaf", "river", "."]
CONFIG = TranslationModelConfig(
    d_model=24, lstm_units=0, dropout=0.0, moe=MoEConfig(num_experts=4, k=2, hidden_sizes=[24])
)


def sentences(number, seed, longest=4):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, longest))) for _ in range(number)]


def turned(sentence):
    return " ".join(reversed(sentence.split()))


@pytest.fixture(scope="module")
def wordpieces():
    return Wordpieces.train(sentences(300, seed=0), 44, target_tokens=["aa", "zz"])


@pytest.fixture(scope="module")
def model(wordpieces):
    """A partly trained model that copies for target "aa" and reverses the words for "zz"."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = TranslationModel(CONFIG, len(wordpieces), noise_generator=torch.Generator())
    text = sentences(300, seed=1)
    tokens = map(wordpieces.target_token_id, ("aa", "zz"))
    sources = [[token, *wordpieces.encode(one)] for token in tokens for one in text]
    targets = [wordpieces.encode(one) for one in [*text, *map(turned, text)]]
    pairs = EncodedPairs(
        *(EncodedSentences(side, wordpieces.eos_id) for side in (sources, targets))
    )
    batches = PairBatches(pairs, tokens_per_batch=400, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(5):
        for batch in batches.epoch(epoch):
            parts = model.loss(batch)
            optimizer.zero_grad()
            (parts.nll_sum / parts.num_tokens + parts.aux_loss).backward()
            optimizer.step()
    torch.set_num_threads(threads)
    assert parts.nll_sum.item() / parts.num_tokens < math.log(len(wordpieces)) / 2
    # In float64, rounding that depends on the batch does not change the best translations.
    return model.double().eval()


@pytest.fixture(scope="module")
def translator(model, wordpieces):
    def make(search=None, into="zz", languages=("aa", "zz"), **options):
        return Translator(model, wordpieces, search, into=into, languages=languages, **options)

    return make


def assert_same_translations(actual, expected):
    """Compares up to rounding in the model, which depends on the batch."""
    for a, e in zip(actual, expected, strict=True):
        assert (a.text, a.source, a.pieces) == (e.text, e.source, e.pieces)
        assert (a.score, a.log_prob) == pytest.approx((e.score, e.log_prob), rel=1e-10)
        torch.testing.assert_close(a.attention, e.attention, rtol=0, atol=1e-10)


def test_each_line_has_its_own_in_whatever_company(translator):
    """Lines of mixed lengths give the same result alone, with small batches or small chunks."""
    lines = sentences(30, seed=2, longest=9)
    search = BeamSearch(num_best=3)
    alone = [next(translator(search)([line])) for line in lines]
    assert len({hypotheses[0].text for hypotheses in alone}) > 10
    for options in ({}, {"tokens_per_batch": 30}, {"lines_at_a_time": 7}):
        together = translator(search, **options)(lines)
        for actual, expected in zip(together, alone, strict=True):
            assert_same_translations(actual, expected)


def score_of(search, translation):
    return float(
        search.score(
            torch.tensor([translation.log_prob], dtype=torch.float64),
            len(translation.pieces),
            translation.attention.sum(0, keepdim=True),
            torch.ones(1, len(translation.source), dtype=torch.bool),
        )
    )


def test_a_hidden_token_needs_no_coverage(wordpieces):
    """The score counts the positions that the attention can reach."""
    torch.manual_seed(0)
    model = TranslationModel(replace(CONFIG, attend_language=False), len(wordpieces))
    translator = Translator(model.double().eval(), wordpieces, into="zz", languages=["aa", "zz"])
    for (best,) in translator(sentences(10, seed=7)):
        assert not best.attention[:, 0].any()
        seen = replace(best, source=best.source[1:], attention=best.attention[:, 1:])
        assert best.score == pytest.approx(score_of(BeamSearch(), seen))


def test_several_translations_of_a_sentence(translator, wordpieces, model):
    """Each translation has the score that the model gives to it as a whole."""
    search = BeamSearch(num_best=8)
    (hypotheses,) = translator(search)(["the  river\thas\nno leaf"])
    assert len({tuple(hypothesis.pieces) for hypothesis in hypotheses}) == len(hypotheses) > 3
    scores = [hypothesis.score for hypothesis in hypotheses]
    assert scores == sorted(scores, reverse=True)
    id_of = {piece: index for index, piece in enumerate(wordpieces.pieces(range(len(wordpieces))))}
    source = ["<2zz>", *wordpieces.pieces(wordpieces.encode("the river has no leaf")), "</s>"]
    for hypothesis in hypotheses:
        assert hypothesis.source == source
        assert "".join(hypothesis.pieces) == "▁" + hypothesis.text.replace(" ", "▁") + "</s>"
        assert hypothesis.attention.shape == (len(hypothesis.pieces), len(source))
        assert_exact(
            hypothesis.attention.sum(1), hypothesis.attention.new_ones(len(hypothesis.pieces))
        )
        ids = [id_of[piece] for piece in hypothesis.pieces]
        sides = [[id_of[piece] for piece in source[:-1]]], [ids[:-1]]
        pairs = EncodedPairs(*(EncodedSentences(side, wordpieces.eos_id) for side in sides))
        (batch,) = PairBatches(pairs, tokens_per_batch=100, shuffle=False).epoch(0)
        assert hypothesis.log_prob == pytest.approx(-float(model.token_nll(batch).sum()), rel=1e-10)
        assert hypothesis.score == pytest.approx(score_of(search, hypothesis), rel=1e-10)


def test_only_the_beginning_of_a_long_line_is_translated(translator, wordpieces):
    cut = translator(max_pieces=len(wordpieces.encode("the tree has")))
    long, short, longer = cut(["the tree has no", "no", "the tree has no leaf . " * 500])
    assert cut.num_cut == 2
    (expected, as_short) = translator()(["the tree has", "no"])
    assert_same_translations(long, expected)
    assert_same_translations(longer, expected)
    assert_same_translations(short, as_short)


def test_characters_that_were_never_seen(translator):
    ((translation,),) = translator()(["the \u4e2d\u6587 \x00 \ufeff tree \U0001f333 </s> <2aa>"])
    assert "<unk>" in translation.source
    assert translation.source.count("</s>") == translation.source.count("<2zz>") == 1
    assert "<2aa>" not in translation.source


def test_translations_come_while_lines_do(translator):
    """The next lines are read only after all previous lines are translated."""
    taken = []

    def lines():
        for line in ["no leaf", "", "the tree", "a river sees"]:
            taken.append(line)
            yield line

    results = translator(lines_at_a_time=2)(lines())
    for expected in (2, 2, 4, 4):
        next(results)
        assert len(taken) == expected
    assert next(results, None) is None


def test_language_to_translate_into(translator, wordpieces):
    (copied,), (turned_around,) = (
        next(translator(into=into)(["no leaf"])) for into in ("aa", "zz")
    )
    assert (copied.source[0], turned_around.source[0]) == ("<2aa>", "<2zz>")
    assert copied.log_prob != turned_around.log_prob
    plain = translator(into=None, languages=())(["the tree"])
    pieces = wordpieces.pieces(wordpieces.encode("the tree"))
    assert next(plain)[0].source == [*pieces, "</s>"]


def test_arguments(translator):
    wrong = [("into", None, {}), ("into", "fr", {}), ("into", "zz", {"languages": ()})]
    wrong += [(option, 0, {}) for option in ("tokens_per_batch", "lines_at_a_time", "max_pieces")]
    for option, value, more in wrong:
        with pytest.raises(ValueError, match=f"^Translator: {option} must .*got {value!r}$"):
            translator(**{option: value}, **more)
    with pytest.raises(ValueError, match="^Translator: lines must .*got 'the'$"):
        translator()("the")
