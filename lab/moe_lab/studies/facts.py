"""Measures how many bits of facts a layer stores with its parameters, at equal operations (Sec. 1).

    moe-lab study facts
    moe-lab study facts --seeds 1 --arms dense moe-4 moe-16
    moe-lab study facts --report

A fact is a random key and a random value, so that only memory can answer. A key is a vector of 16
normal numbers, a value one of 256 fixed random vectors. Seed and number of facts determine the
corpus. The layer maps the key to a vector, and the softmax of its products with the 256 vectors
predicts the value. Only the layer is trained. Of N facts, it stores these bits:

    N · (log2(256) - mean of -log2 p(value | key))          at least 0

A corpus has 2 bits for each parameter of its layer, more than the layer can store. The mixtures
have 4 to 1,024 experts in groups (App. B), with 2 experts in each of 2 groups for each fact. The
dense layer has as many operations as the largest mixture. An arm such as "moe-16 x2" has a corpus
of twice that size. One seed takes 3 minutes on an idle processor.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from moe_lab.cli import at_least, positive
from moe_lab.experiments.arms import Arm, study_parser

if TYPE_CHECKING:
    from moe_lab.experiments.store import Stored

NUM_EXPERTS = (4, 16, 64, 256, 1024)
DENSE, MIXTURES = "dense", tuple(f"moe-{number}" for number in NUM_EXPERTS)

# One mixture also learns corpora of other sizes, to show that the usual one exceeds its capacity.
SATURATION, SIZES = "moe-16", (0.25, 0.5, 2.0, 4.0)
MODELS = (DENSE, *MIXTURES)
ARMS = (*map(Arm, MODELS), *(Arm(SATURATION, times=size) for size in SIZES))


class Settings(NamedTuple):
    """Options that all runs share.

    Attributes:
        bits: bits of the facts for each parameter of the layer.
        epochs: number of epochs.
        logit_std: standard deviation of the gates' logits at the start. The standard deviation of
            their noise is Softplus(0) = 0.69 at the start.
        rate: peak learning rate of the mixtures.
        dense_rate: peak learning rate of the dense layer.
    """

    bits: float = 2.0
    epochs: int = 50
    logit_std: float = 3.0
    rate: float = 0.03
    dense_rate: float = 0.015


def main(arguments: Sequence[str] | None = None) -> "Stored":
    """Runs the study and returns the stored runs."""
    parser = study_parser(__doc__, "facts", MODELS, settings=["times"], overrides=False)
    parser.set_defaults(arms=[*ARMS])
    for name, what in (
        ("epochs", "number of epochs"),
        ("bits", "bits of the facts for each parameter"),
        ("logit_std", "standard deviation of the gates' logits at the start"),
        ("rate", "peak learning rate of the mixtures"),
        ("dense_rate", "peak learning rate of the dense layer"),
    ):
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=at_least(1) if name == "epochs" else positive(),
            default=Settings._field_defaults[name],
            help=f"{what} (%(default)s)",
        )
    options = parser.parse_args(arguments)

    from moe_lab.studies._facts import FactsStudy

    return FactsStudy(options).main()
