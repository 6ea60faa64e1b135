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

from collections.abc import Sequence
from pathlib import Path

from moe_lab.cli import DEVICE, Option, at_least, one, parse, require_checkpoint
from moe_lab.errors import config_errors
from moe_lab.names import PARTS_AND_ALL

OPTIONS: dict[str, Option] = {
    "run": {"help": "folder of a training run; with --text, a transformers model"},
    "--text": {"help": "text file for a transformers model to read"},
    "--part": {"choices": PARTS_AND_ALL, "default": "train",
               "help": "part of the run's corpus to read"},
    "--positions": one(at_least(1), 200_000, "approximate number of tokens to read"),
    "--layer": one(int, None, "index among the model's MoE layers (default: 0; with --text, all "
                   "layers)"),
    "--contexts": one(at_least(1), 10, "number of contexts for each expert"),
    "--sentences": one(at_least(0), 200, "number of sentences in the explorer, divided over its "
                       "layers"),
    "--output": {"help": "path of the output files without .txt and .html (default: RUN/experts; "
                         "with --text, experts)"},
    **DEVICE,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    options = parse(__doc__, OPTIONS, arguments, alone=("--text", "--part"))
    if options.text is None:
        require_checkpoint(options.run)

    from moe_lab.commands._inspect_experts import route_run, route_transformers, write_experts
    from moe_lab.training.device import set_up_torch

    set_up_torch(options.device, options.threads)
    run, text, positions, layer = options.run, options.text, options.positions, options.layer
    with config_errors(f"{run}: "):
        if text is None:
            routed = route_run(run, options.part, positions, layer or 0, options.device)
        else:
            routed = route_transformers(run, text, positions, layer, options.device)
    output = Path(options.output or (Path() if text else Path(run)) / "experts")
    write_experts(routed, output, num_contexts=options.contexts, num_sentences=options.sentences)
