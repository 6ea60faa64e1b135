"""Counts parameters and operations of a model as the paper does (Tables 2 to 5, 7 and 8)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from moe_ext import FeedForwardExperts, MoE, MoELSTM
from moe_ext.checks import require
from moe_ext.gates import HierarchicalGate
from moe_lab.models import AnyModel, LanguageModel, TranslationModel
from moe_lab.models.translation import AttentionLSTM


@dataclass(frozen=True)
class Cost:
    """The size of a model, as the paper counts it.

    Operations are multiply-adds of the forward pass of one position. For a language model, they
    exclude the softmax (Tables 7 and 8). For a translation model, they include it, and are those of
    one source position and one target position (Tables 2 to 5).
    """

    ops_per_timestep: int
    parameters: int  # without embedding and softmax
    total_parameters: int

    def __str__(self) -> str:
        return (
            f"{self.ops_per_timestep / 1e6:.3f}M ops/timestep, {self.parameters / 1e6:.2f}M "
            f"parameters ({self.total_parameters / 1e6:.2f}M with embedding and softmax)"
        )


@dataclass(frozen=True)
class TrainingFlops:
    """Floating-point operations of training per token; a multiply-add counts as two (Sec. 5.1)."""

    total: int  # operations of the forward and backward pass, with the softmax
    experts: int  # the operations of the experts alone

    @property
    def expert_share(self) -> float:
        return self.experts / self.total


def cost(model: AnyModel) -> Cost:
    """Counts a model's operations and parameters from the shapes of its tensors.

    The model does not run, so it can be on the meta device. Each weight of a matrix counts as one
    multiply-add for each position. A position uses k of the E experts of a MoE, and the secondary
    matrices of its groups in a hierarchical gate. The biases of the LSTMs count in the total only;
    they are smaller than the precision of the tables. Operations exclude the attention, because
    the paper's tables exclude it.
    """
    count = _count(model)
    ops = count.ops + count.expert_ops
    if isinstance(model, TranslationModel):
        ops += model.softmax.weight.numel()
    return Cost(ops, count.parameters, _weights(model.parameters()))


def training_flops(model: LanguageModel) -> TrainingFlops:
    """Counts a token's floating-point operations in training: 6 times its forward multiply-adds.

    The backward pass has twice the operations of the forward pass. The softmax counts the target
    class and the sampled classes, or all classes without sampling. Only GEMMs count, and each
    counts once even if recomputed. These operations, divided by the time of a step, give the
    efficiency in the paper's tables.
    """
    count = _count(model)
    num_classes, d_model = model.softmax.weight.shape
    num_sampled = model.config.num_sampled
    softmax = d_model * (1 + num_sampled if num_sampled else num_classes)
    return TrainingFlops(6 * (count.ops + count.expert_ops + softmax), 6 * count.expert_ops)


class MoEOps(NamedTuple):
    """Multiply-adds of a token's forward pass through a mixture of experts."""

    gate: int  # of the logits
    # Of the k experts and the shared expert; with zero-computation experts, the mean over tokens.
    experts: int


def moe_ops(layer: MoE) -> MoEOps:
    """Counts the multiply-adds of one MoE layer per token, as `cost` does."""
    num_ranks = 1 if layer.sharding is None else layer.sharding.placement.num_ranks
    require(num_ranks == 1, "moe_ops: layer", "have all experts on one rank", num_ranks)
    gate = layer.gate
    # Only the matrices w_*: thresholds need no multiplications.
    matrices = {name: p.numel() for name, p in gate.named_parameters() if name.startswith("w_")}
    ops = sum(size for name, size in matrices.items() if not name.endswith("_secondary"))
    if isinstance(gate, HierarchicalGate):
        ops += (sum(matrices.values()) - ops) * gate.k_of_levels[0] // gate.num_groups
    expert_ops = _weights(layer.experts.parameters()) * layer.k // layer.gate.num_experts
    if layer.shared_expert is not None:
        expert_ops += _weights(layer.shared_expert.parameters())
    return MoEOps(ops, expert_ops)


class _Count(NamedTuple):
    ops: int  # multiply-adds of a position's forward pass without the experts
    expert_ops: int  # multiply-adds of the experts
    parameters: int


def _count(model: AnyModel) -> _Count:
    """Counts operations and weights of the layers between embedding and softmax."""
    ops = expert_ops = parameters = 0
    for layer in model.layers:
        if isinstance(layer, (MoE, MoELSTM)):
            moe = layer if isinstance(layer, MoE) else layer.cell.moe
            gate_ops, layer_expert_ops = moe_ops(moe)
            ops += gate_ops
            expert_ops += layer_expert_ops
            for part in (moe.gate, moe.experts, moe.shared_expert):
                parameters += 0 if part is None else _weights(part.parameters())
        elif isinstance(layer, FeedForwardExperts):
            expert_ops += _weights(layer.weights)
            parameters += _weights(layer.weights)
        else:
            without_attention = layer.lstm if isinstance(layer, AttentionLSTM) else layer
            ops += _weights(_matrices(without_attention))
            parameters += _weights(_matrices(layer))
    return _Count(ops, expert_ops, parameters)


def _matrices(layer: nn.Module) -> list[Tensor]:
    return [p for p in layer.parameters() if p.dim() == 2]


def _weights(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)
