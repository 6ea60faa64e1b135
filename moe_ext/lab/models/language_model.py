"""The paper's language models (App. C.1): embedding, LSTM, MoE, LSTM, softmax."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from moe_ext import MoEAux, MoELSTM
from moe_ext.checks import require, require_at_least
from moe_ext.lab.data import Batch
from moe_ext.lab.models.lstm import LSTM
from moe_ext.lab.models.parts import (
    FeedForwardConfig,
    MoEConfig,
    WordModel,
    ffn_layer,
    gate_layer,
    moe_layer,
    require_lstm_units,
    sigmoid_of,
    word_embedding,
    word_softmax,
)
from moe_ext.ops import accumulation_dtype

_LAYER_KINDS = ("lstm", "moe", "moe_lstm", "ffn")
DTYPES = ("float32", "bfloat16")


@dataclass
class LanguageModelConfig:
    """A stack of layers between embedding and softmax, every one `d_model` wide.

    Attributes:
        d_model: D.
        layers: of "lstm", "moe", "moe_lstm" and "ffn". The paper's models: ["lstm", "moe", "lstm"];
            MoE-1-Wide and MoE-1-Deep: "ffn" with hidden_sizes [4096] and [1024] * 4; 4xLSTM-512:
            four "lstm". A "moe_lstm" is an LSTM whose matrices are a mixture of experts (Sec. 3.1).
        dropout: probability, on the output of each layer and of the embedding.
        residual: add each layer's input to its output.
        lstm_units: width of the LSTMs' cells, at least d_model, which are projected back to
            d_model; 0 is cells of d_model units without projection.
        num_sampled: classes drawn for the softmax in training, ids being in the order of frequency
            (App. C.1: 8,192); 0 is the full softmax.
        memory_slots: states that a "moe_lstm" keeps for the backward pass; 0 is everything.
        dtype: of the large matrices, those of embedding, softmax and experts: "float32", or
            "bfloat16" for models that do not fit otherwise. What an optimizer adds to a bfloat16
            weight is lost below 2^-9 of it.
        moe, ffn: what these layers are. The experts of a "moe_lstm" are matrices: it leaves out
            hidden_sizes, activation and recompute.
    """

    d_model: int = 512
    layers: list[str] = field(default_factory=lambda: ["lstm", "moe", "lstm"])
    dropout: float = 0.1
    residual: bool = True
    lstm_units: int = 0
    num_sampled: int = 0
    memory_slots: int = 0
    dtype: str = "float32"
    moe: MoEConfig = field(default_factory=MoEConfig)
    ffn: FeedForwardConfig = field(default_factory=FeedForwardConfig)

    def __post_init__(self) -> None:
        require_at_least(1, d_model=self.d_model)
        require_at_least(0, num_sampled=self.num_sampled, memory_slots=self.memory_slots)
        require(
            len(self.layers) > 0 and set(self.layers) <= set(_LAYER_KINDS),
            "layers",
            f"be a list of {', '.join(_LAYER_KINDS)}",
            self.layers,
        )
        require(0 <= self.dropout < 1, "dropout", "be in [0, 1)", self.dropout)
        require_lstm_units(self.lstm_units, self.d_model)
        require(self.dtype in DTYPES, "dtype", f"be one of {', '.join(DTYPES)}", self.dtype)
        require(
            "moe_lstm" not in self.layers or self.moe.gate != "balanced",
            "moe.gate",
            "choose k experts for every token where layers have a moe_lstm",
            self.moe.gate,
        )


class LanguageModel(WordModel):
    """Predicts each next word of a sentence.

    h = dropout(embedding), then for every layer  h <- h + dropout(f(h))  with f the LSTM, or the
    sigmoid of the MoE (or of the dense layer in its place), then the softmax (App. C.1). The MoE
    sees all positions of all sentences as one batch (Sec. 3.1), padding left out. Embedding and
    softmax are separate, each [vocab_size, d_model]; the embedding starts normal with deviation
    d_model^-1/2, the softmax uniform with variance 1 / d_model and zero bias.

    Models of the same seed that differ in their other layers start from the same embedding, softmax
    and LSTMs, in order.

    Args:
        config: the layers.
        vocab_size: V, the number of classes of the softmax.
        process_group: the processes that share the experts of the MoE layers and balance them
            together (a "moe_lstm" has all of its own in each); see `MoE` and `MoELSTM`.
        noise_generator: where the gates' noise comes from; None is torch's default generator. With
            one of its own, a model with MoE layers and one without draw the same dropout masks from
            the same seed.
        class_generator: where the classes of a sampled softmax come from, on the CPU; likewise.

    Raises:
        ValueError: config.num_sampled is above vocab_size.
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
        # None, so that torch's default type rules all of a model that is not to be mixed.
        dtype = None if config.dtype == "float32" else getattr(torch, config.dtype)
        self.embedding = word_embedding(vocab_size, d_model, dtype)
        self.softmax = word_softmax(
            d_model, vocab_size, config.num_sampled, generator=class_generator, dtype=dtype
        )
        self.dropout = nn.Dropout(config.dropout)

        # LSTMs first: models that differ in the other layers then share the random draws up to
        # here.
        lstms = iter([LSTM(d_model, config.lstm_units) for kind in config.layers if kind == "lstm"])
        self.layers = nn.ModuleList()
        for kind in config.layers:
            if kind == "lstm":
                self.layers.append(next(lstms))
            elif kind == "moe":
                self.layers.append(
                    moe_layer(
                        config.moe,
                        d_model,
                        noise_generator=noise_generator,
                        dtype=dtype,
                        process_group=process_group,
                    )
                )
            elif kind == "moe_lstm":
                self.layers.append(
                    MoELSTM(
                        d_model,
                        d_model,
                        config.moe.num_experts,
                        config.moe.experts_per_token,
                        gate=gate_layer(config.moe, 2 * d_model, noise_generator),
                        w_importance=config.moe.w_importance,
                        w_load=config.moe.w_load,
                        memory_slots=config.memory_slots or None,
                        process_group=process_group,
                    )
                )
            else:
                self.layers.append(ffn_layer(config.ffn, d_model, dtype=dtype))

    def forward(
        self, inputs: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, tuple[MoEAux, ...]]:
        """Ids to what the softmax reads.

        Args:
            inputs: [B, S] int64, ids.
            mask: [B, S] bool, True at real tokens; None if all are.

        Returns:
            [B, S, D], undefined where masked, and each MoE layer's report.
        """
        h = self.dropout(self._embed(inputs))
        reports: list[MoEAux] = []
        for layer in self.layers:
            if isinstance(layer, LSTM):
                y = layer(h)
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
        """Where the embedding is of a half type, float32: as all that is between the layers."""
        if self.config.dtype == "float32":
            return self.embedding(inputs)
        # The gradients of a word's occurrences are added up in float32.
        words, place = inputs.unique(return_inverse=True)
        table = self.embedding(words)
        return F.embedding(place, table.to(accumulation_dtype(table)))

    def of_batch(self, batch: Batch) -> tuple[Tensor, tuple[MoEAux, ...]]:
        return self(batch.inputs, batch.mask)
