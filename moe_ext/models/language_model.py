"""The paper's language models (App. C.1): embedding, LSTM, MoE, LSTM, softmax."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from moe_ext.balanced import BalancedGate, HierarchicalBalancedGate
from moe_ext.checks import require
from moe_ext.data import Batch
from moe_ext.experts import FeedForwardExperts
from moe_ext.gates import NoisyTopKGate, TopKGate
from moe_ext.hierarchical import HierarchicalNoisyTopKGate
from moe_ext.models.lstm import LSTM
from moe_ext.models.sampled_softmax import SampledSoftmax
from moe_ext.moe import MoE, MoEAux
from moe_ext.ops import ACTIVATIONS
from moe_ext.recurrent import MoELSTM

LAYER_KINDS = ("lstm", "moe", "moe_lstm", "ffn")
GATE_KINDS = ("noisy_topk", "topk", "balanced")
DTYPES = ("float32", "bfloat16")


def _require_activation(name: str) -> None:
    require(name in ACTIVATIONS, "activation", f"be one of {', '.join(sorted(ACTIVATIONS))}", name)


@dataclass
class MoEConfig:
    """A mixture-of-experts layer: every token goes through `k` of `num_experts` experts.

    Attributes: those of `moe_ext.MoE` that have the same names, and
        gate: "noisy_topk" (Sec. 2.1), or one without noise, whose load has no gradient, so that
            w_load must be 0: "topk" or "balanced" (App. F).
        num_groups: groups of a hierarchical mixture (App. B), of which a token goes to k, and there
            to k of the group's experts (0: a flat one).
    """

    gate: str = "noisy_topk"
    num_experts: int = 32
    num_groups: int = 0
    k: int = 4
    hidden_sizes: list[int] = field(default_factory=lambda: [1024])
    activation: str = "relu"
    w_importance: float = 0.1
    w_load: float = 0.1
    noise_epsilon: float = 1e-2
    recompute: bool = False

    def __post_init__(self) -> None:
        require(self.gate in GATE_KINDS, "gate", f"be one of {', '.join(GATE_KINDS)}", self.gate)
        require(self.num_experts >= 1, "num_experts", "be at least 1", self.num_experts)
        require(
            self.num_groups >= 0 and (self.gate != "topk" or self.num_groups == 0),
            "num_groups",
            'be at least 0, and 0 with gate = "topk"',
            self.num_groups,
        )
        require(
            self.num_groups == 0 or self.num_experts % self.num_groups == 0,
            "num_groups",
            f"divide num_experts = {self.num_experts}",
            self.num_groups,
        )
        choices = self.num_experts
        if self.num_groups:
            choices = min(self.num_groups, self.num_experts // self.num_groups)
        rule = "num_experts" if self.num_groups == 0 else "num_groups and the experts of a group"
        require(1 <= self.k <= choices, "k", f"be in [1, {rule} = {choices}]", self.k)
        require(
            min(self.hidden_sizes, default=1) >= 1, "hidden_sizes", "be positive", self.hidden_sizes
        )
        _require_activation(self.activation)
        require(self.w_importance >= 0, "w_importance", "be at least 0", self.w_importance)
        require(self.w_load >= 0, "w_load", "be at least 0", self.w_load)
        require(
            self.w_load == 0 or self.gate == "noisy_topk",
            "w_load",
            f'be 0 with gate = "{self.gate}", whose load has no gradient',
            self.w_load,
        )
        require(self.noise_epsilon >= 0, "noise_epsilon", "be at least 0", self.noise_epsilon)

    @property
    def experts_per_token(self) -> int:
        """How many experts a token goes through (with a balanced gate, on average)."""
        return self.k**2 if self.num_groups else self.k


@dataclass
class FeedForwardConfig:
    """The dense layer in the MoE's place: one expert that every token goes through, no gate.

    Attributes: those of `moe_ext.FeedForwardExperts` that have the same names.
    """

    hidden_sizes: list[int] = field(default_factory=lambda: [4096])
    activation: str = "relu"

    def __post_init__(self) -> None:
        require(
            min(self.hidden_sizes, default=1) >= 1, "hidden_sizes", "be positive", self.hidden_sizes
        )
        _require_activation(self.activation)


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
        require(self.d_model >= 1, "d_model", "be at least 1", self.d_model)
        require(
            len(self.layers) > 0 and set(self.layers) <= set(LAYER_KINDS),
            "layers",
            f"be a list of {', '.join(LAYER_KINDS)}",
            self.layers,
        )
        require(0 <= self.dropout < 1, "dropout", "be in [0, 1)", self.dropout)
        require(
            self.lstm_units == 0 or self.lstm_units >= self.d_model,
            "lstm_units",
            f"be 0 or at least d_model = {self.d_model}",
            self.lstm_units,
        )
        require(self.num_sampled >= 0, "num_sampled", "be at least 0", self.num_sampled)
        require(self.memory_slots >= 0, "memory_slots", "be at least 0", self.memory_slots)
        require(self.dtype in DTYPES, "dtype", f"be one of {', '.join(DTYPES)}", self.dtype)
        require(
            "moe_lstm" not in self.layers or self.moe.gate != "balanced",
            "moe.gate",
            "choose k experts for every token where layers have a moe_lstm",
            self.moe.gate,
        )


def _gate(config: MoEConfig, d_model: int, noise_generator: torch.Generator | None) -> nn.Module:
    options: dict[str, Any] = {"k": config.k}
    if config.num_groups:
        options["num_groups"] = config.num_groups
        options["experts_per_group"] = config.num_experts // config.num_groups
    else:
        options["num_experts"] = config.num_experts
    if config.gate == "noisy_topk":
        options.update(noise_epsilon=config.noise_epsilon, generator=noise_generator)
        return (HierarchicalNoisyTopKGate if config.num_groups else NoisyTopKGate)(
            d_model, **options
        )
    if config.gate == "topk":
        return TopKGate(d_model, **options)
    return (HierarchicalBalancedGate if config.num_groups else BalancedGate)(d_model, **options)


class LossParts(NamedTuple):
    """What one batch contributes.

    The objective is nll_sum / num_tokens + aux_loss; a perplexity is made of the first two alone.

    Attributes:
        nll_sum: scalar, nats, summed over the batch's tokens (ends of sentences included); from a
            sampled softmax in training too low.
        num_tokens: how many.
        aux_loss: scalar, sum of the balancing losses of all MoE layers, weights included.
        aux: what each MoE layer reports, in order.
    """

    nll_sum: Tensor
    num_tokens: int
    aux_loss: Tensor
    aux: tuple[MoEAux, ...]


class LanguageModel(nn.Module):
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
        process_group: the processes that share the experts of the MoE layers (a "moe_lstm" has all
            of its own in each); see `MoE`.
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
        self.embedding = nn.Embedding(vocab_size, d_model, dtype=dtype)
        nn.init.normal_(self.embedding.weight, std=d_model**-0.5)
        self.softmax = SampledSoftmax(
            d_model, vocab_size, config.num_sampled, generator=class_generator, dtype=dtype
        )
        nn.init.uniform_(self.softmax.weight, -((3 / d_model) ** 0.5), (3 / d_model) ** 0.5)
        nn.init.zeros_(self.softmax.bias)
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
                    MoE(
                        d_model,
                        config.moe.num_experts,
                        config.moe.experts_per_token,
                        gate=_gate(config.moe, d_model, noise_generator),
                        hidden_sizes=tuple(config.moe.hidden_sizes),
                        activation=config.moe.activation,
                        w_importance=config.moe.w_importance,
                        w_load=config.moe.w_load,
                        recompute=config.moe.recompute,
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
                        gate=_gate(config.moe, 2 * d_model, noise_generator),
                        w_importance=config.moe.w_importance,
                        w_load=config.moe.w_load,
                        memory_slots=config.memory_slots or None,
                    )
                )
            else:
                self.layers.append(
                    FeedForwardExperts(
                        1,
                        d_model,
                        tuple(config.ffn.hidden_sizes),
                        activation=config.ffn.activation,
                        dtype=dtype,
                    )
                )

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
        reports = []
        for layer in self.layers:
            if isinstance(layer, MoE):
                y, aux = layer(h, mask)
                y = torch.sigmoid(y)
                reports.append(aux)
            elif isinstance(layer, MoELSTM):
                y, _, aux = layer(h, mask=mask)
                reports.append(aux)
            elif isinstance(layer, FeedForwardExperts):
                rows = h.flatten(0, 1).to(layer.weights[0].dtype)
                offsets = torch.arange(0, 2 * len(rows), len(rows), device=h.device)  # [0, B * S]
                y = torch.sigmoid(layer(rows, offsets).view_as(h).to(h.dtype))
            else:
                y = layer(h)
            y = self.dropout(y)
            h = h + y if self.config.residual else y
        return h, tuple(reports)

    def _embed(self, inputs: Tensor) -> Tensor:
        """Where the embedding is bfloat16, float32: as all that is between the layers."""
        if self.config.dtype == "float32":
            return self.embedding(inputs)
        # The gradients of a word's occurrences are added up in float32.
        words, place = inputs.unique(return_inverse=True)
        return F.embedding(place, self.embedding(words).float())

    def loss(self, batch: Batch) -> LossParts:
        """The parts of the training objective. Logits are made for real tokens only."""
        h, aux = self(batch.inputs, batch.mask)
        targets = batch.targets[batch.mask]
        nll_sum = self.softmax.loss(h[batch.mask], targets)
        aux_loss = sum((report.loss for report in aux), start=nll_sum.new_zeros(()))
        return LossParts(nll_sum, len(targets), aux_loss, aux)

    @torch.no_grad()
    def token_nll(self, batch: Batch) -> Tensor:
        """-ln p of each real token's target, nats, [T] float32 in row order; no gradient."""
        h, _ = self(batch.inputs, batch.mask)
        return self.softmax.nll(h[batch.mask], batch.targets[batch.mask])


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode for a while."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
