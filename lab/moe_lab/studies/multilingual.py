"""Compares translation models for one and for several language pairs (Table 5, small scale).

    moe-lab study multilingual data.corpus=CORPUS
    moe-lab study multilingual data.corpus=CORPUS --arms moe dense --seeds 1
    moe-lab study multilingual --text manuals data.corpus=CORPUS --arms moe-oversampled
    moe-lab study multilingual --report

Trains the models of configs/mt/small-moe-32.toml and small-dense.toml with one shared vocabulary of
wordpieces:

- moe: MoE layers with 32 experts, trained on all language pairs together
- dense: dense layers with equal operations instead of MoE layers, trained on all language pairs
- single: a separate dense model for each language pair, which sees about twice as much text of its
  pair as the multilingual models
- single-short: the model single with half the steps, and so about as much text of its pair as the
  multilingual models
- moe-oversampled: the model moe, with every language pair oversampled to the size of the largest;
  --arms selects it, for --text manuals, whose pairs differ in size

With captions, the attention of the multilingual models does not see the token ``<2xx>``, with which
each source begins. It sees this token in the arms "moe attends language" and "dense attends
language". The arm "dense rate 0.002" is the model dense with another learning rate, "moe dropout
0.3" with another dropout. --arms selects such arms.

By default, the corpus is Multi30k, with captions of images in English, German and French. CORPUS is
a folder with its files train, val and test_2016_flickr. The corpus of --text manuals has manuals,
help and descriptions of packages, in English to and from six languages. There, the models have a
vocabulary of 16,000 wordpieces, no dropout and half the learning rate. A multilingual run takes 40
minutes on one processor. The page has perplexity and BLEU of each language pair. Its plot shows the
two pairs with the least text.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moe_lab.experiments.arms import study_parser
from moe_lab.studies.translation import TEXTS

if TYPE_CHECKING:
    from moe_lab.experiments.store import Stored

MIXTURE, DENSE, OVERSAMPLED = "moe", "dense", "moe-oversampled"
SINGLE, SHORT = "single", "single-short"  # a model of each language pair
MODELS = (MIXTURE, DENSE, SINGLE, SHORT, OVERSAMPLED)
USUAL = (MIXTURE, DENSE, SINGLE)


def main(arguments: Sequence[str] | None = None) -> "Stored":
    """Runs the study and returns the stored runs."""
    settings = ("attends_language", "rate", "dropout")
    parser = study_parser(__doc__, "multilingual", MODELS, USUAL, settings)
    parser.add_argument("--text", choices=TEXTS, default="captions", help="the kind of the corpus")
    options = parser.parse_intermixed_args(arguments)

    from moe_lab.studies._multilingual import Multilingual

    return Multilingual(options).main()
