"""Shows what the experts of a trained model specialise in (Table 9).

    python scripts/inspect_experts.py runs/moe-32
    python scripts/inspect_experts.py runs/moe-32 --layer 1 --positions 50000 --output experts
    python scripts/inspect_experts.py runs/en-fr --part dev

Prints for each expert its share of the tokens, its most characteristic words, and the contexts with
the highest gates. The most specialised experts come first. Writes the same to RUN/experts.txt and
to the HTML page RUN/experts.html. In a translation model, layer 0 is the encoder's MoE and shows
source wordpieces; layer 1 is the decoder's. With two or more language pairs, it also prints their
shares of each expert's tokens.
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
    parser.add_argument("run", help="the folder of a training run")
    parser.add_argument("--part", choices=PARTS_AND_ALL, default="train")
    parser.add_argument(
        "--positions", type=at_least(1), default=200_000, help="how many words to look at"
    )
    parser.add_argument("--layer", type=int, default=0, help="which of the model's MoE layers")
    parser.add_argument("--contexts", type=at_least(1), default=10, help="how many for each expert")
    parser.add_argument("--output", help="where the .txt and .html go; RUN/experts if not given")
    add_threads(parser)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
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
    title = f"{Path(options.run).name}, step {trained.step}: what each expert sees"
    page = as_html(reports, trained.vocabulary, title)
    write_text(output.with_name(f"{output.name}.txt"), text)
    write_text(output.with_name(f"{output.name}.html"), page)
    print(text)
    print(f"also in {output}.txt and {output}.html")
