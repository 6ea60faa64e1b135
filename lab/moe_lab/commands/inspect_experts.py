"""Shows what the experts of a trained model specialise in (Table 9 of the paper).

    moe-lab inspect-experts runs/moe-32
    moe-lab inspect-experts runs/moe-32 --layer 1 --positions 50000 --output experts
    moe-lab inspect-experts runs/en-fr --part dev
    moe-lab inspect-experts allenai/OLMoE-1B-7B-0924 --text notes.txt --positions 20000

Prints for each expert its share of the tokens, its most characteristic words and the contexts with
the highest gates. The experts with the most information come first. Writes two files:

    RUN/experts.txt    the printed text
    RUN/experts.html   the expert explorer: open it in a browser

The explorer is one file, which loads nothing else. It sorts the experts, searches them by word,
and colours the words of some sentences by expert.

A translation model has two MoE layers. Layer 0 is in the encoder and sees the wordpieces of the
sources. Layer 1 is in the decoder and sees the wordpieces of the targets. With several language
pairs, the report of an expert has the share of each pair in the expert's tokens.

With --text, the model is a model of Hugging Face transformers: a folder of save_pretrained or a
name of the hub. It reads the first tokens of the text file, each line on its own. The explorer has
all layers, and the files are experts.txt and experts.html in the current folder. The text of
several layers is written, not printed.
"""

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from moe_lab.analysis import (
    ExpertPage,
    RoutedText,
    Spelling,
    as_text,
    by_specialisation,
    expert_reports,
    route_lines,
    route_text,
)
from moe_lab.cli import add_threads, at_least, make_parser
from moe_lab.data.corpora import PARTS_AND_ALL
from moe_lab.errors import ConfigError
from moe_lab.files import write_text
from moe_lab.packages import require_package
from moe_lab.training.checkpoint import load_run
from moe_lab.training.device import set_up_torch
from moe_lab.training.text import load_part

_LONGEST_LINE = 2**16  # characters; longer lines are read in parts


class _Routed(NamedTuple):
    """The routing of a text in some layers of a model.

    Attributes:
        title: the names of the model and of its text.
        spelling: the vocabulary of the text.
        num_layers: the number of layers.
        layers: the name and the routing of each layer. An iterator needs less memory than a list.
    """

    title: str
    spelling: Spelling
    num_layers: int
    layers: Iterable[tuple[str, RoutedText]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = make_parser(__doc__)
    parser.add_argument("run", help="folder of a training run; with --text, a transformers model")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--text", help="text file for a transformers model to read")
    source.add_argument(
        "--part", choices=PARTS_AND_ALL, default="train", help="part of the run's corpus to read"
    )
    parser.add_argument(
        "--positions",
        type=at_least(1),
        default=200_000,
        help="approximate number of tokens to read",
    )
    parser.add_argument(
        "--layer",
        type=int,
        help="index among the model's MoE layers (default: 0; with --text, all layers)",
    )
    parser.add_argument(
        "--contexts", type=at_least(1), default=10, help="number of contexts for each expert"
    )
    parser.add_argument(
        "--sentences",
        type=at_least(0),
        default=200,
        help="number of sentences in the explorer, divided over its layers",
    )
    parser.add_argument(
        "--output",
        help="path of the output files without .txt and .html (default: RUN/experts; with --text, "
        "experts)",
    )
    add_threads(parser)
    parser.add_argument("--device", default="cpu", help="device that runs the model")
    options = parser.parse_args(arguments)
    set_up_torch(options.device, options.threads)

    output = Path(options.output or (Path() if options.text else Path(options.run)) / "experts")
    route = _route_run if options.text is None else _route_transformers
    try:
        routed = route(options)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{options.run}: {error}") from error
    output.parent.mkdir(parents=True, exist_ok=True)
    title = f"{routed.title}: what each expert sees"
    num_sentences = math.ceil(options.sentences / routed.num_layers)
    page = ExpertPage(routed.spelling, title, num_sentences=num_sentences)
    texts = []
    for name, layer in routed.layers:
        reports = expert_reports(layer, routed.spelling, num_contexts=options.contexts)
        reports = by_specialisation(reports)
        page.add_layer(name, layer, reports)
        texts.append((name, as_text(reports)))
    text = "\n".join(f"{name}\n\n{each}" for name, each in texts)
    if len(texts) == 1:
        text = texts[0][1]
        print(text)
    write_text(output.with_name(f"{output.name}.txt"), text)
    write_text(output.with_name(f"{output.name}.html"), page.html())
    print(f"written: {output}.txt and {output}.html")


def _route_run(options: argparse.Namespace) -> _Routed:
    """Runs a model of the lab on a part of its corpus.

    Raises:
        ValueError: the model has no MoE layer with the index --layer.
    """
    layer = options.layer or 0
    trained = load_run(options.run, options.device)
    sentences = load_part(trained.config.data, trained.vocabulary, options.part)
    routed = route_text(trained.model, sentences, num_positions=options.positions, layer=layer)
    name = Path(options.run).resolve().name
    title = f"{name}, step {trained.step:,}, layer {layer}"
    return _Routed(title, trained.vocabulary, 1, [(f"layer {layer}", routed)])


def _route_transformers(options: argparse.Namespace) -> _Routed:
    """Runs a model of transformers on a text file.

    Raises:
        ConfigError: transformers is not installed.
        ValueError: the model has no experts or no layer with the index --layer, or the text has no
            token.
    """
    try:
        transformers = require_package("--text", "transformers", "transformers")
        import moe_ext.integrations.transformers  # noqa: F401  registers "moe_ext"
    except ImportError as error:
        raise ConfigError(str(error)) from error
    with open(options.text, encoding="utf-8", errors="replace") as file:
        # AutoModel has no output layer, whose logits nobody needs.
        model = transformers.AutoModel.from_pretrained(
            options.run, dtype="auto", experts_implementation="moe_ext"
        ).to(options.device)
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.run)
        pieces = iter(lambda: file.readline(_LONGEST_LINE), "")
        routed = route_lines(model, tokenizer, pieces, num_positions=options.positions)
    title = f"{Path(options.run).name}, {Path(options.text).name}"
    if options.layer is not None:
        layer = routed.layer(options.layer)
        name = routed.layers[options.layer]
        return _Routed(f"{title}, {name}", routed.spelling, 1, [(name, layer)])
    layers = ((name, routed.layer(index)) for index, name in enumerate(routed.layers))
    return _Routed(title, routed.spelling, len(routed.layers), layers)
