"""Parts shared by the paper's models: embedding, MoE and dense layers, softmax, loss."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext import (
    BalancedGate,
    Capacity,
    Drop,
    ExpertChoiceGate,
    FeedForwardExperts,
    Gate,
    HierarchicalBalancedGate,
    HierarchicalNoisyTopKGate,
    MoE,
    MoEAux,
    NoisyTopKGate,
    ReLUGate,
    RouterLoss,
    SharedExpert,
    SwitchLoss,
    TopKGate,
    ZLoss,
)
from moe_ext.checks import require
from moe_ext.experts import uniform_
from moe_ext.ops import ACTIVATIONS, CLAMPED_ACTIVATIONS, Activation, Score
from moe_lab.models.sampled_softmax import SampledSoftmax
from moe_lab.rules import Count, Limit, Options, Weight, Widths, must, one_of

_GATES: dict[str, tuple[Callable[..., Gate], ...]] = {  # of a flat and a hierarchical mixture
    "noisy_topk": (NoisyTopKGate, HierarchicalNoisyTopKGate),
    "topk": (TopKGate,),
    "balanced": (BalancedGate, HierarchicalBalancedGate),
    "expert_choice": (ExpertChoiceGate,),
    "relu": (ReLUGate,),
}
_FLAT_KINDS = [name for name, kinds in _GATES.items() if len(kinds) == 1]  # without groups

_ActivationName = Annotated[
    str, one_of(*(name for name in ACTIVATIONS if name not in CLAMPED_ACTIVATIONS))
]

# Options that only some mixtures support, and the values with which they have no effect.
ONLY_OF_FLAT = {
    "num_identity_experts": 0,
    "num_null_experts": 0,
    "capacity_factor": 0,
    "w_switch": 0,
    "w_switch_per_sequence": 0,
    "w_z": 0,
}
_ONLY_OF_TOPK = {"score": "softmax", "renormalize": True, "scale": 1.0, "bias_update_rate": 0.0}


def require_values(
    config: object, values: Mapping[str, object], when: str = "", prefix: str = ""
) -> None:
    """Requires that options have their only supported values.

    `when` ends the rule of the error, and `prefix` begins the options' names.
    """
    for name, value in values.items():
        given = getattr(config, name)
        require(given == value, f"{prefix}{name}", f"be {value} {when}".rstrip(), given)


def require_lstm_units(lstm_units: int, d_model: int) -> None:
    rule = f"be 0 or at least d_model = {d_model}"
    require(lstm_units == 0 or lstm_units >= d_model, "lstm_units", rule, lstm_units)


@dataclass
class MoEConfig(Options):
    """Options of a mixture-of-experts layer.

    An option without a description is the argument of `moe_ext.MoE` with the same name.
    """

    # "noisy_topk" (Sec. 2.1), "topk", "balanced" (App. F), "expert_choice" or "relu". Only the load
    # of "noisy_topk" has a gradient; the other gates need w_load = 0. "expert_choice" is not
    # causal: a language model sees later words, also in evaluation.
    gate: Annotated[str, one_of(*_GATES)] = "noisy_topk"
    num_experts: Count = 32  # number of experts, summed over all groups
    num_groups: int = 0  # of a hierarchical mixture (App. B); 0 gives a flat mixture
    # Number of experts for each token. In a hierarchical mixture, each token goes to k groups and
    # to k experts in each of these groups.
    k: int = 4
    hidden_sizes: Widths = field(default_factory=lambda: [1024])
    activation: _ActivationName = "relu"
    w_importance: Weight = 0.1
    w_load: Weight = 0.1
    noise_epsilon: Weight = 1e-2
    recompute: bool = False
    # Only for "topk"; see `moe_ext.TopKGate`. bias_update_rate = 0: no selection bias.
    score: Annotated[str, one_of(*get_args(Score))] = "softmax"
    renormalize: bool = True
    scale: Annotated[float, must("be above 0", lambda scale: scale > 0)] = 1.0
    bias_update_rate: Weight = 0.0
    # Only for a flat mixture: weights of `moe_ext.SwitchLoss` over the whole batch and over each
    # sentence, and of `moe_ext.ZLoss`.
    w_switch: Weight = 0.0
    w_switch_per_sequence: Weight = 0.0
    w_z: Weight = 0.0
    shared_sizes: Widths = field(default_factory=list)  # of a `moe_ext.SharedExpert`; []: none
    # Only for a flat mixture. The gate also selects among the identity and null experts.
    # capacity_factor = 0 drops nothing. Otherwise, experts have a capacity in evaluation too, and
    # the perplexity depends on the batches. drop = "score" is not causal.
    num_identity_experts: Limit = 0
    num_null_experts: Limit = 0
    capacity_factor: Weight = 0.0
    drop: Annotated[str, one_of(*get_args(Drop))] = "position"

    def __post_init__(self) -> None:
        super().__post_init__()
        groups = self.num_groups
        rule = f"be at least 0, and 0 with the gates {', '.join(_FLAT_KINDS)}"
        known = groups >= 0 and (self.gate not in _FLAT_KINDS or groups == 0)
        require(known, "num_groups", rule, groups)
        rule = f"divide num_experts = {self.num_experts}"
        require(groups == 0 or self.num_experts % groups == 0, "num_groups", rule, groups)
        if self.capacity_factor == 0:
            require_values(self, {"drop": "position"}, "with capacity_factor = 0")
        choices, rule = self.num_choices, "the number of experts"
        if self.num_groups:
            require_values(self, ONLY_OF_FLAT, f"with num_groups = {self.num_groups}")
            choices = min(self.num_groups, self.num_experts // self.num_groups)
            rule = "min(num_groups, experts per group)"
        require(1 <= self.k <= choices, "k", f"be in [1, {rule} = {choices}]", self.k)
        if self.gate != "topk":
            require_values(self, _ONLY_OF_TOPK, f'with gate = "{self.gate}"')
        rule = f'be 0 with gate = "{self.gate}", whose load has no gradient'
        require(self.w_load == 0 or self.gate == "noisy_topk", "w_load", rule, self.w_load)

    @property
    def num_choices(self) -> int:
        """Number of experts among which the gate selects."""
        return self.num_experts + self.num_identity_experts + self.num_null_experts

    @property
    def experts_per_token(self) -> int:
        """Number of experts for each token; the average number if it differs between tokens."""
        return self.k**2 if self.num_groups else self.k

    def losses(self) -> tuple[RouterLoss, ...]:
        """Creates the losses whose weights are not 0."""
        losses = (
            SwitchLoss(self.w_switch),
            SwitchLoss(self.w_switch_per_sequence, per_sequence=True),
            ZLoss(self.w_z),
        )
        return tuple(loss for loss in losses if loss.weight)


@dataclass
class FeedForwardConfig(Options):
    """Options of the dense layer that replaces a MoE layer: a single expert without a gate."""

    hidden_sizes: Widths = field(default_factory=lambda: [4096])
    activation: _ActivationName = "relu"


def word_embedding(vocab_size: int, d_model: int, dtype: torch.dtype | None = None) -> nn.Embedding:
    """Creates an embedding with normal weights of standard deviation d_model^-1/2."""
    embedding = nn.Embedding(vocab_size, d_model, dtype=dtype)
    nn.init.normal_(embedding.weight, std=d_model**-0.5)
    return embedding


def word_softmax(
    d_model: int, vocab_size: int, num_sampled: int = 0, **options: Any
) -> SampledSoftmax:
    """Creates a `SampledSoftmax` with uniform weights of variance 1 / d_model and zero bias."""
    softmax = SampledSoftmax(d_model, vocab_size, num_sampled, **options)
    uniform_(softmax.weight, d_model)
    nn.init.zeros_(softmax.bias)
    return softmax


def gate_layer(config: MoEConfig, d_model: int, noise_generator: torch.Generator | None) -> Gate:
    """Creates the gate of a MoE layer of width d_model; noise_generator samples the noise."""
    options: dict[str, Any] = {"num_experts": config.num_choices}
    if groups := config.num_groups:
        options = {"num_groups": groups, "experts_per_group": config.num_experts // groups}
    if config.gate == "noisy_topk":
        options |= {"noise_epsilon": config.noise_epsilon, "generator": noise_generator}
    if config.gate == "topk":
        options |= {name: getattr(config, name) for name in ("score", "renormalize", "scale")}
        options["bias_update_rate"] = config.bias_update_rate or None
    return _GATES[config.gate][bool(groups)](d_model, k=config.k, **options)


def moe_layer(
    config: MoEConfig,
    d_model: int,
    noise_generator: torch.Generator | None = None,
    process_group: ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
) -> MoE:
    """Creates a MoE layer; noise_generator samples the gate's noise, dtype is of the experts."""
    activation = cast(Activation, config.activation)
    shared_expert = None
    if sizes := config.shared_sizes:
        shared_expert = SharedExpert(d_model, sizes, activation=activation, dtype=dtype)
    capacity = None
    if config.capacity_factor:
        capacity = Capacity(config.capacity_factor, cast(Drop, config.drop))
    return MoE(
        d_model,
        config.num_experts,
        config.experts_per_token,
        gate=gate_layer(config, d_model, noise_generator),
        hidden_sizes=tuple(config.hidden_sizes),
        activation=activation,
        shared_expert=shared_expert,
        num_identity_experts=config.num_identity_experts,
        num_null_experts=config.num_null_experts,
        capacity=capacity,
        w_importance=config.w_importance,
        w_load=config.w_load,
        losses=config.losses(),
        recompute=config.recompute,
        expert_dtype=dtype,
        process_group=process_group,
    )


