"""Exports a trained language model to an AOTInductor package, which C++ runs without Python.

    moe-lab export runs/moe-32 --output lm.pt2        # takes about 30 seconds

The package is one file with weights and compiled code. examples/cpp/serve.cpp is a program that
loads it. The package maps word ids [B, S], int64, to the log-probabilities [B, S, V] of each next
word, for any B and S. The first id of a sentence is the id of ``</s>``. Results equal those of
eager mode to rounding. The entry "vocabulary" of the package's metadata has the V words in the
order of their ids, one per line.

A program that loads the package needs libmoe_ext.so, the same version of torch, and a processor
with the instruction sets of this one.

The run must be one of a language model of words. A model with layers of the kind "moe_lstm" cannot
be exported: torch.export would unroll the layer's time steps and fix S.
"""

from collections.abc import Sequence
from pathlib import Path

from moe_lab.cli import RUN_FOLDER, parse, require_checkpoint
from moe_lab.errors import ConfigError


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    output_option = {"type": Path, "required": True, "help": "the package, a file *.pt2"}
    options = parse(__doc__, {**RUN_FOLDER, "--output": output_option}, arguments)
    output: Path = options.output
    if output.suffix != ".pt2":
        raise ConfigError(f"--output must end in .pt2, got {output}")
    require_checkpoint(options.run)

    from moe_lab.data import Vocabulary
    from moe_lab.models import LanguageModel
    from moe_lab.models.export import export
    from moe_lab.training.checkpoint import load_run

    trained = load_run(options.run)
    model, vocabulary = trained.model, trained.vocabulary
    if not isinstance(model, LanguageModel) or not isinstance(vocabulary, Vocabulary):
        kind = "wordpieces" if isinstance(model, LanguageModel) else "a translation model"
        raise ConfigError(f"{options.run} must be a run of a language model of words, got {kind}")
    if "moe_lstm" in model.config.layers:
        raise ConfigError(f"{options.run}: a model with moe_lstm layers cannot be exported")
    output.parent.mkdir(parents=True, exist_ok=True)
    export(model, vocabulary, output)
    print(
        f"written: {output}  ({len(vocabulary):,} words, step {trained.step}, "
        f"{output.stat().st_size / 1e6:.1f} MB)"
    )
