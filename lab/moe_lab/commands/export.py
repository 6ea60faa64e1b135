"""Exports a trained language model to an AOTInductor package, which C++ runs without Python.

    moe-lab export runs/moe-32 --output lm.pt2        # takes about 30 seconds

The package is one file with weights and compiled code. examples/cpp/serve.cpp is a program that
loads it. The package maps word ids [B, S], int64, to the log-probabilities [B, S, V] of each next
word, for any B and S. The first id of a sentence is the id of ``</s>``. Results equal those of
eager mode to rounding. The entry "vocabulary" of the package's metadata has the V words in the
order of their ids, one per line.

A program that loads the package needs libmoe_ext.so, the same version of torch, and a processor
with the instruction sets of this one.

A model with layers of the kind "moe_lstm" cannot be exported: torch.export would unroll the layer's
time steps and fix S.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export._patches import register_lstm_while_loop_decomposition
from torch.nn import functional as F

from moe_ext.ops import accumulation_dtype
from moe_lab.cli import make_parser
from moe_lab.data import Vocabulary
from moe_lab.errors import ConfigError
from moe_lab.models import LanguageModel
from moe_lab.training.checkpoint import load_run


class NextWord(nn.Module):
    """Computes the log-probabilities [B, S, V] of the next words after word ids [B, S]."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor) -> Tensor:
        hidden, _ = self.model(words)
        softmax, dtype = self.model.softmax, hidden.dtype
        logits = F.linear(hidden, softmax.weight.to(dtype), softmax.bias.to(dtype))
        return logits.log_softmax(-1, dtype=accumulation_dtype(hidden))


def export(model: LanguageModel, vocabulary: Vocabulary, output: Path) -> None:
    """Writes the package of a model in evaluation mode to the file output, which ends in .pt2."""
    dynamic = {dim: torch.export.Dim.DYNAMIC for dim in range(2)}
    words = torch.zeros(2, 3, dtype=torch.int64)  # sizes 0 and 1 would become constants
    with (
        torch.no_grad(),
        register_lstm_while_loop_decomposition(),  # torch.export unrolls an LSTM otherwise
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # torch warns of its own LSTM and loop
        program = torch.export.export(NextWord(model), (words,), dynamic_shapes=(dynamic,))
        torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(output),
            inductor_configs={
                "aot_inductor.metadata": {"vocabulary": "\n".join(vocabulary.words)},
                "cpp.dynamic_threads": True,  # the number of threads of the program that runs it
            },
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = make_parser(__doc__)
    parser.add_argument("run", help="the folder of a training run")
    parser.add_argument("--output", type=Path, required=True, help="the package, a file *.pt2")
    options = parser.parse_args(arguments)
    output: Path = options.output
    if output.suffix != ".pt2":
        raise ConfigError(f"--output must end in .pt2, got {output}")

    trained = load_run(options.run)
    model, vocabulary = trained.model, trained.vocabulary
    if not isinstance(model, LanguageModel) or not isinstance(vocabulary, Vocabulary):
        found = "wordpieces" if isinstance(model, LanguageModel) else "a translation model"
        raise ConfigError(f"{options.run} must be a run of a language model of words, got {found}")
    if "moe_lstm" in model.config.layers:
        raise ConfigError(f"{options.run}: a model with moe_lstm layers cannot be exported")
    output.parent.mkdir(parents=True, exist_ok=True)
    export(model, vocabulary, output)
    print(
        f"written: {output}  ({len(vocabulary):,} words, step {trained.step}, "
        f"{output.stat().st_size / 1e6:.1f} MB)"
    )
