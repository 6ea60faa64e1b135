"""What a model costs, and what its experts have learned."""

from moe_ext.analysis.cost import Cost, TrainingFlops, cost, training_flops
from moe_ext.analysis.experts import ExpertReport, by_specialisation, inspect_experts

__all__ = [
    "Cost",
    "ExpertReport",
    "TrainingFlops",
    "by_specialisation",
    "cost",
    "inspect_experts",
    "training_flops",
]
