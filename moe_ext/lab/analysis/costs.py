"""Parameters and operations of a model, counted as in the paper (Tables 2 to 5, 7 and 8)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from moe_ext import (
    FeedForwardExperts,
    HierarchicalBalancedGate,
    HierarchicalNoisyTopKGate,
    MoE,
    MoELSTM,
)
from moe_ext.checks import require
from moe_ext.lab.models import AnyModel, LanguageModel, TranslationModel
from moe_ext.lab.models.translation import AttentionLSTM


@dataclass(frozen=True)
class Cost:
    """The size of a model.

    Attributes:
        ops_per_timestep: multiply-adds of one position's forward pass. Of a language model without
            the softmax (Tables 7 and 8); of a translation model, with it and for a position of the
            source and one of the target (Tables 2 to 5).
        parameters: weights without embedding and softmax.
        total_parameters: with both.
    """

    ops_per_timestep: int
    parameters: int
    total_parameters: int

    def __str__(self) -> str:
        return (
            f"{self.ops_per_timestep / 1e6:.3f}M ops/timestep, {self.parameters / 1e6:.2f}M "
            f"parameters ({self.total_parameters / 1e6:.2f}M with embedding and softmax)"
        )


@dataclass(frozen=True)
class TrainingFlops:
    """Floating-point operations in training, of each token; a multiply-add is two (Sec. 5.1).

    Attributes:
        total: forward and backward, softmax included.
        experts: of these, the experts'.
    """

    total: int
    experts: int

    @property
    def expert_share(self) -> float:
        return self.experts / self.total


def cost(model: AnyModel) -> Cost:
    """Counted from the model's own tensors; nothing is run, so it works on the meta device too.

    Every matrix is one multiply-add per weight and position; of a MoE's experts each position meets
    k of E, and of a hierarchical gate's secondary matrices those of its groups. The biases of the
    LSTMs, below the precision of the tables, are left out of ops and parameters and are in the
    total; the attention, without which the ops of the tables come out, is left out of ops.

    Raises:
        ValueError: other processes have some of its experts; a model made on the meta device,
            without a process_group, has all.
    """
    count = _count(model)
    ops = count.ops + count.expert_ops
    if isinstance(model, TranslationModel):
        ops += model.softmax.weight.numel()
    return Cost(ops, count.parameters, _weights(model.parameters()))


def training_flops(model: LanguageModel) -> TrainingFlops:
    """6 times the multiply-adds of a token's forward pass: the backward pass has twice as many.

    Of the softmax these are the token's own class and the sampled ones, if not all. What is
    computed again in the backward pass is not counted again, and nothing but products of matrices
    is. Divided by the time of a step, this is the efficiency of the paper's tables.

    Raises:
        ValueError: see `cost`.
    """
    count = _count(model)
    num_classes, d_model = model.softmax.weight.shape
    num_sampled = model.config.num_sampled
    softmax = d_model * (1 + num_sampled if num_sampled else num_classes)
    return TrainingFlops(6 * (count.ops + count.expert_ops + softmax), 6 * count.expert_ops)


class MoEOps(NamedTuple):
    """Multiply-adds of a token's forward pass through a mixture of experts.

    Attributes:
        gate: of the logits.
        experts: of the k that the token meets.
    """

    gate: int
    experts: int


def moe_ops(layer: MoE) -> MoEOps:
    """Counted as in `cost`, of one layer.

    Raises:
        ValueError: other processes have some of its experts.
    """
    num_ranks = 1 if layer.sharding is None else layer.sharding.placement.num_ranks
    require(num_ranks == 1, "moe_ops: layer", "be in one process", num_ranks)
    gate = layer.gate
    # Of the matrices w_…: thresholds multiply nothing.
    matrices = {name: p.numel() for name, p in gate.named_parameters() if name.startswith("w_")}
    ops = sum(size for name, size in matrices.items() if not name.endswith("_secondary"))
    if isinstance(gate, HierarchicalNoisyTopKGate | HierarchicalBalancedGate):
        ops += (sum(matrices.values()) - ops) * gate.k_of_levels[0] // gate.num_groups
    return MoEOps(ops, _weights(layer.experts.parameters()) * layer.k // layer.num_experts)


class _Count(NamedTuple):
    ops: int  # multiply-adds of a position's forward pass but for the experts, and theirs
    expert_ops: int
    parameters: int


def _count(model: AnyModel) -> _Count:
    """Of the layers between embedding and softmax."""
    ops = expert_ops = parameters = 0
    for layer in model.layers:
        if isinstance(layer, (MoE, MoELSTM)):
            moe = layer if isinstance(layer, MoE) else layer.cell.moe
            of_gate, of_experts = moe_ops(moe)
            ops += of_gate
            expert_ops += of_experts
            parameters += _weights(moe.gate.parameters()) + _weights(moe.experts.parameters())
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
