"""BLEU of a corpus (Papineni et al. 2002), computed by sacreBLEU (Post 2018)."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from sacrebleu.metrics.bleu import BLEU, BLEUScore

from moe_ext.checks import require

# Python splits words at these characters; multi-bleu.perl reads bytes and does not. The
# characters are replaced by private-use characters, at which Python does not split.
_NO_SPACES = {
    ord(space): 0x10F000 + number
    for number, space in enumerate(
        "\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009"
        "\u200a\u2028\u2029\u202f\u205f\u3000"
    )
}


class Bleu(NamedTuple):
    """A BLEU score, and how it was computed."""

    score: float  # 100 BP (p_1 p_2 p_3 p_4)^(1/4), where BP = min(1, exp(1 - r/c))
    signature: str  # sacreBLEU's signature of the computation; quote it with the score
    # sacreBLEU's result: 100 p_n (precisions), BP (bp), the numbers of tokens of the translations,
    # c (sys_len), and of the references closest in length, r (ref_len).
    counts: BLEUScore


# sacreBLEU's tokenizers of languages without spaces between words, by ISO 639 code.
_TOKENIZERS = {
    **dict.fromkeys(("ja", "jpn", "th", "tha"), "char"),
    **dict.fromkeys(("zh", "zho", "chi", "cmn", "yue"), "zh"),
}


def corpus_bleu(
    translations: Sequence[str],
    *references: Sequence[str],
    language: str = "",
    tokenized: bool = False,
    lowercase: bool = False,
) -> Bleu:
    """Computes BLEU of a corpus.

    By default, sacreBLEU tokenizes the text, so scores of different papers are comparable. The
    tokenizer is 13a, or characters for Japanese, Chinese and Thai, which have no spaces.

    With tokenized=True, the text is already tokenized and the score equals that of multi-bleu.perl
    (App. E). Tokens are separated by ASCII white space. The score is 0 if no n-gram matches for an
    n from 1 to 4. Such scores depend on the tokenizer of the text.

    Args:
        translations: the translated sentences.
        references: one or several sequences of human translations, in the order of `translations`.
        language: language of the translations, such as "ja", "jpn" or "zh-CN".
        tokenized: whether the sentences are already tokenized.
        lowercase: whether upper and lower case count as equal.
    """
    for name, texts in (("translations", [translations]), ("references", references)):
        for text in texts:
            rule = "be a sequence of sentences"
            require(not isinstance(text, str), f"corpus_bleu: {name}", rule, text)
    number, numbers = len(translations), [len(sentences) for sentences in references]
    require(number >= 1, "corpus_bleu: translations", "contain at least one sentence", translations)
    rule = f"be one or several sequences of {number} sentences"
    require(set(numbers) == {number}, "corpus_bleu: references", rule, numbers)
    if tokenized:
        translations, references = _as_bytes(translations), tuple(map(_as_bytes, references))
        bleu = BLEU(lowercase, tokenize="none", smooth_method="none", force=True)
    else:
        name = re.split("[-_]", language.lower())[0]  # without script and country
        bleu = BLEU(lowercase, tokenize=_TOKENIZERS.get(name, "13a"))
    result = bleu.corpus_score(translations, references)
    return Bleu(result.score, str(bleu.get_signature()), result)


def _as_bytes(sentences: Sequence[str]) -> list[str]:
    """Replaces white space outside ASCII, so that only ASCII white space separates words."""
    return [sentence.translate(_NO_SPACES) for sentence in sentences]
