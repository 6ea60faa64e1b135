"""Construction of a model from a configuration."""

import re
from typing import Any

import torch

from moe_lab.errors import ConfigError, config_errors
from moe_lab.models import (
    AnyModel,
    LanguageModel,
    LanguageModelConfig,
    TranslationModel,
    TranslationModelConfig,
)


def make_model(
    config: LanguageModelConfig | TranslationModelConfig,
    vocab_size: int,
    *,
    class_generator: torch.Generator | None = None,
    **options: Any,
) -> AnyModel:
    """Creates a language model or a translation model with initialised weights.

    `LanguageModel` and `TranslationModel` describe the arguments. Only a language model uses
    `class_generator`.
    """
    try:
        with config_errors("model: "):
            if isinstance(config, TranslationModelConfig):
                return TranslationModel(config, vocab_size, **options)
            return LanguageModel(config, vocab_size, class_generator=class_generator, **options)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        if not re.search("allocate|out of memory|overflow", reason):
            raise
        raise ConfigError(f"model: its sizes must fit into the memory, got: {reason}") from error
