"""Compares the training speed of sparse and dense models, at small scale (Sec. 5.1).

    moe-lab study efficiency                     # one thread; needs 6 GiB of memory
    moe-lab study efficiency --threads 2 --rounds 20 --output runs/efficiency
    moe-lab study efficiency --report

The study measures these run times in interleaved rounds:

1. Training steps of mixtures and of dense models, at the paper's width, on random words.
2. Forward and backward pass of a MoE layer and of a dense layer. With more experts, each expert
   gets fewer rows.
3. A MoE layer on all time steps of a batch at once (Sec. 3.1), and in one call for each time step.

The compared models have equal operations. Speed is in GFLOP/s and counted as in the paper: only the
operations of GEMMs, with a backward pass of twice the forward pass. The command writes
efficiency.md, .json and .png to the folder OUTPUT; --report writes page and plot from the file.
"""

from collections.abc import Sequence
from typing import Any

from moe_lab.cli import add_output, at_least, make_parser
from moe_lab.experiments.arms import add_report


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs the study and returns the measurements as data for JSON."""
    parser = make_parser(__doc__)
    for name, least, default, what in (
        ("--threads", 1, 1, "number of threads"),
        ("--rounds", 2, 20, "interleaved rounds"),
        ("--width", 1, 512, "d_model"),
    ):
        help_text = f"{what} (%(default)s)"
        parser.add_argument(name, type=at_least(least), default=default, help=help_text)
    parser.add_argument(
        "--tokens",
        type=at_least(64),
        nargs="+",
        default=[1_280, 5_120],
        help="tokens of a training step (default: 1280 5120)",
    )
    add_output(parser)
    add_report(parser)
    options = parser.parse_args(arguments)

    from moe_lab.experiments.report import publish
    from moe_lab.files import read_json
    from moe_lab.studies import _efficiency

    path = options.output / "efficiency.json"
    found = read_json(path) if options.report else _efficiency.measure(options)
    publish(options.output, "efficiency", _efficiency.page_of(found), found)
    return found
