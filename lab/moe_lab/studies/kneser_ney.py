"""Fits the n-gram baseline of App. C.1, an interpolated Kneser-Ney model, to a run's corpus.

    moe-lab study kneser-ney small/moe-32 data.corpus=path/to/text
    moe-lab study kneser-ney small/moe-32 --shares 0.25 1 --output runs/kn5
    moe-lab study kneser-ney small/moe-32 --discounts 1 --order 3

The study reads the text and the vocabulary of a configuration's [data], as training does. Each
value of --shares is a fraction of the training sentences, from the start of the training part. The
study fits one model to each fraction. All models use the vocabulary of the whole training part.
Perplexity includes unknown words and ends of sentences, as in moe-lab evaluate.

The command writes OUTPUT/kneser_ney.md, and .json with the nats of each test sentence.
"""

import argparse
import math
import shlex
import time
from typing import Any

from moe_lab.data import EncodedSentences
from moe_lab.experiments.page import Command, Page, page_of_template, publish
from moe_lab.markdown import markdown_table
from moe_lab.models import NGramModel, fit_kneser_ney
from moe_lab.training.config import Config, read_config
from moe_lab.training.device import set_up_torch
from moe_lab.training.metrics import Evaluation
from moe_lab.training.text import SentenceText, load_text


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Fits a model to each share of the text and tests it; returns data for JSON."""
    config = read_config(options.config, options.overrides, Config)
    set_up_torch("cpu", config.num_threads)
    text = load_text(config.data)
    models = []
    for part in options.shares:
        train = text.train.first(math.ceil(part * len(text.train)))
        start = time.perf_counter()
        model = fit_kneser_ney(
            train, len(text.vocabulary), options.order, modified=options.discounts == 3
        )
        seconds = time.perf_counter() - start
        models.append({"seconds": seconds, **measured(model, train, text)})
    command = ["moe-lab", "study", "kneser-ney", options.config, *options.overrides]
    command += ["--order", options.order, "--discounts", options.discounts]
    return {
        "command": shlex.join(map(str, [*command, "--shares", *options.shares])),
        "corpus": config.data.corpus,
        "vocabulary": len(text.vocabulary),
        "order": options.order,
        "num_discounts": options.discounts,
        "test_tokens": text.test.num_tokens,
        "test_sentence_tokens": text.test.lengths.tolist(),
        "models": models,
    }


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


def page_of(report: dict[str, Any]) -> Page:
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
    return page_of_template(
        __file__, report=report, kind=kind, table=table, command=Command(report["command"])
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    report = measure(options)
    publish(options.output, "kneser_ney", page_of(report), report)
    return report
