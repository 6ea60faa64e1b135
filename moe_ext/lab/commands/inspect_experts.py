"""Shows what the experts of a trained model specialise in (Table 9 of the paper).

    python scripts/inspect_experts.py runs/moe-32
    python scripts/inspect_experts.py runs/moe-32 --layer 1 --positions 50000 --output experts
    python scripts/inspect_experts.py runs/en-fr --part dev

Prints for each expert its share of the tokens, its most characteristic words and the contexts with
the highest gates. The experts with the most information come first. Writes two files:

    RUN/experts.txt    the printed text
    RUN/experts.html   the expert explorer: open it in a browser

The explorer is one file, which loads nothing else. It sorts the experts, searches them by word,
and colours the words of some sentences by expert.

A translation model has two MoE layers. Layer 0 is in the encoder and sees the wordpieces of the
sources. Layer 1 is in the decoder and sees the wordpieces of the targets. With several language
pairs, the report of an expert has the share of each pair in the expert's tokens.
"""

from collections.abc import Sequence
from pathlib import Path

from moe_ext.lab.analysis import as_html, as_text, by_specialisation, expert_reports, route_text
from moe_ext.lab.data.corpora import PARTS_AND_ALL
from moe_ext.lab.files import write_text
from moe_ext.lab.training.checkpoint import load_run
from moe_ext.lab.training.command import add_threads, at_least, make_parser
from moe_ext.lab.training.config import ConfigError
from moe_ext.lab.training.device import set_up_torch
from moe_ext.lab.training.text import load_part


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = make_parser(__doc__)
    parser.add_argument("run", help="folder of a training run")
    parser.add_argument(
        "--part", choices=PARTS_AND_ALL, default="train", help="part of the corpus to read"
    )
    parser.add_argument(
        "--positions",
        type=at_least(1),
        default=200_000,
        help="approximate number of tokens to read",
    )
    parser.add_argument("--layer", type=int, default=0, help="index among the model's MoE layers")
    parser.add_argument(
        "--contexts", type=at_least(1), default=10, help="number of contexts for each expert"
    )
    parser.add_argument(
        "--sentences", type=at_least(0), default=200, help="number of sentences in the explorer"
    )
    parser.add_argument(
        "--output", help="path of the output files without .txt and .html (default: RUN/experts)"
    )
    add_threads(parser)
    parser.add_argument("--device", default="cpu", help="device that runs the model")
    options = parser.parse_args(arguments)
    set_up_torch(options.device, options.threads)

    trained = load_run(options.run, options.device)
    output = Path(options.output or Path(options.run) / "experts")
    output.parent.mkdir(parents=True, exist_ok=True)
    sentences = load_part(trained.config.data, trained.vocabulary, options.part)
    try:
        routed = route_text(
            trained.model, sentences, num_positions=options.positions, layer=options.layer
        )
    except ValueError as error:
        raise ConfigError(f"{options.run}: {error}") from error
    reports = expert_reports(routed, trained.vocabulary, num_contexts=options.contexts)
    reports = by_specialisation(reports)
    text = as_text(reports)
    name = Path(options.run).resolve().name
    title = f"{name}, step {trained.step:,}, layer {options.layer}: what each expert sees"
    page = as_html(routed, reports, trained.vocabulary, title, num_sentences=options.sentences)
    write_text(output.with_name(f"{output.name}.txt"), text)
    write_text(output.with_name(f"{output.name}.html"), page)
    print(text)
    print(f"written: {output}.txt and {output}.html")
