"""Translating with the model of a run."""

from typing import Any

from moe_ext.data import Wordpieces
from moe_ext.decoding import BeamSearch, Translator
from moe_ext.models import TranslationModel
from moe_ext.training.checkpoint import TrainedModel
from moe_ext.training.config import ConfigError, TranslationConfig


def make_translator(
    trained: TrainedModel, search: BeamSearch, into: str | None = None, **options: Any
) -> Translator:
    """A trained model's translator.

    Args:
        trained: from `load_run`.
        search: how translations are searched for.
        into: the language to translate into, of a model of several language pairs.
        options: further ones of `Translator`.

    Raises:
        ConfigError: it is no translation model, has not learnt that language or needs to be told
            which, or an option is out of range.
    """
    model, wordpieces, config = trained.model, trained.vocabulary, trained.config
    if not isinstance(config, TranslationConfig):
        raise ConfigError(f'the run\'s task must be "translation", got "{config.task}"')
    assert isinstance(model, TranslationModel) and isinstance(wordpieces, Wordpieces)
    pairs = config.data.pairs
    languages = sorted({pair.partition("-")[2] for pair in pairs}) if len(pairs) > 1 else []
    try:
        return Translator(model, wordpieces, search, into=into, languages=languages, **options)
    except ValueError as error:
        raise ConfigError(str(error)) from error
