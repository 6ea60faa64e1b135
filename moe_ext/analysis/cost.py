"""Parameters and operations of a language model, counted as in the paper's tables (7 and 8)."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from moe_ext.balanced import HierarchicalBalancedGate
from moe_ext.experts import FeedForwardExperts
from moe_ext.hierarchical import HierarchicalNoisyTopKGate
from moe_ext.models import LanguageModel
from moe_ext.moe import MoE
from moe_ext.recurrent import MoELSTM


@dataclass(frozen=True)
class Cost:
    """The size of a model.

    Attributes:
        ops_per_timestep: multiply-adds of one position's forward pass, embedding and softmax
            excluded.
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


def cost(model: LanguageModel) -> Cost:
    """Counted from the model's own tensors; nothing is run, so it works on the meta device too.

    Every matrix is one multiply-add per weight and position; of a MoE's experts each position meets
    k of E, and of a hierarchical gate's secondary matrices those of its groups. The biases of the
    LSTMs, below the precision of the tables, are left out of ops and parameters and are in the
    total.
    """
    ops = parameters = 0
    for layer in model.layers:
        if isinstance(layer, (MoE, MoELSTM)):
            moe = layer if isinstance(layer, MoE) else layer.cell.moe
            experts = _weights(moe.experts.parameters())
            k = model.config.moe.experts_per_token
            ops += _gate_ops(moe.gate) + experts * k // moe.num_experts
            parameters += _weights(moe.gate.parameters()) + experts
        elif isinstance(layer, FeedForwardExperts):
            ops += _weights(layer.weights)
            parameters += _weights(layer.weights)
        else:
            matrices = _weights(p for p in layer.parameters() if p.dim() == 2)
            ops += matrices
            parameters += matrices
    return Cost(ops, parameters, sum(p.numel() for p in model.parameters()))


def _gate_ops(gate: nn.Module) -> int:
    """Of the matrices w_…: thresholds multiply nothing."""
    matrices = {name: p.numel() for name, p in gate.named_parameters() if name.startswith("w_")}
    ops = sum(size for name, size in matrices.items() if not name.endswith("_secondary"))
    if isinstance(gate, HierarchicalNoisyTopKGate | HierarchicalBalancedGate):
        ops += (sum(matrices.values()) - ops) * gate.k_of_levels[0] // gate.num_groups
    return ops


def _weights(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)
