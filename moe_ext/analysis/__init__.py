"""What a model costs, and what its experts have learned."""

from .cost import Cost, cost
from .experts import ExpertReport, inspect_experts

__all__ = ["Cost", "ExpertReport", "cost", "inspect_experts"]
