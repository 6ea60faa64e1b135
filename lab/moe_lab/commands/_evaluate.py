"""The work of ``moe-lab evaluate``: evaluates a trained model and prints the results."""

from argparse import Namespace
from dataclasses import replace

from moe_lab.data import EncodedPairs, EncodedSentences, Wordpieces
from moe_lab.decoding.bleu import corpus_bleu
from moe_lab.errors import ConfigError
from moe_lab.training.checkpoint import load_run
from moe_lab.training.config import ParallelDataConfig
from moe_lab.training.metrics import (
    Evaluation,
    by_language_pair,
    bytes_of,
    evaluate,
    perplexity,
    words_of,
)
from moe_lab.training.text import load_part, parallel_text
from moe_lab.training.translation import translations_of


def evaluate_run(options: Namespace) -> Evaluation:
    """Evaluates the newest model of the command's options, and prints the results."""
    trained, part = load_run(options.run, options.device), options.part
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
        for name, pair in by_language_pair(result.sentence_nll, text).items():
            print(
                f"  {name}  {pair.perplexity:.3f}  ({pair.num_tokens:,} pieces and ends of "
                f"{len(pair.sentence_nll):,} sentences)"
            )
    if isinstance(text, EncodedPairs):
        for line in text.report().splitlines():
            print(f"  {line}")
    if options.bleu:
        assert isinstance(data, ParallelDataConfig)
        for pairs in parallel_text(data, part):
            targets = [target for _, target in pairs]
            scored = corpus_bleu(translations_of(trained, pairs), targets, language=pairs.target)
            print(f"  {pairs.source}-{pairs.target}  BLEU {scored.score:.2f}  ({scored.signature})")
    return result
