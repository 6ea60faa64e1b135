"""Compares the routers of the paper and of later papers, at small scale and equal operations.

    moe-lab study routers data.corpus=CORPUS
    moe-lab study routers data.corpus=CORPUS --seeds 1 --arms "noisy rate 0.004"
    moe-lab study routers --report

Trains configs/small/moe-32.toml on 3.1 million words with five routers:

- noisy: noisy top-k gating with the paper's two losses (Sec. 2.1 and 4).
- switch: softmax, top k without noise, and the switch loss (arXiv 2101.03961).
- bias: sigmoid, top k and a selection bias instead of a loss (arXiv 2408.15664).
- balanced: strictly balanced gating (App. F).
- expert_choice: each expert selects its words (arXiv 2202.09368). It is not causal: the experts of
  a word depend on later words. So its perplexity is not that of a language model.

An arm such as "noisy rate 0.004" has another peak learning rate; --arms selects such arms. A run
takes 3 minutes on one processor.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moe_lab.experiments.arms import study_parser

if TYPE_CHECKING:
    from moe_lab.experiments.store import Stored

PAPER, NOT_CAUSAL = "noisy", "expert_choice"
_WITHOUT_LOSSES = ("model.moe.w_importance=0", "model.moe.w_load=0")
ROUTERS: dict[str, tuple[str, ...]] = {  # the overrides of each router
    PAPER: (),
    "switch": (*_WITHOUT_LOSSES, "model.moe.gate=topk", "model.moe.w_switch=0.01"),
    "bias": (
        *_WITHOUT_LOSSES,
        "model.moe.gate=topk",
        "model.moe.score=sigmoid",
        "model.moe.bias_update_rate=1e-3",
    ),
    "balanced": (
        "model.moe.gate=balanced",
        "model.moe.w_load=0",
        "optimizer.threshold_learning_rate=1e-3",
    ),
    NOT_CAUSAL: (*_WITHOUT_LOSSES, "model.moe.gate=expert_choice"),
}


def main(arguments: Sequence[str] | None = None) -> "Stored":
    """Runs the study and returns the stored runs."""
    parser = study_parser(__doc__, "routers", [*ROUTERS], settings=["rate"])
    options = parser.parse_intermixed_args(arguments)

    from moe_lab.studies._routing import Routers

    return Routers(options).main()
