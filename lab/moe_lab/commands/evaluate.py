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
from dataclasses import replace

from moe_lab.cli import add_threads, at_least, make_parser
from moe_lab.data import EncodedPairs, EncodedSentences, Wordpieces
from moe_lab.data.corpora import PARTS_AND_ALL
from moe_lab.decoding import corpus_bleu
from moe_lab.errors import ConfigError
from moe_lab.training.checkpoint import load_run
from moe_lab.training.config import ParallelDataConfig
from moe_lab.training.device import set_up_torch
from moe_lab.training.metrics import (
    Evaluation,
    by_language_pair,
    bytes_of,
    evaluate,
    perplexity,
    words_of,
)
from moe_lab.training.text import load_part, parallel_text
from moe_lab.training.translation import require_bleu, translations_of


def main(arguments: Sequence[str] | None = None) -> Evaluation:
    """Runs the command and returns the evaluation."""
    parser = make_parser(__doc__)
    parser.add_argument("run", help="the folder of a training run")
    parser.add_argument(
        "--part",
        choices=PARTS_AND_ALL,
        help="part of the corpus (default: test; all with --corpus)",
    )
    parser.add_argument(
        "--corpus", help='"builtin", "sources" or a path (default: the corpus of the run)'
    )
    parser.add_argument(
        "--bleu", action="store_true", help="also translate the sources and print BLEU"
    )
    parser.add_argument(
        "--tokens-per-batch", type=at_least(1), default=2_560, help="batch size (%(default)s)"
    )
    add_threads(parser)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    options = parser.parse_args(arguments)
    part = options.part or ("all" if options.corpus else "test")
    set_up_torch(options.device, options.threads)
    if options.bleu:
        require_bleu()

    trained = load_run(options.run, options.device)
    data = trained.config.data
    data = replace(data, corpus=options.corpus) if options.corpus else data
    if options.bleu and not isinstance(data, ParallelDataConfig):
        raise ConfigError("--bleu must be omitted: the run is a language model")
    text = load_part(data, trained.vocabulary, part)
    result = evaluate(trained.model, text, tokens_per_batch=options.tokens_per_batch)
    unit = "word" if data.kind == "words" else "piece"
    print(
        f"{part} perplexity {result.perplexity:.3f}  ({result.nll:.4f} nats per {unit}, "
        f"{result.num_tokens:,} {unit}s and ends of {len(text):,} sentences; "
        f"step {trained.step})"
    )
    if isinstance(text, EncodedSentences) and isinstance(trained.vocabulary, Wordpieces):
        nats = result.nll * result.num_tokens
        num_words = words_of(text, trained.vocabulary)
        num_bytes = bytes_of(text, trained.vocabulary)
        print(
            f"  perplexity per word {perplexity(nats / num_words):.3f}  "
            f"({num_words:,} words and ends)\n"
            f"  perplexity per byte {perplexity(nats / num_bytes):.4f}  ({num_bytes:,} bytes)"
        )
    if isinstance(text, EncodedPairs) and len(text.names) > 1:
        for name, each in by_language_pair(result.sentence_nll, text).items():
            print(
                f"  {name}  {each.perplexity:.3f}  ({each.num_tokens:,} pieces and ends of "
                f"{len(each.sentence_nll):,} sentences)"
            )
    if isinstance(text, EncodedPairs):
        for line in text.report().splitlines():
            print(f"  {line}")
    if options.bleu:
        assert isinstance(data, ParallelDataConfig)
        for pairs in parallel_text(data, part):
            targets = [target for _, target in pairs]
            bleu = corpus_bleu(translations_of(trained, pairs), targets, language=pairs.target)
            print(f"  {pairs.source}-{pairs.target}  BLEU {bleu.score:.2f}  ({bleu.signature})")
    return result
