"""BLEU, compared with hand-worked numbers and with multi-bleu.perl."""

import math
import sys

import pytest
from moe_lab.decoding import bleu, corpus_bleu


def test_clipped_counts_and_brevity():
    """The count of "the" is clipped from 3 to 2; the lengths are 7 and 9 tokens."""
    translations = ["the the the cat sat", "on mats"]
    references = ["the cat and the dog sat down", "on mats"]
    found = corpus_bleu(translations, references, tokenized=True)
    # The matches are the, the, cat, sat, on, mats; "the cat", "on mats"; no 3-grams or 4-grams.
    assert found.precisions == pytest.approx((100 * 6 / 7, 100 * 2 / 5, 0, 0), abs=1e-12)
    assert found.brevity_penalty == pytest.approx(math.exp(1 - 9 / 7), abs=1e-12)
    assert (found.num_tokens, found.num_reference_tokens) == (7, 9)
    assert found.score == 0


def test_score_by_hand():
    translations = ["a b c d e f", "g h i j"]
    references = ["a b c d x f", "g h i j k"]
    found = corpus_bleu(translations, references, tokenized=True)
    # After the x in the first sentence, only f matches. No n-gram spans two sentences.
    assert found.precisions == pytest.approx((90, 100 * 6 / 8, 100 * 4 / 6, 50), abs=1e-12)
    assert found.brevity_penalty == pytest.approx(math.exp(1 - 11 / 10), abs=1e-12)
    product = 9 / 10 * 6 / 8 * 4 / 6 * 2 / 4
    assert found.score == pytest.approx(100 * math.exp(-0.1) * product**0.25, abs=1e-9)


def test_several_references():
    """Counts are clipped by the largest of a reference; of lengths 4 and 6, 4 is used for 5."""
    found = corpus_bleu(
        ["a a b c d"], ["a b c d x y"], ["a a b c"], ["b c d a z z z z"], tokenized=True
    )
    assert found.precisions == (100, 100, 100, 100)
    assert (found.num_tokens, found.num_reference_tokens) == (5, 4)
    assert found.brevity_penalty == 1 and found.score == pytest.approx(100)


def test_case_counts():
    found = corpus_bleu(["The end"], ["the end"], tokenized=True)
    assert found.precisions[0] == 50
    for tokenized in (True, False):
        upper, lower = ["The end of THE line."], ["the end of the Line."]
        found = corpus_bleu(upper, lower, tokenized=tokenized, lowercase=True)
        assert found.score == pytest.approx(100) and "case:lc" in found.signature
        assert corpus_bleu(upper, lower, tokenized=tokenized).score < 50


def test_only_ascii_space_separates():
    """multi-bleu.perl reads bytes: 5 tokens. White space inside a token must match."""
    found = corpus_bleu(["a 10\u00a0000 b\u3000c d\te"], ["a 10\u00a0000 b c d e"], tokenized=True)
    assert found.num_tokens == 5 and found.num_reference_tokens == 6
    assert found.precisions[0] == pytest.approx(100 * 4 / 5)
    spaces = {chr(c) for c in range(sys.maxunicode + 1) if chr(c).isspace()}
    assert set(map(ord, spaces - set(" \t\n\r\f\v"))) == set(bleu._NO_SPACES)
    for space in spaces:
        words = 2 if space in " \t\n\r\f\v" else 1
        assert corpus_bleu([f"a{space}b"], ["a"], tokenized=True).num_tokens == words
        assert corpus_bleu([f"a{space}"], ["a b"], tokenized=True).num_tokens == 1


def test_signatures():
    default = corpus_bleu(["a b"], ["a b"]).signature
    assert default.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    tokenized = corpus_bleu(["a b"], ["a b"], ["a c"], tokenized=True).signature
    assert tokenized.startswith("nrefs:2|case:mixed|eff:no|tok:none|smooth:none|version:")


def test_numbers_of_sentences():
    with pytest.raises(ValueError, match=r"^corpus_bleu: translations must .*got \[\]$"):
        corpus_bleu([], [])
    with pytest.raises(ValueError, match=r"^corpus_bleu: references must .*got \[\]$"):
        corpus_bleu(["a"])
    with pytest.raises(ValueError, match="^corpus_bleu: translations must .*got 'a b'"):
        corpus_bleu("a b", ["a b"])
    with pytest.raises(ValueError, match="^corpus_bleu: references must .*got 'ab'$"):
        corpus_bleu(["a", "b"], "ab")
    with pytest.raises(ValueError, match=r"^corpus_bleu: references .* of 1 .* got \[1, 2\]$"):
        corpus_bleu(["a"], ["a"], ["a", "b"])


def test_languages_without_spaces_are_cut_into_characters():
    """Six of seven characters match, five of them in sequence; as one word, nothing would match."""
    translation, reference = ["猫が好きです。"], ["猫が好きだ。"]
    assert corpus_bleu(translation, reference).score < 20
    assert "tok:char" in corpus_bleu(translation, reference, language="jpn").signature
    assert "tok:zh" in corpus_bleu(translation, reference, language="zh_Hans-CN").signature
    found = corpus_bleu(translation, reference, language="ja")
    assert (found.num_tokens, found.num_reference_tokens) == (7, 6)
    assert found.precisions == pytest.approx([500 / 7, 300 / 6, 200 / 5, 100 / 4])
    assert "tok:char" in found.signature
    assert "tok:13a" in corpus_bleu(translation, reference, language="ko").signature
