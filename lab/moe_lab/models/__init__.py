"""The paper's models, built on the public names of moe_ext."""

from moe_lab.models.attention import Attention
from moe_lab.models.kneser_ney import NGramModel, fit_kneser_ney
from moe_lab.models.language_model import LanguageModel, LanguageModelConfig
from moe_lab.models.lstm import LSTM
from moe_lab.models.parts import FeedForwardConfig, LossParts, MoEConfig, evaluating
from moe_lab.models.sampled_softmax import LogUniformSampler, SampledSoftmax, sampled_cross_entropy
from moe_lab.models.translation import TranslationModel, TranslationModelConfig

AnyModel = LanguageModel | TranslationModel

__all__ = [
    "LSTM", "AnyModel", "Attention", "FeedForwardConfig", "LanguageModel", "LanguageModelConfig",
    "LogUniformSampler", "LossParts", "MoEConfig", "NGramModel", "SampledSoftmax",
    "TranslationModel", "TranslationModelConfig", "evaluating", "fit_kneser_ney",
    "sampled_cross_entropy",
]  # fmt: skip
