"""Optimizers, learning-rate schedules and groups of parameters, Appendices C, D and E."""

from moe_ext.optim.factored import FactoredAdagrad, FactoredAdam
from moe_ext.optim.groups import ParameterSplit, split_parameters
from moe_ext.optim.schedules import (
    language_model_schedule,
    translation_schedule,
    warmup_inverse_sqrt,
)

__all__ = [
    "FactoredAdagrad",
    "FactoredAdam",
    "ParameterSplit",
    "language_model_schedule",
    "split_parameters",
    "translation_schedule",
    "warmup_inverse_sqrt",
]
