"""Fits the n-gram baseline of App. C.1, an interpolated Kneser-Ney model, to a run's corpus.

    moe-lab study kneser-ney small/moe-32 data.corpus=path/to/text
    moe-lab study kneser-ney small/moe-32 --shares 0.25 1 --output runs/kn5
    moe-lab study kneser-ney small/moe-32 --discounts 1 --order 3

The script reads the text and the vocabulary of a configuration's [data], as training does. Each
value of --shares is a fraction of the training sentences, from the start of the training part. The
script fits one model to each fraction. All models use the vocabulary of the whole training part.
Perplexity includes unknown words and ends of sentences, as in moe-lab evaluate.

The script writes OUTPUT/kneser_ney.md, and .json with the nats of each test sentence. --arpa also
writes the model of the last fraction to OUTPUT/kneser_ney.arpa, for other programs.
"""

import argparse
import math
import time
from collections.abc import Sequence
from typing import Any

from moe_lab.cli import add_output, add_overrides, at_least, make_parser
from moe_lab.data import EncodedSentences
from moe_lab.experiments.report import markdown_table, write_report
from moe_lab.models import NGramModel, fit_kneser_ney
from moe_lab.training.config import Config, read_config
from moe_lab.training.device import set_up_torch
from moe_lab.training.metrics import Evaluation
from moe_lab.training.text import SentenceText, load_text


def share(text: str) -> float:
    """Parses a number in (0, 1] from `text`, as an argparse type."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text!r}")
    return value


def measured(model: NGramModel, train: EncodedSentences, text: SentenceText) -> dict[str, Any]:
    """Evaluates an n-gram model on the dev and test parts; the result can be written as JSON."""
    dev, test = (
        Evaluation(model.sentence_nll(part), part.num_tokens) for part in (text.dev, text.test)
    )
    return {
        "train_sentences": len(train),
        "train_tokens": train.num_tokens,
        "num_ngrams": model.num_ngrams,
        "num_parameters": model.num_parameters,
        "discounts": model.discounts,
        "dev_perplexity": dev.perplexity,
        "test_perplexity": test.perplexity,
        "test_nll": test.nll,
        "test_sentence_nll": test.sentence_nll.tolist(),
    }


def as_markdown(report: dict[str, Any]) -> str:
    """Formats the report as a Markdown page."""
    kind = "modified, three discounts" if report["num_discounts"] == 3 else "one discount"
    orders = range(1, report["order"] + 1)
    table = markdown_table(
        ["training tokens", "dev perplexity", "test perplexity", "parameters", "seconds"]
        + [f"{n}-grams" for n in orders],
        [
            [
                f"{model['train_tokens']:,}",
                f"{model['dev_perplexity']:.2f}",
                f"{model['test_perplexity']:.2f}",
                f"{model['num_parameters'] / 1e6:.2f}M",
                f"{model['seconds']:.0f}",
                *(f"{number:,}" for number in model["num_ngrams"]),
            ]
            for model in report["models"]
        ],
    )
    return (
        f"The models are interpolated Kneser-Ney {report['order']}-gram models ({kind} for each "
        f"order) without pruning. The corpus is {report['corpus']}, with a vocabulary of "
        f"{report['vocabulary']:,} words and {report['test_tokens']:,} test tokens.\n\n"
        f"{table}\nParameters are the stored probabilities and back-off weights.\n"
    )


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

    config = read_config(options.config, options.overrides, Config)
    set_up_torch("cpu", config.num_threads)
    text = load_text(config.data)
    options.output.mkdir(parents=True, exist_ok=True)
    models = []
    for part in options.shares:
        train = text.train.first(math.ceil(part * len(text.train)))
        start = time.perf_counter()
        model = fit_kneser_ney(
            train, len(text.vocabulary), options.order, modified=options.discounts == 3
        )
        seconds = time.perf_counter() - start
        models.append({"seconds": seconds, **measured(model, train, text)})
    if options.arpa:
        model.write_arpa(options.output / "kneser_ney.arpa", text.vocabulary)
    report = {
        "corpus": config.data.corpus,
        "vocabulary": len(text.vocabulary),
        "order": options.order,
        "num_discounts": options.discounts,
        "test_tokens": text.test.num_tokens,
        "test_sentence_tokens": text.test.lengths.tolist(),
        "models": models,
    }
    page = as_markdown(report)
    write_report(options.output, "kneser_ney", page, report)
    return report
