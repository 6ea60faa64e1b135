"""The paper's translation models (App. E): encoder and decoder of LSTMs with a MoE in each."""

from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from moe_ext import MoEAux, ops
from moe_ext.checks import require, require_at_least
from moe_ext.lab.data import PairBatch
from moe_ext.lab.models.attention import ATTENTION_KINDS, Attention
from moe_ext.lab.models.lstm import LSTM, LSTMState
from moe_ext.lab.models.parts import (
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
from moe_ext.ops import accumulation_dtype

_BETWEEN_KINDS = ("moe", "ffn", "none")
_ENCODER_KINDS = ("parallel", "stacked")


@dataclass
class TranslationModelConfig:
    """Three LSTMs of an encoder and two of a decoder, every one `d_model` wide.

    Attributes:
        d_model: D.
        lstm_units: width of the LSTMs' cells, at least d_model, which are projected back to
            d_model; 0 is cells of d_model units without projection.
        encoder: the directions of its first two LSTMs: "parallel", both on the embedding, their
            outputs summed; "stacked", the one from right to left on the other's output.
        attention: "product" or "gnmt" (App. G).
        attention_units: its width; 0 is d_model.
        between: what stands before the last LSTM of the encoder and of the decoder: "moe"; "ffn", a
            dense layer in its place; or "none".
        dropout: probability, on the output of each layer and of the embeddings.
        shared_embedding: one embedding for source and target words, whose ids are those of a common
            vocabulary.
        moe, ffn: what these layers are.
    """

    d_model: int = 512
    lstm_units: int = 2048
    encoder: str = "parallel"
    attention: str = "product"
    attention_units: int = 0
    between: str = "moe"
    dropout: float = 0.4
    shared_embedding: bool = True
    moe: MoEConfig = field(default_factory=MoEConfig)
    ffn: FeedForwardConfig = field(default_factory=FeedForwardConfig)

    def __post_init__(self) -> None:
        require_at_least(1, d_model=self.d_model)
        require_at_least(0, attention_units=self.attention_units)
        require_lstm_units(self.lstm_units, self.d_model)
        for name, kinds in (
            ("encoder", _ENCODER_KINDS),
            ("attention", ATTENTION_KINDS),
            ("between", _BETWEEN_KINDS),
        ):
            value = getattr(self, name)
            require(value in kinds, name, f"be one of {', '.join(kinds)}", value)
        require(0 <= self.dropout < 1, "dropout", "be in [0, 1)", self.dropout)


class Encoded(NamedTuple):
    """B source sentences as the decoder sees them.

    Attributes:
        output: [B, S, D], of the encoder.
        keys: [B, S, A], of the attention.
        mask: [B, S] bool, True at tokens.
    """

    output: Tensor
    keys: Tensor
    mask: Tensor

    def select(self, index: Tensor) -> Self:
        """The sentences index [N] int64."""
        return type(self)(*(part.index_select(0, index) for part in self))


class DecoderState(NamedTuple):
    """N unfinished translations of B source sentences.

    Attributes:
        encoded: the sources.
        source: [N] int64, which of them each is a translation of.
        first, second: of the decoder's LSTMs.
    """

    encoded: Encoded
    source: Tensor
    first: LSTMState
    second: LSTMState

    def select(self, index: Tensor) -> Self:
        """The translations index [N'] int64, any of them any number of times.

        The sources stay where they are until one of them has no translation left.
        """
        encoded = self.encoded
        used, source = self.source[index].unique(return_inverse=True)
        if len(used) < len(encoded.mask):
            encoded = encoded.select(used)
        return type(self)(encoded, source, self.first.select(index), self.second.select(index))


class AttentionLSTM(nn.Module):
    """The LSTM that asks where to look, and sees it in the next step (App. E; Wu et al., Eq. 4).

        a_t = attention(m_{t-1}, source)          m_t, c_t = LSTM([x_t, a_t], m_{t-1}, c_{t-1})

    Args:
        d_model: D, the width of x, m and the source.
        units: see `LSTM`.
        attention_units, kind: see `Attention`.
    """

    def __init__(
        self, d_model: int, units: int | None, attention_units: int, kind: str = "product"
    ) -> None:
        super().__init__()
        self.lstm = LSTM(d_model, units, d_input=2 * d_model)
        self.attention = Attention(d_model, d_model, attention_units, kind)

    def forward(self, x: Tensor, encoded: Encoded) -> Tensor:
        """x [B, T, D] to m [B, T, D]."""
        # All that does not depend on the step before is done for all steps at once.
        of_x, of_context = self._input_weights()
        steps = F.linear(x.transpose(0, 1), of_x, self.lstm.bias)
        state = self.lstm.start(len(x))
        outputs = []
        for gates in steps.unbind():
            context, _ = self._attend(state.m.unsqueeze(1), encoded)
            state = self._step(gates, context.squeeze(1), of_context, state)
            outputs.append(state.m)
        return torch.stack(outputs, 1)

    def step(
        self, x: Tensor, state: LSTMState, encoded: Encoded, source: Tensor
    ) -> tuple[LSTMState, Tensor]:
        """x_t [N, D] to the state after it and the attention's weights [N, S].

        Args:
            x, state: of N translations.
            encoded: B sources.
            source: [N] int64, which of them each is a translation of.
        """
        # The translations of a source ask side by side, so that its vectors are read once for all.
        plan = ops.dispatch_plan(source, len(encoded.mask))
        place, counts = plan.inverse - plan.offsets[source], plan.tokens_per_expert.tolist()
        m = state.m.new_zeros(len(counts), max(counts, default=0), state.m.shape[1])
        m[source, place] = state.m
        context, weights = (y[source, place] for y in self._attend(m, encoded))
        of_x, of_context = self._input_weights()
        gates = F.linear(x, of_x, self.lstm.bias)
        return self._step(gates, context, of_context, state), weights

    def _attend(self, m: Tensor, encoded: Encoded) -> tuple[Tensor, Tensor]:
        """Contexts [B, T, D] and weights [B, T, S] of m [B, T, D]."""
        return self.attention(m, encoded.keys, encoded.output, encoded.mask)

    def _input_weights(self) -> tuple[Tensor, Tensor]:
        """The columns of W that x_t meets, and those that a_t meets."""
        of_x, of_context = self.lstm.input_weight.chunk(2, 1)
        return of_x, of_context

    def _step(
        self, gates: Tensor, context: Tensor, of_context: Tensor, state: LSTMState
    ) -> LSTMState:
        """From what x_t and b add to the gates, [N, 4 · units], and a_t, [N, D]."""
        gates = torch.addmm(gates, context, of_context.t())
        gates = torch.addmm(gates, state.m, self.lstm.recurrent_weight.t())
        return self.lstm.cell(gates, state.c)


class TranslationModel(WordModel):
    """Predicts each next word of a translation.

        encoder:   h = x + dropout(LSTM(x) + reversed LSTM(x)),  x = dropout(embedding)
                   h <- h + dropout(sigmoid(MoE(h)))
                   h <- h + dropout(LSTM(h))
        decoder:   h = x + dropout(AttentionLSTM(x)),  x = dropout(embedding)
                   h <- h + dropout(sigmoid(MoE(h)))
                   h <- h + dropout(LSTM(h))

    then the softmax (App. E). The decoder's first LSTM reads the attention's context beside x and
    is what the attention asks by: the only part of a translation that goes word by word in
    training. Each MoE sees all positions of all sentences as one batch (Sec. 3.1), padding left
    out, which also never reaches attention or the LSTM from right to left. States begin at zero.

    Embedding and softmax are separate, and start as those of `LanguageModel`. Models of the same
    seed that differ in `between` start from the same embeddings, softmax, LSTMs and attention.

    Args:
        config: the layers.
        vocab_size: V, of source and target together.
        process_group: the processes that share the experts; see `MoE`.
        noise_generator: where the gates' noise comes from; None is torch's default generator. With
            one of its own, a model with MoE layers and one with dense ones draw the same dropout
            masks from the same seed.
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
                return moe_layer(
                    config.moe,
                    d_model,
                    noise_generator=noise_generator,
                    process_group=process_group,
                )
            return ffn_layer(config.ffn, d_model) if config.between == "ffn" else None

        # The last to be drawn: models that differ in them share the draws up to here.
        self.encoder_between, self.decoder_between = between(), between()

    @property
    def layers(self) -> list[nn.Module]:
        """All between embedding and softmax."""
        encoder = [self.forwards, self.backwards, self.encoder_between, self.encoder_top]
        decoder = [self.attention_lstm, self.decoder_between, self.decoder_top]
        return [layer for layer in encoder + decoder if layer is not None]

    def forward(
        self, source: Tensor, source_mask: Tensor, inputs: Tensor, mask: Tensor
    ) -> tuple[Tensor, tuple[MoEAux, ...]]:
        """Ids to what the softmax reads.

        Args:
            source: [B, S] int64, ids.
            source_mask: [B, S] bool, True at the source's tokens, which come first and of which
                every sentence has at least one.
            inputs: [B, T] int64, ids of the words before those to be predicted.
            mask: [B, T] bool, True at real tokens, which come first.

        Returns:
            [B, T, D], undefined where masked, and the reports of the encoder's MoE layer and of the
            decoder's.
        """
        encoded, aux = self._encode(source, source_mask)
        x = self._embed_target(inputs)
        h = x + self.dropout(self.attention_lstm(x, encoded))
        h, more = self._between(self.decoder_between, h, mask)
        h = h + self.dropout(self.decoder_top(h))
        return h, aux + more

    def of_batch(self, batch: PairBatch) -> tuple[Tensor, tuple[MoEAux, ...]]:
        return self(batch.source, batch.source_mask, batch.inputs, batch.mask)

    @torch.no_grad()
    def encode(self, source: Tensor, source_mask: Tensor) -> Encoded:
        """The source as the decoder sees it; arguments as of `forward`, no gradient."""
        return self._encode(source, source_mask)[0]

    def start(self, encoded: Encoded) -> DecoderState:
        """Before the first word of a translation of each sentence."""
        source = torch.arange(len(encoded.mask), device=encoded.mask.device)
        first, second = (
            lstm.start(len(source)) for lstm in (self.attention_lstm.lstm, self.decoder_top)
        )
        return DecoderState(encoded, source, first, second)

    @torch.no_grad()
    def step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, Tensor, DecoderState]:
        """The next word's distribution, in evaluation mode that of `forward`; no gradient.

        Args:
            tokens: [N] int64, the word before it in each translation; at first the id of the end of
                a sentence, as in the inputs of `forward`.
            state: of N translations after the words before that.

        Returns:
            log_probs: [N, V], nats.
            attention: [N, S], the weights of the source's tokens.
            state: after `tokens`.
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
            h = h + self.dropout(self.forwards(h) + self._from_the_right(h, mask))
        else:
            h = h + self.dropout(self.forwards(h))
            h = h + self.dropout(self._from_the_right(h, mask))
        h, aux = self._between(self.encoder_between, h, mask)
        h = h + self.dropout(self.encoder_top(h))
        return Encoded(h, self.attention_lstm.attention.keys(h), mask), aux

    def _from_the_right(self, h: Tensor, mask: Tensor) -> Tensor:
        return reverse(self.backwards(reverse(h, mask)), mask)

    def _between(
        self, layer: nn.Module | None, h: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, tuple[MoEAux, ...]]:
        if layer is None:
            return h, ()
        y, aux = sigmoid_of(layer, h, mask)
        return h + self.dropout(y), aux

    def _embed_target(self, tokens: Tensor) -> Tensor:
        return self.dropout((self.target_embedding or self.embedding)(tokens))


def reverse(x: Tensor, mask: Tensor) -> Tensor:
    """The tokens of each sentence in the opposite order, the padding behind them where it was.

    Args:
        x: [B, S, D].
        mask: [B, S] bool, True at tokens, which come first.
    """
    place = torch.arange(mask.shape[1], device=mask.device)
    place = torch.where(mask, mask.sum(1, keepdim=True) - 1 - place, place)
    return x.gather(1, place.unsqueeze(2).expand_as(x))
