"""Formats expert reports as text and as an HTML page, the expert explorer (Table 9)."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from moe_ext.lab.analysis.experts import ExpertReport
from moe_ext.lab.analysis.routed_text import RoutedText
from moe_ext.lab.data import AnyVocabulary, Wordpieces

_TEMPLATE = Path(__file__).with_name("explorer.html")
_GATE_BINS = 20  # of the histograms, from 0 to 1


def as_text(reports: Sequence[ExpertReport]) -> str:
    """Formats the reports as plain text, one paragraph for each expert."""
    lines = []
    for report in reports:
        lines.append(
            f"expert {report.expert}: {100 * report.share:.2f}% of the tokens, "
            f"information {report.information:.2f} nats, purity {report.purity:.2f}"
        )
        words = ", ".join(f"{w.word} ({100 * w.share:.0f}%)" for w in report.words)
        lines.append(f"  words: {words}")
        if report.pairs:
            pairs = ", ".join(
                f"{p.name} {100 * p.share:.1f}% ({100 * p.expected:.1f}%)" for p in report.pairs
            )
            information = f"{report.pair_information:.2f} nats"
            lines.append(f"  language pairs (of all tokens), {information}: {pairs}")
        for c in report.contexts:
            lines.append(f"  {c.gate:.2f}  {c.before:>30} [{c.word}] {c.after}")
        lines.append("")
    return "\n".join(lines)


def as_html(
    routed: RoutedText,
    reports: Sequence[ExpertReport],
    vocabulary: AnyVocabulary,
    title: str,
    *,
    num_sentences: int = 200,
) -> str:
    """Builds the expert explorer: one HTML page that loads no other file.

    Args:
        routed: the routed text that the reports describe.
        reports: the reports from `expert_reports`, in any order.
        vocabulary: the vocabulary of the model.
        title: the heading of the page.
        num_sentences: the number of sentences on the page, chosen at random.
    """
    data = _explorer_data(routed, reports, vocabulary, num_sentences)
    text = json.dumps({"title": title, **data}, separators=(",", ":"))
    for character in "<>&":  # no word of the corpus can end the script element
        text = text.replace(character, f"\\u{ord(character):04x}")
    return _TEMPLATE.read_text("utf-8").replace("{{data}}", text)


def _explorer_data(
    routed: RoutedText, reports: Sequence[ExpertReport], vocabulary: AnyVocabulary, number: int
) -> dict[str, Any]:
    """Returns the data of the page; a word is an index into the list "words"."""
    index: dict[str, int] = {}

    def index_of(word: str) -> int:
        return index.setdefault(word, len(index))

    bins = (routed.gate * _GATE_BINS).long().clamp(0, _GATE_BINS - 1)
    cells = torch.bincount(
        routed.expert * _GATE_BINS + bins, minlength=routed.num_experts * _GATE_BINS
    )
    gates = cells.view(-1, _GATE_BINS).tolist()
    experts = [
        {
            "number": report.expert,
            "share": round(report.share, 6),
            "information": round(report.information, 4),
            "purity": round(report.purity, 4),
            "words": [[index_of(w.word), w.times, round(w.share, 4)] for w in report.words],
            "contexts": [[round(c.gate, 4), *map(index_of, c.words)] for c in report.contexts],
            "gates": gates[report.expert],
            "pairs": [[p.name, round(p.share, 6), round(p.expected, 6)] for p in report.pairs],
            "pair_information": round(report.pair_information, 4),
        }
        for report in reports
    ]
    return {
        "tokens": len(routed.windows),
        "experts_per_token": len(routed.expert) / len(routed.windows),
        "pieces": isinstance(vocabulary, Wordpieces),
        "pairs": bool(routed.pair_names),
        "experts": experts,
        "sentences": _sentences(routed, vocabulary, number, index_of),
        "words": list(index),
    }


def _sentences(
    routed: RoutedText,
    vocabulary: AnyVocabulary,
    number: int,
    index_of: Callable[[str], int],
) -> list[dict[str, Any]]:
    """Returns random sentences; a token is [word, expert, gate, ...], highest gate first."""
    order, count = routed.slots_by_position()
    experts, gates = routed.expert[order].tolist(), routed.gate[order].tolist()
    begins, ends = (count.cumsum(0) - count).tolist(), count.cumsum(0).tolist()
    words, spelling = routed.words.tolist(), vocabulary.words

    def token(position: int) -> list[float]:
        slots = range(begins[position], ends[position])
        choices = (value for slot in slots for value in (experts[slot], round(gates[slot], 4)))
        return [index_of(spelling[words[position]]), *choices]

    sentences = routed.sentences()
    return [
        {
            "pair": "" if routed.pair is None else routed.pair_names[routed.pair[positions.start]],
            "tokens": list(map(token, positions)),
        }
        for positions in random.Random(0).sample(sentences, min(number, len(sentences)))
    ]
