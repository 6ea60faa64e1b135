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

from collections.abc import Sequence
from pathlib import Path

from moe_lab.cli import (
    DEVICE,
    RUN_FOLDER,
    Option,
    at_least,
    flag,
    one,
    parse,
    plot_file,
    require_checkpoint,
)

OPTIONS: dict[str, Option] = {
    **RUN_FOLDER,
    "files": {"nargs": "*", "default": [], "help": 'text files; "-" is stdin (default: stdin)'},
    "--into": {"help": "target language, for a model of several language pairs"},
    "--beam": one(at_least(1), 8, "beam width (default: %(default)s); a translation has at most 2 "
                  "times as many wordpieces as its source, or 10 if that is more; hypotheses more "
                  "than 3 nats below the best one are pruned"),
    "--length-penalty": one(float, 0.2, "in [0, 10]; larger values favour longer translations"),
    "--coverage-penalty": one(float, 0.2, "in [0, 10]; larger values favour translations of the "
                              "whole source"),
    "--greedy": flag("a beam of 1, without penalties"),
    "--n-best": one(at_least(1), 1, "number of translations for each line"),
    "--output": one(Path, None, "file of the translations (default: stdout)"),
    "--reference": {"help": "file of reference translations; prints BLEU"},
    "--attention": one(plot_file, None, "plot the attention into this .png or .pdf"),
    "--max-pieces": one(at_least(1), 500, "wordpieces after which a line is cut"),
    "--tokens-per-batch": one(at_least(1), 2_560, "approximate number of source wordpieces in a "
                              "batch"),
    **DEVICE,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    options = parse(__doc__, OPTIONS, arguments)
    require_checkpoint(options.run)

    from moe_lab.commands._translate import translate_files
    from moe_lab.training.device import set_up_torch

    set_up_torch(options.device, options.threads)
    translate_files(options)