def ffn_layer(
    config: FeedForwardConfig, d_model: int, dtype: torch.dtype | None = None
) -> FeedForwardExperts:
    """Creates the dense layer that replaces a MoE layer."""
    sizes, activation = tuple(config.hidden_sizes), cast(Activation, config.activation)
    return FeedForwardExperts(1, d_model, sizes, activation=activation, dtype=dtype)


def sigmoid_of(
    layer: nn.Module, h: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, tuple[MoEAux, ...]]:
    """Computes sigmoid(layer(h)) in the dtype of h (App. C.1), and the `MoEAux` of a MoE."""
    if isinstance(layer, MoE):
        y, aux = layer(h, mask)
        return torch.sigmoid(y), (aux,)
    assert isinstance(layer, FeedForwardExperts)
    rows = h.flatten(0, -2).to(layer.weights[0].dtype)
    return torch.sigmoid(layer(rows, None).view_as(h).to(h.dtype)), ()


class LossParts(NamedTuple):
    """The parts of the loss of one batch.

    The training objective is nll_sum / num_tokens + aux_loss. The perplexity is
    exp(nll_sum / num_tokens). In training, a sampled softmax underestimates nll_sum.
    """

    nll_sum: Tensor  # scalar, nats summed over the tokens of the batch, ends of sentences included
    num_tokens: int  # number of tokens in nll_sum
    aux_loss: Tensor  # scalar, sum of the weighted balancing losses of all MoE layers
    aux: tuple[MoEAux, ...]  # of each MoE layer, in order


class WordModel(nn.Module):
    """Base class of models whose softmax predicts each word of a batch."""

    softmax: SampledSoftmax

    def hidden_states(self, batch: Any) -> tuple[Tensor, tuple[MoEAux, ...]]:
        """Computes the vectors before the softmax layer, and the `MoEAux` of each MoE layer."""
        raise NotImplementedError(f"{type(self).__name__} must implement hidden_states(batch)")

    def loss(self, batch: Any) -> LossParts:
        """Computes the parts of the training objective; the softmax skips padding."""
        h, aux = self.hidden_states(batch)
        targets = batch.targets[batch.mask]
        nll_sum = self.softmax.loss(h[batch.mask], targets)
        aux_loss = sum((report.loss for report in aux), start=nll_sum.new_zeros(()))
        return LossParts(nll_sum, len(targets), aux_loss, aux)

    @torch.no_grad()
    def token_nll(self, batch: Any) -> Tensor:
        """Computes -ln p of the target of each real token, [T] in nats, without gradient."""
        h, _ = self.hidden_states(batch)
        return self.softmax.nll(h[batch.mask], batch.targets[batch.mask])


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts the model into evaluation mode; restores the mode of each module at the end."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
