"""The paper's translation models (App. E): LSTM encoder and decoder with a MoE layer in each."""

from dataclasses import dataclass, field
from typing import Annotated, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from moe_ext import MoEAux, ops
from moe_ext.checks import require
from moe_ext.ops import accumulation_dtype
from moe_lab.data import PairBatch
from moe_lab.models.attention import ATTENTION_KINDS, Attention
from moe_lab.models.lstm import LSTM, LSTMState
from moe_lab.models.parts import (
    FeedForwardConfig,
    MoEConfig,
    WordModel,
    ffn_layer,
    moe_layer,
    require_lstm_units,
    sigmoid_of,
    word_embedding,
    word_softmax,
)
from moe_lab.rules import Count, Limit, Options, Share, one_of


@dataclass
class TranslationModelConfig(Options):
    """Options of a translation model: three LSTMs in the encoder and two in the decoder."""

    d_model: Count = 512  # D, width of the embeddings and of every layer's output
    # Width of the LSTM cells, at least d_model; the cell outputs are projected to d_model. 0 gives
    # cells of d_model units without projection.
    lstm_units: int = 2048
    # "parallel": the left-to-right and the right-to-left LSTM read the embedding, and their outputs
    # are summed. "stacked": the right-to-left LSTM reads the output of the left-to-right LSTM.
    encoder: Annotated[str, one_of("parallel", "stacked")] = "parallel"
    attention: Annotated[str, one_of(*ATTENTION_KINDS)] = "product"  # App. G
    attention_units: Limit = 0  # A of `Attention`; 0 means d_model
    # Whether the attention sees the first source token. In a model of several language pairs, this
    # is <2xx>, on which the attention can get stuck for thousands of steps.
    attend_language: bool = True
    # Layer before the last LSTM of the encoder and of the decoder; "ffn" is dense.
    between: Annotated[str, one_of("moe", "ffn", "none")] = "moe"
    dropout: Share = 0.4  # dropout probability of the embeddings and of the output of each layer
    # Whether source and target words share one embedding. They always share one vocabulary.
    shared_embedding: bool = True
    moe: MoEConfig = field(default_factory=MoEConfig)  # of the "moe" layers
    ffn: FeedForwardConfig = field(default_factory=FeedForwardConfig)  # of the "ffn" layers

    def __post_init__(self) -> None:
        super().__post_init__()
        require_lstm_units(self.lstm_units, self.d_model)
        causal = self.moe.gate != "expert_choice"
        rule = 'not be "expert_choice", which cannot decode word by word'
        require(causal, "moe.gate", rule, self.moe.gate)
        capacity, rule = self.moe.capacity_factor, "be 0: decoding word by word has other batches"
        require(capacity == 0, "moe.capacity_factor", rule, capacity)


class Encoded(NamedTuple):
    """B encoded source sentences."""

    output: Tensor  # [B, S, D], output of the encoder
    keys: Tensor  # [B, S, A], keys of the attention
    mask: Tensor  # [B, S] bool, True at tokens that the attention sees

    def select(self, index: Tensor) -> Self:
        """Returns the encoded sentences in index [N] int64."""
        return type(self)(*(part.index_select(0, index) for part in self))


class DecoderState(NamedTuple):
    """State of N unfinished translations of B source sentences."""

    encoded: Encoded  # the B source sentences
    source: Tensor  # [N] int64, index of the source sentence of each translation
    first: LSTMState  # state of the decoder's first LSTM
    second: LSTMState  # state of the decoder's second LSTM

    def select(self, index: Tensor) -> Self:
        """Returns the state of the translations in index [N'] int64; indices may repeat.

        Encoded source sentences are copied only if a source sentence has no translation left.
        """
        encoded = self.encoded
        used, source = self.source[index].unique(return_inverse=True)
        if len(used) < len(encoded.mask):
            encoded = encoded.select(used)
        return type(self)(encoded, source, self.first.select(index), self.second.select(index))


