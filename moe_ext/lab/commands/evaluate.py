"""Perplexity of a trained model.

    python scripts/evaluate.py runs/moe-32                      # the test part of its own corpus
    python scripts/evaluate.py runs/moe-32 --part dev
    python scripts/evaluate.py runs/moe-32 --corpus text.txt    # all of it, in the model's words
    python scripts/evaluate.py runs/en-fr --bleu                # of its translations, too
    python scripts/evaluate.py runs/en-fr --corpus news.en-fr.tsv

Perplexity is exp(nats / predictions) over all words, unknown ones and ends of sentences included,
under the full softmax, whole sentences from a zero state; it does not depend on the batch size. Of
a translation model it is that of the target's wordpieces, given the source; of several language
pairs also each by itself. With --bleu the sources are translated (scripts/translate.py has options
for that), and compared with the targets as they are written.
"""

from collections.abc import Sequence
from dataclasses import replace

from moe_ext.lab.data import EncodedPairs
from moe_ext.lab.data.corpora import PARTS_AND_ALL
from moe_ext.lab.decoding import corpus_bleu
from moe_ext.lab.training.checkpoint import load_run
from moe_ext.lab.training.command import add_threads, at_least, make_parser
from moe_ext.lab.training.config import ConfigError, ParallelDataConfig
from moe_ext.lab.training.device import set_up_torch
from moe_ext.lab.training.metrics import Evaluation, by_language_pair, evaluate
from moe_ext.lab.training.text import load_part, parallel_text
from moe_ext.lab.training.translation import require_bleu, translations_of


def main(arguments: Sequence[str] | None = None) -> Evaluation:
    parser = make_parser(__doc__)
    parser.add_argument("run", help="the folder of a training run")
    parser.add_argument(
        "--part", choices=PARTS_AND_ALL, help="test, or all with --corpus, if not given"
    )
    parser.add_argument("--corpus", help='"builtin" or a path; that of the run if not given')
    parser.add_argument("--bleu", action="store_true", help="translate, and say how well")
    parser.add_argument("--tokens-per-batch", type=at_least(1), default=2_560)
    add_threads(parser)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    part = options.part or ("all" if options.corpus else "test")
    set_up_torch(options.device, options.threads)
    if options.bleu:
        require_bleu()

    trained = load_run(options.run, options.device)
    data = trained.config.data
    data = replace(data, corpus=options.corpus) if options.corpus else data
    if options.bleu and not isinstance(data, ParallelDataConfig):
        raise ConfigError("--bleu must be left out for a language model")
    text = load_part(data, trained.vocabulary, part)
    result = evaluate(trained.model, text, tokens_per_batch=options.tokens_per_batch)
    unit = "piece" if isinstance(text, EncodedPairs) else "word"
    print(
        f"{part} perplexity {result.perplexity:.3f}  ({result.nll:.4f} nats a {unit}, "
        f"{result.num_tokens:,} {unit}s and ends of {len(text):,} sentences; "
        f"step {trained.step})"
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
