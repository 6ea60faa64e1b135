"""Translates text with one sentence per line, using a trained model.

    echo "a sentence" | moe-lab translate runs/en-fr
    moe-lab translate runs/en-fr news.en --output news.fr --reference news.reference.fr
    moe-lab translate runs/multilingual --into fr < news.en
    moe-lab translate runs/en-fr news.en --n-best 5
    moe-lab translate runs/en-fr news.en --attention attention.pdf

Reads files (.gz and .xz too) or stdin, and writes one translation to stdout for each line. Input
from a terminal is translated line by line. Other input is sorted by length, thousands of lines at a
time, and translated in batches. An empty line stays empty. A line is cut after --max-pieces
wordpieces; stderr reports the number of cut lines and the speed.

--n-best prints several translations for each line, best first, in the format of Moses:

    line number, from 0 ||| translation ||| logP= log P(Y|X) ||| score s(Y, X)

--output is written after the last line is translated, so it may be one of the input files.

--reference prints sacreBLEU's score with its signature to stderr, or to stdout with --output.

--attention plots the attention of each translated wordpiece over the source wordpieces. A .png has
the first sentence, a .pdf has one page for each sentence.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from moe_lab.cli import add_device, add_run, at_least, make_parser, plot_file, require_checkpoint


def _options_parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    add_run(parser)
    parser.add_argument(
        "files", nargs="*", default=[], help='text files; "-" is stdin (default: stdin)'
    )
    parser.add_argument("--into", help="target language, for a model of several language pairs")
    parser.add_argument(
        "--beam",
        type=at_least(1),
        default=8,
        help="beam width (default: %(default)s); a translation has at most 2 times as many "
        "wordpieces as its source, or 10 if that is more; hypotheses more than 3 nats below the "
        "best one are pruned",
    )
    parser.add_argument(
        "--length-penalty",
        type=float,
        default=0.2,
        help="in [0, 10]; larger values favour longer translations",
    )
    parser.add_argument(
        "--coverage-penalty",
        type=float,
        default=0.2,
        help="in [0, 10]; larger values favour translations of the whole source",
    )
    parser.add_argument("--greedy", action="store_true", help="a beam of 1, without penalties")
    parser.add_argument(
        "--n-best",
        type=at_least(1),
        default=1,
        help="number of translations for each line",
    )
    parser.add_argument("--output", type=Path, help="file of the translations (default: stdout)")
    parser.add_argument("--reference", help="file of reference translations; prints BLEU")
    parser.add_argument(
        "--attention", type=plot_file, help="plot the attention into this .png or .pdf"
    )
    parser.add_argument(
        "--max-pieces",
        type=at_least(1),
        default=500,
        help="wordpieces after which a line is cut",
    )
    parser.add_argument(
        "--tokens-per-batch",
        type=at_least(1),
        default=2_560,
        help="approximate number of source wordpieces in a batch",
    )
    add_device(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    options = _options_parser().parse_intermixed_args(arguments)
    require_checkpoint(options.run)

    from moe_lab.training.device import set_up_torch
    from moe_lab.training.translate_files import translate_files

    set_up_torch(options.device, options.threads)
    translate_files(options)