class AttentionLSTM(nn.Module):
    """Runs an LSTM whose previous output queries the attention (App. E; Wu et al. 2016, Eq. 4).

    The equations are::

        a_t = attention(m_{t-1}, source)          m_t, c_t = LSTM([x_t, a_t], m_{t-1}, c_{t-1})
    """

    def __init__(
        self, d_model: int, units: int | None, attention_units: int, kind: str = "product"
    ) -> None:
        super().__init__()
        self.lstm = LSTM(d_model, units, d_input=2 * d_model)
        self.attention = Attention(d_model, d_model, attention_units, kind)

    def forward(self, x: Tensor, encoded: Encoded) -> Tensor:
        """Computes the output m [B, T, D] for x [B, T, D], with attention over the sources."""
        # The contribution of x does not depend on the previous step: one GEMM for all steps.
        x_weight, context_weight = self.lstm.input_weight.chunk(2, 1)
        steps = F.linear(x.transpose(0, 1), x_weight, self.lstm.bias)
        state = self.lstm.start(len(x))
        outputs = []
        for gates in steps.unbind():
            context, _ = self._attend(state.m.unsqueeze(1), encoded)
            state = self._step(gates, context.squeeze(1), context_weight, state)
            outputs.append(state.m)
        return torch.stack(outputs, 1)

    def step(
        self, x: Tensor, state: LSTMState, encoded: Encoded, source: Tensor
    ) -> tuple[LSTMState, Tensor]:
        """Computes the state after the token x_t [N, D], and the attention weights [N, S].

        `source` [N] is the index of the source sentence of each translation.
        """
        # Group the queries by source, so that attention reads the vectors of a source only once.
        plan = ops.dispatch_plan(source, len(encoded.mask))
        place, counts = plan.inverse - plan.offsets[source], plan.tokens_per_expert.tolist()
        m = state.m.new_zeros(len(counts), max(counts, default=0), state.m.shape[1])
        m[source, place] = state.m
        context, weights = (y[source, place] for y in self._attend(m, encoded))
        x_weight, context_weight = self.lstm.input_weight.chunk(2, 1)
        gates = F.linear(x, x_weight, self.lstm.bias)
        return self._step(gates, context, context_weight, state), weights

    def _attend(self, m: Tensor, encoded: Encoded) -> tuple[Tensor, Tensor]:
        """Computes contexts [B, T, D] and weights [B, T, S] for the queries m [B, T, D]."""
        return self.attention(m, encoded.keys, encoded.output, encoded.mask)

    def _step(
        self, gates: Tensor, context: Tensor, context_weight: Tensor, state: LSTMState
    ) -> LSTMState:
        """Computes the next state from W_x x_t + b [N, 4 · units] and a_t [N, D]."""
        gates = torch.addmm(gates, context, context_weight.t())
        gates = torch.addmm(gates, state.m, self.lstm.recurrent_weight.t())
        return self.lstm.cell(gates, state.c)


