"""Gates: they select the experts of each token and weight them (Section 2.1).

Contents, with the paper's equation or section::

    Gate, Routing                the interface between a gate and `MoE`
    HierarchicalGate             the interface of gates on two levels         App. B
    SoftmaxGate                  every expert for every token                 Eq. 2
    TopKGate                     the k experts with the largest scores        App. F
    NoisyTopKGate                noise before the selection, smooth load      Eqs. 3-5, App. A
    HierarchicalNoisyTopKGate    selects groups, then experts within them     App. B
    BalancedGate                 every expert gets the same number of tokens  App. F
    HierarchicalBalancedGate     balanced gating on two levels                App. B, F
    ExpertChoiceGate             each expert selects its tokens               arXiv 2202.09368
    ReLUGate                     the experts with positive scores             arXiv 2412.14711
    AdaptiveGate, update_gates   gates that adapt after each step
"""

from moe_ext.gates.adaptive import AdaptiveGate, adaptive_gates, update_gates
from moe_ext.gates.balanced import (
    BalancedGate,
    HierarchicalBalancedGate,
    StrictlyBalancedGate,
    balanced_gates,
    batchwise_masks,
    rows_per_expert,
)
from moe_ext.gates.expert_choice import ExpertChoiceGate
from moe_ext.gates.gate import Gate
from moe_ext.gates.hierarchical import HierarchicalNoisyTopKGate, hierarchical_load
from moe_ext.gates.hierarchical_gate import HierarchicalGate, PrimarySelection, SecondarySelection
from moe_ext.gates.noisy_top_k import NoisyTopKGate
from moe_ext.gates.relu import ReLUGate
from moe_ext.gates.softmax import SoftmaxGate, TopKGate
from moe_ext.routing import Routing

__all__ = [
    "AdaptiveGate",
    "BalancedGate",
    "ExpertChoiceGate",
    "Gate",
    "HierarchicalBalancedGate",
    "HierarchicalGate",
    "HierarchicalNoisyTopKGate",
    "NoisyTopKGate",
    "PrimarySelection",
    "ReLUGate",
    "Routing",
    "SecondarySelection",
    "SoftmaxGate",
    "StrictlyBalancedGate",
    "TopKGate",
    "adaptive_gates",
    "balanced_gates",
    "batchwise_masks",
    "hierarchical_load",
    "rows_per_expert",
    "update_gates",
]
