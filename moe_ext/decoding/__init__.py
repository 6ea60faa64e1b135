"""From a model's log-probabilities to translations."""

from moe_ext.decoding.beam_search import BeamSearch, Hypothesis, StepModel, StepState

__all__ = ["BeamSearch", "Hypothesis", "StepModel", "StepState"]