class TranslationModel(WordModel):
    """Predicts each next word of a translation (App. E).

    With encoder = "parallel" and between = "moe", the equations are::

        encoder:   h = x + dropout(LSTM(x) + reversed LSTM(x)),  x = dropout(embedding)
                   h <- h + dropout(sigmoid(MoE(h)))
                   h <- h + dropout(LSTM(h))
        decoder:   h = x + dropout(AttentionLSTM(x)),  x = dropout(embedding)
                   h <- h + dropout(sigmoid(MoE(h)))
                   h <- h + dropout(LSTM(h))

    A softmax follows the decoder. ``AttentionLSTM`` also reads the attention context and provides
    the queries. In training, only ``AttentionLSTM`` loops over the words in Python.

    Each MoE layer sees all positions of all sentences as one batch, without padding (Sec. 3.1).
    Padding never reaches the attention or the right-to-left LSTM. LSTM states start at zero.

    Embedding and softmax are separate weights, initialised as in `LanguageModel`. Two models with
    the same seed and different `between` start with the same weights in all other layers.

    The arguments are those of `LanguageModel`. V is the number of words of all languages.
    """

    def __init__(
        self,
        config: TranslationModelConfig,
        vocab_size: int,
        *,
        process_group: ProcessGroup | None = None,
        noise_generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        d_model, units = config.d_model, config.lstm_units
        self.embedding = word_embedding(vocab_size, d_model)
        self.target_embedding = None
        if not config.shared_embedding:
            self.target_embedding = word_embedding(vocab_size, d_model)
        self.softmax = word_softmax(d_model, vocab_size)
        self.dropout = nn.Dropout(config.dropout)

        self.forwards, self.backwards, self.encoder_top = (LSTM(d_model, units) for _ in range(3))
        self.attention_lstm = AttentionLSTM(
            d_model, units, config.attention_units or d_model, config.attention
        )
        self.decoder_top = LSTM(d_model, units)

        def between() -> nn.Module | None:
            if config.between == "moe":
                return moe_layer(config.moe, d_model, noise_generator, process_group)
            return ffn_layer(config.ffn, d_model) if config.between == "ffn" else None

        # Initialised last: models that differ in these layers start with the same other weights.
        self.encoder_between, self.decoder_between = between(), between()

    @property
    def layers(self) -> list[nn.Module]:
        """The layers of encoder and decoder, without embeddings and softmax."""
        encoder = [self.forwards, self.backwards, self.encoder_between, self.encoder_top]
        decoder = [self.attention_lstm, self.decoder_between, self.decoder_top]
        return [layer for layer in encoder + decoder if layer is not None]

    def forward(
        self, source: Tensor, source_mask: Tensor, inputs: Tensor, mask: Tensor
    ) -> tuple[Tensor, tuple[MoEAux, ...]]:
        """Computes the input of the softmax for each target position.

        Source ids are [B, S]; inputs, the ids before the predicted words, are [B, T]. The masks are
        True at tokens, which padding follows. Every source has at least one token.

        Returns:
            The input of the softmax [B, T, D], undefined where mask is False, and the `MoEAux` of
            the MoE layers in encoder and decoder.
        """
        encoded, aux = self._encode(source, source_mask)
        x = self._embed_target(inputs)
        h = x + self.dropout(self.attention_lstm(x, encoded))
        h, more = self._between(self.decoder_between, h, mask)
        h = h + self.dropout(self.decoder_top(h, mask))
        return h, aux + more

    def hidden_states(self, batch: PairBatch) -> tuple[Tensor, tuple[MoEAux, ...]]:
        return self(batch.source, batch.source_mask, batch.inputs, batch.mask)

    @torch.no_grad()
    def encode(self, source: Tensor, source_mask: Tensor) -> Encoded:
        """Encodes source sentences without gradient; `forward` describes the arguments."""
        return self._encode(source, source_mask)[0]

    def start(self, encoded: Encoded) -> DecoderState:
        """Returns the decoder state before the first word, with one translation per sentence."""
        source = torch.arange(len(encoded.mask), device=encoded.mask.device)
        first, second = (
            lstm.start(len(source)) for lstm in (self.attention_lstm.lstm, self.decoder_top)
        )
        return DecoderState(encoded, source, first, second)

    @torch.no_grad()
    def step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, Tensor, DecoderState]:
        """Computes the distribution of the next word, without gradient.

        In evaluation mode, the distribution equals the softmax of the result of `forward`. `tokens`
        [N] has the previous word of each translation, at first the end-of-sentence id.

        Returns:
            The log-probabilities [N, V] in nats, the attention weights [N, S], and the state after
            `tokens`.
        """
        x = self._embed_target(tokens)
        first, attention = self.attention_lstm.step(x, state.first, state.encoded, state.source)
        h = x + self.dropout(first.m)
        h, _ = self._between(self.decoder_between, h, None)
        second = self.decoder_top.step(h, state.second)
        logits = self.softmax(h + self.dropout(second.m))
        log_probs = logits.log_softmax(1, dtype=accumulation_dtype(logits))
        return log_probs, attention, state._replace(first=first, second=second)

    def _encode(self, source: Tensor, mask: Tensor) -> tuple[Encoded, tuple[MoEAux, ...]]:
        h = self.dropout(self.embedding(source))
        if self.config.encoder == "parallel":
            from_the_left = self.forwards(h, mask)
            h = h + self.dropout(from_the_left + self.backwards(h, mask, reverse=True))
        else:
            h = h + self.dropout(self.forwards(h, mask))
            h = h + self.dropout(self.backwards(h, mask, reverse=True))
        h, aux = self._between(self.encoder_between, h, mask)
        h = h + self.dropout(self.encoder_top(h, mask))
        if not self.config.attend_language:
            mask = F.pad(mask[:, 1:], (1, 0))
        return Encoded(h, self.attention_lstm.attention.keys(h), mask), aux

    def _between(
        self, layer: nn.Module | None, h: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, tuple[MoEAux, ...]]:
        if layer is None:
            return h, ()
        y, aux = sigmoid_of(layer, h, mask)
        return h + self.dropout(y), aux

    def _embed_target(self, tokens: Tensor) -> Tensor:
        return self.dropout((self.target_embedding or self.embedding)(tokens))
