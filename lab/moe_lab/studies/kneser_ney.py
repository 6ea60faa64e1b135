"""Fits the n-gram baseline of App. C.1, an interpolated Kneser-Ney model, to a run's corpus.

    moe-lab study kneser-ney small/moe-32 data.corpus=path/to/text
    moe-lab study kneser-ney small/moe-32 --shares 0.25 1 --output runs/kn5
    moe-lab study kneser-ney small/moe-32 --discounts 1 --order 3

The study reads the text and the vocabulary of a configuration's [data], as training does. Each
value of --shares is a fraction of the training sentences, from the start of the training part. The
study fits one model to each fraction. All models use the vocabulary of the whole training part.
Perplexity includes unknown words and ends of sentences, as in moe-lab evaluate.

The command writes OUTPUT/kneser_ney.md, and .json with the nats of each test sentence. --arpa also
writes the model of the last fraction to OUTPUT/kneser_ney.arpa, for other programs.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from moe_lab.cli import add_output, add_overrides, at_least, make_parser


def share(text: str) -> float:
    """Parses a number in (0, 1] from `text`, as an argparse type."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text!r}")
    return value


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs the study and returns its report."""
    parser = make_parser(__doc__)
    parser.add_argument("config", help="a TOML file; only its [data] is used")
    add_overrides(parser)
    parser.add_argument(
        "--order", type=at_least(1), default=5, help="n of the longest n-grams (%(default)s)"
    )
    parser.add_argument(
        "--discounts",
        type=int,
        choices=(1, 3),
        default=3,
        help="discounts of each order; 3 is modified Kneser-Ney (%(default)s)",
    )
    parser.add_argument(
        "--shares", type=share, nargs="+", default=[1.0], help="fractions of the training sentences"
    )
    parser.add_argument(
        "--arpa", action="store_true", help="also write the last model as an ARPA file"
    )
    add_output(parser)
    options = parser.parse_intermixed_args(arguments)

    from moe_lab.experiments.report import publish
    from moe_lab.studies._kneser_ney import measure, page_of

    report = measure(options)
    publish(options.output, "kneser_ney", page_of(report), report)
    return report
