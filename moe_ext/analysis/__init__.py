"""What a model costs, and what its experts have learned."""

from .cost import Cost, cost
from .experts import ExpertReport, by_specialisation, inspect_experts

__all__ = ["Cost", "ExpertReport", "by_specialisation", "cost", "inspect_experts"]
