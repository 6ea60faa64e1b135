"""Measures what experts specialise in, and shows the contexts of some experts (Table 9).

    moe-lab study specialisation runs/moe-64-seed*
    moe-lab study specialisation runs/moe-64 --positions 50000 --permutations 200
    moe-lab study specialisation runs/moe-64 --domains prose=text/a technical=text/b
    moe-lab study specialisation --report

The arguments are finished runs of one model that differ only in their seeds. The study runs
sentences of the training text through each model, once with the trained gate and once with a random
gate. A position in the text has these labels: its word, the previous word, the word class and the
domain. The study measures for each label:

- purity: the share of the most frequent label among the 50 positions with an expert's highest gates
- mutual information of the label and the expert with the highest gate

Shuffled labels show the values that chance gives. --domains names two or more corpora as
NAME=CORPUS, and an equal number of words of each is labelled with the domain NAME. All corpora are
encoded with the vocabulary of the run.

The file OUTPUT/specialisation.json keeps the numbers of each run, so the same command continues
after an interruption. One run takes 3 minutes on one processor. The command also writes the page
and its plot; --report writes them from the file, without the runs.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moe_lab.cli import add_output, add_threads, at_least, make_parser, require_checkpoint
from moe_lab.experiments.arms import add_report
from moe_lab.names import PARTS_AND_ALL

if TYPE_CHECKING:
    from moe_lab.experiments.store import Stored

USUAL = {"part": "train", "positions": 200_000, "permutations": 1_000, "layer": 0}


def main(arguments: Sequence[str] | None = None) -> "Stored":
    """Runs the study and returns the stored runs."""
    parser = make_parser(__doc__)
    parser.add_argument("folders", nargs="*", metavar="RUN", help="the folders of training runs")
    parser.add_argument("--part", choices=PARTS_AND_ALL, help="part of the corpus (%(default)s)")
    parser.add_argument("--positions", type=at_least(1), help="number of words (%(default)s)")
    parser.add_argument(
        "--permutations", type=at_least(2), help="shuffles of the labels (%(default)s)"
    )
    parser.add_argument("--layer", type=int, help="index among the MoE layers (%(default)s)")
    parser.add_argument(
        "--domains", nargs="+", default=[], metavar="NAME=CORPUS", help="two or more corpora"
    )
    add_output(parser)
    add_report(parser)
    add_threads(parser)
    parser.set_defaults(**USUAL)
    options = parser.parse_args(arguments)
    if options.report == bool(options.folders):
        parser.error("the folder of a run must be given, or --report instead")
    options.runs = Path(options.output)  # of the lock files
    for folder in options.folders:
        require_checkpoint(folder)

    from moe_lab.studies._specialisation import SpecialisationStudy

    return SpecialisationStudy(options).main()
