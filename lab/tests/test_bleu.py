"""BLEU, compared with hand-worked numbers and with multi-bleu.perl."""

import math
import sys

import pytest
from moe_lab.decoding import bleu
from moe_lab.decoding.bleu import corpus_bleu

BY_HAND = [  # translations, references, precisions, number of tokens, and of the references
    # "the" counts twice, not three times; "the cat" and "on mats" match, no 3-grams or 4-grams.
    (
        ["the the the cat sat", "on mats"], [["the cat and the dog sat down", "on mats"]],
        (600 / 7, 200 / 5, 0, 0), 7, 9,
    ),
    # After the x in the first sentence, only f matches. No n-gram spans two sentences.
    (["a b c d e f", "g h i j"], [["a b c d x f", "g h i j k"]], (90, 75, 400 / 6, 50), 10, 11),
    # Counts are clipped by the largest of a reference; of lengths 4 and 6, 4 is used for 5.
    (["a a b c d"], [["a b c d x y"], ["a a b c"], ["b c d a z z z z"]], (100,) * 4, 5, 4),
    (["The end"], [["the end"]], (50, 0, 0, 0), 2, 2),
    # multi-bleu.perl reads bytes: 5 tokens. White space inside a token must match.
    (
        ["a 10\u00a0000 b\u3000c d\te"], [["a 10\u00a0000 b c d e"]],
        (80, 50, 0, 0), 5, 6,
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("translations", "references", "precisions", "tokens", "ref_tokens"), BY_HAND
)
def test_tokenized_bleu_by_hand(translations, references, precisions, tokens, ref_tokens):
    bleu = corpus_bleu(translations, *references, tokenized=True)
    assert bleu.counts.precisions == pytest.approx(precisions, abs=1e-12)
    assert (bleu.counts.sys_len, bleu.counts.ref_len) == (tokens, ref_tokens)
    brevity = math.exp(min(0, 1 - ref_tokens / tokens))
    assert bleu.counts.bp == pytest.approx(brevity, abs=1e-12)
    assert bleu.score == pytest.approx(brevity * math.prod(precisions) ** 0.25, abs=1e-9)


@pytest.mark.parametrize("tokenized", [True, False])
def test_lowercase(tokenized):
    upper, lower = ["The end of THE line."], ["the end of the Line."]
    bleu = corpus_bleu(upper, lower, tokenized=tokenized, lowercase=True)
    assert bleu.score == pytest.approx(100) and "case:lc" in bleu.signature
    assert corpus_bleu(upper, lower, tokenized=tokenized).score < 50


def test_only_ascii_space_separates():
    spaces = {chr(c) for c in range(sys.maxunicode + 1) if chr(c).isspace()}
    assert set(map(ord, spaces - set(" \t\n\r\f\v"))) == set(bleu._NO_SPACES)
    for space in spaces:
        words = 2 if space in " \t\n\r\f\v" else 1
        assert corpus_bleu([f"a{space}b"], ["a"], tokenized=True).counts.sys_len == words
        assert corpus_bleu([f"a{space}"], ["a b"], tokenized=True).counts.sys_len == 1


def test_signatures():
    """Tokenizer 13a separates punctuation; tokenized text is not changed."""
    default = corpus_bleu(["a b."], ["a b"])
    assert default.signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    tokenized = corpus_bleu(["a b."], ["a b"], ["a c"], tokenized=True)
    assert tokenized.signature.startswith("nrefs:2|case:mixed|eff:no|tok:none|smooth:none|version:")
    assert (default.counts.sys_len, tokenized.counts.sys_len) == (3, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], []), r"translations must .*got \[\]$"),
        ((["a"],), r"references must .*got \[\]$"),
        (("a b", ["a b"]), "translations must .*got 'a b'"),
        ((["a", "b"], "ab"), "references must .*got 'ab'$"),
        ((["a"], ["a"], ["a", "b"]), r"references .* of 1 .* got \[1, 2\]$"),
    ],
)
def test_numbers_of_sentences(arguments, message):
    with pytest.raises(ValueError, match=f"^corpus_bleu: {message}"):
        corpus_bleu(*arguments)


def test_languages_without_spaces_are_cut_into_characters():
    """Six of seven characters match, five of them in sequence; as one word, nothing would match."""
    translation, reference = ["猫が好きです。"], ["猫が好きだ。"]
    assert corpus_bleu(translation, reference).score < 20
    signatures = {"jpn": "char", "zh_Hans-CN": "zh", "ja": "char", "ko": "13a"}
    for language, tokenizer in signatures.items():
        bleu = corpus_bleu(translation, reference, language=language)
        assert f"tok:{tokenizer}" in bleu.signature
    bleu = corpus_bleu(translation, reference, language="ja")
    assert (bleu.counts.sys_len, bleu.counts.ref_len) == (7, 6)
    assert bleu.counts.precisions == pytest.approx([500 / 7, 300 / 6, 200 / 5, 100 / 4])
