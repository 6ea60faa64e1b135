"""Compares values of w_importance and w_load, at small scale (Table 6).

    moe-lab study losses data.corpus=CORPUS
    moe-lab study losses data.corpus=CORPUS --seeds 1 2 --arms 0,0 0.1,0.1
    moe-lab study losses --report

Trains configs/small/moe-32.toml on 3.1 million words for each seed and for six settings of
w_importance,w_load. The page has the perplexity, and the experts' load balance over the last 50
training batches. A run takes 3 minutes on one processor.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moe_lab.experiments.arms import study_parser

if TYPE_CHECKING:
    from moe_lab.experiments.store import Stored

NONE, USUAL = "0,0", "0.1,0.1"  # w_importance,w_load
WEIGHTS = (NONE, "0.2,0", "0,0.2", USUAL, "0.01,0.01", "1,1")


def main(arguments: Sequence[str] | None = None) -> "Stored":
    """Runs the study and returns the stored runs."""
    options = study_parser(__doc__, "losses", WEIGHTS).parse_intermixed_args(arguments)

    from moe_lab.studies._routing import Losses

    return Losses(options).main()
