"""BLEU of a corpus (Papineni et al. 2002), computed by sacreBLEU (Post 2018)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moe_ext.checks import require
from moe_ext.lab.packages import require_package

# Python splits words at these, multi-bleu.perl, which reads bytes, does not: there they are a part
# of a word, as are here the symbols, without any meaning, that they become.
_NO_SPACES = {
    ord(space): 0x10F000 + number
    for number, space in enumerate(
        "\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009"
        "\u200a\u2028\u2029\u202f\u205f\u3000"
    )
}


@dataclass(frozen=True)
class Bleu:
    """The BLEU of translations, and what it is made of.

    Attributes:
        score: 100 BP (p_1 p_2 p_3 p_4)^(1/4).
        precisions: 100 p_n for n = 1, ..., 4, of the translations' n-grams those in a reference.
        brevity_penalty: BP = min(1, exp(1 - r/c)).
        num_tokens: c, of the translations.
        num_reference_tokens: r, of the references closest in length.
        signature: sacreBLEU's name for how it was computed; to be quoted beside the score.
    """

    score: float
    precisions: tuple[float, ...]
    brevity_penalty: float
    num_tokens: int
    num_reference_tokens: int
    signature: str


# Of sacreBLEU, for languages without spaces between words, by their names in ISO 639.
_TOKENIZERS = {
    **dict.fromkeys(("ja", "jpn", "th", "tha"), "char"),
    **dict.fromkeys(("zh", "zho", "chi", "cmn", "yue"), "zh"),
}


def corpus_bleu(
    translations: Sequence[str],
    *references: Sequence[str],
    language: str = "",
    tokenized: bool = False,
) -> Bleu:
    """BLEU of a corpus, case-sensitive.

    By default of text as it is written: sacreBLEU cuts it into tokens (13a; Japanese, Chinese and
    Thai, which have no spaces, into characters), and papers can be compared. Or of text that is
    tokenized already, as by multi-bleu.perl (App. E), with the number that this prints: tokens are
    what stands between white space of ASCII, and an order of n-grams without a match makes it 0.
    Then the tokenizer is a part of the measure.

    Args:
        translations: a sentence each.
        references: one or several translations by people of all sentences, in the same order.
        language: of the translations, such as "ja", "jpn" or "zh-CN".
        tokenized: whether the sentences are tokenized.

    Raises:
        ImportError: sacreBLEU is not installed.
        ValueError: there are no translations or references, or they differ in number.
    """
    BLEU = import_bleu()
    for name, sentences in (
        ("translations", translations),
        *(("references", r) for r in references),
    ):
        require(not isinstance(sentences, str), f"corpus_bleu: {name}", "be several", sentences)
    number = len(translations)
    require(number >= 1, "corpus_bleu: translations", "be at least one sentence", translations)
    numbers = [len(sentences) for sentences in references]
    require(
        set(numbers) == {number},
        "corpus_bleu: references",
        f"be one or several of {number} sentences each",
        numbers,
    )
    if tokenized:
        translations = _as_bytes(translations)
        references = tuple(map(_as_bytes, references))
        bleu = BLEU(tokenize="none", smooth_method="none", force=True)
    else:
        name = re.split("[-_]", language.lower())[0]  # without script and country
        bleu = BLEU(tokenize=_TOKENIZERS.get(name, "13a"))
    found = bleu.corpus_score(translations, references)
    return Bleu(
        found.score,
        tuple(found.precisions),
        found.bp,
        found.sys_len,
        found.ref_len,
        str(bleu.get_signature()),
    )


def import_bleu() -> Any:
    """sacreBLEU's class.

    Raises:
        ImportError: it is not installed.
    """
    return require_package("corpus_bleu", "sacrebleu.metrics", "translation").BLEU


def _as_bytes(sentences: Sequence[str]) -> list[str]:
    """With the words of a program that knows no white space beyond ASCII's."""
    return [sentence.translate(_NO_SPACES) for sentence in sentences]
