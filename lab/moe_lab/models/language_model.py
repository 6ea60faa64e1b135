"""The paper's language models (App. C.1): embedding, LSTM, MoE, LSTM, softmax."""

from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from moe_ext import MoEAux, MoELSTM
from moe_ext.checks import require
from moe_ext.ops import accumulation_dtype
from moe_lab.data import Batch
from moe_lab.models.lstm import LSTM
from moe_lab.models.parts import (
    ONLY_OF_FLAT,
    FeedForwardConfig,
    MoEConfig,
    WordModel,
    ffn_layer,
    gate_layer,
    moe_layer,
    require_lstm_units,
    require_values,
    sigmoid_of,
    word_embedding,
    word_softmax,
)
from moe_lab.rules import Count, Limit, Options, Share, must, one_of

_LAYER_KINDS = ("lstm", "moe", "moe_lstm", "ffn")
_KNOWN = must(
    f"be a non-empty list of {', '.join(_LAYER_KINDS)}",
    lambda kinds: len(kinds) > 0 and set(kinds) <= set(_LAYER_KINDS),
)
DTYPES = ("float32", "bfloat16")


@dataclass
class LanguageModelConfig(Options):
    """Options of a language model: a stack of layers between embedding and softmax."""

    d_model: Count = 512  # D, width of the embedding and of every layer's output
    # Kinds of the layers, in order. The paper's MoE models are ["lstm", "moe", "lstm"]. MoE-1-Wide
    # and MoE-1-Deep replace "moe" by "ffn" with hidden_sizes [4096] and [1024] * 4; 4xLSTM-512 has
    # four "lstm". The weight matrix of a "moe_lstm" is a mixture of experts (Sec. 3.1).
    layers: Annotated[list[str], _KNOWN] = field(default_factory=lambda: ["lstm", "moe", "lstm"])
    dropout: Share = 0.1  # dropout probability of the embedding and of the output of each layer
    residual: bool = True  # whether to add each layer's input to its output
    # Width of the LSTM cells, at least d_model; the cell outputs are projected to d_model. 0 gives
    # cells of d_model units without projection.
    lstm_units: int = 0
    # Number of sampled classes of the softmax in training (App. C.1: 8,192). Word ids must be
    # ordered by decreasing frequency. 0 uses the full softmax.
    num_sampled: Limit = 0
    memory_slots: Limit = 0  # states that a "moe_lstm" saves for backward; 0 saves all states
    # dtype of the weights of embedding, softmax and experts. Use "bfloat16" only for a model that
    # exceeds the memory in float32. An optimizer update smaller than 2^-9 of a bfloat16 weight is
    # lost to rounding. The experts of a "moe_lstm" are always float32.
    dtype: Annotated[str, one_of(*DTYPES)] = "float32"
    # Options of the "moe" and "moe_lstm" layers. A "moe_lstm" ignores hidden_sizes, activation and
    # recompute, because its experts are matrices.
    moe: MoEConfig = field(default_factory=MoEConfig)
    ffn: FeedForwardConfig = field(default_factory=FeedForwardConfig)  # of the "ffn" layers

    def __post_init__(self) -> None:
        super().__post_init__()
        require_lstm_units(self.lstm_units, self.d_model)
        if "moe_lstm" in self.layers:
            rule = "if layers contain moe_lstm"
            kinds = ("noisy_topk", "topk")
            gate = self.moe.gate
            require(gate in kinds, "moe.gate", f"be {' or '.join(kinds)} {rule}", gate)
            off: dict[str, object] = {"bias_update_rate": 0, **ONLY_OF_FLAT, "shared_sizes": []}
            require_values(self.moe, off, rule, prefix="moe.")


