"""Optimizers, learning-rate schedules and parameter groups (Appendices C, D and E)."""

from moe_ext.optim.factored import FactoredAdagrad, FactoredAdam
from moe_ext.optim.schedules import warmup_inverse_sqrt, warmup_schedule
from moe_ext.optim.split import ParameterSplit, split_parameters

__all__ = [
    "FactoredAdagrad",
    "FactoredAdam",
    "ParameterSplit",
    "split_parameters",
    "warmup_inverse_sqrt",
    "warmup_schedule",
]
