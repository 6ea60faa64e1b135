"""Compares models with 4 to 256 experts at equal operations (Figs. 2 and 3, Table 7).

    moe-lab study capacity
    moe-lab study capacity --seeds 4 --arms "moe-64 x4" "4xlstm x4 rate 0.016"
    moe-lab study capacity --text prose data.corpus=CORPUS
    moe-lab study capacity --text languages data.corpus=CORPUS
    moe-lab study capacity --report

The models are those of configs/small, with a width of 96, without dropout, on wordpieces with the
full softmax. The text has Python code, C++ headers and documentation. With --text prose,
data.corpus has English prose. With --text languages, it is the corpus of `moe-lab prepare-data
languages`, which has English and six other languages.

The models with " x4" in their names train for four times the steps. Those with " rate" or
" dropout" have other options; "experts 0.008" is the learning rate of the experts. --arms selects
such models. The page compares each model at the options with the lowest dev perplexity. A run takes
3 to 30 minutes on an idle processor.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from moe_lab.experiments.arms import study_parser

if TYPE_CHECKING:
    from moe_lab.experiments.store import Stored

MIXTURES = {"moe-4": 4, "moe-16": 16, "moe-64": 64, "moe-256-h": 256}  # numbers of experts
DENSE = ("moe-1-wide", "moe-1-deep", "4xlstm", "lstm-384-96")  # of equal operations
LARGE, LARGE_BASE = "moe-64-2x", "moe-64"  # a mixture of twice the operations
MODELS = (*MIXTURES, *DENSE, LARGE)


class Kind(NamedTuple):
    """A kind of text.

    Attributes:
        title: the title of the page.
        contents: what the text contains.
    """

    title: str
    contents: str


TEXTS = {
    "sources": Kind("code and documentation", "Python code, C++ headers and documentation"),
    "prose": Kind("English prose", "English prose"),
    "languages": Kind("seven languages", "sentences of English and six other languages"),
}


def main(arguments: Sequence[str] | None = None) -> "Stored":
    """Runs the study and returns the stored runs."""
    settings = ("times", "rate", "expert_rate", "dropout")
    parser = study_parser(__doc__, "capacity", MODELS, settings=settings)
    parser.add_argument("--text", choices=TEXTS, default="sources", help="the kind of the corpus")
    options = parser.parse_intermixed_args(arguments)

    from moe_lab.studies._capacity import Capacity

    return Capacity(options).main()
