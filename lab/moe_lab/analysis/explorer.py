"""Formats expert reports as text and as an HTML page, the expert explorer (Table 9)."""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from moe_lab.analysis.experts import ExpertReport
from moe_lab.analysis.routed_text import RoutedText
from moe_lab.files import json_text

_TEMPLATE = Path(__file__).with_name("explorer.html")
_GATE_BINS = 20  # of the histograms


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


class ExpertPage:
    """Builds the expert explorer: one HTML page that loads no other file.

    The page shows one MoE layer at a time, with sentences that are chosen at random. All layers of
    the same text have the same sentences. `spelling` has the words in the order of their ids.
    """

    def __init__(
        self, spelling: Sequence[str], title: str, *, pieces: bool, num_sentences: int = 200
    ) -> None:
        self._spelling = spelling
        self._title = title
        self._has_pieces = pieces
        self._num_sentences = num_sentences
        self._layers: list[dict[str, Any]] = []
        self._index: dict[str, int] = {}

    def add_layer(self, name: str, routed: RoutedText, reports: Sequence[ExpertReport]) -> None:
        # Models that scale their gates have gates above 1. A gate of 1 may be rounded up.
        gate_end = max(1, math.ceil(routed.gate.max() - 0.01)) if len(routed.gate) else 1
        bins = (routed.gate / gate_end * _GATE_BINS).long().clamp(0, _GATE_BINS - 1)
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
                "words": [
                    [self._index_of(w.word), w.times, round(w.share, 4)] for w in report.words
                ],
                "contexts": [
                    [round(c.gate, 4), *map(self._index_of, c.words)] for c in report.contexts
                ],
                "gates": gates[report.expert],
                "pairs": [[p.name, round(p.share, 6), round(p.expected, 6)] for p in report.pairs],
                "pair_information": round(report.pair_information, 4),
            }
            for report in reports
        ]
        self._layers.append(
            {
                "name": name,
                "tokens": len(routed.windows),
                "experts_per_token": len(routed.expert) / len(routed.windows),
                "gate_end": gate_end,
                "experts": experts,
                "sentences": self._sentences(routed),
            }
        )

    def html(self) -> str:
        data = {
            "title": self._title,
            "pieces": self._has_pieces,
            "pairs": any(expert["pairs"] for layer in self._layers for expert in layer["experts"]),
            "layers": self._layers,
            "words": list(self._index),
        }
        text = json_text(data, separators=(",", ":"))
        for character in "<>&":  # no word of the corpus can end the script element
            text = text.replace(character, f"\\u{ord(character):04x}")
        return _TEMPLATE.read_text("utf-8").replace("{{data}}", text)

    def _index_of(self, word: str) -> int:
        return self._index.setdefault(word, len(self._index))

    def _sentences(self, routed: RoutedText) -> list[dict[str, Any]]:
        """Returns random sentences; a token is [word, expert, gate, ...], highest gate first."""
        order, count = routed.slots_by_position()
        experts, gates = routed.expert[order].tolist(), routed.gate[order].tolist()
        begins, ends = (count.cumsum(0) - count).tolist(), count.cumsum(0).tolist()
        words = routed.words.tolist()

        def token(position: int) -> list[float]:
            slots = range(begins[position], ends[position])
            choices = (value for slot in slots for value in (experts[slot], round(gates[slot], 4)))
            return [self._index_of(self._spelling[words[position]]), *choices]

        def pair(position: int) -> str:
            return "" if routed.pair is None else routed.pair_names[routed.pair[position]]

        sentences = routed.sentences()
        number = min(self._num_sentences, len(sentences))
        return [
            {"pair": pair(positions.start), "tokens": list(map(token, positions))}
            for positions in random.Random(0).sample(sentences, number)
        ]
