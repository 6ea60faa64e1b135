"""What the experts see, as text and as a page (Table 9)."""

from collections.abc import Sequence

from moe_ext.lab.analysis.experts import ExpertReport
from moe_ext.lab.data import AnyVocabulary, Wordpieces
from moe_ext.lab.packages import require_package

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 70em; }
section { border-top: 1px solid #ccc; padding: .6em 0; display: grid; gap: 2em; }
section { grid-template-columns: 22em 1fr; }
h2 { font-size: 1.1em; margin: 0 0 .3em; }
table { border-collapse: collapse; }
td, th { padding: 0 .5em; text-align: left; font-weight: normal; }
th, .n, p.note { color: #777; }
.n { text-align: right; font-variant-numeric: tabular-nums; }
td.left { text-align: right; }
td.word { font-weight: 600; background: #fff3c4; text-align: center; }
@media (max-width: 50em) { section { grid-template-columns: 1fr; } }
</style></head><body>
<h1>{{ title }}</h1>
<p class="note">{{ legend }}</p>
{% for e in reports %}
<section id="expert-{{ e.expert }}">
<div><h2>Expert {{ e.expert }}</h2>
<p>{{ "%.2f%%"|format(100 * e.share) }} of the tokens; information
{{ "%.2f"|format(e.information) }} nats; purity {{ "%.2f"|format(e.purity) }}</p>
<table><tr><th>word</th><th class="n">times</th><th class="n">of all its</th></tr>
{% for w in e.words %}
<tr><td>{{ w.word }}</td><td class="n">{{ "{:,}".format(w.times) }}</td>
<td class="n">{{ "%.0f%%"|format(100 * w.share) }}</td></tr>
{% endfor %}
</table>{% if e.pairs %}
<p>Language pair: {{ "%.2f"|format(e.pair_information) }} nats</p>
<table><tr><th>pair</th><th class="n">of its tokens</th><th class="n">of all tokens</th></tr>
{% for p in e.pairs %}
<tr><td>{{ p.name }}</td><td class="n">{{ "%.1f%%"|format(100 * p.share) }}</td>
<td class="n">{{ "%.1f%%"|format(100 * p.expected) }}</td></tr>
{% endfor %}
</table>{% endif %}</div>
<table><tr><th class="n">gate</th><th></th><th></th><th></th></tr>
{% for c in e.contexts %}
<tr><td class="n">{{ "%.2f"|format(c.gate) }}</td>
<td class="left">{{ c.before }}</td>
<td class="word">{{ c.word }}</td>
<td>{{ c.after }}</td></tr>
{% endfor %}
</table>
</section>
{% endfor %}
</body></html>
"""

_LEGEND = (
    "Share: tokens that go through the expert. Information: how much the current word tells "
    "the expert's tokens from all tokens (Kullback-Leibler divergence in nats, less its value for "
    "shuffled words). Purity: share of the most frequent word among the 50 highest gates. Words: "
    "those that contribute most to the information, and the part of all their occurrences that "
    "the expert gets."
)
_PIECES = ' Words are wordpieces: where "▁" stands a word begins.'
_PAIRS = (
    " Language pairs: what each has of the expert's tokens and of all tokens, and how much it "
    "tells the ones from the others (Kullback-Leibler divergence in nats)."
)


def _legend_of(reports: Sequence[ExpertReport], vocabulary: AnyVocabulary) -> str:
    """What the words and numbers are."""
    pieces = _PIECES if isinstance(vocabulary, Wordpieces) else ""
    return _LEGEND + pieces + (_PAIRS if any(report.pairs for report in reports) else "")


def as_text(reports: Sequence[ExpertReport]) -> str:
    """The reports as plain text, one paragraph for each expert."""
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


def as_html(reports: Sequence[ExpertReport], vocabulary: AnyVocabulary, title: str) -> str:
    """The reports as one HTML page that needs no other file; vocabulary is the model's."""
    jinja2 = require_package("as_html", "jinja2", "train")
    template = jinja2.Environment(autoescape=True).from_string(_PAGE)
    legend = _legend_of(reports, vocabulary)
    return template.render(title=title, legend=legend, reports=reports)
