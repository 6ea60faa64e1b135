"""What a model costs, and what its experts have learned."""

from moe_ext.lab.analysis.costs import Cost, TrainingFlops, cost, moe_ops, training_flops
from moe_ext.lab.analysis.experts import (
    ExpertReport,
    by_specialisation,
    expert_reports,
)
from moe_ext.lab.analysis.routing import (
    Routing,
    collect_routing,
    find_moe_layer,
    joined,
    untrained_gates,
)
from moe_ext.lab.analysis.specialisation import Specialisation, labels_of, specialisation

__all__ = [
    "Cost",
    "ExpertReport",
    "Routing",
    "Specialisation",
    "TrainingFlops",
    "by_specialisation",
    "collect_routing",
    "cost",
    "expert_reports",
    "joined",
    "labels_of",
    "find_moe_layer",
    "moe_ops",
    "specialisation",
    "training_flops",
    "untrained_gates",
]
