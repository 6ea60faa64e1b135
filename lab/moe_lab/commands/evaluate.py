"""Measures the perplexity of a trained model, and the BLEU of its translations.

    moe-lab evaluate runs/moe-32                      # the test part of the run's corpus
    moe-lab evaluate runs/moe-32 --part dev
    moe-lab evaluate runs/moe-32 --corpus text.txt    # a whole file
    moe-lab evaluate runs/en-fr --bleu                # also translates and scores
    moe-lab evaluate runs/en-fr --corpus news.en-fr.tsv

Perplexity is exp(nats / predictions) under the full softmax. Predictions include unknown words and
ends of sentences. Each sentence starts from a zero state, so perplexity does not depend on the
batch size. The text of --corpus is encoded with the model's vocabulary. For a language model of
wordpieces, the perplexity per word and per byte of UTF-8 is printed too. They compare models of
different vocabularies. For a translation model, predictions are the target wordpieces, given the
source. With two or more language pairs, each pair is reported too. --bleu translates the sources
and compares the translations with the original targets; moe-lab translate has more options for
translation.
"""

from collections.abc import Sequence
from typing import Any

from moe_lab.cli import DEVICE, RUN_FOLDER, Option, at_least, flag, one, parse, require_checkpoint
from moe_lab.names import PARTS_AND_ALL

OPTIONS: dict[str, Option] = {
    **RUN_FOLDER,
    "--part": {"choices": PARTS_AND_ALL,
               "help": "part of the corpus (default: test; all with --corpus)"},
    "--corpus": {"help": '"builtin", "sources" or a path (default: the corpus of the run)'},
    "--bleu": flag("also translate the sources and print BLEU"),
    "--tokens-per-batch": one(at_least(1), 2_560, "approximate number of predictions in a batch; "
                              "for pairs, of source wordpieces"),
    **DEVICE,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> Any:
    """Runs the command and returns the evaluation."""
    options = parse(__doc__, OPTIONS, arguments)
    options.part = options.part or ("all" if options.corpus else "test")
    require_checkpoint(options.run)

    from moe_lab.commands._evaluate import evaluate_run
    from moe_lab.training.device import set_up_torch

    set_up_torch(options.device, options.threads)
    return evaluate_run(options)
