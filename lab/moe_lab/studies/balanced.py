"""Trains a model with strictly balanced gates and compares its two kinds of masks (App. F).

    moe-lab study balanced data.corpus=CORPUS
    moe-lab study balanced steps=500 --output runs/balanced
    moe-lab study balanced --report

Trains configs/small/moe-32-balanced.toml. The study stops if an expert does not get exactly m =
round(k·T/E) tokens of a training batch. The page has

- the dev perplexity under the threshold mask and under the batchwise mask, at several steps
- the fraction of assignments in which the two masks disagree
- the fraction of tokens without an expert

The page shows the first seed; the default is the single seed 1.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moe_lab.experiments.arms import study_parser

if TYPE_CHECKING:
    from moe_lab.experiments.store import Stored

MODEL = "moe-32-balanced"


def main(arguments: Sequence[str] | None = None) -> "Stored":
    """Runs the study and returns the stored runs."""
    parser = study_parser(__doc__, "balanced", [MODEL])
    parser.set_defaults(seeds=[1])
    options = parser.parse_intermixed_args(arguments)

    from moe_lab.studies._balanced import Balanced

    return Balanced(options).main()
