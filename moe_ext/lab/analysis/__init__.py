"""Counts the cost of a model, and measures the specialisation of its experts."""

from moe_ext.lab.analysis.costs import Cost, TrainingFlops, cost, moe_ops, training_flops
from moe_ext.lab.analysis.experts import (
    ExpertReport,
    by_specialisation,
    expert_reports,
)
from moe_ext.lab.analysis.pages import as_html, as_text
from moe_ext.lab.analysis.routed_text import (
    RoutedText,
    find_moe_layer,
    joined,
    route_text,
    untrained_gates,
)
from moe_ext.lab.analysis.specialisation import Specialisation, labels_of, measure_specialisation

__all__ = [
    "Cost",
    "ExpertReport",
    "RoutedText",
    "Specialisation",
    "TrainingFlops",
    "as_html",
    "as_text",
    "by_specialisation",
    "cost",
    "expert_reports",
    "find_moe_layer",
    "joined",
    "labels_of",
    "measure_specialisation",
    "moe_ops",
    "route_text",
    "training_flops",
    "untrained_gates",
]
