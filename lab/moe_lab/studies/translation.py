"""Compares translation models with and without experts, at small scale (Fig. 4, Tables 2 to 4).

    moe-lab study translation data.corpus=CORPUS
    moe-lab study translation data.corpus=CORPUS --seeds 1 --arms none "none rate 0.008"
    moe-lab study translation --text manuals --pair en-fr data.corpus=CORPUS
    moe-lab study translation --report

Trains the models of configs/mt/small-MODEL.toml for one language pair:

- moe-32: MoE layers with noisy top-k gates
- moe-32-balanced: MoE layers with strictly balanced gates
- dense: dense layers with equal operations instead of MoE layers; the paper has no such model
- none: neither MoE layers nor dense layers; the paper's baseline

The arm "none rate 0.008" is the model none with another learning rate, "none dropout 0.1" with
another dropout. --arms selects such arms.

By default, the corpus is Multi30k, with captions of images. CORPUS is a folder with its files
train, val and test_2016_flickr. The corpus of --text manuals has manuals, help and descriptions of
packages; there, the models have a vocabulary of 8,000 wordpieces, no dropout and 2,500 steps. A run
takes 15 to 45 minutes on one processor. The page shows ten unedited translations of each model.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moe_lab.experiments.arms import study_parser

if TYPE_CHECKING:
    from moe_lab.experiments.store import Stored

MIXTURE, BALANCED, DENSE, NONE = "moe-32", "moe-32-balanced", "dense", "none"
MODELS = (MIXTURE, BALANCED, DENSE, NONE)
TEXTS = {  # what the corpora contain
    "captions": "captions of images, the public corpus Multi30k",
    "manuals": "manuals, help and descriptions of packages",
}


def main(arguments: Sequence[str] | None = None) -> "Stored":
    """Runs the study and returns the stored runs."""
    parser = study_parser(__doc__, "translation", MODELS, settings=["rate", "dropout"])
    parser.add_argument("--text", choices=TEXTS, default="captions", help="the kind of the corpus")
    parser.add_argument("--pair", default="en-de", help="the language pair, such as en-de")
    options = parser.parse_intermixed_args(arguments)

    from moe_lab.studies._translation import Translation

    return Translation(options).main()
