"""Claims of the paper, and the verdicts of a study on them."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from moe_lab.experiments.page import Claims
from moe_lab.experiments.runs import PairedDifference
from moe_lab.markdown import markdown_table

SUPPORTED, CONTRADICTED, NOT_DECIDED = "supported", "contradicted", "not decided"  # verdicts

# Sentences of the studies' pages.
HOW_COMPARED = (
    "The perplexity over several seeds is exp of the mean of ln ppl. A difference is the mean over "
    "the seeds that both models have. With three seeds or more, its 95% t interval follows in "
    "brackets."
)
HOW_DECIDED = (
    "A claim is supported if the whole interval lies below zero, contradicted if it lies above "
    "zero, and otherwise not decided."
)


class Claim(NamedTuple):
    """A claim of the paper and the result of the study."""

    claim: str
    compared: str  # the models
    difference: PairedDifference | None  # in ln ppl; negative if the claim holds


class Judged(NamedTuple):
    """A claim with the text of its difference and its own verdict."""

    claim: str
    compared: str
    difference: PairedDifference | None
    shown: str
    verdict: str


def verdict(difference: PairedDifference | None, low: float = -math.inf, high: float = 0.0) -> str:
    """Judges the claim that a difference is between low and high, by default below zero.

    The claim is supported if the confidence interval of the difference lies inside (low, high),
    contradicted if it lies outside, and otherwise not decided.
    """
    if difference is None or difference.low is None or difference.high is None:
        return NOT_DECIDED
    if low < difference.low and difference.high < high:
        return SUPPORTED
    return CONTRADICTED if difference.low > high or difference.high < low else NOT_DECIDED


def percent(difference: float) -> float:
    return 100 * math.expm1(difference)


def as_change(difference: PairedDifference | None) -> str:
    """Formats a difference of ln ppl as a change of the perplexity in per cent."""
    if difference is None:
        return ""
    return difference.text(lambda value: f"{percent(value):+.2f}", "%")


def as_percent(difference: PairedDifference | None) -> str:
    """Formats a relative difference in per cent."""
    return "" if difference is None else difference.text(lambda gap: f"{100 * gap:+.1f}", "%")


def claims_data(claims: Iterable[NamedTuple]) -> list[dict[str, Any]]:
    """Converts claims, or other tuples with differences, to data for JSON."""
    return [
        {
            name: asdict(value) if isinstance(value, PairedDifference) else value
            for name, value in claim._asdict().items()
        }
        for claim in claims
    ]


def claims_of(
    claims: Sequence[Claim],
    title: str = "perplexity, 95%",
    shown: Callable[[PairedDifference | None], str] = as_change,
    low: float = -math.inf,
    high: float = 0.0,
) -> Claims:
    """Makes the part of a page with claims, which differences in (low, high) support."""
    rows = [[claim, what, shown(gap), verdict(gap, low, high)] for claim, what, gap in claims]
    return Claims(_table(rows, title), claims_data(claims))


def judged(claims: Sequence[Judged]) -> Claims:
    """Makes the part of a page with claims that have their own ranges."""
    rows = [[claim, what, shown, verdict] for claim, what, _, shown, verdict in claims]
    return Claims(_table(rows, "difference, 95%"), claims_data(claims))


def _table(rows: Iterable[Sequence[str]], title: str) -> str:
    return markdown_table(["claim", "compared", title, "verdict"], rows)
