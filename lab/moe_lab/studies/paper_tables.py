"""Counts operations and parameters of the models of the paper's Tables 2 to 5, 7 and 8.

    moe-lab study paper-tables           # prints, writes runs/results/paper_tables.*
    moe-lab study paper-tables --output DIR

The study builds every model of configs/ on torch's meta device, without memory for the weights, and
counts it with moe_lab.analysis.costs. The published figures are in moe_lab.analysis.paper. The
second table has the floating-point operations of a training batch, counted as in Section 5.1. It
also has the time that these operations take at the published TFLOPS/GPU.
"""

from collections.abc import Sequence

from moe_lab.cli import add_output, make_parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the study."""
    parser = make_parser(__doc__)
    add_output(parser)
    options = parser.parse_args(arguments)

    from moe_lab.experiments.report import publish
    from moe_lab.studies._paper_tables import counted, page_of

    report = counted()
    publish(options.output, "paper_tables", page_of(report), report)
