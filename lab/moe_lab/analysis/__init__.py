"""Counts the cost of a model, and measures the specialisation of its experts."""

from moe_lab.analysis.costs import Cost, TrainingFlops, cost, moe_ops, training_flops
from moe_lab.analysis.experts import ExpertReport, Spelling, by_specialisation, expert_reports
from moe_lab.analysis.pages import ExpertPage, as_text
from moe_lab.analysis.routed_text import (
    RoutedText,
    find_moe_layer,
    joined,
    route_text,
    untrained_gates,
)
from moe_lab.analysis.specialisation import Specialisation, labels_of, measure_specialisation
from moe_lab.analysis.transformers_text import RoutedLines, TokenSpelling, route_lines

__all__ = [
    "Cost",
    "ExpertPage",
    "ExpertReport",
    "RoutedLines",
    "RoutedText",
    "Specialisation",
    "Spelling",
    "TokenSpelling",
    "TrainingFlops",
    "as_text",
    "by_specialisation",
    "cost",
    "expert_reports",
    "find_moe_layer",
    "joined",
    "labels_of",
    "measure_specialisation",
    "moe_ops",
    "route_lines",
    "route_text",
    "training_flops",
    "untrained_gates",
]
