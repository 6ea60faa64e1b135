"""Exports a language model to an AOTInductor package, which C++ runs without Python."""

import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export._patches import register_lstm_while_loop_decomposition
from torch.nn import functional as F

from moe_ext.ops import accumulation_dtype
from moe_lab.data import Vocabulary
from moe_lab.models.language_model import LanguageModel


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
