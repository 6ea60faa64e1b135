"""The paper's models, built on the layers of moe_ext."""

from .language_model import (
    FeedForwardConfig,
    LanguageModel,
    LanguageModelConfig,
    LossParts,
    MoEConfig,
    evaluating,
)
from .lstm import LSTM
from .softmax import linear_cross_entropy, linear_nll

__all__ = [
    "LSTM",
    "FeedForwardConfig",
    "LanguageModel",
    "LanguageModelConfig",
    "LossParts",
    "MoEConfig",
    "evaluating",
    "linear_cross_entropy",
    "linear_nll",
]
