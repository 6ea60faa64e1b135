"""A corpus as ids: what the models are trained on and measured with."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from moe_ext.data import (
    Corpus,
    CorpusError,
    EncodedSentences,
    Vocabulary,
    encode_sentences,
    load_corpus,
)
from moe_ext.progress import progress
from moe_ext.training.config import ConfigError, DataConfig


@dataclass(frozen=True)
class Text:
    """The three parts of a corpus as ids of its own vocabulary."""

    vocabulary: Vocabulary
    train: EncodedSentences
    dev: EncodedSentences
    test: EncodedSentences


def load_text(config: DataConfig) -> Text:
    """The corpus, in the vocabulary of its own training part.

    Raises:
        ConfigError: whatever is wrong with it.
    """
    with _config_errors():
        corpus = load_corpus(config.corpus, max_train_sentences=config.max_train_sentences or None)
        words = progress(corpus.train, "counting words", "sentences")
        vocabulary = Vocabulary.build(words, config.vocab_size, config.min_count)
        return Text(
            vocabulary,
            train=_encode(corpus, "train", vocabulary),
            dev=_encode(corpus, "dev", vocabulary),
            test=_encode(corpus, "test", vocabulary),
        )


def load_part(config: DataConfig, vocabulary: Vocabulary, part: str) -> EncodedSentences:
    """One part of the corpus in a given vocabulary; the others are not read.

    Args:
        config: names the corpus; its vocabulary's options do not count.
        vocabulary: of the model.
        part: "train", "dev", "test" or "all".

    Raises:
        ConfigError: whatever is wrong with the corpus.
    """
    with _config_errors():
        corpus = load_corpus(
            config.corpus, parts=[part], max_train_sentences=config.max_train_sentences or None
        )
        return _encode(corpus, part, vocabulary)


def _encode(corpus: Corpus, part: str, vocabulary: Vocabulary) -> EncodedSentences:
    sentences = progress(getattr(corpus, part), f"reading {part}", "sentences")
    return encode_sentences(sentences, vocabulary)


@contextmanager
def _config_errors() -> Iterator[None]:
    try:
        yield
    except CorpusError as error:
        raise ConfigError(f"data.corpus: {error}") from error
    except ValueError as error:
        raise ConfigError(f"data: {error}") from error