class LanguageModel(WordModel):
    """Predicts each next word of a sentence (App. C.1).

    With ``residual=True``, the equations are::

        h = dropout(embedding)
        h <- h + dropout(f(h))          for every layer

    f is an LSTM, or the sigmoid of a MoE or dense layer. A softmax follows the last layer. A MoE
    sees all positions of all sentences as one batch, without padding (Sec. 3.1).

    Embedding and softmax are separate weights [V, D]. The embedding is initialised with normal
    values of standard deviation D^-1/2. The softmax is initialised uniformly with variance 1 / D;
    its bias is zero.

    Two models with the same seed and different "moe" or "ffn" layers start with the same embedding,
    softmax and LSTMs.

    Args:
        config: options of the layers.
        vocab_size: V, number of classes of the softmax.
        process_group: the ranks that share the experts; see `MoE` and `MoELSTM`.
        noise_generator: generator of the gates' noise. With a separate generator, MoE and dense
            models of one seed get the same dropout masks.
        class_generator: CPU generator that samples classes for the softmax in training.
    """

    def __init__(
        self,
        config: LanguageModelConfig,
        vocab_size: int,
        *,
        process_group: ProcessGroup | None = None,
        noise_generator: torch.Generator | None = None,
        class_generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        d_model = config.d_model
        # None lets torch's default dtype apply to all weights.
        dtype = None if config.dtype == "float32" else getattr(torch, config.dtype)
        self.embedding = word_embedding(vocab_size, d_model, dtype)
        self.softmax = word_softmax(
            d_model, vocab_size, config.num_sampled, generator=class_generator, dtype=dtype
        )
        self.dropout = nn.Dropout(config.dropout)

        # LSTMs are initialised first: models that differ in the other layers start with the same
        # LSTMs.
        lstms = iter([LSTM(d_model, config.lstm_units) for kind in config.layers if kind == "lstm"])
        self.layers = nn.ModuleList()
        moe = config.moe
        for kind in config.layers:
            layer: nn.Module
            if kind == "lstm":
                layer = next(lstms)
            elif kind == "moe":
                layer = moe_layer(moe, d_model, noise_generator, process_group, dtype)
            elif kind == "moe_lstm":
                layer = MoELSTM(
                    d_model,
                    d_model,
                    moe.num_experts,
                    moe.experts_per_token,
                    gate=gate_layer(moe, 2 * d_model, noise_generator),
                    w_importance=moe.w_importance,
                    w_load=moe.w_load,
                    memory_slots=config.memory_slots or None,
                    process_group=process_group,
                )
            else:
                layer = ffn_layer(config.ffn, d_model, dtype)
            self.layers.append(layer)

    def forward(
        self, inputs: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, tuple[MoEAux, ...]]:
        """Computes the input of the softmax from word ids [B, S] int64.

        mask [B, S] is True at real tokens; None means that all tokens are real.

        Returns:
            The input of the softmax [B, S, D], undefined where mask is False, and the `MoEAux` of
            each MoE layer.
        """
        h = self.dropout(self._embed(inputs))
        reports: list[MoEAux] = []
        for layer in self.layers:
            if isinstance(layer, LSTM):
                y = layer(h, mask)
            elif isinstance(layer, MoELSTM):
                y, _, aux = layer(h, mask=mask)
                reports.append(aux)
            else:
                y, some = sigmoid_of(layer, h, mask)
                reports += some
            y = self.dropout(y)
            h = h + y if self.config.residual else y
        return h, tuple(reports)

    def _embed(self, inputs: Tensor) -> Tensor:
        """Looks up the embeddings of word ids; the result of bfloat16 weights is float32."""
        if self.config.dtype == "float32":
            return self.embedding(inputs)
        # The second lookup accumulates the gradients of repeated words in float32.
        words, place = inputs.unique(return_inverse=True)
        table = self.embedding(words)
        return F.embedding(place, table.to(accumulation_dtype(table)))

    def hidden_states(self, batch: Batch) -> tuple[Tensor, tuple[MoEAux, ...]]:
        return self(batch.inputs, batch.mask)
